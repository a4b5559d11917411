"""Scripts of the Tinker API's SDK, whose service is killed at random moments.

A script knows only URL and key, and retries as the SDK does. It must print the losses and digests
of a script that nothing befell, and its model's journal must have the same operations, each once,
with the same digests of weights.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.service import Service
from harness.tinker_site import NEWEST, STEPS, environment
from ratoon.api.tinker.names import NOBODY, model_of
from ratoon.engine.journal.records import OperationRecord
from ratoon_client import RatoonClient
from tests.faults.judge.history import Verdict, end_of, read_journal

NUM_STEPS = 20
OUTAGE_S = 12.0
ALL = "all"
# Each is killed once during every script, in a random order.
ROLES = ("worker", "engine", "gateway", "sampler", ALL)
MODEL = "tiny-model"
SEED = 1
# For a whole script and its kills.
PATIENCE_S = 1200.0


@dataclass
class ScriptResult:
    """`kills`: by role. `seconds`: by role, the longest step after its kill and before the next."""

    kills: Counter[str] = field(default_factory=Counter[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    operations: int = 0
    verdict: Verdict = field(default_factory=Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a script printed of each step, without its model, and what the journal has of that."""

    steps: list[dict[str, Any]]
    records: list[OperationRecord]
    error: str


def run_scripts(model_folder: Path, seed: int, kills: int) -> ScriptResult:
    """At least `kills` kills of one service, at moments that `seed` decides."""
    result, rng = ScriptResult(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="rt-scripts-", dir="/tmp") as folder:
        root = Path(folder)
        shutil.copytree(model_folder, root / "models" / MODEL)
        # Scripts ask the gateway: there is no Serve, which would only make starts longer.
        settings = {"tinker": {"enabled": True}, "serve": {"num_replicas": 0}}
        with Service(root, crash_points=False, **settings) as service:
            expected = _run(service, {}, result)
            if expected.error:
                raise RuntimeError(expected.error)
            while result.kills.total() < kills:
                moments = rng.sample(range(NUM_STEPS - 1), len(ROLES))
                plan = dict(zip(moments, rng.sample(ROLES, len(ROLES)), strict=True))
                _judge(_run(service, plan, result, rng.random), expected, result)
    return result


def _run(
    service: Service,
    plan: Mapping[int, str],
    result: ScriptResult,
    draw: Callable[[], float] = float,
) -> _Run:
    """One script with a model of its own. `plan`: whom to kill once a step has ended."""
    steps, model_id, error = list[dict[str, Any]](), "", ""
    killed, step_s, begin = "", 0.0, time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, str(STEPS), MODEL, str(NUM_STEPS), str(SEED)],
            env=environment(service.http, [NEWEST]),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as script,
        _killed_after(script, PATIENCE_S),
    ):
        assert script.stdout is not None
        for line in script.stdout:
            told: dict[str, Any] = json.loads(line)
            model_id = told.pop("model_id")
            steps.append(told)
            taken_s, begin = time.monotonic() - begin, time.monotonic()
            if killed:
                result.seconds[killed] = max(round(taken_s, 2), result.seconds.get(killed, 0.0))
            elif len(steps) > 1:
                step_s = min(taken_s, step_s or taken_s)
            if role := plan.get(told["step"]):
                time.sleep(step_s * draw())
                _kill(service, role)
                result.kills[role] += 1
                killed = role
        if script.wait():
            errors.seek(0)
            error = f"status {script.returncode}: {errors.read()[-2000:]}"
    if not steps:
        raise RuntimeError(error)
    policy_id = model_of(model_id, NOBODY).policy_id
    records = read_journal(service.data_root / "ratoon.sqlite", policy_id)
    with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
        client.delete_policy(policy_id)
    result.operations += len(records)
    return _Run(steps=steps, records=records, error=error)


@contextmanager
def _killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill a process that has not ended after so many seconds, or when the block ends."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


def _kill(service: Service, role: str) -> None:
    if role != ALL:
        service.kill(role)
        return
    service.kill_all()
    time.sleep(OUTAGE_S)
    service.start()


def _judge(run: _Run, expected: _Run, result: ScriptResult) -> None:
    lost, doubled = result.verdict.lost, result.verdict.doubled
    if run.error:
        lost.append(f"a script ended: {run.error}")
    for got, wanted in zip(run.steps, expected.steps, strict=False):
        if got != wanted:
            lost.append(f"a script's step: {got}, expected {wanted}")
    got, wanted = _facts(run), _facts(expected)
    counts = lost if len(got) < len(wanted) else doubled
    if len(got) != len(wanted):
        counts.append(f"a script has {len(got)} operations, expected {len(wanted)}")
    for mine, theirs in zip(got, wanted, strict=False):
        if mine != theirs:
            lost.append(f"a script's operation {mine}, expected {theirs}")


def _facts(run: _Run) -> list[tuple[object, ...]]:
    """What two runs have in common of each operation."""
    return [
        (each.seq, each.kind, end_of(each), each.version, each.weights_digest)
        for each in run.records
    ]
