"""Where the processes of a light run are killed: every crash point, inside windows, at random.

A crash point counts only where its file was taken, so that a process killed itself there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ratoon.engine.crash_points import CrashPoint
from tests.faults.judge.calls import Call, Kind
from tests.faults.venues.light import LightRun

# Until a point is given up, both: how many checkpoints a segment has is a matter of the machine's
# speed, and one that failed with a worker is tried again after 30 s.
MIN_SEGMENTS, PATIENCE_S = 40, 90.0
# Who is killed in a window, where nobody dies at a crash point.
WINDOW_ROLES = ("worker", "engine", "engine", "worker", "worker", "engine")
# Calls of windows have numbers that no segment comes to.
_WINDOW_NUMBERS = 1_000_000
_STORE_NUMBERS = 2_000_000
_IMPORT_NUMBERS = 3_000_000
_NAME_NUMBERS = 4_000_000
_TAUGHT_NUMBERS = 5_000_000
# Points that the two processes reach; the real service reaches the others (`live`).
POINTS = tuple(point for point in CrashPoint if not point.startswith(("ingress-", "rank-")))
# Points of a policy that is put away.
AWAY_POINTS = (
    CrashPoint.ENGINE_BEFORE_PUT_AWAY,
    CrashPoint.ENGINE_AFTER_PUT_AWAY,
    CrashPoint.ENGINE_IN_RETURN,
)
# Points that an import reaches: it has no body and no micro-batches.
IMPORT_POINTS = tuple(
    point
    for point in POINTS
    if point
    not in (
        *AWAY_POINTS,
        CrashPoint.ENGINE_AFTER_ANSWER,
        CrashPoint.ENGINE_AFTER_BODY,
        CrashPoint.ENGINE_IN_REPLAY,
        CrashPoint.WORKER_IN_APPLY,
    )
)


# Points that a PublishVersion reaches, and those of the publication that it waits for.
NAME_POINTS = (
    CrashPoint.ENGINE_BEFORE_ACCEPT,
    CrashPoint.ENGINE_AFTER_ACCEPT,
    CrashPoint.WORKER_BEFORE_APPLY,
    CrashPoint.WORKER_AFTER_APPLY,
    CrashPoint.ENGINE_BEFORE_END,
    CrashPoint.ENGINE_AFTER_END,
)
AWAITED_POINTS = (
    CrashPoint.ENGINE_BEFORE_PUBLISH,
    CrashPoint.WORKER_BEFORE_PUBLISH,
    CrashPoint.WORKER_AFTER_PUBLISH,
    CrashPoint.ENGINE_AFTER_PUBLISH,
)


@dataclass
class Kills:
    """Counts of one run. `missed`: points that no process came to."""

    points: set[str] = field(default_factory=set[str])
    missed: set[str] = field(default_factory=set[str])
    in_window: int = 0
    at_random: int = 0


def crash_at(run: LightRun, kills: Kills, point: CrashPoint) -> None:
    """Play on until a process has been killed at the point, and until all has ended after it."""
    numbers = itertools.count(_TAUGHT_NUMBERS)

    def play() -> None:
        if point is CrashPoint.ENGINE_IN_REPLAY:
            run.pair.kill("worker")
        if point in AWAY_POINTS:
            run.pair.put_away()
        if point is CrashPoint.ENGINE_AFTER_ANSWER:
            play_taught(run, numbers)
        else:
            run.play_segment()

    run.pair.arm(point, run.rng.randint(1, 3))
    _play_until_killed(run, kills, point, play)


def play_taught(run: LightRun, numbers: Iterator[int]) -> None:
    """A window whose second part the policy answers for, at the version that the first one left."""
    for kind, is_taught in (
        (Kind.FORWARD_BACKWARD, False),
        (Kind.FORWARD_BACKWARD, True),
        (Kind.OPTIM_STEP, False),
    ):
        run.play([Call(number=next(numbers), kind=kind, is_taught=is_taught)])


def crash_at_imports(run: LightRun, kills: Kills) -> None:
    """Imports of both modes in turn, and a kill at each point that they come to."""
    numbers = itertools.count(_IMPORT_NUMBERS)

    def play() -> None:
        number = next(numbers)
        run.play([Call(number=number, kind=Kind.IMPORT_WEIGHTS, replaces=number % 4 == 2)])
        run.play([Call(number=next(numbers), kind=Kind.UPDATE)])

    for point in IMPORT_POINTS:
        run.pair.arm(point, 1)
        _play_until_killed(run, kills, point, play)


def crash_at_names(run: LightRun, kills: Kills) -> None:
    """A version is named, and a kill at each point that this comes to, or waits for."""
    numbers = itertools.count(_NAME_NUMBERS)

    def play(*kinds: Kind) -> None:
        run.play([Call(number=next(numbers), kind=kind) for kind in kinds])

    for point in NAME_POINTS:
        play(Kind.UPDATE)
        run.pair.arm(point, 1)
        _play_until_killed(run, kills, point, lambda: play(Kind.PUBLISH_VERSION))
    for point in AWAITED_POINTS:
        run.pair.arm(point, 1)
        _play_until_killed(run, kills, point, lambda: play(Kind.UPDATE, Kind.PUBLISH_VERSION))


def _play_until_killed(
    run: LightRun, kills: Kills, point: CrashPoint, play: Callable[[], None]
) -> None:
    end = time.monotonic() + PATIENCE_S
    for played in itertools.count(1):
        play()
        if not run.pair.is_armed(point):
            kills.points.add(point)
            return
        if played >= MIN_SEGMENTS and time.monotonic() > end:
            break
    run.pair.disarm(point)
    kills.missed.add(point)


def crash_in_windows(run: LightRun, kills: Kills) -> None:
    """Windows of six ForwardBackwards with a checkpoint in each, and a kill at six places in them.

    In two of them a process dies while a ForwardBackward runs, in the others between two.
    """
    for place, role in enumerate(WINDOW_ROLES):
        window = _window(place)
        before, after = window[: place + 2], window[place + 2 :]
        run.play(before)
        if place in (1, 4):
            run.pair.arm(CrashPoint.WORKER_IN_APPLY, 1)
        else:
            run.pair.kill(role)
        kills.in_window += 1
        run.play(after)


def _window(place: int) -> list[Call]:
    """An Update, six ForwardBackwards with a checkpoint after the third, their step."""
    kinds = [Kind.UPDATE] + [Kind.FORWARD_BACKWARD] * 3 + [Kind.SAVE_CHECKPOINT]
    kinds += [Kind.FORWARD_BACKWARD] * 3 + [Kind.OPTIM_STEP]
    first = _WINDOW_NUMBERS + 100 * place
    return [
        Call(number=first + index, kind=kind, checkpoint_id=f"window-{first}")
        for index, kind in enumerate(kinds)
    ]


def lose_store(run: LightRun) -> None:
    """The object store takes nothing: a save fails and leaves its name, a load loads.

    The engine dies once the worker has ended each, before the journal knows.
    """
    names = itertools.count(_STORE_NUMBERS)

    def play(*kinds: Kind, checkpoint_id: str = "", is_without_store: bool = False) -> None:
        run.play(
            [
                Call(
                    number=next(names),
                    kind=kind,
                    checkpoint_id=checkpoint_id,
                    is_without_store=is_without_store,
                )
                for kind in kinds
            ]
        )

    for kept, lost in (("kept-0", "lost-0"), ("kept-1", "lost-1")):
        play(Kind.DISCARD_GRADIENTS, Kind.UPDATE, Kind.SAVE_CHECKPOINT, checkpoint_id=kept)
        play(Kind.UPDATE)
        run.settings.store_is_away.touch()
        for kind, name in ((Kind.SAVE_CHECKPOINT, lost), (Kind.LOAD_CHECKPOINT, kept)):
            if kept == "kept-1":
                run.pair.arm(CrashPoint.ENGINE_BEFORE_END, 1)
            play(kind, checkpoint_id=name, is_without_store=True)
        run.settings.store_is_away.unlink()
        play(Kind.UPDATE, Kind.SAVE_CHECKPOINT, Kind.UPDATE, checkpoint_id=lost)
        play(Kind.LOAD_CHECKPOINT, Kind.UPDATE, checkpoint_id=lost)


def crash_at_random(run: LightRun, kills: Kills, count: int) -> None:
    """Kill either at any time, while segments go on."""
    for _ in range(count):
        role = run.rng.choice(["worker", "engine"])
        delay_s = run.rng.uniform(0.0, 1.0)
        killer = threading.Timer(delay_s, run.pair.kill, [role])
        killer.start()
        run.play_segment()
        killer.join()
        kills.at_random += 1
    time.sleep(0.1)
