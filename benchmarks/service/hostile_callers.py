"""`make bench-hostile`: a service under hostile callers, with a good caller beside them.

Records resident memory and open connections of gateway and engine, sampled once per second, and the
good caller's latency, during each attack and from a second after it. The file is written only if
every attack ran; missed bounds are recorded as they are.

A quantity is flat if its maximum over the last minute is at most a tenth plus `SLACK` above its
maximum over the first. The good caller polls GetOperation over both wires, from another loopback
address than the attacks but for those that say so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import numpy as np
import psutil

from benchmarks.common.document import write_json
from benchmarks.service.hostile_attacks import ATTACKS
from harness.environment import describe
from harness.service import TITLES, Service
from ratoon.auth.keys import KeyFile, Scope, new_key
from ratoon_client import RatoonClient
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub

MIB = 2**20
POLICY = "good"
ROLES = ("gateway", "engine")
P99_MS = 500.0
AFTER_P99_MS = 100.0
FLAT_RATIO = 1.1
SLACK = {"memory_mib": 32.0, "connections": 64.0}
WINDOW_S = 60
_CALL_S = 0.05
_REST_S = 5.0
# Start and duration of the measurement of an attack's aftermath.
_AFTER_FROM_S = 1.0
_AFTER_S = 4.0
_CONNECTED = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)


@dataclass(slots=True, kw_only=True)
class Samples:
    """One attack: one value per second by role, and milliseconds per good call by wire."""

    memory_mib: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    connections: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    latencies_ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failures: Counter[str] = field(default_factory=Counter[str])


class GoodCaller:
    """Polls one finished operation."""

    def __init__(self, service: Service, key: str, operation_id: str) -> None:
        self._headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=service.http, headers=self._headers, timeout=10)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}")
        self._stub = PolicyServiceStub(self._channel)
        self._operation_id = operation_id

    async def call_until(self, ends_at: float, samples: Samples) -> None:
        await asyncio.gather(*(self._poll(wire, ends_at, samples) for wire in ("grpc", "http")))

    async def close(self) -> None:
        await self._http.aclose()
        await self._channel.close()

    async def _poll(self, wire: str, ends_at: float, samples: Samples) -> None:
        latencies = samples.latencies_ms.setdefault(wire, [])
        while time.monotonic() < ends_at:
            begin = time.perf_counter()
            try:
                await (self._over_grpc() if wire == "grpc" else self._over_http())
            except (grpc.aio.AioRpcError, httpx.HTTPError) as error:
                samples.failures[f"{wire}: {type(error).__name__}"] += 1
            # Failed calls count with their time too.
            latencies.append((time.perf_counter() - begin) * 1000)
            await asyncio.sleep(_CALL_S)

    async def _over_grpc(self) -> None:
        request = service_pb2.GetOperationRequest(operation_id=self._operation_id)
        metadata = tuple(self._headers.items())
        await self._stub.GetOperation(request, timeout=10, metadata=metadata)

    async def _over_http(self) -> None:
        answer = await self._http.get(f"/v1/operations/{self._operation_id}")
        answer.raise_for_status()


async def sample_until(service: Service, ends_at: float, samples: Samples) -> None:
    """Samples once per second. A process that is gone counts as nothing."""
    pids = {role: service.pids(role) for role in ROLES}
    due = time.monotonic()
    while time.monotonic() < ends_at:
        memory, connections = await asyncio.to_thread(_measured, pids)
        for role in ROLES:
            samples.memory_mib.setdefault(role, []).append(memory[role])
            samples.connections.setdefault(role, []).append(connections[role])
        due += 1.0
        await asyncio.sleep(max(due - time.monotonic(), 0.0))


def _measured(pids: Mapping[str, Sequence[int]]) -> tuple[dict[str, float], dict[str, int]]:
    open_of = Counter(one.pid for one in psutil.net_connections("tcp") if one.status in _CONNECTED)
    memory: dict[str, float] = {}
    for role, found in pids.items():
        memory[role] = sum(_resident(pid) for pid in found) / MIB
    return memory, {role: sum(open_of[pid] for pid in found) for role, found in pids.items()}


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def flatness(values: Sequence[float], slack: float) -> dict[str, float | bool]:
    """Maxima of the first and the last window, and whether the values are flat."""
    window = min(WINDOW_S, max(len(values) // 2, 1))
    first, last = max(values[:window]), max(values[-window:])
    return {"first": first, "last": last, "flat": last <= FLAT_RATIO * first + slack}


def judged(samples: Samples, after: Samples) -> dict[str, Any]:
    """The verdicts on one attack and its aftermath, samples last."""
    flat = {
        what: {
            role: flatness(values, SLACK[what]) for role, values in getattr(samples, what).items()
        }
        for what in SLACK
    }
    calls, calls_after = _latencies(samples), _latencies(after)
    return {
        "flat": all(bool(one["flat"]) for roles in flat.values() for one in roles.values()),
        "p99_ms": max(one["p99_ms"] for one in calls.values()),
        "after_p99_ms": max(one["p99_ms"] for one in calls_after.values()),
        "get_operation": calls,
        "get_operation_after": calls_after,
        "failures": dict(samples.failures + after.failures),
        **flat,
        "samples": {
            "memory_mib": {
                role: [round(value, 1) for value in values]
                for role, values in samples.memory_mib.items()
            },
            "connections": samples.connections,
        },
    }


def _latencies(samples: Samples) -> dict[str, dict[str, float]]:
    return {
        wire: {
            "calls": len(values),
            "p50_ms": round(float(np.quantile(values, 0.5)), 1),
            "p99_ms": round(float(np.quantile(values, 0.99)), 1),
            "max_ms": round(max(values), 1),
        }
        for wire, values in samples.latencies_ms.items()
    }


async def attacked(
    service: Service, name: str, seconds: float, keys: Mapping[str, str], operation_id: str
) -> dict[str, Any]:
    """Samples one attack from start to end, and what follows it."""
    attack = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.service.hostile_attacks", name,
        "--http-port", str(service.http_port), "--grpc-port", str(service.grpc_port),
        "--seconds", str(seconds),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"RATOON_API_KEY": keys["hostile"]},
    )  # fmt: skip
    samples, after = Samples(), Samples()
    good = GoodCaller(service, keys["good"], operation_id)
    ends_at = time.monotonic() + seconds
    try:
        await asyncio.gather(
            good.call_until(ends_at, samples), sample_until(service, ends_at, samples)
        )
        output, _ = await asyncio.wait_for(attack.communicate(), 60.0)
        await asyncio.sleep(_AFTER_FROM_S)
        await good.call_until(time.monotonic() + _AFTER_S, after)
    finally:
        await good.close()
        if attack.returncode is None:
            attack.kill()
    if attack.returncode:
        raise RuntimeError(f"the attack {name} ended with {attack.returncode}")
    described = (ATTACKS[name].__doc__ or "").strip()
    return {
        "what": described,
        "seconds": seconds,
        "done": json.loads(output),
        **judged(samples, after),
    }


def _keys(data_root: Path) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, scope in (("good", Scope.ADMIN), ("hostile", Scope.TRAIN)):
        key, made[name] = new_key(
            scope=scope, policies=None, note=name, created_at=time.time(), expires_at=None
        )
        KeyFile(data_root).add(key)
    return made


def run(names: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Runs the attacks one after another on one service."""
    attacks: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        root = Path(folder)
        keys = _keys(root / "data")
        with Service(root, auth={"required": True}, crash_points=False) as service:
            with RatoonClient(service.grpc, api_key=keys["good"]) as client:
                client.create_policy(POLICY, preset="tiny").result()
                saved = client.policy(POLICY).save_checkpoint(seq=1)
                saved.result()
            for name in names:
                attacks[name] = asyncio.run(
                    attacked(service, name, seconds, keys, saved.operation_id)
                )
                said = ("flat", "p99_ms", "after_p99_ms", "failures", "done")
                line = {key: attacks[name][key] for key in said}
                print(name, json.dumps(line), flush=True)
                time.sleep(_REST_S)
    return attacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180.0, help="of each attack")
    parser.add_argument(
        "--only",
        choices=sorted(ATTACKS),
        action="append",
        help="this attack; what --out has of the others stays",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the service with this process.
    environment = describe(args.seed)
    attacks = run(args.only or list(ATTACKS), args.seconds)
    for attack in attacks.values():
        attack["commit"] = environment["commit"]
    if args.only and args.out.exists():
        attacks = json.loads(args.out.read_text(encoding="utf-8"))["attacks"] | attacks
    result = {
        "flat": all(attack["flat"] for attack in attacks.values()),
        "p99_ms": max(attack["p99_ms"] for attack in attacks.values()),
        "after_p99_ms": max(attack["after_p99_ms"] for attack in attacks.values()),
        "targets": {"flat": True, "p99_ms": P99_MS, "after_p99_ms": AFTER_P99_MS},
        "criterion": {"window_s": WINDOW_S, "ratio": FLAT_RATIO, "slack": SLACK},
        **environment,
        "roles": {role: TITLES[role] for role in ROLES},
        "attacks": attacks,
    }
    write_json(args.out, result)
    said = ("flat", "p99_ms", "after_p99_ms", "targets")
    print(json.dumps({key: result[key] for key in said}, indent=1))


if __name__ == "__main__":
    main()
