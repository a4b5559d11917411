"""Times `ratoon serve` up to a model's first update, cold and warm, by phase.

The model has random weights, made here. The service is started twice on one folder: the second time
it finds compiled code, and files in the page cache. With `--kinds` policies of other kinds follow
the first in each start, one at a time.

    python -m benchmarks.service.start --out benchmarks/results/h200/start.json
    python -m benchmarks.service.start --model Qwen3-1.7B --kinds full lora fast --root /dev/shm
    python -m benchmarks.service.start --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import aligned
from benchmarks.common.forests import PAPER_LENGTHS
from benchmarks.service.run import MODEL, SMALL, Plan, rollouts, worker_settings, write_model
from benchmarks.step.workload import QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, TINY, Group
from harness.gpu_results import write_result
from harness.service import Service
from ratoon_client import Lora, Loss, Optim, RatoonClient, RatoonClientError
from ratoon_proto.types import StepReport

POLICY = "start"
PATIENCE_S = 1800.0
# Target for a warm start of Qwen3-8B, all three phases together.
TARGET_S = 75.0
SIZES = {size.name: size for size in (QWEN3_8B, QWEN3_1_7B, QWEN3_0_6B, TINY)}
# Options of each kind of policy.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"lora": Lora(rank=16, alpha=32.0)},
    "fast": {"deterministic": False, "recovery": "fail"},
}
# Log events of the worker: about its start and a creation, and about all that it has compiled.
_EVENT = re.compile(r"\{.*\}")
_EVENTS = ("worker started", "policy loaded")
_COMPILED = "layers compiled"
FULL = Plan(
    model=QWEN3_8B,
    dtype="bfloat16",
    group=Group(prompt=5059, responses=PAPER_LENGTHS),
    num_threads=8,
)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=SIZES, help="another size than the plan's")
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["full"])
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(format_table(result)))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    plan = FULL if is_for_gpu(args) else SMALL
    if args.model is not None:
        plan = replace(plan, model=SIZES[args.model])
    with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
        write_model(plan, args.device, Path(folder) / "models" / MODEL, args.seed)
        result = measure(plan, args.device, Path(folder), args.seed, args.kinds)
    if args.out is not None:
        write_result(args.out, result, seed=args.seed)
    return result


def measure(
    plan: Plan, device: str, root: Path, seed: int, kinds: Sequence[str] = ("full",)
) -> dict[str, Any]:
    """Both starts; `total_s` is that of the first kind in the warm one. The model is below `root`
    (`write_model`).

    Raises errors of the service or its client.
    """
    starts = {name: _start(plan, device, root, seed, kinds) for name in ("cold", "warm")}
    return {"total_s": starts["warm"]["total_s"], "plan": asdict(plan), "starts": starts}


def settings_of(plan: Plan, device: str, root: Path) -> dict[str, Any]:
    """Settings of a service below `root`."""
    return {
        "crash_points": False,
        "log_level": "INFO",
        "worker": worker_settings(plan, device),
        "ray": {"num_cpus": max(2, plan.num_threads), "temp_folder": str(root / "ray")},
    }


def _start(plan: Plan, device: str, root: Path, seed: int, kinds: Sequence[str]) -> dict[str, Any]:
    """A start up to the first update of a policy of the first kind, and `others` after it."""
    log = root / "service.log"
    logged = log.stat().st_size if log.exists() else 0
    begin = time.monotonic()
    with Service(root, **settings_of(plan, device, root)) as service:
        serve_s = time.monotonic() - begin
        with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
            policies = dict[str, dict[str, Any]]()
            for kind in kinds:
                try:
                    policies[kind] = _policy(plan, client, kind, seed, log, logged)
                except RatoonClientError as err:
                    # Time for the logs to be written.
                    time.sleep(2.0)
                    raise RuntimeError(log.read_text(encoding="utf-8")[-4000:]) from err
                logged = log.stat().st_size
    first, *others = policies
    return {
        "total_s": serve_s + policies[first]["create_s"] + policies[first]["first_update_s"],
        "serve_s": serve_s,
        **policies[first],
        "others": {kind: policies[kind] for kind in others},
    }


def _policy(
    plan: Plan, client: RatoonClient, kind: str, seed: int, log: Path, logged: int
) -> dict[str, Any]:
    """A policy's creation and its first two updates, the second of which has the self-check."""
    options = {"model_folder": MODEL, "dtype": plan.dtype, "seed": seed, "recovery": "replay"}
    begin = time.monotonic()
    client.create_policy(POLICY, **{**options, **KINDS[kind]}).result(PATIENCE_S)
    create_s = time.monotonic() - begin
    reports: list[StepReport] = []
    seconds: list[float] = []
    for number in (1, 2):
        begin = time.monotonic()
        update = client.policy(POLICY).update(
            [rollouts(plan, number, seed)], loss=Loss("grpo"), optim=Optim(learning_rate=1e-6)
        )
        reports.append(update.result(PATIENCE_S).report)
        seconds.append(time.monotonic() - begin)
    # Time for the logs to be written.
    time.sleep(1.0)
    events = _events(log.read_bytes()[logged:].decode("utf-8", "replace"))
    client.delete_policy(POLICY).result(PATIENCE_S)
    create = {name: value for event in _EVENTS for name, value in events.get(event, {}).items()}
    check = reports[1].self_check
    return {
        "create_s": create_s,
        "first_update_s": seconds[0],
        "second_update_s": seconds[1],
        "create": {**create, "other_s": create_s - sum(create.values())},
        "first_update": {f"{name}_s": value for name, value in asdict(reports[0].seconds).items()},
        "self_check_s": 0.0 if check is None else check.seconds,
        "compiled": events.get(_COMPILED, {}),
    }


def _events(log: str) -> dict[str, dict[str, float]]:
    """The figures of the last record of each event, by event name."""
    found: dict[str, dict[str, float]] = {}
    for line in log.splitlines():
        matched = _EVENT.search(line)
        if matched is None or not any(name in line for name in (*_EVENTS, _COMPILED)):
            continue
        event = json.loads(matched.group())
        names = [name for name in event if name.endswith("_s") or name in ("graphs", "found")]
        found[str(event["event"])] = {name: float(event[name]) for name in names}
    return found


def format_table(result: dict[str, Any]) -> list[str]:
    """The table for a terminal."""
    plan, starts = result["plan"], result["starts"]
    wanted = f", wanted <= {TARGET_S:g}" if plan["model"]["name"] == QWEN3_8B.name else ""
    lines = [f"{plan['model']['name']} in {plan['dtype']}{wanted}"]
    lines += _table(starts, ("total_s", "serve_s"))
    for kind in starts["warm"].get("others", {}):
        lines += ["", kind, *_table({name: each["others"][kind] for name, each in starts.items()})]
    return lines


def _table(columns: Mapping[str, Mapping[str, Any]], names: Sequence[str] = ()) -> list[str]:
    names = (*names, "create_s", "first_update_s", "second_update_s", "self_check_s")
    rows = [["", *columns]]
    rows += [[name, *(f"{each.get(name, 0.0):.1f}" for each in columns.values())] for name in names]
    for part in ("create", "first_update", "compiled"):
        shown = {name: None for each in columns.values() for name in each.get(part, {})}
        for name in shown:
            values = [f"{each.get(part, {}).get(name, 0.0):.2f}" for each in columns.values()]
            rows.append([f"  {part}: {name}", *values])
    return aligned(rows)


if __name__ == "__main__":
    main()
