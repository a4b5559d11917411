"""Versions read by transformers 4 and by an early peft themselves, which are fetched from PyPI.

In: versions of every family, of every rotary scaling, and of adapters. Out: their log-probs in a
process that has the earlier libraries in front of those of this environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.model.export import export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype, PresetBase
from tests.model.builders import LORA, hidden_of, load, randomize
from tests.model.folder_words import SCALINGS, WORDS, say
from tests.model.packing import pack
from tests.tiny_models import ARCHITECTURES, write_folder

pytestmark = pytest.mark.slow

PACKAGES = ("transformers==4.57.3", "huggingface_hub<1", "tokenizers<0.23", "peft==0.13.2")
TOKENS = [int(token) for token in torch.randperm(64, generator=torch.Generator().manual_seed(5))]
# Arguments: packages' folder, tokens, and what to read, as folders with an adapter's or null.
READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
assert __version__.startswith("4.")
ids, found = torch.tensor([json.loads(sys.argv[2])]), {}
for name, (folder, adapter) in json.loads(sys.argv[3]).items():
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in loading), (name, loading)
    if adapter is not None:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        rows = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    found[name] = rows.gather(1, ids[0, 1:, None])[:, 0].tolist()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[4])
found["tokenizer"] = tokenizer("3+4=<|sep|>")["input_ids"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*command, str(folder), *PACKAGES], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"transformers 4 is not to be had here: {done.stderr.strip()[-300:]}")
    return folder


def publish(model: PolicyModel, folder: Path) -> Path:
    folder.mkdir(parents=True)
    export_weights(model, folder)
    return folder


def own_logprobs(model: PolicyModel) -> Tensor:
    with torch.no_grad():
        logits_TV = hidden_of(model, pack([TOKENS])) @ model.lm_head_VD.T
    return logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]


def test_transformers_4_and_an_early_peft_have_the_model_that_was_trained(
    packages: Path, tmp_path: Path
) -> None:
    folders: dict[str, tuple[str, str | None]] = {}
    expected: dict[str, Tensor] = {}

    def add(name: str, model: PolicyModel, base: Path | None = None) -> None:
        randomize(model, seed=3)
        version = publish(model, tmp_path / "versions" / name)
        folders[name] = (str(version), None) if base is None else (str(base), str(version))
        expected[name] = own_logprobs(model)

    for architecture in (*ARCHITECTURES, "qwen3_moe_mixed"):
        for scaling in SCALINGS:
            for words in WORDS:
                name = f"{architecture}-{scaling}-{words}"
                folder = say(write_folder(tmp_path / name, architecture), words, scaling)
                add(name, load(folder, dtype=ModelDtype.FLOAT32))
    for preset in ("tiny", "small"):
        add(preset, load(PresetBase(name=preset), dtype=ModelDtype.FLOAT32))
    for architecture in ARCHITECTURES:
        folder = say(write_folder(tmp_path / architecture, architecture), "old", "default")
        model = load(folder, tuning=LORA, dtype=ModelDtype.FLOAT32)
        add(f"{architecture}-lora", model, folder)

    command = [sys.executable, "-c", READ, str(packages), json.dumps(TOKENS)]
    done = subprocess.run(
        [*command, json.dumps(folders), folders["tiny"][0]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("tokenizer") == [*b"3+4=", 259]
    assert found.keys() == expected.keys()
    for name, logprobs in found.items():
        assert (torch.tensor(logprobs) - expected[name]).abs().max() <= 2e-5, name
