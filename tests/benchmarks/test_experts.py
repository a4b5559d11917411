"""The benchmark of experts on a CPU: its rows, its routes, and what kernels are of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.step.experts import (
    POPULARITY,
    PROFILE,
    TINY_ROUTED,
    TRANSFORMERS,
    UPDATE,
    load_of,
    main,
    part_of,
    with_routes,
)
from benchmarks.step.profiles import Kind
from benchmarks.step.subjects import build_module
from benchmarks.step.workload import Group, make_batch, packed_batch

GROUP = Group(prompt=40, responses=(9, 20, 4))


@pytest.mark.more
def test_all_ways_have_figures_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--draft", "--device", "cpu", "--samples", "1"])
    out = capsys.readouterr().out
    for name in ("over_replicated", "over_transformers", "zipf", UPDATE, TRANSFORMERS):
        assert name in out
    assert "Error" not in out
    assert PROFILE not in out.strip().split("\n\n")[1], "its figures are parts"


def test_parameters_of_a_token_are_those_that_it_passes() -> None:
    size = TINY_ROUTED
    module = build_module(size, torch.device("cpu"), torch.float32, 0)
    layers = [p for name, p in module.named_parameters() if ".layers." in name]
    experts = [p for p in layers if p.ndim == 3]
    others = sum(p.numel() for p in experts) * (size.num_experts - size.experts_per_token)
    assert len(experts) == 2 * size.num_layers
    assert size.layer_parameters == sum(p.numel() for p in layers) - others // size.num_experts


@pytest.mark.parametrize("popularity", POPULARITY)
def test_routes_of_a_prompt_are_shared(popularity: str) -> None:
    batch = make_batch((GROUP,), TINY_ROUTED.vocab_size, 0)
    routed = with_routes(batch, TINY_ROUTED.num_layers, TINY_ROUTED, POPULARITY[popularity], 0)
    packed = packed_batch(routed)
    assert packed.forest.num_tokens == GROUP.prompt + sum(GROUP.responses)
    assert packed.routes is not None
    # Ascending, so that none is twice of a token.
    assert (np.diff(packed.routes.astype(np.int64)) > 0).all()


def test_zipf_is_far_from_even() -> None:
    batch = make_batch((Group(prompt=4000, responses=(9,)),), TINY_ROUTED.vocab_size, 0)
    loads: list[float] = []
    for popularity in POPULARITY.values():
        routes = with_routes(
            batch, TINY_ROUTED.num_layers, TINY_ROUTED, popularity, 0
        ).routed_experts
        assert routes is not None
        counts = [np.bincount(layer.ravel(), minlength=8) for layer in routes.swapaxes(0, 1)]
        found = load_of([[*map(float, count), 0.0, 0.0, 0.0, 0.0] for count in counts])
        assert found is not None
        loads.append(found)
    even, zipf = loads
    assert even < 1.1
    assert zipf > 2
    assert load_of([]) is None


def test_kernels_are_of_a_part() -> None:
    grouped = "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblem"
    assert part_of(grouped, Kind.PRODUCTS) == "grouped products"
    assert part_of("nvjet_tst_256x128_64x4", Kind.PRODUCTS) == "other products"
    assert part_of("triton_poi_fused_index_0", Kind.COMPILED) == "rows gathered and added up"
    assert part_of("triton_poi_fused_mul_silu_1", Kind.COMPILED) == "other compiled kernels"
    assert part_of("radixSortKVInPlace", Kind.EAGER) == "routing"
