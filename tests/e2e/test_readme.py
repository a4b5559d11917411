"""The client example of README.md, run as it stands against the real service."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.running_service import Service

README = Path(__file__).parents[2] / "README.md"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.e2e
def test_readme_example_runs(service: Service, tmp_path: Path) -> None:
    code = _example(service)
    done = _run(code, tmp_path)
    assert re.search(r"^version 2, reward [01](\.\d+)?, loss ", done, re.MULTILINE)
    assert (tmp_path / "weights" / "version-1" / "config.json").is_file()
    # What the sampler said of its tokens is what the trainer says of them.
    gaps = [abs(float(gap)) for gap in re.findall(r"sampler KL (\S+),", done)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


@pytest.mark.e2e
def test_readme_example_prints_a_batch_of_equal_rewards(service: Service, tmp_path: Path) -> None:
    """Nothing is run then, and a figure that was not computed ended the loop in a TypeError."""
    code = _example(service).replace('"first"', '"equal"')
    code, number = re.subn(r"reward=sum\(.*", "reward=1.0,", code)
    assert number == 1
    done = _run(code, tmp_path)
    assert len(re.findall(r"^version \d, reward 1, .*sampler KL none,", done, re.MULTILINE)) == 2


@pytest.mark.e2e
def test_readme_example_runs_on_a_model_folder(service: Service, tmp_path: Path) -> None:
    """With merges, a vocabulary and a template of its own, which the published folders keep."""
    assert service.config.models_root is not None
    _save_model(service.config.models_root / "own")
    code = _example(service)
    for old, new in (('preset="tiny"', 'model_folder="own"'), ('"first"', '"own"')):
        assert old in code
        code = code.replace(old, new)
    assert "version 2, reward" in _run(code, tmp_path)
    published = tmp_path / "weights" / "latest"
    tokenizer = AutoTokenizer.from_pretrained(published)
    assert tokenizer.chat_template == TEMPLATE
    assert len(tokenizer.encode("two and two")) < len("two and two")


def _example(service: Service) -> str:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example.count("grpc://127.0.0.1:8443") == 1
    return example.replace("grpc://127.0.0.1:8443", f"grpc://{service.addresses.grpc}")


def _save_model(folder: Path) -> None:
    """A small model of random weights, with a tokenizer that is trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is two and two? 2+2=4"] * 8, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    assert isinstance(fast.eos_token_id, int)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=0.0,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
