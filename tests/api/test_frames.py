"""What is read of HTTP/2 frames: the length of each message, however the bytes are cut."""

from __future__ import annotations

import struct

import pytest

from harness.attacks.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    header_block,
)
from ratoon.api.grpc.frames import Frames

PADDED = 8
BLOCK = header_block("Update")
PREFIX = struct.pack(">BI", 0, 1000)


def _frames() -> Frames:
    return Frames("127.0.0.1", ("call", "7."), lambda _: None)


def _fed(frames: Frames, data: bytes, cut: int) -> bytes:
    return b"".join(frames.feed(data[at : at + cut]) for at in range(0, len(data), cut))


def _named(stream: int) -> bytes:
    text = f"7.{stream}".encode()
    return frame(CONTINUATION, END_HEADERS, stream, b"\x00\x04call" + bytes([len(text)]) + text)


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
async def test_a_call_is_named_and_its_length_known(cut: int) -> None:
    frames = _frames()
    settings, data = frame(SETTINGS, 0, 0, b""), frame(DATA, 0, 1, PREFIX + b"x")
    sent = PREFACE + settings + frame(HEADERS, END_HEADERS, 1, BLOCK) + data
    got = _fed(frames, sent, cut)
    assert got == PREFACE + settings + frame(HEADERS, 0, 1, BLOCK) + _named(1) + data
    arrival = frames.take(1)
    assert arrival is not None
    assert (await arrival.length(), arrival.num_bytes) == (1000, 6)


@pytest.mark.parametrize("cut", [1, 5, 1000])
async def test_headers_in_two_frames_are_named_after_the_second(cut: int) -> None:
    frames = _frames()
    first, rest = frame(HEADERS, 0, 1, BLOCK[:9]), BLOCK[9:]
    got = _fed(frames, PREFACE + first + frame(CONTINUATION, END_HEADERS, 1, rest), cut)
    assert got == PREFACE + first + frame(CONTINUATION, 0, 1, rest) + _named(1)


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_padding_is_no_part_of_a_message(cut: int) -> None:
    """Two bytes of the prefix a frame, each with padding that looks like a length."""
    frames = _frames()
    padded = [
        frame(DATA, PADDED, 1, bytes([9]) + PREFIX[at : at + 2] + b"\xff" * 9) for at in (0, 2, 4)
    ]
    _fed(frames, PREFACE + frame(HEADERS, END_HEADERS, 1, BLOCK) + b"".join(padded), cut)
    arrival = frames.take(1)
    assert arrival is not None
    assert await arrival.length() == 1000


async def test_a_stream_that_ends_early_has_no_length() -> None:
    frames = _frames()
    frames.feed(PREFACE + frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 0, 1, PREFIX[:3]))
    arrival = frames.take(1)
    assert arrival is not None
    frames.feed(frame(DATA, END_STREAM, 1, b""))
    assert await arrival.length() is None


async def test_what_is_reset_is_forgotten_and_trailers_name_nothing() -> None:
    frames = _frames()
    frames.feed(PREFACE + frame(HEADERS, END_HEADERS, 1, BLOCK))
    trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1, BLOCK)
    assert frames.feed(trailers) == trailers
    frames.feed(frame(RST_STREAM, 0, 1, bytes(4)))
    assert frames.take(1) is None


async def test_calls_that_nobody_takes_are_bounded() -> None:
    frames = _frames()
    frames.feed(PREFACE)
    for stream in range(1, 20_001, 2):
        frames.feed(frame(HEADERS, END_HEADERS, stream, BLOCK))
    assert frames.take(1) is None
    assert frames.take(19_999) is not None
