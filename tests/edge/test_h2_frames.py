"""What is read of HTTP/2 frames: messages' lengths and calls' ends, however the bytes are cut."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from harness.attacks.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
)
from ratoon.edge.h2_frames import MAX_COST, Answers, Frames

PADDED = 8
BLOCK = header_block("Update")
PREFIX = struct.pack(">BI", 0, 1000)


CALL = frame(HEADERS, END_HEADERS, 1, BLOCK)
RESET = frame(RST_STREAM, 0, 1, bytes(4))


class _Places:
    """`num_free` places."""

    def __init__(self, num_free: int = 10**6) -> None:
        self.num_free = num_free
        self.num_resets = 0

    def take(self) -> bool:
        is_free = self.num_free > 0
        self.num_free -= is_free
        return is_free

    def give_back(self) -> None:
        self.num_free += 1

    def rest(self) -> None:
        self.num_resets += 1


def _frames(places: _Places | None = None) -> Frames:
    return Frames("127.0.0.1", ("call", "7."), places or _Places())


def _fed(frames: Frames, data: bytes, cut: int | None = None, most: int = 10**6) -> bytes:
    """What goes to gRPC for `data`, which arrives in pieces of `cut` bytes."""
    out, unseen, step = b"", b"", cut or len(data)
    for at in range(0, len(data), step):
        unseen += data[at : at + step]
        while unseen:
            passed_on, num_bytes = frames.feed(unseen, most)
            unseen = unseen[num_bytes:]
            out += passed_on
            if not num_bytes:
                break
    return out


def _named(stream: int) -> bytes:
    text = f"7.{stream}".encode()
    return frame(CONTINUATION, END_HEADERS, stream, b"\x00\x04call" + bytes([len(text)]) + text)


@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
async def test_a_call_is_named_and_its_length_known(cut: int, most: int) -> None:
    frames = _frames()
    settings, data = frame(SETTINGS, 0, 0, b""), frame(DATA, 0, 1, PREFIX + b"x")
    sent = PREFACE + settings + frame(HEADERS, END_HEADERS, 1, BLOCK) + data
    got = _fed(frames, sent, cut, most)
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
    _fed(frames, PREFACE + frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 0, 1, PREFIX[:3]))
    arrival = frames.take(1)
    assert arrival is not None
    _fed(frames, frame(DATA, END_STREAM, 1, b""))
    assert await arrival.length() is None


async def test_what_is_reset_is_forgotten_and_trailers_name_nothing() -> None:
    frames = _frames()
    _fed(frames, PREFACE + frame(HEADERS, END_HEADERS, 1, BLOCK))
    trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1, BLOCK)
    assert _fed(frames, trailers) == trailers
    _fed(frames, frame(RST_STREAM, 0, 1, bytes(4)))
    assert frames.take(1) is None


async def test_calls_that_nobody_takes_are_bounded() -> None:
    frames = _frames()
    _fed(frames, PREFACE)
    for stream in range(1, 20_001, 2):
        _fed(frames, frame(HEADERS, END_HEADERS, stream, BLOCK))
    assert frames.take(1) is None
    assert frames.take(19_999) is not None


@pytest.mark.parametrize("cut", [1, 5, 1000])
async def test_a_call_without_a_place_is_not_forwarded_until_there_is_one(cut: int) -> None:
    """Its headers may be with gRPC, but not their end."""
    places = _Places(0)
    frames = _frames(places)
    data = frame(DATA, 0, 1, PREFIX)
    assert _fed(frames, PREFACE + CALL, cut) == PREFACE + frame(HEADERS, 0, 1, BLOCK)
    assert frames.feed(data, 9) == (b"", 0)
    places.num_free = 1
    assert frames.feed(data, 9) == (_named(1) + data, len(data))
    assert places.num_free == 0


async def test_headers_that_do_not_end_take_no_place() -> None:
    """They are never judged: a connection that stops there kept its place."""
    places = _Places(1)
    _fed(_frames(places), PREFACE + CALL[:-1])
    _fed(_frames(places), PREFACE + frame(HEADERS, 0, 1, BLOCK))
    assert places.num_free == 1


@pytest.mark.parametrize(
    ("end", "num_resets"),
    [
        (lambda frames, _: _fed(frames, RESET), 1),
        (lambda frames, _: frames.forget(1), 0),
        (lambda frames, _: frames.take(1).leave(), 0),
        (lambda frames, _: frames.leave(), 0),
        (lambda frames, _: frames.end(), 0),
        (lambda _, answers: answers.feed(frame(HEADERS, END_HEADERS, 1, b"")), 0),
        (lambda _, answers: answers.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"")), 0),
        (lambda _, answers: answers.feed(RESET), 0),
        (lambda _, answers: answers.feed(frame(GOAWAY, 0, 0, bytes(8))), 0),
    ],
    ids=["reset", "ended", "judged", "unread", "left", "answered", "refused", "cut", "too late"],
)
async def test_a_place_is_given_back_once_whatever_ends_the_wait(
    end: Callable[[Frames, Answers], object], num_resets: int
) -> None:
    """A call that was reset, or that gRPC refused itself, kept its place for 2 s."""
    places = _Places(1)
    frames = _frames(places)
    answers = Answers(frames)
    _fed(frames, PREFACE + CALL)
    assert places.num_free == 0
    for _ in range(2):
        end(frames, answers)
        assert places.num_free == 1
    _fed(frames, RESET)
    assert (places.num_free, places.num_resets) == (1, num_resets)


async def test_calls_that_grpc_ignores_take_no_place() -> None:
    """After its GOAWAY a call of a later stream is never answered."""
    places = _Places(1)
    frames = _frames(places)
    _fed(frames, PREFACE)
    for byte in frame(GOAWAY, 0, 0, bytes([0, 0, 0, 1]) + bytes(4) + b"max_age"):
        Answers(frames).feed(bytes([byte]))
    answers = Answers(frames)
    for byte in frame(GOAWAY, 0, 0, bytes([0, 0, 0, 1]) + bytes(4) + b"max_age"):
        answers.feed(bytes([byte]))
    assert _fed(frames, CALL + CALL.replace(bytes(3) + b"\1", bytes(3) + b"\3"))
    assert places.num_free == 0


async def test_a_turn_ends_with_its_frames_and_after_a_reset() -> None:
    frames = _frames()
    _fed(frames, PREFACE)
    settings = frame(SETTINGS, 0, 0, b"")
    assert frames.feed(settings * 5, 3)[1] == 3 * len(settings)
    assert frames.feed(CALL + RESET + settings, 9)[1] == len(CALL + RESET)


async def test_a_good_caller_is_no_flood() -> None:
    """A reader sends a WINDOW_UPDATE or two for each frame, and small messages are in one."""
    frames = _frames()
    answers = Answers(frames)
    _fed(frames, PREFACE)
    update = frame(WINDOW_UPDATE, 0, 1, bytes([0, 0, 0, 9]))
    for stream in range(1, 2_001, 2):
        _fed(frames, frame(HEADERS, END_HEADERS, stream, BLOCK))
        _fed(frames, frame(DATA, END_STREAM, stream, PREFIX))
        for kind, flags in ((HEADERS, END_HEADERS), (DATA, 0), (HEADERS, END_HEADERS | END_STREAM)):
            answers.feed(frame(kind, flags, stream, b"x"))
            _fed(frames, update * 2)
    assert not frames.cost.is_flood()
    _fed(frames, frame(HEADERS, END_HEADERS, 2_001, BLOCK))
    for _ in range(int(MAX_COST)):
        _fed(frames, frame(DATA, 0, 2_001, bytes(16 * 1024)) + update)
    assert not frames.cost.is_flood()


async def test_small_pieces_of_a_message_are_a_flood() -> None:
    frames = _frames()
    _fed(frames, PREFACE + CALL + frame(DATA, 0, 1, PREFIX))
    _fed(frames, frame(DATA, 0, 1, b"x") * int(1.1 * MAX_COST))
    assert frames.cost.is_flood()


async def test_keep_alives_are_free_but_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ratoon.edge.h2_frames.time.monotonic", lambda: now)
    frames = _frames()
    _fed(frames, PREFACE)
    for _ in range(10_000):
        now += 1.0
        _fed(frames, frame(SETTINGS, 0, 0, b""))
        assert not frames.cost.is_flood()
    _fed(frames, frame(SETTINGS, 0, 0, b"") * int(1.1 * MAX_COST))
    assert frames.cost.is_flood()
