"""What kernels of a step are of, when nothing runs, and a profile made on a CPU."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from benchmarks.step import profiles as step_profile
from benchmarks.step.profiles import (
    Kernel,
    Kind,
    ProfiledStep,
    busy_us,
    gap_share,
    kinds_of,
    longest_gap_us,
    longest_kernels,
    milliseconds_by_kind,
)
from benchmarks.step.run import SMALL, Run

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
PRODUCT = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT"
SPLIT_PRODUCT = "nvjet_tst_128x64_64x8_4x1_v_bz_splitK_TNT"
END_OF_PRODUCT = "void cublasLt::splitKreduce_kernel<32, 16, int, float>"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
STEP = (
    ("triton_red_fused_add_mean_mul_0", Kind.COMPILED),
    (PRODUCT, Kind.PRODUCTS),
    ("tree_attention_forward", Kind.ATTENTION_FORWARD),
    (SPLIT_PRODUCT, Kind.PRODUCTS),
    (END_OF_PRODUCT, Kind.PRODUCTS),
    ("Memcpy HtoD (Pageable -> Device)", Kind.COPIES),
    # The head's forward: two chunks of logits.
    (PRODUCT, Kind.HEAD),
    ("_reduce_rows", Kind.HEAD),
    (SPLIT_PRODUCT, Kind.HEAD),
    (END_OF_PRODUCT, Kind.HEAD),
    ("_reduce_rows", Kind.HEAD),
    # Its backward: two chunks of one group, then the two products of the group.
    (PRODUCT, Kind.HEAD),
    ("_differentiate_logits", Kind.HEAD),
    (PRODUCT, Kind.HEAD),
    ("_differentiate_logits", Kind.HEAD),
    (PRODUCT, Kind.HEAD),
    (FILL, Kind.EAGER),
    (PRODUCT, Kind.HEAD),
    ("tree_attention_backward_prepare", Kind.ATTENTION_BACKWARD),
    ("tree_attention_backward", Kind.ATTENTION_BACKWARD),
    (PRODUCT, Kind.PRODUCTS),
)
OPTIMIZER = ("triton_poi_fused_1", "Memset (Device)", FILL)


def _kernels(*times: tuple[float, float]) -> list[Kernel]:
    return [Kernel(name=f"k{i}", start_us=a, stop_us=b) for i, (a, b) in enumerate(times)]


def test_products_around_the_heads_kernels_are_the_heads() -> None:
    names = [name for name, _ in STEP]
    assert kinds_of(names, has_optimizer=False) == [kind for _, kind in STEP]


def test_what_follows_the_last_product_is_the_optimizers() -> None:
    names = [*(name for name, _ in STEP), *OPTIMIZER]
    expected = [kind for _, kind in STEP]
    assert kinds_of(names, has_optimizer=True) == [*expected, *[Kind.OPTIMIZER] * 3]
    plain = [Kind.COMPILED, Kind.COPIES, Kind.EAGER]
    assert kinds_of(names, has_optimizer=False) == [*expected, *plain]


def test_time_in_which_several_kernels_run_is_busy_once() -> None:
    """The second within the first, the third overlapping it, the last on its own."""
    kernels = _kernels((10, 40), (15, 20), (30, 50), (80, 90))
    assert busy_us(kernels) == 50
    assert busy_us(kernels[::-1]) == 50
    assert longest_gap_us(kernels) == 30
    assert gap_share(ProfiledStep(seconds=100e-6, kernels=kernels)) == pytest.approx(0.5)


def test_milliseconds_are_means_over_the_steps() -> None:
    def step(scale: float) -> list[Kernel]:
        names = ("triton_poi_fused_0", "tree_attention_forward", "triton_poi_fused_0")
        # In another order than they ran.
        return [
            Kernel(name=name, start_us=1e3 * i, stop_us=1e3 * i + 100 * scale)
            for i, name in reversed(list(enumerate(names)))
        ]

    steps = [step(1), step(3)]
    found = milliseconds_by_kind(steps, has_optimizer=False)
    assert found.pop("compiled elementwise") == pytest.approx(0.4)
    assert found.pop("attention, forward") == pytest.approx(0.2)
    assert set(found.values()) == {0.0}
    (first,) = longest_kernels(steps, 1, has_optimizer=False)
    assert first["name"] == "triton_poi_fused_0"
    assert (first["calls"], first["ms"]) == (2, pytest.approx(0.4))


def test_a_profile_has_steps_streamed_steps_and_an_update() -> None:
    run = Run(device=CPU, scale=SMALL, num_samples=2, stop_at=time.monotonic() + 60, seed=0)
    found = dict(step_profile.measure(run, step_profile.cases(SMALL)))
    assert list(found) == ["12x4", "update 12x4"]
    assert [row["how"] for row in found["12x4"]] == ["reference", "reference-waves-of-2"]
    for row in (*found["12x4"], *found["update 12x4"]):
        assert "error" not in row
        assert row["seconds"] == statistics.median(row["samples"])
        assert 0 < row["busy_s"] < row["profiled_s"]
        assert row["gap_share"] is None, "a CPU has no kernels"
        assert row["num_kernels"] >= len(row["kernels"]) == step_profile.LONGEST_KERNELS
        assert sum(row["kinds_ms"].values()) > 0.99e3 * row["busy_s"]
    packed, streamed = found["12x4"]
    assert streamed["num_kernels"] > packed["num_kernels"], "three stages in the place of one"


class _Watch:
    """A profiler that saw a launch on the host, a range of the caller's, and two kernels."""

    def __init__(self, activities: list[ProfilerActivity]) -> None:
        assert activities == [ProfilerActivity.CUDA]

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def events(self) -> list[SimpleNamespace]:
        seen = (
            ("cudaLaunchKernel", "CPU", False, 0, 5),
            ("a range", "CUDA", True, 0, 100),
            ("_reduce_rows", "CUDA", False, 10, 30),
            ("Memcpy DtoH (Device -> Pinned)", "CUDA", False, 40, 90),
        )
        return [
            SimpleNamespace(
                name=name,
                device_type=SimpleNamespace(name=device),
                is_user_annotation=is_range,
                time_range=SimpleNamespace(start=start, end=stop),
            )
            for name, device, is_range, start, stop in seen
        ]


def test_on_a_gpu_its_kernels_alone_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "profile", _Watch)
    monkeypatch.setattr(step_profile, "timed", lambda _work, _device: 140e-6)
    step = step_profile.profiled_step(lambda: None, torch.device("cuda"))
    names = [kernel.name for kernel in step.kernels]
    assert names == ["_reduce_rows", "Memcpy DtoH (Device -> Pinned)"]
    assert gap_share(step) == pytest.approx(0.5)


def test_a_way_that_cannot_be_profiled_says_why() -> None:
    late = Run(device=CPU, scale=SMALL, num_samples=1, stop_at=time.monotonic() - 1, seed=0)
    found = dict(step_profile.measure(late, step_profile.cases(SMALL)))
    rows = [row for rows in found.values() for row in rows]
    assert len(rows) == 3
    assert all("OutOfTimeError" in row["error"] for row in rows)
