"""`make bench-see`: what it costs that a run can be seen.

Timed are what the trainer finds out for reports and warnings, inside updates of preset `small`;
what a step's row adds to the end of its operation in the journal, in turns with ends without one;
the CPU time that an open page costs the processes of the service; and what a read of the page adds
to an update of preset `tiny` for its caller, in turns with updates without one.

    python -m benchmarks.service.see --out benchmarks/results/cpu/see.json
    python -m benchmarks.service.see --report FILE --markdown docs/performance.md
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from benchmarks.common.command import make_parser, run_figures
from benchmarks.common.document import figure_lines, write_section
from benchmarks.step.cpu import trainer_spec
from benchmarks.step.workload import Group, make_batch
from harness.environment import describe
from harness.service import Service
from ratoon.api.http.page import page_files
from ratoon.engine.journal import fenced
from ratoon.engine.journal.fenced import FencedStore
from ratoon.engine.journal.records import JournalState, OperationEnd, OperationRecord
from ratoon.engine.journal.steps import FIGURES
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import open_database
from ratoon.train import report, trainer
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import CounterDivisor, OptimStep
from ratoon.train.ranks import rank
from ratoon.train.rollout_figures import FoundRollouts, TokenParts
from ratoon.train.trainer import Trainer
from ratoon_client import Loss, Optim, RatoonClient, group, rollout
from ratoon_proto.types import DivideBy, LossConfig, LossKind, OperationKind

BEGIN = "<!-- see: written by benchmarks/service/see.py -->"
END = "<!-- end of see -->"
POLICY = "see"
PATIENCE_S = 300.0
PRESET = "small"
GROUPS = (Group(prompt=512, responses=(128,) * 8),) * 2
# What finds figures and warnings, each called a few times in an update.
FINDERS = (
    (TokenParts, "add"),
    (FoundRollouts, "of"),
    (trainer, "step_warnings"),
    (trainer.Trainer, "_probe"),
    (report, "pass_warnings"),
    (rank, "sampled_weights"),
    (rank, "step_size"),
)
# The page reads what is new after so many seconds, and the lists below its curves each sixth time.
PAGE_PERIOD_S = 5.0
READS_PER_LISTS = 6
# Figures whose curves it shows.
SHOWN = [one for one in FIGURES if f'"{one}"' in page_files()["figures.js"].decode()]
LISTS = ("/weights", "/checkpoints")
# What its CPU time is measured of.
READS = 100
STEPS_PER_READ = 10
WARM_UPDATES = 3
TARGETS = {
    "figures_share": 0.01,
    "history_ms": 1.0,
    "bytes_per_step": 1000,
    "page_cpu_share": 0.01,
    "page_share": 0.01,
}
WHAT = {
    "figures_share": "figures, warnings and probes of an update, share of its time",
    "history_ms": "a step's row at the end of its operation, ms",
    "bytes_per_step": "the row's bytes in the database",
    "page_cpu_share": "CPU time of the service for an open page, share of one core",
    "page_share": "an update while the page is open, longer by the share",
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--updates", type=int, default=20, help="of preset small")
    parser.add_argument(
        "--pairs", type=int, default=200, help="of updates, with a read of the page and without"
    )
    parser.add_argument("--reads", type=int, default=READS, help="of the page, for its CPU time")
    parser.add_argument(
        "--ends", type=int, default=2000, help="of operations, with rows and without"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    run_figures(
        args,
        lambda: measure(args.updates, args.pairs, args.reads, args.ends, args.seed),
        _cells,
        write_markdown,
    )


def measure(updates: int, pairs: int, reads: int, ends: int, seed: int) -> dict[str, Any]:
    """Every figure of `WHAT`, and what it was made of."""
    environment = describe(seed)
    figures = measure_figures(updates, seed)
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        page = measure_page(Path(folder), pairs, reads, seed)
        history = measure_history(Path(folder) / "data" / "ratoon.sqlite", ends)
    return {
        "figures_share": statistics.median(figures["share"]),
        "history_ms": history["with_ms"] - history["without_ms"],
        "bytes_per_step": history["bytes_per_step"],
        "page_cpu_share": page["cpu_s_per_read"] / PAGE_PERIOD_S,
        "page_share": page["read_ms"] / (1000 * PAGE_PERIOD_S),
        **environment,
        "figures": figures,
        "history": history,
        "page": page,
    }


def measure_figures(updates: int, seed: int) -> dict[str, Any]:
    """Updates in this process: seconds of each, and the share of it that `FINDERS` take."""
    made = Trainer.create(trainer_spec(PRESET, GROUPS[0], seed, 2))
    batch = make_batch(GROUPS, made.info().vocab_size, seed)
    loss = resolve_loss(LossConfig(kind=LossKind.GRPO), batch, has_frozen_reference=False)
    step = OptimStep(
        learning_rate=1e-6,
        weight_decay=0.0,
        max_grad_norm=1.0,
        divisor=CounterDivisor(counter=DivideBy.TOKENS),
    )
    seconds: list[float] = []
    found: list[float] = []
    with _timed() as spent:
        for _ in range(WARM_UPDATES + updates):
            before, start = sum(spent), time.perf_counter()
            made.forward_backward(made.prepare(batch, loss))
            made.optim_step(step)
            seconds.append(time.perf_counter() - start)
            found.append(sum(spent) - before)
    pairs = list(zip(found, seconds, strict=True))[WARM_UPDATES:]
    return {
        "preset": PRESET,
        "groups": len(GROUPS),
        "rollouts": sum(len(one.responses) for one in GROUPS),
        "share": [part / whole for part, whole in pairs],
        "update_s": seconds[WARM_UPDATES:],
    }


@contextmanager
def _timed() -> Generator[list[float], None, None]:
    """Collect the seconds of all calls of `FINDERS`; none of them calls another."""
    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent.append(time.perf_counter() - start)

        return run

    with ExitStack() as stack:
        for owner, name in FINDERS:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield spent


def measure_page(root: Path, pairs: int, reads: int, seed: int) -> dict[str, Any]:
    """Ms of updates for their caller, in turns with one read of the page and without; the mean of
    what a read adds; and the CPU seconds of a read."""
    with ExitStack() as stack:
        service = stack.enter_context(Service(root, crash_points=False, worker={"device": "cpu"}))
        page = stack.enter_context(httpx.Client(base_url=f"{service.http}/v1", trust_env=False))
        with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
            client.create_policy(POLICY, preset="tiny", seed=seed).result(PATIENCE_S)
            session = client.policy(POLICY)
            rollouts = [
                rollout(response=[52 + i] * 256, sampler_logprobs=[-5.5] * 256, reward=float(i))
                for i in range(16)
            ]
            batch = [group("a", [50] * 512, rollouts)]

            def update() -> float:
                start = time.perf_counter()
                session.update(batch, loss=Loss("grpo"), optim=Optim(learning_rate=1e-5)).result()
                return 1000 * (time.perf_counter() - start)

            for _ in range(WARM_UPDATES):
                update()
            taken: dict[bool, list[float]] = {False: [], True: []}
            newest = _read_page(page, 0, with_lists=True)
            for number in range(pairs):
                with ThreadPoolExecutor(1) as pool:
                    with_lists = number % READS_PER_LISTS == 0
                    after_seq = max(newest - STEPS_PER_READ, 0)
                    reading = pool.submit(_read_page, page, after_seq, with_lists=with_lists)
                    taken[True].append(update())
                newest = reading.result()
                taken[False].append(update())
        cpu_s = _cpu_s_per_read(service, page, reads)
    return {
        "cpu_s_per_read": cpu_s,
        "read_ms": statistics.mean(taken[True]) - statistics.mean(taken[False]),
        "raw_with_ms": taken[True],
        "raw_without_ms": taken[False],
    }


def _read_page(client: httpx.Client, after_seq: int, *, with_lists: bool) -> int:
    """Ask for what a read of the policy's page asks for; returns the newest step's seq."""
    policy = f"/policies/{POLICY}"
    client.get(policy).raise_for_status()
    asked = {"after_seq": after_seq, "figures": SHOWN}
    steps = client.get(f"{policy}/steps", params=asked).raise_for_status()
    if with_lists:
        for path in LISTS:
            client.get(f"{policy}{path}").raise_for_status()
        newest = {"policy_id": POLICY, "page_size": 8}
        client.get("/operations", params=newest).raise_for_status()
    return max([after_seq, *steps.json()["seq"]])


def _cpu_s_per_read(service: Service, client: httpx.Client, reads: int) -> float:
    """CPU seconds of all processes for a read that finds `STEPS_PER_READ` steps, without those that
    an idle service takes anyway."""
    newest = _read_page(client, 0, with_lists=True)
    start, before = time.monotonic(), _cpu_s(service)
    for number in range(reads):
        with_lists = number % READS_PER_LISTS == 0
        _read_page(client, max(newest - STEPS_PER_READ, 0), with_lists=with_lists)
    taken_s, between = time.monotonic() - start, _cpu_s(service)
    time.sleep(taken_s)
    return (2 * between - before - _cpu_s(service)) / reads


def _cpu_s(service: Service) -> float:
    times = [process.cpu_times() for process in service.processes()]
    return sum(each.user + each.system for each in times)


def measure_history(database: Path, ends: int) -> dict[str, Any]:
    """Medians over `ends` of operations with their steps' rows, and as many without, in turns; and
    what the rows add to the database. The operations are those that the service has journaled."""
    engine = open_database(f"sqlite:///{database}")
    store, journal = SqlStore(engine), FencedStore(engine)
    records = [r for r in store.records_from(POLICY, 1) if r.kind is OperationKind.UPDATE]
    token, seq = journal.acquire(POLICY), records[-1].seq
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * ends):
        has_row, seq = bool(number % 2), seq + 1
        record, end = _again(records[number // 2 % len(records)], seq)
        journal.accept(token, record, seq + 1)
        with mock.patch.object(fenced, "step_row", _no_row) if not has_row else ExitStack():
            start = time.perf_counter()
            journal.end(token, POLICY, end)
            taken[has_row].append(1000 * (time.perf_counter() - start))
    with closing(engine.raw_connection()) as connection:
        sizes = connection.execute(
            "SELECT sum(pgsize), (SELECT count(*) FROM steps) FROM dbstat WHERE name LIKE '%steps%'"
        ).fetchone()
    engine.dispose()
    return {
        "ends": ends,
        "with_ms": statistics.median(taken[True]),
        "without_ms": statistics.median(taken[False]),
        "bytes_per_step": sizes[0] / sizes[1],
        "rows": sizes[1],
    }


def _no_row(*_: object) -> None:
    return None


def _again(record: OperationRecord, seq: int) -> tuple[OperationRecord, OperationEnd]:
    """An operation as it was accepted and as it ended, under another seq."""
    operation_id = f"{POLICY}.{seq}"
    accepted = OperationRecord(
        operation_id=operation_id,
        policy_id=POLICY,
        kind=record.kind,
        seq=seq,
        payload_hash=record.payload_hash,
        command=record.command,
        body_digest=record.body_digest,
        created_at=record.created_at,
    )
    assert record.version is not None
    assert record.result is not None
    assert record.finished_at is not None
    end = OperationEnd(
        operation_id=operation_id,
        state=JournalState.APPLIED,
        result=record.result,
        version=record.version,
        started_at=record.started_at,
        finished_at=record.finished_at,
        choices=record.choices,
        weights_digest=record.weights_digest,
        frees_window=True,
    )
    return accepted, end


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    of_what = (
        f"medians of {result['history']['ends']} ends and {len(result['figures']['share'])} updates"
    )
    write_section(path, BEGIN, END, figure_lines(result, _cells(result), of_what, result_link))


def _cells(result: dict[str, Any]) -> list[list[str]]:
    return [[what, f"{result[name]:.3g}", f"<= {TARGETS[name]:g}"] for name, what in WHAT.items()]


if __name__ == "__main__":
    main()
