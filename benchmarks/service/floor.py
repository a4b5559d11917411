"""`make bench-floor`: the least latency of a caller, and what an idle service holds.

Each run starts `ratoon serve` on an empty folder, creates a `tiny` policy and sends it updates of
two rollouts of one token, first over HTTP by a plain client, then over gRPC by `ratoon_client`, and
at last batches of 64 MiB, which are accepted and not run (`accept`).

    python -m benchmarks.service.floor --out benchmarks/results/cpu/floor.json
    python -m benchmarks.service.floor --report FILE --markdown docs/performance.md
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.command import make_parser, run_figures
from benchmarks.common.document import figure_lines, write_section
from benchmarks.service.accept import acceptance_s
from benchmarks.service.floor_counts import committed_writes, held
from harness.environment import describe
from harness.service import Service
from ratoon_client import Loss, Optim, RatoonClient, group, rollout

BEGIN = "<!-- floor: written by benchmarks/service/floor.py -->"
END = "<!-- end of floor -->"
POLICY = "floor"
PATIENCE_S = 300.0
POLL_WAIT_S = 30.0
SETTLE_S = 5.0
# Warm-up updates, which the medians leave out.
WARM_UPDATES = 3
TARGETS = {
    "serve_s": 8.0,
    "create_s": 3.0,
    "first_update_s": 0.5,
    "overhead_ms": 20.0,
    "overhead_grpc_ms": 20.0,
    "accept_http_s": 0.25,
    "accept_grpc_s": 0.25,
    "accept_8_http_s": 2.0,
    "accept_8_grpc_s": 2.0,
    "processes": 12,
    "resident_gb": 1.8,
    "durable_writes": 3,
}
WHAT = {
    "serve_s": "`ratoon serve` until Health answers 200, seconds",
    "create_s": "a `tiny` policy ready, seconds",
    "first_update_s": "the first update, seconds",
    "overhead_ms": "a trivial update over HTTP, call to result, less the report's phases, ms",
    "overhead_grpc_ms": "the same over gRPC, ms",
    "accept_http_s": "a batch of 64 MiB over HTTP, call to acceptance, seconds",
    "accept_grpc_s": "the same over gRPC, seconds",
    "accept_8_http_s": "the same over HTTP, 8 callers at once, seconds",
    "accept_8_grpc_s": "the same over gRPC, 8 callers at once, seconds",
    "processes": "processes, idle with one policy",
    "resident_gb": "resident memory of all, shared pages counted once, GB",
    "durable_writes": "transactions of the database per update",
}
# Seconds of one update for the caller, and of the phases in its report.
Wire = Callable[[], tuple[float, dict[str, float]]]


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="measured ones of each wire")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    run_figures(
        args, lambda: measure(args.repeats, args.updates, args.seed), _cells, write_markdown
    )


def measure(repeats: int, updates: int, seed: int) -> dict[str, Any]:
    """Medians over `repeats` services with `updates` on each wire, and every run."""
    environment = describe(seed)
    runs: list[dict[str, Any]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="rt-") as folder:
            runs.append(_run(Path(folder), updates, seed))
            print(json.dumps({name: runs[-1][name] for name in WHAT}), flush=True)
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in WHAT}
    return {**medians, **environment, "updates": updates, "runs": runs}


def _run(root: Path, updates: int, seed: int) -> dict[str, Any]:
    # Default settings, except for folders and ports.
    settings = {"crash_points": False, "log_level": "INFO", "worker": {"device": "cpu"}}
    started = time.perf_counter()
    with Service(root, **settings) as service:
        serve_s = time.perf_counter() - started
        with httpx.Client(base_url=service.http, trust_env=False, timeout=PATIENCE_S) as client:
            spec = {"policy_id": POLICY, "preset": "tiny", "seed": seed}
            started = time.perf_counter()
            _wait_http(client, _posted(client, "/v1/policies", {"spec": spec}))
            create_s = time.perf_counter() - started

            seqs = itertools.count(1)

            def over_http() -> tuple[float, dict[str, float]]:
                body = _update(next(seqs))
                started = time.perf_counter()
                accepted = _posted(client, f"/v1/policies/{POLICY}/update", body)
                ended = _wait_http(client, accepted)
                return time.perf_counter() - started, ended["step"]["report"]["seconds"]

            first_update_s, _ = over_http()
            http = _updates(over_http, updates)
            with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as caller:
                of_grpc = _updates(_over_grpc(caller), updates)
            time.sleep(SETTLE_S)
            rows = held(service.processes())
            # Skip the numbers that the gRPC session has used.
            for _ in range(WARM_UPDATES + updates):
                next(seqs)
            writes = [_writes(service, over_http) for _ in range(5)]
            accepted = acceptance_s(service, POLICY, next(seqs), seed)
        return {
            "serve_s": serve_s,
            "create_s": create_s,
            "first_update_s": first_update_s,
            "overhead_ms": statistics.median(http["overhead_ms"]),
            "overhead_grpc_ms": statistics.median(of_grpc["overhead_ms"]),
            **accepted,
            "processes": len(rows),
            "resident_gb": sum(row["pss_mb"] for row in rows) / 1000,
            "durable_writes": statistics.median(writes),
            "http": http,
            "grpc": of_grpc,
            "held": rows,
        }


def _updates(wire: Wire, updates: int) -> dict[str, Any]:
    """Milliseconds of successive updates, and medians of the report's phases."""
    taken = [wire() for _ in range(WARM_UPDATES + updates)][WARM_UPDATES:]
    names = taken[0][1]
    phases_ms = {
        name: 1000 * statistics.median(phases.get(name, 0.0) for _, phases in taken)
        for name in names
    }
    return {
        "update_ms": [1000 * seconds for seconds, _ in taken],
        "overhead_ms": [1000 * (seconds - sum(phases.values())) for seconds, phases in taken],
        "phases_ms": phases_ms,
    }


