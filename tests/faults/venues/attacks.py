"""Attacks on the real service that kill none of its processes but one rank that is created.

In: a service, with a policy of its own. Out: for each attack the reasons why the service did not
stand, none where it did.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from harness.environment import ROOT
from harness.service import Service
from ratoon_client import Group, Loss, Optim, Parallel, RatoonClient, group, rollout
from ratoon_client.errors import RatoonApiError
from ratoon_proto.types import StepResult
from tests.faults.venues.live import MODEL

# A good caller's Health, from the address that floods: much less than a client's patience, much
# more than what other programs of a busy machine cost it.
MAX_P99_DURING_S = 2.0
MAX_P99_AFTER_S = 1.0
FLOODS = ("resets", "calls", "priority", "settings", "ping", "window_update")
_FLOOD_S = 3.0
_CREATION_S = 120.0
_POLICY = "attacked"
# Fields of an optimizer step, with numbers that no step may be told.
_OVERFLOWS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("learning_rate", {"learning_rate": 1e308}),
    ("learning_rate", {"learning_rate": 1e38}),
    ("weight_decay", {"learning_rate": 1e-3, "weight_decay": 1e300}),
    ("eps", {"learning_rate": 1e-3, "eps": 1e-300}),
)


def run_attacks(model_folder: Path) -> dict[str, list[str]]:
    """What each attack on one service has shown; empty lists: the service stood."""
    with tempfile.TemporaryDirectory(prefix="rt-attacks-", dir="/tmp") as folder:
        root = Path(folder)
        shutil.copytree(model_folder, root / "models" / MODEL)
        with Service(root) as service, RatoonClient(service.grpc) as client:
            client.create_policy(_POLICY, model_folder=MODEL, micro_batch_tokens=64).result()
            return {name: attack(service, client) for name, attack in ATTACKS.items()}


def overflow_steps(service: Service, client: RatoonClient) -> list[str]:
    """Steps whose numbers are beyond float32, by either wire, and gradients that are near it."""
    found: list[str] = []
    with RatoonClient(service.http) as http:
        for each in (client, http):
            for field, numbers in _OVERFLOWS:
                try:
                    step = _update(each, Optim(**numbers))  # pyright: ignore[reportArgumentType]
                    found.append(f"{dict(numbers)} was taken: version {step.version}")
                except RatoonApiError as error:
                    if error.code != "INVALID_ARGUMENT" or error.field != f"optim.{field}":
                        found.append(f"{dict(numbers)}: {error.code}, field {error.field}")
    before = client.get_policy(_POLICY).version
    large = Optim(learning_rate=1e4, max_grad_norm=0.0, weight_decay=0.0)
    for advantage in (3e38, 1e25):
        step = _update(client, large, advantage=advantage)
        if not step.report.skipped and step.version == before:
            found.append(f"advantage {advantage:g}: neither skipped nor a version")
        before = step.version
        found += _not_finite(client, f"after advantage {advantage:g}")
    return found


def damage_manifest(service: Service, client: RatoonClient) -> list[str]:
    """The newest version's manifest is cut short, and its readers get a version all the same."""
    step = _update(client, Optim(learning_rate=1e-4))
    newest = client.weight_manifest(_POLICY).version
    if newest != step.version:
        return [f"version {newest} is the newest after {step.version} was made"]
    folder = service.data_root / "policies" / _POLICY / "weights" / f"{newest:08d}"
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    found: list[str] = []
    with RatoonClient(service.http) as http:
        for each in (client, http):
            try:
                version = each.weight_manifest(_POLICY).version
            except RatoonApiError as error:
                found.append(f"{each}: {error.code}: {error.message}")
            else:
                if version not in (newest - 1, newest):
                    found.append(f"version {version} after {newest} was damaged")
    return found + _not_finite(client, "after its manifest was damaged")


def flood_frames(service: Service, client: RatoonClient) -> list[str]:
    """Calls that are reset and frames that cost nothing, from the good caller's own address."""
    found: list[str] = []
    for name in FLOODS:
        command = [sys.executable, "-m", "harness.attacks.floods", name]
        options = ["--port", str(service.grpc_port), "--seconds", str(_FLOOD_S)]
        flood = subprocess.Popen([*command, *options], cwd=ROOT)
        try:
            during_s = _health_p99(client, lambda flood=flood: flood.poll() is None)
        finally:
            flood.kill()
            flood.wait()
        time.sleep(1.0)
        end = time.monotonic() + 1.0
        after_s = _health_p99(client, lambda end=end: time.monotonic() < end)
        if during_s > MAX_P99_DURING_S or after_s > MAX_P99_AFTER_S:
            found.append(f"{name}: Health took {during_s:.2f} s during, {after_s:.2f} s after")
    return found


def lose_created_rank(service: Service, client: RatoonClient) -> list[str]:
    """A rank is killed while its policy is created: that is told, and the next creation ends."""
    found: list[str] = []
    for attempt in ("killed", "whole"):
        begin = time.monotonic()
        parallel = Parallel(num_workers=2, shard="weights")
        creation = client.create_policy(f"ranks-{attempt}", model_folder=MODEL, parallel=parallel)
        try:
            if attempt == "killed":
                service.kill("rank")
            creation.result(timeout_s=_CREATION_S)
            if attempt == "killed":
                continue  # It was killed later than its creation ended.
        except TimeoutError:
            found.append(f"{attempt}: still being created after {_CREATION_S:g} s")
        except RatoonApiError as error:
            seconds = time.monotonic() - begin
            if attempt == "whole" or error.code == "INTERNAL":
                found.append(f"{attempt}: {error.code} after {seconds:.0f} s: {error.message}")
    return found


ATTACKS: Mapping[str, Callable[[Service, RatoonClient], list[str]]] = {
    "steps that overflow": overflow_steps,
    "a damaged manifest": damage_manifest,
    "floods of frames": flood_frames,
    "a rank lost in its creation": lose_created_rank,
}


def _update(client: RatoonClient, optim: Optim, advantage: float = 1.0) -> StepResult:
    loss = Loss("reinforce")
    return client.policy(_POLICY).update(_groups(advantage), loss=loss, optim=optim).result()


def _groups(advantage: float) -> list[Group]:
    rollouts = [
        rollout(response=[number, 7], advantages=[sign * advantage] * 2)
        for number, sign in ((5, 1), (6, -1))
    ]
    return [group("a", [3, 4], rollouts)]


def _not_finite(client: RatoonClient, when: str) -> list[str]:
    """Tensors of the newest version that are not finite."""
    with tempfile.TemporaryDirectory(prefix="rt-pulled-") as folder:
        pulled = client.pull_weights(_POLICY, folder)
        tensors = {
            name: tensor
            for path in pulled.folder.glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        if not tensors:
            return [f"version {pulled.version} {when} has no tensor"]
        return [
            f"{name} of version {pulled.version} is not finite {when}"
            for name, tensor in tensors.items()
            if not math.isfinite(float(tensor.float().abs().max()))
        ]


def _health_p99(client: RatoonClient, goes_on: Callable[[], bool]) -> float:
    """Seconds of a Health, asked one after the other."""
    seconds: list[float] = []
    while goes_on():
        begin = time.monotonic()
        client.health()
        seconds.append(time.monotonic() - begin)
        time.sleep(0.02)
    return float(np.percentile(seconds, 99)) if seconds else 0.0
