"""The presets' tokenizer: a byte is a token, also after transformers has loaded it from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ratoon.model.presets import VOCAB_SIZE, byte_tokenizer, preset_config, write_tokenizer
from ratoon.model.spec import FolderBase, PresetBase
from ratoon.model.tokenizer import (
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    SEPARATOR_TOKEN,
    token_texts,
    tokenizer_of,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As a sampler gets it: beside the preset's config, which transformers looks at too."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    preset_config("tiny").save_pretrained(folder)
    return cast(Any, AutoTokenizer).from_pretrained(folder, local_files_only=True)


def test_ascii_encodes_to_its_bytes_and_back(loaded: Any) -> None:
    text = "".join(map(chr, range(128)))
    assert loaded(text)["input_ids"] == list(range(128))
    assert loaded.decode(list(range(128))) == text


TOKENIZER = cast(Any, byte_tokenizer())


@settings(deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_any_text_encodes_to_its_utf8_bytes_and_back(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_byte_token_is_one_token(loaded: Any) -> None:
    names = loaded.convert_ids_to_tokens(list(range(VOCAB_SIZE)))
    assert len(set(names)) == VOCAB_SIZE == len(loaded)
    assert loaded.convert_tokens_to_ids(names) == list(range(VOCAB_SIZE))


def test_special_tokens_are_known_and_skipped(loaded: Any) -> None:
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (
        PAD_TOKEN,
        BOS_TOKEN,
        EOS_TOKEN,
    )
    ids = [BOS_TOKEN, *b"7*8=56", EOS_TOKEN, PAD_TOKEN]
    assert loaded.decode(ids, skip_special_tokens=True) == "7*8=56"


def test_files_are_in_words_that_transformers_4_knows(loaded: Any) -> None:
    """transformers 4 has no class TokenizersBackend, and takes extra_special_tokens for a mapping:
    a preset's versions had no tokenizer there."""
    settings = json.loads((Path(loaded.name_or_path) / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|sep|>"]
    assert "extra_special_tokens" not in settings
    assert SEPARATOR_TOKEN in loaded.all_special_ids


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([*"hé".encode(), EOS_TOKEN], ["h", "", "é", "<|eos|>"]),
        (list(b"\x1b[31m<b>"), list("\x1b[31m<b>")),
        # Bytes that are no character, and ids that are no token.
        ([0xFF] * 9 + [65], [*[""] * 7, "\ufffd", "", "\ufffdA"]),
        ([10**6, 65], ["", "A"]),
        ([], []),
    ],
)
def test_tokens_have_the_text_that_they_end(
    loaded: Any, tmp_path: Path, tokens: list[int], texts: list[str]
) -> None:
    """A folder's tokenizer and the preset's own do the same."""
    folder = FolderBase(folder=str(Path(loaded.name_or_path)))
    for base in (PresetBase(name="tiny"), folder):
        tokenizer = tokenizer_of(base, tmp_path)
        assert tokenizer is not None
        assert token_texts(tokenizer, tokens) == tuple(texts)


def test_a_broken_tokenizer_is_none(tmp_path: Path) -> None:
    folder = FolderBase(folder=str(tmp_path))
    assert tokenizer_of(folder, tmp_path) is None
    for data in (b"", b"{}", b'{"model": {"type": "BPE", "vocab": [], "merges": 1}}', b"\xff" * 99):
        (tmp_path / "tokenizer.json").write_bytes(data)
        assert tokenizer_of(folder, tmp_path) is None
    preset = tokenizer_of(PresetBase(name="tiny"), tmp_path)
    assert preset is not None
    assert token_texts(preset, [65, -1]) == ()
