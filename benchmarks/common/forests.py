"""The forests that kernels are benchmarked on: Table 1 of DualKV, real batches, agents' trees.

A name and a seed give the same forest on every machine. Nodes are in packed depth-first order,
heaviest child first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

# Response lengths, in tokens, of one recorded group whose prompt has 5,059 tokens.
PAPER_LENGTHS = (
    *(1432, 1866, 504, 379, 1588, 411, 152, 218, 918, 416, 1770, 1826, 1456, 378, 1575, 297),
    *(1503, 1944, 1503, 731, 753, 1311, 1448, 1925, 457, 1940, 1655, 941, 1483, 1106, 1185, 1193),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """M nodes in packed order: node m owns the tokens [start, stop), its subtree [start, end).

    Attributes:
        start: int64 [M].
        stop: int64 [M].
        end: int64 [M].
        parent: int64 [M]; -1 for a root.
    """

    start: Int64Array
    stop: Int64Array
    end: Int64Array
    parent: Int64Array

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens."""
        return int(self.stop[-1])

    @property
    def num_pairs(self) -> int:
        """Attended (query, key) pairs: the least work that any attention does."""
        length = self.stop - self.start
        return int((length * (self.end - self.stop) + length * (length + 1) // 2).sum())

    def arrays(self) -> dict[str, Int64Array]:
        """The arguments of `build_layout`, without the device."""
        return {
            "node_start": self.start,
            "node_stop": self.stop,
            "node_end": self.end,
            "node_parent": self.parent,
        }


@dataclass(frozen=True, slots=True)
class Tree:
    """Parent and length in tokens of each node; parents come before children, a root has -1."""

    parents: list[int]
    lengths: list[int]


def groups(prompt: int, responses: list[list[int]]) -> Tree:
    """One tree per list of response lengths, each with a prompt of `prompt` tokens."""
    parents: list[int] = []
    lengths: list[int] = []
    for group in responses:
        parents += [-1] + [len(parents)] * len(group)
        lengths += [prompt, *group]
    return Tree(parents, lengths)


def binary(depth: int, lengths: list[int]) -> Tree:
    """A full binary tree, its nodes numbered level by level: 2 ** (depth + 1) - 1 lengths."""
    return Tree([(node + 1) // 2 - 1 for node in range(2 ** (depth + 1) - 1)], lengths)


def spine(turns: list[int], leaves: list[list[int]]) -> Tree:
    """A chain of turns, each with side leaves of the given lengths."""
    parents = list(range(-1, len(turns) - 1))
    lengths = list(turns)
    for turn, group in enumerate(leaves):
        parents += [turn] * len(group)
        lengths += group
    return Tree(parents, lengths)


def _uniform(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    return rng.integers(low, high, count, endpoint=True).tolist()


def _table_1(num_responses: int, prompt: int) -> Callable[[np.random.Generator], Tree]:
    return lambda _rng: groups(prompt, [[2048] * num_responses])


def _one_token_nodes(_rng: np.random.Generator) -> Tree:
    parents: list[int] = []
    for _ in range(17):
        tree = binary(11, [])
        parents += [-1 if parent < 0 else parent + len(parents) for parent in tree.parents]
    return Tree(parents, [1] * len(parents))


SHAPES: dict[str, Callable[[np.random.Generator], Tree]] = {
    "t1-28-4k": _table_1(28, 4096),
    "t1-28-16k": _table_1(28, 16_384),
    "t1-16-32k": _table_1(16, 32_768),
    "t1-28-32k": _table_1(28, 32_768),
    "paper": lambda _rng: groups(5059, [list(PAPER_LENGTHS)]),
    "short": lambda rng: groups(1000, [_uniform(rng, 16, 200, 64)]),
    "forest16": lambda rng: groups(2000, [_uniform(rng, 200, 1500, 8) for _ in range(16)]),
    "binary6": lambda rng: binary(6, _uniform(rng, 100, 1500, 127)),
    "spine30": lambda rng: spine(
        _uniform(rng, 200, 1200, 30), [_uniform(rng, 50, 400, 2) for _ in range(30)]
    ),
    "one_token_nodes": _one_token_nodes,
}


def build(name: str, seed: int) -> Nodes:
    """The nodes of a shape of `SHAPES`; ties in weight keep their order, roots included."""
    return pack(SHAPES[name](np.random.default_rng(seed)))


def pack(tree: Tree) -> Nodes:
    """Lays a tree out depth-first, each node's heaviest child first."""
    weights = list(tree.lengths)
    children: list[list[int]] = [[] for _ in weights]
    roots: list[int] = []
    for node in range(len(weights) - 1, -1, -1):
        parent = tree.parents[node]
        (children[parent] if parent >= 0 else roots).append(node)
        if parent >= 0:
            weights[parent] += weights[node]
    order: list[int] = []
    # `roots` is last to first, as the stack needs it.
    stack = roots
    while stack:
        node = stack.pop()
        order.append(node)
        # The stack pops the last first: among equal weights, the first child.
        stack += sorted(children[node], key=lambda child: weights[child])
    row_of = np.full(len(order) + 1, -1)
    row_of[order] = np.arange(len(order))
    length = np.array(tree.lengths, np.int64)[order]
    start = np.cumsum(length) - length
    return Nodes(
        start=start,
        stop=start + length,
        end=start + np.array(weights, np.int64)[order],
        parent=row_of[np.array(tree.parents, np.int64)[order]],
    )
