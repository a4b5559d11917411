"""Byte tokenizer of the presets: a token id below 256 is that byte; text is its UTF-8."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
