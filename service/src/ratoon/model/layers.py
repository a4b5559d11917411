"""Runs a model's decoder layers, compiled or not, and controls what each keeps for its backward.

Neither what is kept nor whether a layer is compiled changes a result beyond the rounding of fused
elementwise operations. Without either, the bits are those of the layer itself. The bits of compiled
layers do not depend on what the process ran before.

Recomputation is chosen by operation (torch's selective activation checkpointing): attention and
routing never run again, a matrix product only if it is not kept. Compiled, each kind is one graph
for all layers, and recomputation is fused into the backward's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from inspect import getsource
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ratoon.model.attention import PathAttention
from ratoon.model.experts import BIAS_FEATURES
from ratoon.model.offload import HostOffload
from ratoon.planner.activation_plan import Kept
from ratoon.shards.layer_shards import LayerShards

_MAX_GRAPHS = 64
# Upper bounds on the tokens of the graphs; beyond the last bound, each is four times the previous
# one. They are prime, so that no other size of a model equals one.
_MOST_TOKENS = (4093, 16_381, 65_521, 262_139)

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class DecoderLayers:
    """Owns the forward of each layer of one decoder. Not thread-safe."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        wide_features: Collection[int],
        adapter_rank: int,
        is_compiled: bool,
        precision: Callable[[], AbstractContextManager[Any]],
        shards: LayerShards | None = None,
        first_shard: int = 0,
    ) -> None:
        """`wide_features`: outputs of products that NARROW leaves out, beside those of experts.
        `adapter_rank`: inputs of an adapter's second product, 0 without one. `precision`: a context
        in which a layer must be recomputed. `shards`, if ranks share the weights, has the layers by
        number; the first of these layers is `first_shard`."""
        # None: everything that autograd keeps, if nothing is compiled.
        self.kept: tuple[Kept, ...] | None = None
        # Layer before whose backward the first AWAY layer is fetched.
        self.fetched_at: int | None = None
        self._is_compiled = is_compiled
        if is_compiled:
            configure_compiler()
        self._contexts = {kept: _selective(kept, wide_features, adapter_rank) for kept in Kept}
        self._contexts[Kept.HOST] = self._contexts[Kept.ATTENTION]
        self._contexts[Kept.AWAY] = self._contexts[Kept.PRODUCTS]
        self._offload: HostOffload | None = None
        self._precision = precision
        self._shards, self._first_shard = shards, first_shard
        for index, layer in enumerate(layers):
            cast("Any", layer).forward = partial(self._run, index, layer)

    def _run(self, index: int, layer: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self._shards is None:
            return self._run_layer(index, layer, hidden_states, kwargs)
        shards, number = self._shards, self._first_shard + index
        shards.enter(number, number + 1)
        output = self._run_layer(index, layer, hidden_states, kwargs)
        if output.requires_grad:
            # The hook runs once the output's gradient is complete, before the layer's backward and
            # its recomputation.
            output.register_hook(lambda _: shards.enter(number, number - 1))
        return output

    def _run_layer(
        self, index: int, layer: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        kept = self.kept if torch.is_grad_enabled() else None
        most = most_tokens(hidden_states.shape[1], kwargs.pop("ratoon_at_least", 0))
        if self._is_compiled:
            if torch.is_grad_enabled() and not hidden_states.requires_grad:
                # The first layer behind an embedding that is not trained: the graph of all others
                # runs it, and makes a gradient that nobody reads, a few products of one layer.
                hidden_states = hidden_states.detach().requires_grad_()
            rows = (hidden_states, kwargs["position_ids"], *kwargs["position_embeddings"])
            _mark_sizes(most, rows, kwargs["ratoon_tree"])
        # Everything that differs between layers is selected before compilation.
        kwargs["ratoon_tree"] = kwargs["ratoon_tree"].at_layer(index)
        if kept is None:
            run = _compiled_plain() if self._is_compiled else _run_plain
            return run(layer, hidden_states, str(most), kwargs)
        contexts = self._contexts[kept[index]]
        with self._where(kept, index, layer, kwargs):
            if self._is_compiled:
                output = _compiled_again()(layer, hidden_states, str(most), contexts, kwargs)
            else:
                # Autograd saves only the input here; the rest is in the cache of the recomputation.
                contexts = partial(self._in_precision, contexts)
                output = _run_again(layer, hidden_states, str(most), contexts, kwargs)
        if self._offload is not None and Kept.AWAY in kept:
            if index == self.fetched_at:
                output.register_hook(self._offload.fetcher())
            if index == len(kept) - 1:
                self._offload.end()
        return output

    def _where(
        self, kept: Sequence[Kept], index: int, layer: nn.Module, kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Within the context, tensors saved by autograd go where they are to wait."""
        if not kept[index].is_on_host:
            return nullcontext()
        parameters = list(layer.parameters())
        if self._offload is None:
            self._offload = HostOffload(parameters[0].device)
        resident = (*parameters, *kwargs["position_embeddings"])
        # Layers that are AWAY have the time of the layers behind them to leave.
        is_last = kept[index] is Kept.HOST and Kept.HOST not in kept[index + 1 :]
        return self._offload.layer(index, resident, is_last=is_last)

    def _in_precision(
        self, contexts: Contexts
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = contexts()
        precision = self._precision()
        if isinstance(precision, nullcontext):
            return first, again
        return first, _Both(precision, again)


class _Both(AbstractContextManager[None]):
    """Two contexts, entered in order."""

    def __init__(
        self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
    ) -> None:
        self._contexts = (outer, inner)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _run_plain(
    layer: nn.Module, hidden_states: Tensor, most: str, kwargs: dict[str, Any]
) -> Tensor:
    # The compiler guards on texts that it reads, so no graph runs tokens of another graph's range.
    torch._check(hidden_states.shape[1] <= int(most))
    return type(layer).forward(layer, hidden_states, **kwargs)


def _run_again(
    layer: nn.Module, hidden_states: Tensor, most: str, contexts: Contexts, kwargs: dict[str, Any]
) -> Tensor:
    def run(hidden_states: Tensor) -> Tensor:
        return _run_plain(layer, hidden_states, most, kwargs)

    return cast(
        "Tensor",
        checkpoint(
            run,
            hidden_states,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
        ),
    )


def most_tokens(num_tokens: int, at_least: int = 0) -> int:
    """Upper bound of the graph that runs `num_tokens`, or `at_least` if that is more.

    One token has its own graph, because the compiler makes one in any case.
    """
    if num_tokens < 2:
        return 1
    num_tokens = max(num_tokens, at_least)
    most = next((most for most in _MOST_TOKENS if num_tokens <= most), _MOST_TOKENS[-1])
    while most < num_tokens:
        most *= 4
    return most


def _mark_sizes(most: int, rows: Iterable[Tensor], attention: PathAttention) -> None:
    """Make the next graph compile for up to `most` tokens, whatever the current sizes are.

    The compiler takes sizes as hints for cutting sums, and reuses the first ones it meets for all
    later ones. A process that replays from a checkpoint meets other sizes first than the process
    whose bits it must reproduce, so the hint is the range's. It is the range's maximum, so that
    conclusions from the hint, such as that an offset fits 32 bits, hold for the whole range.
    """
    if most > 1:
        for row in rows:
            torch._dynamo.mark_dynamic(row, 1, hint_override=most, min=2, max=most)
        # These tensors have the same number of tokens, whose bounds are above: one layout may be
        # run by graphs of two ranges.
        for each in attention.per_token:
            torch._dynamo.mark_dynamic(each, 0, hint_override=most)
    for table in attention.tables:
        torch._dynamo.decorators.mark_unbacked(table, 0)


def configure_compiler() -> None:
    """Set the options of torch's compiler that layers need, in the context of this thread."""
    settings = cast("Any", torch._dynamo.config)
    # The limit covers each kind, for a whole forest or a stage, in each range of tokens.
    settings.recompile_limit = max(settings.recompile_limit, _MAX_GRAPHS)
    # The scale of attention is then guarded on, and not a symbol, for example if a process has two
    # models.
    settings.specialize_float = True


def _compile(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Both options decide by the number of tokens, but a graph is for a range of it.
    options: Any = {"triton.mix_order_reduction": False, "shape_padding": False}
    return torch.compile(run, fullgraph=True, options=options)


@cache
def _compiled_plain() -> Callable[[nn.Module, Tensor, str, dict[str, Any]], Tensor]:
    return _compile(_run_plain)


@cache
def _compiled_again() -> Callable[[nn.Module, Tensor, str, Contexts, dict[str, Any]], Tensor]:
    return _compile(_run_again)


def _selective(kept: Kept, wide_features: Collection[int], adapter_rank: int) -> Contexts:
    # The values are passed as text: the compiler guards on text, but would make symbols of numbers.
    wide = ",".join(map(str, sorted(wide_features)))
    named = str(kept), wide, str(adapter_rank)
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, *named))
    # Without this text torch would not cache graphs with this policy for the next start.
    text = _policy_source() + " ".join(named)
    cast("Any", contexts).cache_hash = xxhash.xxh3_128_hexdigest(text.encode())
    return contexts


@cache
def _policy_source() -> str:
    return getsource(_policy) + getsource(_always_kept)


def _policy(
    kept: str,
    wide_features: str,
    adapter_rank: str,
    _context: Any,
    operation: Any,
    *args: Any,
    **_kwargs: Any,
) -> CheckpointPolicy:
    """Decides which operations' results a layer of this kind keeps."""
    ops = torch.ops
    if operation in _always_kept():
        return CheckpointPolicy.MUST_SAVE
    products = (ops.aten.mm.default, ops.aten.addmm.default, ops.ratoon.grouped_linear.default)
    if kept == Kept.ATTENTION or operation not in products:
        return CheckpointPolicy.PREFER_RECOMPUTE
    weight = args[2] if operation is ops.aten.addmm.default else args[1]
    is_grouped = operation is ops.ratoon.grouped_linear.default
    if weight.shape[-1 if is_grouped else -2] == int(adapter_rank):
        return CheckpointPolicy.PREFER_RECOMPUTE
    if is_grouped and weight.shape[-1] == BIAS_FEATURES:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if kept == Kept.NARROW and (is_grouped or str(weight.shape[-1]) in wide_features.split(",")):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _always_kept() -> tuple[Any, ...]:
    """Operations that never run twice: attention, recurrences, and which experts a token visits."""
    names = ("tree_attention", "stage_attention", "sequence_attention")
    names += ("gated_delta_rule", "part_gated_delta", "route", "sort_by_expert")
    ops = torch.ops.ratoon
    # Operations whose module nobody has imported are in no graph.
    return tuple(getattr(ops, name).default for name in names if hasattr(ops, name))