def _writes(service: Service, wire: Wire) -> int:
    """Transactions committed by one update, including what it does after its answer."""
    database = service.data_root / "ratoon.sqlite"
    before = committed_writes(database)
    wire()
    time.sleep(0.5)
    return committed_writes(database) - before


def _update(seq: int) -> dict[str, Any]:
    rollouts = [
        {"response": [52 + index], "sampler_logprobs": [-5.5], "reward": float(index)}
        for index in range(2)
    ]
    return {
        "seq": seq,
        "loss": {"kind": "grpo"},
        "optim": {"learning_rate": 1e-5},
        "batch": {"groups": [{"group_id": "a", "prompt": [50], "rollouts": rollouts}]},
    }


def _posted(client: httpx.Client, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    if answer.is_error:
        raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
    return answer.json()


def _wait_http(client: httpx.Client, operation: dict[str, Any]) -> dict[str, Any]:
    while operation["state"] in ("queued", "running"):
        path = f"/v1/operations/{operation['operation_id']}"
        answer = client.get(path, params={"wait_s": POLL_WAIT_S})
        answer.raise_for_status()
        operation = answer.json()
    if operation["state"] != "done":
        raise RuntimeError(f"an operation ended {operation['state']}: {operation}")
    return operation


def _over_grpc(client: RatoonClient) -> Wire:
    session = client.policy(POLICY)
    rollouts = [
        rollout(response=[52 + index], sampler_logprobs=[-5.5], reward=float(index))
        for index in range(2)
    ]
    batch, loss, optim = [group("a", [50], rollouts)], Loss("grpo"), Optim(learning_rate=1e-5)

    def over_grpc() -> tuple[float, dict[str, float]]:
        started = time.perf_counter()
        result = session.update(batch, loss=loss, optim=optim).result(PATIENCE_S)
        return time.perf_counter() - started, asdict(result.report.seconds)

    return over_grpc


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    of_what = f"medians of {len(result['runs'])}"
    write_section(path, BEGIN, END, figure_lines(result, _cells(result), of_what, result_link))


def _cells(result: dict[str, Any]) -> list[list[str]]:
    """A row of each figure that the result has: one of earlier sources may have fewer."""
    return [
        [what, f"{result[name]:.3g}", f"<= {TARGETS[name]:g}"]
        for name, what in WHAT.items()
        if name in result
    ]


if __name__ == "__main__":
    main()
