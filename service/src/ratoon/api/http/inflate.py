"""Inflates compressed bodies piece by piece.

Only one piece of at most a few MiB is held, besides the decoder's window. A body that inflates to
more than its call's bound, or to more than `MAX_RATIO` times its size after the first `FREE_BYTES`,
is refused before more of it is made.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import zstandard

from ratoon.errors import ErrorCode, RatoonError

# JSON of tokens and log-probs shrinks to a third; no real batch to a hundredth.
MAX_RATIO = 100
FREE_BYTES = 2**20
_PIECE_BYTES = 256 * 1024
# zstd's decoder has no limit per call. The smallest block, 4 bytes, makes 128 KiB.
_ZSTD_SLICE_BYTES = 256
_ZSTD_WINDOW_BYTES = 8 * 2**20


class _Decoder(Protocol):
    """Decodes one compressed stream, piece by piece.

    `is_at_end`: the stream has ended, with nothing behind it.
    """

    @property
    def is_at_end(self) -> bool: ...
    def decode(self, data: bytes) -> Iterator[bytes]: ...


class Inflater:
    """Inflates one body.

    `coding` is one of `CODINGS`. `check_size` is called with the number of inflated bytes and
    raises if there are too many.
    """

    def __init__(self, coding: str, *, check_size: Callable[[int], None]) -> None:
        self._coding = coding
        self._check_total = check_size
        self._decoder = CODINGS[coding]()
        self._num_in = 0
        self._num_out = 0

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces that `data` adds. Raises BODY_TOO_LARGE, MALFORMED_BODY."""
        self._num_in += len(data)
        try:
            for piece in self._decoder.decode(data):
                self._num_out += len(piece)
                self._check_size()
                if piece:
                    yield piece
        except (zlib.error, zstandard.ZstdError, ValueError) as err:
            raise self._malformed() from err

    def check_end(self) -> None:
        """Check that the body is whole. Raises MALFORMED_BODY if it is truncated."""
        if not self._decoder.is_at_end:
            raise self._malformed()

    def _check_size(self) -> None:
        self._check_total(self._num_out)
        if self._num_out > max(FREE_BYTES, MAX_RATIO * self._num_in):
            raise RatoonError(
                ErrorCode.BODY_TOO_LARGE,
                f"the body grows more than {MAX_RATIO} times when it is inflated",
                field="Content-Encoding",
                got=f"{self._num_out} bytes from {self._num_in}",
                expected=f"at most {MAX_RATIO} times as many",
            )

    def _malformed(self) -> RatoonError:
        return RatoonError(
            ErrorCode.MALFORMED_BODY,
            f"the body is not one whole {self._coding} stream",
            field="Content-Encoding",
            got=f"{self._num_in} bytes",
            expected=self._coding,
        )


class _Gzip:
    """Decodes one gzip member; anything after it is malformed."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def is_at_end(self) -> bool:
        return self._decoder.eof and not self._decoder.unused_data

    def decode(self, data: bytes) -> Iterator[bytes]:
        while True:
            if data and self._decoder.eof:
                raise ValueError("bytes after the end")
            piece = self._decoder.decompress(data, _PIECE_BYTES)
            yield piece
            data = self._decoder.unconsumed_tail
            if not data and len(piece) < _PIECE_BYTES:
                return


class _Zstd:
    """Decodes one zstd frame; anything after it is malformed."""

    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._decoder = decompressor.decompressobj()

    @property
    def is_at_end(self) -> bool:
        return self._decoder.eof and not self._decoder.unused_data

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_SLICE_BYTES):
            if self._decoder.eof:
                raise ValueError("bytes after the end")
            yield self._decoder.decompress(data[start : start + _ZSTD_SLICE_BYTES])


CODINGS: Mapping[str, Callable[[], _Decoder]] = {"gzip": _Gzip, "zstd": _Zstd}
