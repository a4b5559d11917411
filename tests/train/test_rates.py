"""Rates of a device: known, measured by the clock, kept from one start to the next."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.planner.device_costs import H100_RATES, H200_RATES, KNOWN_RATES, DeviceRates
from ratoon.stream.files import seal_document
from ratoon.train import rates
from ratoon.train.rates import (
    SHAPE,
    Attention,
    BlockSizes,
    Shape,
    kept_rates,
    measure_rates,
    rates_of,
)
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import AdamWConfig, FullTuning

CPU = torch.device("cpu")
BEST = Attention(backend="", deterministic=True)
SIZES = BlockSizes(hidden_size=64, mlp_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
TINY = Shape(
    sizes=SIZES,
    least=replace(SIZES, hidden_size=32, num_heads=2, num_kv_heads=1),
    vocab_size=100,
    tokens=48,
    few_tokens=4,
    rows=20,
    copied_bytes=4096,
)
FOUND = replace(H200_RATES, linear_flops=1e14)
KEY = {"device": "NVIDIA A100-SXM4-80GB", "torch": "2.11.0"}
SPEC = TrainerSpec(
    model=ModelSpec(
        base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.BFLOAT16, seed=0
    ),
    optimizer=AdamWConfig(),
    deterministic=True,
    micro_batch_tokens=None,
    keep_reference=False,
    attention_backend="flex",
    device="cuda:0",
    num_threads=1,
)


def test_a_cpus_rates_are_those_of_a_device() -> None:
    found = asdict(measure_rates(CPU, BEST, TINY))
    assert all(0 < rate < math.inf for rate in found.values()), found


def test_rates_are_work_over_the_median_of_seconds() -> None:
    """By a clock that gives each operation's samples seconds of their own, in any order."""
    samples = [9.0, 1.0, 2.0, 8.0, 3.0]
    assert statistics.median(samples) == 3.0
    steps = chain.from_iterable((0.0, operation * s) for operation in range(1, 6) for s in samples)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += next(steps)
        return now

    found = measure_rates(CPU, BEST, TINY, clock)
    assert next(steps, None) is None, "each sample is between two looks at the clock"
    assert asdict(found) == pytest.approx(
        {
            "linear_flops": 0.81 * 6 * 48 * 64 * 96 / 3,
            "attention_flops": 14 * 4 * 16 * (48 * 49 / 2) / 6,
            "head_flops": 6 * 20 * 100 * 64 / 9,
            "memory_bytes": 2 * 4096 / 12,
            "layer_call_s": 15.0,
            "link_bytes": H200_RATES.link_bytes,
            "exchange_s": H200_RATES.exchange_s,
        }
    )


def test_what_is_measured_is_a_layer_of_the_known_rates_model() -> None:
    """More than launches, and within the memory of a GPU that has no model yet."""
    sizes = SHAPE.sizes
    assert 6 * SHAPE.tokens * sizes.hidden_size * sizes.mlp_size / H200_RATES.linear_flops > 1e-3
    assert (SHAPE.least.head_dim, SHAPE.least.num_heads) == (sizes.head_dim, 2)
    heads = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    assert SHAPE.tokens * (heads + 2 * sizes.mlp_size) * 2 < 2**30


def test_its_process_prints_them_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measured(*args: Any) -> DeviceRates:
        print("a library's own words", end="")
        asked.append(args)
        return FOUND

    monkeypatch.setattr(rates, "measure_rates", measured)
    rates.main(["cuda:1", "--backend=flex", "--deterministic"])
    assert asked == [(torch.device("cuda:1"), Attention(backend="flex", deterministic=True))]
    assert DeviceRates(**json.loads(capsys.readouterr().out.splitlines()[-1])) == FOUND


def _measures(*found: DeviceRates) -> Any:
    """To be called once for each; whoever calls more often fails."""
    left = iter(found)
    return lambda: next(left)


def test_rates_are_measured_once(tmp_path: Path) -> None:
    folder, measure = tmp_path / "compiled", _measures(FOUND)
    assert [kept_rates(folder, KEY, measure) for _ in range(3)] == [FOUND] * 3
    other = {**KEY, "torch": "2.12.0"}
    assert kept_rates(folder, other, _measures(H200_RATES)) == H200_RATES
    assert kept_rates(folder, KEY, _measures()) == FOUND
    assert len(list(folder.iterdir())) == 2
    assert kept_rates(None, KEY, _measures(H200_RATES)) == H200_RATES, "kept nowhere"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "of another"])
def test_what_is_no_file_of_these_rates_is_measured_again(tmp_path: Path, damage: str) -> None:
    kept_rates(tmp_path, KEY, _measures(FOUND))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    other = {"key": {**KEY, "device": "another"}, "rates": asdict(FOUND)}
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "flipped": whole.replace(b"1.0", b"2.0").replace(b"1e", b"2e"),
            "empty": b"",
            "of another": seal_document(other),
        }[damage]
    )
    assert path.read_bytes() != whole
    assert kept_rates(tmp_path, KEY, _measures(H200_RATES)) == H200_RATES
    assert kept_rates(tmp_path, KEY, _measures()) == H200_RATES


def test_rates_that_cannot_be_kept_are_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert kept_rates(tmp_path / "file" / "folder", KEY, _measures(FOUND)) == FOUND


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the only GPU."""
    names = ["NVIDIA A100-SXM4-80GB"]
    monkeypatch.setattr(rates, "device_model", lambda _device: names[0])
    return names


@pytest.mark.parametrize("name", list(KNOWN_RATES))
def test_a_known_device_is_not_measured(
    device: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", repeat)
    device[0] = name
    assert rates_of(SPEC, tmp_path) == KNOWN_RATES[name]
    assert rates_of(replace(SPEC, device="cpu"), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_known_devices_differ_by_bandwidth_alone() -> None:
    assert replace(H200_RATES, memory_bytes=H100_RATES.memory_bytes) == H100_RATES
    assert H100_RATES.memory_bytes / H200_RATES.memory_bytes == pytest.approx(3.35 / 4.8)


@pytest.mark.usefixtures("device")
def test_another_is_measured_as_the_policy_attends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per backend and mode: they are what attention's rate is of."""
    asked: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout=_printed(FOUND))

    monkeypatch.setattr(subprocess, "run", run)
    for spec in (SPEC, SPEC, replace(SPEC, deterministic=False), SPEC):
        assert rates_of(spec, tmp_path) == FOUND
    command = ["-m", "ratoon.train.rates", "cuda:0", "--backend=flex"]
    assert asked == [[*command, "--deterministic"], command]


def _printed(found: Mapping[str, float] | DeviceRates) -> bytes:
    fields = asdict(found) if isinstance(found, DeviceRates) else dict(found)
    return b"a warning\n" + json.dumps(fields).encode() + b"\n"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("failure", ["dies", "hangs", "silent", "nonsense", "negative", "infinite"])
def test_a_device_that_cannot_be_measured_has_an_h200s(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        if failure == "dies":
            raise subprocess.CalledProcessError(1, command)
        if failure == "hangs":
            raise subprocess.TimeoutExpired(command, 1.0)
        rate = {"negative": -1.0, "infinite": math.inf}.get(failure, 1.0)
        out = _printed({**asdict(FOUND), "head_flops": rate})
        length = {"silent": 0, "nonsense": 20}.get(failure)
        return subprocess.CompletedProcess(command, 0, out[:length])

    monkeypatch.setattr(subprocess, "run", run)
    assert rates_of(SPEC, tmp_path) == H200_RATES
    assert not list(tmp_path.iterdir()), "and is measured at the next start"
