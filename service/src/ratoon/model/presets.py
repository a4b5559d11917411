"""The built-in models: Qwen3-style decoders over bytes, and their tokenizer.

A token id below 256 is that byte; text is its UTF-8. Weights are random, decided by the seed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.attention import ATTENTION_NAME
from ratoon.model.spec import PRESET_NAMES

PAD_TOKEN = 256
BOS_TOKEN = 257
EOS_TOKEN = 258
SEPARATOR_TOKEN = 259
VOCAB_SIZE = 260
_SPECIAL_TOKENS = {
    "<|pad|>": PAD_TOKEN,
    "<|bos|>": BOS_TOKEN,
    "<|eos|>": EOS_TOKEN,
    "<|sep|>": SEPARATOR_TOKEN,
}
# A turn is <|bos|>ROLE, a newline and its text, and ends with <|eos|> and a newline.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
_EMBEDDING_STD = 0.02


def tensor_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the tensor `name` of a model with this seed (unsigned, 64 bits)."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()))
    return generator


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files in the form that `AutoTokenizer` of transformers 4 and of 5
    reads.

    transformers 5 accepts the older names of two settings; 4 fails on the newer ones.
    """
    byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; `write_tokenizer` writes it for others."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _SPECIAL_TOKENS]
    )
    assert all(tokenizer.token_to_id(text) == token for text, token in _SPECIAL_TOKENS.items())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|sep|>"],
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., 2019).

    Printable Latin-1 stands for itself; the others take U+0100 and up in order of the byte.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def preset_config(name: str) -> Qwen3Config:
    """The shape of a preset: `tiny` learns in seconds on a CPU, `small` is for benchmarks there."""
    if name == "tiny":
        return _config(hidden=128, intermediate=512, layers=4, heads=4, kv_heads=2, head_dim=32)
    if name == "small":
        return _config(hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=2, head_dim=64)
    raise RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"preset: got {name!r}, expected one of {', '.join(PRESET_NAMES)}",
        field="preset",
        got=repr(name),
        expected=", ".join(PRESET_NAMES),
    )


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """A preset's module with the weights of `seed`, float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        module = cast("Any", AutoModelForCausalLM).from_config(
            preset_config(name), attn_implementation=ATTENTION_NAME
        )
    _initialize(module, seed)
    return module


def _config(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=PAD_TOKEN,
        bos_token_id=BOS_TOKEN,
        eos_token_id=EOS_TOKEN,
    )


@torch.no_grad()
def _initialize(module: PreTrainedModel, seed: int) -> None:
    """Linear maps keep the variance of their input; those that write to the residual stream, two a
    layer, are scaled down by 1 / sqrt(2 layers) (Radford et al., 2019)."""
    residual_scale = 1 / math.sqrt(2 * module.config.num_hidden_layers)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        if name.endswith("embed_tokens.weight"):
            std = _EMBEDDING_STD
        else:
            std = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual_scale
        _fill_normal(parameter, std, tensor_generator(seed, name))


def _fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
