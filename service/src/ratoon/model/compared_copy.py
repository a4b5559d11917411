"""A copy of weights to the host that finds, on their device, what differs from the copy before.

In: live weights, and the host's values of an earlier version. Out: the host has the live values,
and a part of the delta between both. The earlier values go to the device chunk by chunk while new
ones come, so that nothing is kept there for it but a few chunks, and it does not matter what has
changed the weights, nor how often. Decision 0017 has the reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import Queue
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ratoon.log import get_logger
from ratoon.model import delta_runs
from ratoon.model.changed_words import WORD_DTYPES, Planes, find_changes, most_bytes
from ratoon.model.delta_runs import (
    DeltaPart,
    EncodedRun,
    Run,
    compress_all,
    encoded_run,
    make_compressor,
)

_LOG = get_logger("weights")
# Runs of a chunk: few launches, and few bytes of the device.
CHUNK_RUNS = 16
# Chunks of either version on the device: one is loaded while one is compared. Four took as long.
_SLOTS = 2
# A chunk of which more has changed is not compared, and the delta is left to files: a delta of a
# larger share is hardly smaller than they are.
_MOST_CHANGED = 8
# Chunks whose planes may wait for being compressed, and threads that compress them.
_WAITING = 6
_THREADS = 4
_THREADS_EACH = 4

# Copies elements [start, stop) of a parameter, flattened, to a tensor on its device.
Read = Callable[[str, int, int, Tensor], None]
Event = torch.cuda.Event | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a parameter, flattened, at element `place` of a file's tensors."""

    parameter: str
    start: int
    stop: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A weight file: its tensors' bytes begin at byte `start`; `pieces` are in their order."""

    name: str
    start: int
    pieces: tuple[Piece, ...]

    @property
    def num_words(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Words of a file from its word `first` on; the places of `pieces` count from there."""

    file: FileLayout
    first: int
    num_words: int
    pieces: tuple[Piece, ...]


class CopyStreams:
    """What a GPU runs side by side for copies: earlier values in, comparing, new values out.

    Made once: memory of a stream is not used by others.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Blocks of a stream of high priority go before those of the passes.
        self.load, self.compare, self.out = (
            torch.cuda.Stream(device, priority=-1) for _ in range(3)
        )

    def follow_launched(self) -> None:
        """Later work of all streams follows what this thread has launched."""
        for stream in (self.load, self.compare, self.out):
            stream.wait_stream(torch.cuda.current_stream(self.device))


class ComparedCopy:
    """Copies and compares from its creation on: on a thread of its own, where there is a GPU.

    Live weights must not change before `settle`. Any thread may call the methods.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        read: Read,
        values: Mapping[str, Tensor],
        dtype: torch.dtype,
        streams: CopyStreams | None,
    ) -> None:
        """`chunks`: those of all files, in order; `values`: contiguous tensors of the host by
        parameter, of this dtype; `streams`: those of the GPU that has the live ones; None: a CPU
        has them."""
        self._chunks, self._read, self._dtype, self._streams = chunks, read, dtype, streams
        self._values = {name: value.view(-1) for name, value in values.items()}
        # By file, of each of its chunks.
        self._arrivals: dict[str, list[Future[Event]]] = {c.file.name: [] for c in chunks}
        for chunk in chunks:
            self._arrivals[chunk.file.name].append(Future())
        # What compresses each chunk's runs; cancelled from the first chunk on that is not compared.
        self._found: list[Future[_Compressing]] = [Future() for _ in self._chunks]
        self._is_compared = True
        self._buffers, self._num_buffers = Queue[Tensor](), 0
        self._is_launched = threading.Event()
        if streams is None:
            self._run()
        else:
            streams.follow_launched()
            self._thread = threading.Thread(target=self._run, name="ratoon-weights", daemon=True)
            self._thread.start()

    @property
    def _word_bytes(self) -> int:
        return self._dtype.itemsize

    def settle(self) -> None:
        """Make later work on this thread's stream of the device wait until no live weight is read
        any more."""
        self._is_launched.wait()
        if self._streams is not None:
            torch.cuda.current_stream(self._streams.device).wait_stream(self._streams.compare)

    def finish(self) -> None:
        """Wait until no live weight is read any more, another rank's either."""
        self._is_launched.wait()
        if self._streams is not None:
            self._streams.compare.synchronize()

    def end(self) -> None:
        """Wait until the host's values change no more."""
        if self._streams is not None:
            self._thread.join()

    def wait(self, file: str, num_bytes: int | None = None) -> None:
        """Wait until the host has the first bytes of a file's tensors; None: all.

        Raises what the copy failed with.
        """
        last = -1 if num_bytes is None else (num_bytes - 1) // _chunk_bytes()
        arrival = self._arrivals[file][last].result()
        if arrival is not None:
            arrival.synchronize()

    def write(self, path: Path) -> DeltaPart | None:
        """Write the streams of all changed runs to a new file; None, and no file, if they are not
        known. Raises what the copy failed with, and `OSError`."""
        entries: dict[str, list[dict[str, Any]]] = {name: [] for name in self._arrivals}
        num_changed = 0
        try:
            with path.open("xb") as out:
                for found in self._found:
                    for name, run in found.result().result():
                        entries[name].append(run.entry)
                        out.writelines(run.streams)
                        num_changed += run.num_changed
        except CancelledError:
            path.unlink()
            return None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return DeltaPart(path=path, num_changed=num_changed, runs=entries)

    @torch.no_grad()
    def _run(self) -> None:
        threads = ThreadPoolExecutor(_THREADS)
        try:
            self._copy(threads)
        except BaseException as err:  # noqa: BLE001 - raised where the copy is waited for
            for awaited in (*chain(*self._arrivals.values()), *self._found):
                if not awaited.done():
                    awaited.set_exception(err)
        finally:
            threads.shutdown(wait=False)
            self._is_launched.set()

    def _copy(self, threads: ThreadPoolExecutor) -> None:
        streams, device = self._streams, torch.device("cpu")
        if streams is not None:
            device = streams.device
            torch.cuda.set_device(device)
        with _on(streams and streams.compare):
            before, after = self._memory(device), self._memory(device)
        try:
            self._copy_through(before, after, threads)
        finally:
            self._is_launched.set()
            if streams is not None:
                # Before the memory of the chunks goes.
                for stream in (streams.load, streams.compare, streams.out):
                    stream.synchronize()

    def _copy_through(
        self, before: Sequence[Tensor], after: Sequence[Tensor], threads: ThreadPoolExecutor
    ) -> None:
        """Copy all chunks, by turns through `_SLOTS` places on the device."""
        streams, chunks = self._streams, self._chunks
        loaded, compared, copied = (list[Event]([None] * _SLOTS) for _ in range(3))
        for slot, chunk in enumerate(chunks[: _SLOTS - 1]):
            loaded[slot] = self._load(chunk, before[slot], None)
        arrivals = chain(*self._arrivals.values())
        for number, (chunk, arrival) in enumerate(zip(chunks, arrivals, strict=True)):
            slot, ahead = number % _SLOTS, number + _SLOTS - 1
            own = after[slot][: chunk.num_words]
            with _on(streams and streams.compare):
                _follow(copied[slot])
                for piece in chunk.pieces:
                    at = piece.place - chunk.first
                    self._read(piece.parameter, piece.start, piece.stop, own[at:][: _size(piece)])
                _follow(loaded[slot])
                ready = _mark(streams and streams.compare)
            if ahead < len(chunks) and self._is_compared:
                free = ahead % _SLOTS
                loaded[free] = self._load(chunks[ahead], before[free], compared[free])
            with _on(streams and streams.out):
                _follow(ready)
                for piece in chunk.pieces:
                    at = piece.place - chunk.first
                    target = self._values[piece.parameter][piece.start : piece.stop]
                    target.copy_(own[at:][: _size(piece)], non_blocking=True)
                copied[slot] = _mark(streams and streams.out)
            arrival.set_result(copied[slot])
            # The host waits in here, when all that does not depend on it is launched.
            planes = None
            if self._is_compared:
                with _on(streams and streams.compare):
                    planes = self._compare(chunk, before[slot][: chunk.num_words], own)
                    compared[slot] = _mark(streams and streams.compare)
            if planes is None:
                self._found[number].cancel()
            else:
                self._found[number].set_result(self._submit(threads, chunk, planes, own))

    def _memory(self, device: torch.device) -> list[Tensor]:
        size = max((chunk.num_words for chunk in self._chunks), default=0)
        return [torch.empty(size, dtype=self._dtype, device=device) for _ in range(_SLOTS)]

    def _load(self, chunk: Chunk, into: Tensor, after: Event) -> Event:
        """Bring the host's values to the device."""
        with _on(self._streams and self._streams.load):
            _follow(after)
            for piece in chunk.pieces:
                at = piece.place - chunk.first
                value = self._values[piece.parameter][piece.start : piece.stop]
                into[at:][: _size(piece)].copy_(value, non_blocking=True)
            return _mark(self._streams and self._streams.load)

    def _compare(self, chunk: Chunk, before: Tensor, after: Tensor) -> Planes | None:
        words = WORD_DTYPES[self._word_bytes]
        most = _most_changed(chunk.num_words)
        run_words = delta_runs.RUN_BYTES // self._word_bytes
        try:
            planes = self._find(before.view(words), after.view(words), run_words, most)
        except torch.OutOfMemoryError:
            _LOG.warning("weights are not compared", reason="the device has no memory for it")
            planes = None
        self._is_compared = planes is not None
        return planes

    def _find(self, before: Tensor, after: Tensor, run_words: int, most: int) -> Planes | None:
        if self._streams is None:
            return find_changes(before, after, run_words, most)
        from ratoon.model.changed_words_kernels import find_changes as find_on_gpu

        return find_on_gpu(before, after, run_words, most)

    def _submit(
        self, threads: ThreadPoolExecutor, chunk: Chunk, planes: Planes, after: Tensor
    ) -> _Compressing:
        """Begin to compress the planes of a chunk, once there is memory of the host for them."""
        buffer = self._buffer()
        with _on(self._streams and self._streams.compare):
            split = planes.digits.numel()
            buffer[:split].copy_(planes.digits.view(-1), non_blocking=True)
            buffer[split : planes.num_bytes].copy_(planes.differences.view(-1), non_blocking=True)
            arrived = _mark(self._streams and self._streams.compare)
            runs = list(_runs_of(chunk, planes, self._word_bytes))
            # Runs of few words, whose streams may be larger than they are.
            whole = {number: after[words].cpu() for number, words, _ in runs if words is not None}
        return threads.submit(self._encode, chunk, planes, runs, whole, buffer, arrived)

    def _encode(
        self,
        chunk: Chunk,
        planes: Planes,
        runs: Sequence[_RunOfChunk],
        whole: Mapping[int, Tensor],
        buffer: Tensor,
        arrived: Event,
    ) -> list[tuple[str, EncodedRun]]:
        places = [planes.places(number, run.num_words) for number, _, run in runs]
        flat = [place for of_run in places for place in of_run]
        try:
            if arrived is not None:
                arrived.synchronize()
            streams = iter(compress_all(buffer.numpy(), flat, _THREADS_EACH))
        finally:
            self._buffers.put(buffer)
        compressor, encoded = make_compressor(), list[tuple[str, EncodedRun]]()
        for (number, _, run), of_run in zip(runs, places, strict=True):
            after = np.empty(0, np.uint8)
            if number in whole:
                after = whole[number].view(torch.uint8).numpy()
            own = tuple(next(streams) for _ in of_run)
            each = encoded_run(run, planes.num_changed[number], own, after, compressor)
            encoded.append((chunk.file.name, each))
        return encoded

    def _buffer(self) -> Tensor:
        """uint8 memory of the host for the planes of any chunk; waits for it."""
        if self._num_buffers == _WAITING:
            return self._buffers.get()
        self._num_buffers += 1
        sizes = (chunk.num_words for chunk in self._chunks)
        most = max(most_bytes(size, self._word_bytes, _most_changed(size)) for size in sizes)
        return torch.empty(most, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


_Compressing = Future[list[tuple[str, EncodedRun]]]
# The number of a run in its chunk, its words in the chunk if they may be needed, and the run.
_RunOfChunk = tuple[int, slice | None, Run]


def _runs_of(chunk: Chunk, planes: Planes, word_bytes: int) -> Iterator[_RunOfChunk]:
    """The changed runs of a chunk."""
    run_words = delta_runs.RUN_BYTES // word_bytes
    for number, num_changed in enumerate(planes.num_changed):
        if not num_changed:
            continue
        first = number * run_words
        stop = min(first + run_words, chunk.num_words)
        start = chunk.file.start + (chunk.first + first) * word_bytes
        run = Run(start=start, stop=start + (stop - first) * word_bytes, word_bytes=word_bytes)
        sizes = [size for _, size in planes.places(number, run.num_words)]
        is_small = sum(map(_compressed_bound, sizes)) < run.stop - run.start
        yield number, None if is_small else slice(first, stop), run


def _compressed_bound(num_bytes: int) -> int:
    """Most bytes of a zstd frame (ZSTD_COMPRESSBOUND of zstd.h)."""
    return num_bytes + (num_bytes >> 8) + 64


def _most_changed(num_words: int) -> int:
    # Small ones may change whole: the bound is for the device's memory.
    return max(num_words // _MOST_CHANGED, 2**16)


def device_bytes(file_bytes: int) -> int:
    """Most bytes of a GPU that a copy takes beside what is copied, where no file has more than
    these: chunks of either version, and planes."""
    return (2 * _SLOTS + 1) * min(_chunk_bytes(), file_bytes)


def cut_file(file: FileLayout, dtype: torch.dtype) -> Iterator[Chunk]:
    """The chunks of a file, whose tensors have this dtype."""
    step, total = _chunk_bytes() // dtype.itemsize, file.num_words
    for first in range(0, total, step):
        stop = min(first + step, total)
        yield Chunk(
            file=file,
            first=first,
            num_words=stop - first,
            pieces=tuple(_cut(file.pieces, first, stop)),
        )


def _chunk_bytes() -> int:
    return CHUNK_RUNS * delta_runs.RUN_BYTES


def _cut(pieces: Sequence[Piece], first: int, stop: int) -> Iterator[Piece]:
    for piece in pieces:
        end = piece.place + _size(piece)
        begin, end = max(piece.place, first), min(end, stop)
        if begin < end:
            start = piece.start + begin - piece.place
            yield Piece(
                parameter=piece.parameter, start=start, stop=start + end - begin, place=begin
            )


def _size(piece: Piece) -> int:
    return piece.stop - piece.start


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else cast("Any", torch.cuda.stream(stream))


def _mark(stream: torch.cuda.Stream | None) -> Event:
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _follow(event: Event) -> None:
    """Later work on this thread's stream follows the event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
