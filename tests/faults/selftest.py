"""Would a fault run see it? Each build that is broken on purpose must be reported, a whole one not.

A build counts as found only where the same schedule on the whole build loses and doubles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.worker.tasks import FencedError, WorkerLostError
from ratoon_proto.types import Sequencing
from tests.faults.builds import BUILDS
from tests.faults.judge.calls import Call, Kind
from tests.faults.judge.history import Verdict
from tests.faults.venues.cut_logs import SHARES, cut_for_a_while
from tests.faults.venues.light import LightOptions, LightRun, light_run
from tests.faults.venues.power import cut_power

# A broken build may stand still: its callers do not wait for long.
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a build came to, and the whole one on the same schedule."""

    build: str
    broken: Verdict
    whole: Verdict

    @property
    def is_found(self) -> bool:
        return self.whole.is_good and not self.broken.is_good


def find_builds(model_folder: Path, seed: int) -> list[Finding]:
    """One finding a build."""
    return [find_build(build, model_folder, seed) for build in SCHEDULES]


def find_build(build: str, model_folder: Path, seed: int) -> Finding:
    """What the build's own schedule shows of it, and of the whole one."""
    schedule = SCHEDULES[build]
    return Finding(
        build=build,
        broken=_play(build, schedule, model_folder, seed),
        whole=_play("", schedule, model_folder, seed),
    )


def _play(
    build: str, schedule: Callable[[LightRun], None], model_folder: Path, seed: int
) -> Verdict:
    options = LightOptions(
        seed=seed,
        model_folder=model_folder,
        build=build,
        sequencing=Sequencing.SERVER if schedule is retries else Sequencing.CLIENT,
        has_power_cuts=schedule is power_cut,
        patience_s=PATIENCE_S if build else 600.0,
    )
    with light_run(options) as run:
        schedule(run)
        return run.finish()


def retries(run: LightRun) -> None:
    """Calls of which a third is made twice."""
    run.play_segment()


def late_message(run: LightRun) -> None:
    """A dead engine's order to restore a part of a window arrives in the next window."""
    update, one, two = (_call(1, Kind.UPDATE), *_parts(2, 2))
    run.play([update, one, two])
    (run.root / "held-restore").touch()
    step = Call(number=4, kind=Kind.OPTIM_STEP, includes=(one.number,))
    place = run.take_seqs(1)
    run.submit(step, place)
    deadline = time.monotonic() + run.pair.patience_s
    while not run.pair.held and time.monotonic() < deadline:
        time.sleep(0.01)
    run.pair.kill("engine")
    run.wait(step)
    run.play(_parts(5, 2))
    for method, args in run.pair.held:
        with suppress(FencedError, WorkerLostError):
            run.pair.worker().call(method, *args)
    run.play([_call(7, Kind.OPTIM_STEP), _call(8, Kind.UPDATE)])


def kill_before_apply(run: LightRun) -> None:
    """The worker is killed when it is asked to run an Update."""
    run.play([_call(1, Kind.UPDATE)])
    run.pair.arm(CrashPoint.WORKER_BEFORE_APPLY, 1)
    run.play([_call(number, Kind.UPDATE) for number in (2, 3)])


def power_cut(run: LightRun) -> None:
    """Updates wait behind a gap when the power goes; the gap is filled afterwards."""
    run.play([_call(1, Kind.UPDATE)])
    first, *waiting = [_call(number, Kind.UPDATE) for number in (2, 3, 4)]
    place = run.take_seqs(3)
    for index, call in enumerate(waiting, start=1):
        run.submit(call, place + index)
    run.pair.stop()
    cut_power(run.root, run.settings.data_root / "policies")
    run.pair.start()
    run.submit(first, place)
    for call in (first, *waiting):
        run.wait(call)


def lost_window(run: LightRun) -> None:
    """The worker is killed in a window that a checkpoint was taken in."""
    save = Call(number=4, kind=Kind.SAVE_CHECKPOINT, checkpoint_id="in-window")
    run.play([*_parts(1, 3), save, *_parts(5, 1)])
    run.pair.kill("worker")
    run.play([*_parts(6, 1), _call(7, Kind.OPTIM_STEP)])


def cut_log(run: LightRun) -> None:
    """All is killed, and started on seven tenths of the journal's log before it is put back."""
    cut_for_a_while(run, SHARES[0])


SCHEDULES: dict[str, Callable[[LightRun], None]] = {
    "no dedupe": retries,
    "no fencing": late_message,
    "commit before apply": kill_before_apply,
    "no fsync": power_cut,
    "window not re-run": lost_window,
    "lost end unnoticed": cut_log,
}
assert SCHEDULES.keys() == BUILDS.keys()


def _call(number: int, kind: Kind) -> Call:
    return Call(number=number, kind=kind)


def _parts(first: int, count: int) -> list[Call]:
    return [_call(first + index, Kind.FORWARD_BACKWARD) for index in range(count)]
