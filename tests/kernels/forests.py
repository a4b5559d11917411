"""Random packed forests and a dense attention oracle, written from parent pointers alone.

Nothing here reads `end` to decide who attends whom, and nothing imports the ops under test.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratoon_kernels import TreeLayout, build_layout

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Nodes in depth-first packed order; int64 arrays of shape [M]."""

    start: IntArray
    stop: IntArray
    end: IntArray
    parent: IntArray

    @property
    def num_tokens(self) -> int:
        return int(self.stop[-1]) if len(self.stop) else 0

    def layout(self, device: str = "cpu", windows: Collection[int] = ()) -> TreeLayout:
        return build_layout(
            node_start=self.start,
            node_stop=self.stop,
            node_end=self.end,
            node_parent=self.parent.astype(np.int32),
            device=device,
            windows=windows,
        )

    def mask(self, window: int | None = None) -> npt.NDArray[np.bool_]:
        """bool [T, T]: row q attends column k, one of the last `window` tokens of its path."""
        num_nodes = len(self.parent)
        is_on_path = np.zeros((num_nodes, num_nodes), np.bool_)
        for node, parent in enumerate(self.parent):
            if parent >= 0:
                is_on_path[node] = is_on_path[parent]
            is_on_path[node, node] = True
        node_of_token = np.repeat(np.arange(num_nodes), self.stop - self.start)
        token = np.arange(self.num_tokens)
        mask = is_on_path[node_of_token][:, node_of_token] & (token[None, :] <= token[:, None])
        if window is not None:
            depth = mask.sum(axis=1)
            mask &= depth[:, None] - depth[None, :] < window
        return mask


def forest_from(parents: list[int], lengths: list[int]) -> Forest:
    """Lays out nodes that are given in depth-first order."""
    length = np.array(lengths, np.int64)
    stop = np.cumsum(length)
    end = stop.copy()
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            end[parents[node]] = max(end[parents[node]], end[node])
    return Forest(start=stop - length, stop=stop, end=end, parent=np.array(parents, np.int64))


def random_forest(rng: np.random.Generator, max_nodes: int, max_length: int) -> Forest:
    """A forest of 1..max_nodes nodes of 1..max_length tokens, of any depth and number of roots."""
    num_nodes = int(rng.integers(1, max_nodes + 1))
    path: list[int] = []
    parents: list[int] = []
    for node in range(num_nodes):
        depth = int(rng.integers(0, len(path) + 1))
        # Deep paths are rare when the depth is uniform: go down from the last node half the time.
        depth = len(path) if rng.random() < 0.5 else depth
        parents.append(path[depth - 1] if depth else -1)
        path = [*path[:depth], node]
    return forest_from(parents, rng.integers(1, max_length + 1, num_nodes).tolist())


def chain(num_nodes: int, length: int) -> Forest:
    return forest_from(list(range(-1, num_nodes - 1)), [length] * num_nodes)


def star(prompt: int, num_responses: int, length: int) -> Forest:
    return forest_from([-1] + [0] * num_responses, [prompt] + [length] * num_responses)


def comb(num_teeth: int, length: int) -> Forest:
    """A spine whose every node also has a leaf, laid out after the spine's rest."""
    parents = list(range(-1, num_teeth - 1)) + list(range(num_teeth - 1, -1, -1))
    return forest_from(parents, [length] * len(parents))


def binary(depth: int, length: int) -> Forest:
    parents: list[int] = []

    def grow(parent: int, levels: int) -> None:
        parents.append(parent)
        node = len(parents) - 1
        for _ in range(2 if levels else 0):
            grow(node, levels - 1)

    grow(-1, depth)
    return forest_from(parents, [length] * len(parents))


