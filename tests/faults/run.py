"""`make faults`: nothing that is killed, torn or hostile loses or doubles what was acknowledged.

Runs a number of kills, minutes of load, attacks and hostile inputs. Writes one result file, a line
of the self-test and a line of the whole; exit 1 where anything was lost, doubled, loaded or
crashed. The long form has more of each. Nothing of ours runs beside the load, which is timed.

    python -m tests.faults.run
    python -m tests.faults.run --kills 300 --deliveries 1000 --scripts 200 --minutes 30 \\
        --inputs 1000000 --out benchmarks/results/cpu/faults.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import FrameType

import psutil

from harness.environment import describe
from ratoon_proto.types import Sequencing
from tests.durability.torn import tear_all
from tests.faults.judge.history import judge_acks, read_journal
from tests.faults.judge.reference import worst_difference
from tests.faults.selftest import find_builds
from tests.faults.summary import MIN_KILLS, Summary
from tests.faults.venues import crashes as faults_crashes
from tests.faults.venues.attacks import run_attacks
from tests.faults.venues.crashes import (
    Kills,
    crash_at,
    crash_at_imports,
    crash_at_names,
    crash_at_random,
    crash_in_windows,
    lose_store,
)
from tests.faults.venues.cut_logs import run_cuts
from tests.faults.venues.deliveries import run_deliveries
from tests.faults.venues.failover import run_failovers
from tests.faults.venues.light import POLICY, LightOptions, LightRun, light_run
from tests.faults.venues.live import LiveResult, run_live
from tests.faults.venues.load import run_load
from tests.faults.venues.scripts import ROLES as SCRIPT_ROLES
from tests.faults.venues.scripts import run_scripts
from tests.hostile.fuzz import fuzz
from tests.tiny_models import write_folder

# Random kills of each light run; a run by seq has all crash points and windows besides.
RANDOM_KILLS = 5
SEED_STEP = 1000


def main() -> None:
    args = _parse()
    end_at_sigterm()
    summary = Summary()
    with tempfile.TemporaryDirectory(prefix="rt-model-") as folder:
        model = write_folder(Path(folder) / "model", "qwen3")
        with _beside() as beside:
            _kill(summary, model, args, beside)
            scripts = beside.submit(run_scripts, model, args.seed, args.scripts)
            done = summary.part("kills, scripts", scripts.result)
            if done is not None:
                summary.add_scripts(done)
        failovers = summary.part("failovers", lambda: run_failovers(args.seed))
        if failovers is not None:
            summary.add_failovers(failovers)
        cuts = summary.part("cut logs", lambda: run_cuts(model, args.seed))
        if cuts is not None:
            summary.add_cuts(cuts)
        load = summary.part("load", lambda: run_load(model, args.seed, 60 * args.minutes))
        if load is not None:
            summary.add_load(load)
        summary.attacks = summary.part("attacks", lambda: run_attacks(model)) or {}
        # In a process of its own: its memory is looked at.
        with _beside() as fresh:
            hostile = fresh.submit(fuzz, args.seed, args.inputs)
            summary.hostile = summary.part("hostile", hostile.result)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document(summary, args), indent=1) + "\n", encoding="utf-8")
    for text in summary.problems():
        print(f"problem: {text}")
    print(summary.figures())
    print(summary.self_test_line())
    print(summary.last_line())
    raise SystemExit(0 if summary.is_good else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="kill, tear and load everything")
    parser.add_argument("--out", type=Path, help="write this result file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=MIN_KILLS, help="at least so many")
    parser.add_argument("--deliveries", type=int, default=12, help="kills under a receiver")
    parser.add_argument(
        "--scripts", type=int, default=len(SCRIPT_ROLES), help="kills under scripts"
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="of load")
    parser.add_argument("--torn", type=int, default=150, help="damaged files a light run")
    parser.add_argument("--inputs", type=int, default=10_000, help="hostile inputs")
    return parser.parse_args()


def document(summary: Summary, args: argparse.Namespace) -> dict[str, object]:
    """The result file's content; docs/operations.md has its fields."""
    options = {name: value for name, value in vars(args).items() if name not in ("out", "seed")}
    return {**summary.result(), **describe(args.seed), "options": options}


def _kill(
    summary: Summary, model: Path, args: argparse.Namespace, beside: ProcessPoolExecutor
) -> None:
    """The self-test, and rounds of kills, each with another seed, until there were enough.

    The real service is killed in the process beside, for it mostly waits; nothing here is timed.
    """
    seed = args.seed
    live = beside.submit(_timed_live, model, seed)
    findings = summary.part("self-test", lambda: find_builds(model, args.seed))
    summary.findings = findings or []
    deliveries = summary.part(
        "kills, deliveries", lambda: run_deliveries(model, args.seed, args.deliveries)
    )
    if deliveries is not None:
        summary.add_deliveries(deliveries)
    while True:
        for sequencing in Sequencing:
            options = LightOptions(
                seed=seed, model_folder=model, sequencing=sequencing, has_store=True
            )
            summary.part(f"kills, by {sequencing}", lambda o=options: _light(summary, o, args.torn))
        _add_live(summary, live)
        if summary.kills >= args.kills or summary.broken or not summary.verdict.is_good:
            return
        seed += SEED_STEP
        live = beside.submit(_timed_live, model, seed)


def _timed_live(model: Path, seed: int) -> tuple[LiveResult, float]:
    begin = time.monotonic()
    return run_live(model, seed, 1), time.monotonic() - begin


def _add_live(summary: Summary, live: Future[tuple[LiveResult, float]]) -> None:
    done = summary.part("wait for the service's kills", live.result)
    if done is not None:
        result, seconds = done
        summary.took("kills, service", seconds)
        summary.add_live(result)


def _light(summary: Summary, options: LightOptions, num_torn: int) -> None:
    """Kills, the verdict, and then the files that are left torn."""
    kills = Kills()
    with light_run(options) as run:
        if options.sequencing is Sequencing.CLIENT:
            for point in faults_crashes.POINTS:
                crash_at(run, kills, point)
            crash_in_windows(run, kills)
            crash_at_imports(run, kills)
            crash_at_names(run, kills)
        lose_store(run)
        crash_at_random(run, kills, RANDOM_KILLS)
        verdict = run.finish()
        summary.verdict.add(verdict)
        if verdict.is_good:
            difference = _fp64_difference(run)
            summary.fp64_difference = max(summary.fp64_difference, difference)
        torn = tear_all(run.settings.data_root, options.seed, num_torn)
        summary.add_light(kills, run.pair.num_kills, len(run.notes.told), torn)


def _fp64_difference(run: LightRun) -> float:
    records = read_journal(run.settings.database, POLICY)
    _, entries = judge_acks(run.notes.acks(), run.notes.told, records)
    model, seed = run.options.model_folder, run.options.seed
    return worst_difference(entries, run.trainer, model, seed, run.root / "fp64")


def _beside() -> ProcessPoolExecutor:
    """One process more, for as long as its block lasts."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=end_at_sigterm)


def end_at_sigterm() -> None:
    """SIGTERM ends this process as its own end would: with everything that it started."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(_number: int, _frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.terminate()
    sys.exit(143)


if __name__ == "__main__":
    main()
