#!/usr/bin/env python3
"""Counts the code: its size, and the modules that one update passes on its way.

    python scripts/count_code.py                 # sizes of this checkout
    python scripts/count_code.py --update        # starts a service, and follows one update in it

Prints one JSON object. A module is on the way if one of its functions is called in a process of
the service during each of three updates, and not in the time before the first of them.
Threads that Ray's C++ starts are not seen: the worker's own modules are left out, and the gateway's
and the engine's are all there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("service/src", "clients/python/src", "kernels/src", "proto/src")
TESTS = ("tests", "benchmarks", "harness")
GENERATED = "proto/src/ratoon_proto/types.py"
# What is between the edge and the trainer.
CORRIDOR = ("api", "auth", "cluster", "edge", "engine")
_WATCH_S = 3.0
_UPDATES = 3

# Run by every Python process of the service at its start: notes when a function of each module was
# last called, and writes that down every half second.
_HOOK = """
import atexit, json, os, sys, threading, time
def _watch():
    folder = os.environ["COUNT_CODE_FOLDER"]
    last = {}
    def called(frame, event, _argument):
        if event == "call":
            name = frame.f_globals.get("__name__", "")
            if name.startswith("ratoon"):
                last[name] = time.time()
    def write():
        path = os.path.join(folder, str(os.getpid()))
        while True:
            time.sleep(0.5)
            with open(path + ".new", "w") as file:
                json.dump(dict(last), file)
            os.replace(path + ".new", path)
    threading.setprofile(called)
    sys.setprofile(called)
    threading.Thread(target=write, daemon=True).start()
if os.environ.get("COUNT_CODE_FOLDER"):
    _watch()
"""


def sizes() -> dict[str, object]:
    """Lines and files of Python that are kept in the repository, without generated code."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in listed:
        if "_pb2" in name or name == GENERATED:
            continue
        part = next((part for part in (*PRODUCT, *TESTS) if name.startswith(f"{part}/")), None)
        if part is None:
            continue
        lines[part] += len((ROOT / name).read_text(encoding="utf-8").splitlines())
        files[part] += 1
    return {
        "product_lines": sum(lines[part] for part in PRODUCT),
        "product_files": sum(files[part] for part in PRODUCT),
        "test_lines": lines["tests"],
        "lines": dict(sorted(lines.items())),
        "files": dict(sorted(files.items())),
    }


def modules_of_update() -> dict[str, object]:
    """Modules that an update passes in the service's processes, by their first package."""
    sys.path.insert(0, str(ROOT))
    from harness.service import Service
    from ratoon_client import Loss, Optim, RatoonClient, group, rollout

    with tempfile.TemporaryDirectory(prefix="count-code-", dir="/tmp") as name:
        root = Path(name)
        hooks, calls = root / "hooks", root / "calls"
        hooks.mkdir()
        calls.mkdir()
        (hooks / "sitecustomize.py").write_text(_HOOK, encoding="utf-8")
        environment = {"PYTHONPATH": str(hooks), "COUNT_CODE_FOLDER": str(calls)}
        (root / "models").mkdir()
        with (
            Service(root, environment=environment) as service,
            RatoonClient(service.grpc) as client,
        ):
            client.create_policy("counted", preset="tiny", seed=7).result()
            session = client.policy("counted")
            groups = [
                group(
                    "a",
                    [50, 43],
                    [rollout(response=[52], reward=1.0), rollout(response=[53], reward=0.0)],
                )
            ]

            def update() -> None:
                loss = Loss("grpo", old_logprobs="on_policy")
                session.update(groups, loss=loss, optim=Optim(learning_rate=1e-5)).result()

            update()  # What is imported or connected once is no part of the way.
            time.sleep(2 * _WATCH_S)
            idle = _called(calls, time.time() - _WATCH_S)
            passed: list[set[str]] = []
            for _ in range(_UPDATES):
                begin = time.time()
                update()
                time.sleep(_WATCH_S)
                passed.append(_called(calls, begin))
    way = sorted(set.intersection(*passed) - idle)
    parts = Counter(module.split(".")[1] for module in way if module.startswith("ratoon."))
    corridor = [m for m in way if m.startswith(tuple(f"ratoon.{name}." for name in CORRIDOR))]
    return {
        "modules_of_update": len(way),
        "modules_between_edge_and_worker": len(corridor),
        "modules_by_part": dict(sorted(parts.items())),
        "between_edge_and_worker": corridor,
    }


def _called(folder: Path, since: float) -> set[str]:
    found: set[str] = set()
    for path in folder.iterdir():
        if path.suffix != ".new":
            last = json.loads(path.read_text(encoding="utf-8"))
            found |= {module for module, at in last.items() if at >= since}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="count the code")
    parser.add_argument("--update", action="store_true", help="follow one update, in a service")
    args = parser.parse_args()
    counted = sizes() | (modules_of_update() if args.update else {})
    print(json.dumps(counted, indent=1))


if __name__ == "__main__":
    main()