NAMED: dict[str, Forest] = {
    "empty": forest_from([], []),
    "single_token": forest_from([-1], [1]),
    "single_tokens": forest_from([-1, -1, -1], [1, 1, 1]),
    "one_sequence": forest_from([-1], [131]),
    "chain": chain(7, 19),
    "chain_of_tokens": chain(90, 1),
    "star": star(67, 9, 13),
    "star_of_tokens": star(5, 80, 1),
    "comb": comb(8, 11),
    "binary": binary(4, 5),
    "binary_of_tokens": binary(6, 1),
    "sequences": forest_from([-1] * 5, [33, 1, 70, 64, 65]),
    "two_trees": forest_from([-1, 0, 1, 1, 0, -1, 5, 5], [40, 3, 21, 90, 17, 66, 1, 2]),
}


def random_forests(seed: int, count: int, max_nodes: int, max_length: int) -> Iterator[Forest]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield random_forest(rng, max_nodes, max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs of attention over a forest and random gradients of its two results."""

    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    dout_TNH: Tensor
    dlse_NT: Tensor
    scale: float


def random_problem(
    num_tokens: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
    value_dim: int | None = None,
    device: str = "cpu",
) -> Problem:
    value_dim = value_dim or head_dim
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        # Drawn in fp64, so that a 16-bit problem is the rounding of the fp64 one.
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device=device, dtype=dtype)

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Problem(
        q_TNH=draw(num_tokens, heads, head_dim),
        k_TKH=draw(num_tokens, kv_heads, head_dim),
        v_TKH=draw(num_tokens, kv_heads, value_dim),
        dout_TNH=draw(num_tokens, heads, value_dim),
        dlse_NT=draw(heads, num_tokens).to(lse_dtype),
        scale=1.7 * head_dim**-0.5,
    )


Results = dict[str, Tensor]


def run(
    attention: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    problem: Problem,
    *,
    with_dlse: bool = True,
) -> Results:
    """Output, log-sum-exp and all gradients of an attention function."""
    inputs = [x.clone().requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH)]
    out_TNH, lse_NT = attention(*inputs)
    outputs, grads = [out_TNH], [problem.dout_TNH]
    if with_dlse:
        outputs.append(lse_NT)
        grads.append(problem.dlse_NT.to(lse_NT.dtype))
    dq, dk, dv = torch.autograd.grad(outputs, inputs, grads)
    return {
        "out": out_TNH.detach(), "lse": lse_NT.detach(), "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip


def dense_oracle(
    mask: npt.NDArray[np.bool_], problem: Problem, *, with_dlse: bool = True
) -> Results:
    """Results through a dense T x T mask in fp64 and torch's own derivatives."""
    mask_TT = torch.from_numpy(mask).to(problem.q_TNH.device)

    def attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        group = q_TNH.shape[1] // k_TKH.shape[1]
        q, k, v = (x.transpose(0, 1).double() for x in (q_TNH, k_TKH, v_TKH))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        scores = (q @ k.mT * problem.scale).masked_fill(~mask_TT, -torch.inf)
        out = torch.softmax(scores, dim=-1) @ v
        return out.transpose(0, 1), torch.logsumexp(scores, dim=-1)

    exact = Problem(
        q_TNH=problem.q_TNH.double(),
        k_TKH=problem.k_TKH.double(),
        v_TKH=problem.v_TKH.double(),
        dout_TNH=problem.dout_TNH.double(),
        dlse_NT=problem.dlse_NT.double(),
        scale=problem.scale,
    )
    return run(attention, exact, with_dlse=with_dlse)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_close(got: Results, expected: Results, tolerance: float, label: str = "") -> None:
    """Compares by rel-L2; a gradient that is truly zero (one token) by the size of the others."""
    largest_gradient = max(float(expected[name].norm()) for name in ("dq", "dk", "dv"))
    for name, value in expected.items():
        assert got[name].isfinite().all(), f"{label} {name} is not finite"
        error = float((got[name].double() - value.double()).norm())
        floor = 0.05 * largest_gradient if name in {"dq", "dk"} else 0.0
        bound = tolerance * max(float(value.norm()), floor)
        assert error <= bound, f"{label} {name}: error {error:.3g} > {bound:.3g}"
