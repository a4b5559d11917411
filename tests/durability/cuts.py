"""A recorded life and the disks that a power cut at any moment of it leaves.

Enters a model folder, leaves cuts: an image and what was promised by then.
Invariant: cuts of one recording differ in nothing but the moment, the fsyncs that were done and
what of the rest survived.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratoon.engine.types import PolicySpec
from tests.durability.disk import Disk, Image, IsDone, image_digest, write_image
from tests.durability.machine import DurableMachine, commands, digests_of, spec_of
from tests.durability.promises import Digests, Mark, Promises, check, parse_marks
from tests.durability.recorder import Event, Kind, record

DATA = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`root` is as the recorded process left it."""

    root: Path
    spec: PolicySpec
    events: Sequence[Event]
    oracle: Mapping[int, Digests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`place`: how many events came before."""

    place: int
    image: Image
    promises: Promises


def ram_folder() -> Path:
    """A folder of the caller's own, where an fsync costs nothing if there is such a place."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="ratoon-", dir=parent))


def record_life(folder: Path, shim: Path, base: Path) -> Recording:
    """Run `driver.py` below `folder`, and, for the weights, what it ran without a crash."""
    root = folder / "recorded"
    root.mkdir()
    events = record(shim, "tests.durability.driver", root, (str(root), str(base)))
    spec = spec_of(base)
    oracle = asyncio.run(undisturbed(folder / "undisturbed", spec))
    return Recording(root=root, spec=spec, events=events, oracle=oracle)


async def undisturbed(root: Path, spec: PolicySpec) -> Mapping[int, Digests]:
    """Digests after each seq of a run without a crash."""
    machine = DurableMachine(root, spec, creates=True)
    await machine.start()
    start = digests_of(machine.training.real[-1])
    for seq, (command, number) in commands().items():
        await machine.end(await machine.submit(seq, command, number))
    await machine.abandon(closes=True)
    return {0: start, **machine.training.digests}


def all_done(_event: Event) -> bool:
    return True


def cuts_at_promises(recording: Recording, is_done: IsDone = all_done) -> Iterator[Cut]:
    """One at each promise: nothing survives that was not synced."""
    disk, made = Disk(is_done), list[Mark]()
    for place, event in enumerate(recording.events):
        disk.apply(event)
        if event.kind is Kind.MARK:
            made += parse_marks([event])
            yield _cut(recording, place + 1, disk.strict(), made)


def distinct(cuts: Iterable[Cut]) -> list[Cut]:
    """Last of the cuts with equal disks: it has the most promises."""
    last = {image_digest(cut.image): cut for cut in cuts}
    return sorted(last.values(), key=lambda cut: cut.place)


def torn_cuts(recording: Recording, places: Sequence[int]) -> Iterator[Cut]:
    """One at each place, in order, which is its seed too: of what was not synced some survives."""
    disk, made, wanted = Disk(all_done), list[Mark](), set(places)
    for place, event in enumerate(recording.events):
        if place in wanted:
            yield _cut(recording, place, disk.torn(place), made)
        disk.apply(event)
        if event.kind is Kind.MARK:
            made += parse_marks([event])


def recover(recording: Recording, cut: Cut, folder: Path) -> None:
    """Start the service on the cut's disk. Raises `LostError`, or what the start raises."""
    root = folder / f"cut-{cut.place}"
    write_image(cut.image, root)
    try:
        asyncio.run(check(root / DATA, recording.spec, cut.promises))
    finally:
        shutil.rmtree(root)


def first_loss(recording: Recording, is_done: IsDone, folder: Path) -> str | None:
    """How a power cut at some promise is noticed where only some fsyncs are done; None: it is not.

    Disks that are those of the whole recording are not tried again.
    """
    whole = {cut.place: image_digest(cut.image) for cut in cuts_at_promises(recording)}
    for cut in cuts_at_promises(recording, is_done):
        if image_digest(cut.image) == whole[cut.place]:
            continue
        try:
            recover(recording, cut, folder)
        except Exception as err:  # noqa: BLE001 - a start that fails has noticed it too
            return f"{type(err).__name__}: {err}"
    return None


def _cut(recording: Recording, place: int, image: Image, made: Sequence[Mark]) -> Cut:
    promises = Promises(made=tuple(made), oracle=recording.oracle)
    return Cut(place=place, image=image, promises=promises)
