"""Gradient sums of a rank that keeps, of decoder layers, only the sums of its own parts.

While a backward runs, a thread sends the gradients of each finished layer to the owners of its
parts, in the parameters' own dtype, and adds what it receives for this rank's parts. The order of
sending and adding is a function of the plan (`turns_of`), so an update repeats its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ratoon.rollout.packed import UpdatePlan
from ratoon.shards.copies import Copies
from ratoon.train.optim.gradients import GradientSums, add_terms, wide_dtype
from ratoon.train.ranks.exchange import LayerExchange, handed_bytes, turns_of
from ratoon.train.ranks.shares import Outbox, Shares


class ShardedSums(GradientSums):
    """Gradient sums: whole ones of parameters outside of layers, of layers those of own parts.

    Outside of `of_pass` the gradients of other ranks' parts are dropped, as no other rank takes
    part in what runs then.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layers: Sequence[Collection[str]],
        shares: Shares,
        copies: Copies,
        neighbours: Sequence[int] = (),
    ) -> None:
        """`layers`: the parameters' names, by layer. `neighbours`: the ranks of the node, this one
        among them, if they map each other's `outbox` before the first pass."""
        sharded = {name for layer in layers for name in layer}
        super().__init__({n: p for n, p in parameters.items() if n not in sharded})
        self._layers = [{name: parameters[name] for name in layer} for layer in layers]
        self._copies = copies
        self._parts = [shares.by_rank(layer) for layer in layers]
        self._shards: dict[str, Tensor] = {}
        self._exchange: LayerExchange | None = None
        self.outbox = (
            Outbox(self._layers, self._parts, copies.rank, neighbours) if neighbours else None
        )
        for index, layer in enumerate(self._layers):
            for part in self._parts[index][copies.rank]:
                like = layer[part.parameter]
                self._shards[part.name] = part.empty_like(like, wide_dtype(like)).zero_()
            for name, parameter in layer.items():
                parameter.register_post_accumulate_grad_hook(partial(self._take, index, name))

    @property
    def passing_bytes(self) -> int:
        return super().passing_bytes + handed_bytes(self._layers, self._copies.size)

    def shards(self) -> dict[str, Tensor]:
        """This rank's parts of all layers."""
        return self._shards

    def sum_of(self, name: str) -> Tensor:
        """A parameter's sum; of one in a layer, zeros outside of this rank's parts."""
        for layer, by_rank in zip(self._layers, self._parts, strict=True):
            if name in layer:
                whole = torch.zeros_like(layer[name], dtype=wide_dtype(layer[name]))
                for part in by_rank[self._copies.rank]:
                    if part.parameter == name:
                        part.of(whole).copy_(self._shards[part.name])
                return whole
        return super().sum_of(name)

    def clear(self) -> None:
        super().clear()
        for shard in self._shards.values():
            shard.zero_()
        for layer in self._layers:
            for parameter in layer.values():
                parameter.grad = None

    @contextmanager
    def of_pass(self, plan: UpdatePlan, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Exchange gradients while the block runs this rank's backwards of `plan`.

        All ranks enter it for the same plan. However it is left, no rank waits for this one any
        more. Raises CANCELLED where another rank was stopped, or this one while it waited, and
        `CopyFailedError` where one is gone.
        """
        steps = turns_of(plan, self._copies.size, len(self._layers))
        self._exchange = exchange = LayerExchange(
            self._layers,
            self._parts,
            self._shards,
            self._copies,
            steps,
            is_cancelled,
            self.outbox,
        )
        try:
            yield
            exchange.finish()
        except BaseException:
            exchange.stop()
            raise
        finally:
            self._exchange = None
            exchange.join()

    def _take(self, layer: int, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        if self._exchange is not None:
            self._exchange.take(layer, name, gradient)
            return
        for part in self._parts[layer][self._copies.rank]:
            if part.parameter == name:
                add_terms(self._shards[part.name], [part.of(gradient)])
