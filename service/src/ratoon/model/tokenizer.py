"""The tokenizer of a base, and the text of single tokens. Imports no torch.

A token id of a preset below 256 is that byte; text is its UTF-8. A folder's tokenizer is whatever
its `tokenizer.json` says: what it lacks, or does not decode, has no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from ratoon.errors import RatoonError
from ratoon.log import get_logger
from ratoon.model.folder import ModelFolder
from ratoon.model.spec import FolderBase, PresetBase

PAD_TOKEN = 256
BOS_TOKEN = 257
EOS_TOKEN = 258
SEPARATOR_TOKEN = 259
_SPECIAL_TOKENS = {
    "<|pad|>": PAD_TOKEN,
    "<|bos|>": BOS_TOKEN,
    "<|eos|>": EOS_TOKEN,
    "<|sep|>": SEPARATOR_TOKEN,
}
_FILE = "tokenizer.json"
_MAX_BYTES = 128 * 2**20
# More tokens than any character has bytes; and what stands for bytes that are none.
_MAX_SILENT = 8
_NO_CHARACTER = "\ufffd"
_LOG = get_logger("tokenizer")


def preset_tokenizer() -> Tokenizer:
    """The tokenizer of every preset."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _SPECIAL_TOKENS]
    )
    assert all(tokenizer.token_to_id(text) == token for text, token in _SPECIAL_TOKENS.items())
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., 2019).

    Printable Latin-1 stands for itself; the others take U+0100 and up in order of the byte.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def base_texts(
    base: PresetBase | FolderBase, models_root: Path, tokens: Sequence[int]
) -> tuple[str, ...]:
    """`token_texts` by the base's tokenizer; empty where there is none."""
    tokenizer = tokenizer_of(base, models_root)
    return () if tokenizer is None else token_texts(tokenizer, tokens)


def tokenizer_of(base: PresetBase | FolderBase, models_root: Path) -> Tokenizer | None:
    """The base's tokenizer; None where its folder has none that the tokenizers library reads."""
    try:
        return _loaded(base, models_root)
    except RatoonError:
        return None
    except BaseException as err:  # noqa: BLE001 - the library's panics are no exceptions
        _raise_unless_of_library(err)
        return None


@lru_cache(maxsize=4)
def _loaded(base: PresetBase | FolderBase, models_root: Path) -> Tokenizer:
    if isinstance(base, PresetBase):
        return preset_tokenizer()
    data = ModelFolder.of(Path(base.folder), models_root).read(_FILE, _MAX_BYTES)
    return Tokenizer.from_buffer(data)


@lru_cache(maxsize=64)
def token_conflict(
    one: PresetBase | FolderBase, other: PresetBase | FolderBase, models_root: Path
) -> int | None:
    """The lowest id that is another token in each of two bases.

    None: there is none among the ids that both have, or one of the two has no tokenizer.
    """
    first, second = tokenizer_of(one, models_root), tokenizer_of(other, models_root)
    if first is None or second is None:
        return None
    tokens = {token: text for text, token in first.get_vocab().items()}
    pairs = second.get_vocab().items()
    return min((token for text, token in pairs if tokens.get(token, text) != text), default=None)


class TextStream:
    """The text of tokens, special ones too, one token after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._silent = 0

    def step(self, token: int) -> str:
        """What the token adds. Of a character that several tokens share the last has the text.

        Raises ValueError where the tokenizer fails.
        """
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except BaseException as err:
            _raise_unless_of_library(err)
            raise ValueError("the tokenizer has no text of a token") from err
        self._silent = 0 if text else self._silent + 1
        if self._silent == _MAX_SILENT:
            # No character: the stream would decode all of them anew at each token.
            text, self._silent = _NO_CHARACTER, 0
            self._stream = DecodeStream(skip_special_tokens=False)
        return text


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text of each token as a `TextStream` has it; joined they are that of all, but for broken
    UTF-8. Empty where the tokenizer fails.
    """
    stream = TextStream(tokenizer)
    try:
        return tuple(stream.step(token) for token in tokens)
    except ValueError:
        return ()


def _raise_unless_of_library(err: BaseException) -> None:
    """A panic of the tokenizers library is no `Exception`."""
    if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
        raise err
    _LOG.warning("no text of tokens", error=type(err).__name__)
