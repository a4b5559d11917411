"""Gradient sums of one of several ranks: of decoder layers it keeps those of its own parts alone.

While a backward goes on, a thread sends the gradients of each layer that is through to the owners
of its parts, in the parameters' own dtype, and adds what comes for this rank's parts. The order in
which that is sent and added is a function of the plan (`turns_of`), so an update repeats its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ratoon.rollout.packed import UpdatePlan
from ratoon.train.copies import Copies
from ratoon.train.optim.gradients import GradientSums, add_terms, wide_dtype
from ratoon.train.optim.layer_exchange import LayerExchange, handed_bytes
from ratoon.train.optim.outbox import Outbox
from ratoon.train.optim.parts import Shares
from ratoon.train.optim.turns import turns_of


class ShardedSums(GradientSums):
    """Of parameters outside of the layers a rank has whole sums, as of one device.

    Outside of `of_pass` gradients of parts that are not this rank's are dropped: what runs then is
    this rank's alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layers: Sequence[Collection[str]],
        shares: Shares,
        copies: Copies,
        *,
        are_neighbours: bool,
    ) -> None:
        """`layers`: names of the parameters of each; `are_neighbours`: ranks map each other's
        memory, that of `outbox`, before the first pass."""
        sharded = {name for layer in layers for name in layer}
        super().__init__({n: p for n, p in parameters.items() if n not in sharded})
        self._layers = [{name: parameters[name] for name in layer} for layer in layers]
        self._copies = copies
        self._parts = [shares.by_rank(layer) for layer in layers]
        self._shards: dict[str, Tensor] = {}
        self._exchange: LayerExchange | None = None
        self.outbox = Outbox(self._layers, self._parts, copies.rank) if are_neighbours else None
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
        """Of a parameter that is sharded: zeros but for this rank's parts."""
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
        """Inside, all ranks run the backwards of their parts of `plan`.

        However it is left, no rank waits for this one then. Raises CANCELLED where another rank was
        stopped, or this one while it waited; `CopyFailedError` where one is gone.
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
