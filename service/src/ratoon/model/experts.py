"""Routed experts as an implementation of transformers' interface: rows sorted by expert, and one
product for all experts.

A token has a row for each expert that it visits. Tokens are copied to rows, whose places come from
a stable sort, and rows are added up again in the order of the token's experts; each of the two is
the other's backward. No sum has an unspecified order, and no float is added by atomics.

T tokens, E experts, C experts of a token, S = T * C rows, D features of the model, F features of a
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface

from ratoon.model.router import in_any_order
from ratoon_kernels.precision import accumulation_dtype

EXPERTS_NAME = "ratoon_grouped"

# y_SF, x_SD, stop_E -> y_SF and what an adapter of the product from x to y adds to it.
Adapter = Callable[[Tensor, Tensor, Tensor], Tensor]

# Activation classes that `gated_linear` implements.
_SILU = (torch.nn.SiLU, SiLUActivation)

# Grouped products on a GPU want rows of whole 16 bytes.
_ROW_MULTIPLE = 8
# Features of the product that adds a bias; all but the first are zero.
BIAS_FEATURES = _ROW_MULTIPLE
# Compute capabilities whose grouped products write zeros for the weight gradient of an expert
# without rows.
_ZEROING_CAPABILITIES = ((9, 0),)


def register_grouped_experts() -> None:
    """Make `experts_implementation="ratoon_grouped"` known to transformers; may be called
    repeatedly."""
    ExpertsInterface.register(EXPERTS_NAME, grouped_experts)


def grouped_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: tuple[Adapter, Adapter, Adapter] | None = None,
) -> Tensor:
    """[T, D], experts [T, C] and their weights [T, C] -> the weighted sums of experts, [T, D].

    The weight multiplies before the product `down`, where a row is narrower than after it; weights
    may be wider than the hidden states. `adapters` are those of the products gate, up and down.
    """
    place_TC, stop_E = sort_by_expert(top_k_index, module.num_experts)
    x_SD = to_rows(hidden_states, place_TC)
    weight_S1 = to_rows(top_k_weights.reshape(-1, 1), place_TC.reshape(-1, 1))
    if module.has_bias:
        assert adapters is None, "no adapter reaches them"
        return to_tokens(_biased(module, x_SD, weight_S1, stop_E), place_TC)
    gate_up_SG = grouped_linear(x_SD, module.gate_up_proj, stop_E)
    if adapters is None and type(module.act_fn) in _SILU:
        out_SD = gated_linear(gate_up_SG, weight_S1, module.down_proj, stop_E)
        return to_tokens(out_SD, place_TC)
    gate_SF, up_SF = gate_up_SG.chunk(2, dim=-1)
    if adapters is not None:
        gate_SF, up_SF = adapters[0](gate_SF, x_SD, stop_E), adapters[1](up_SF, x_SD, stop_E)
    product_SF = (module.act_fn(gate_SF) * up_SF * weight_S1).to(x_SD.dtype)
    out_SD = grouped_linear(product_SF, module.down_proj, stop_E)
    if adapters is not None:
        out_SD = adapters[2](out_SD, product_SF, stop_E)
    return to_tokens(out_SD, place_TC)


def _biased(module: Any, x_SD: Tensor, weight_S1: Tensor, stop_E: Tensor) -> Tensor:
    """out_SD of gpt-oss' experts, with biases and a gate of their own, and with weights that
    transformers stores transposed."""
    ones_S1 = torch.ones_like(weight_S1)
    gate_up_SG = grouped_linear(x_SD, module.gate_up_proj.mT, stop_E)
    gate_up_SG = gate_up_SG + _biases(ones_S1, module.gate_up_proj_bias, stop_E)
    product_SF = module._apply_gate(gate_up_SG) * weight_S1
    out_SD = grouped_linear(product_SF, module.down_proj.mT, stop_E)
    return out_SD + _biases(weight_S1, module.down_proj_bias, stop_E)


def _biases(weight_S1: Tensor, bias_EF: Tensor, stop_E: Tensor) -> Tensor:
    """[S, F]: the bias of each row's expert times the row's weight.

    It is a product of one feature, so that the bias' gradient is a sum in a specified order.
    """
    pad = (0, BIAS_FEATURES - 1)
    weight_S8 = torch.nn.functional.pad(weight_S1, pad)
    bias_EF8 = torch.nn.functional.pad(bias_EF[..., None], pad)
    return grouped_linear(weight_S8, bias_EF8, stop_E)


@torch.library.custom_op("ratoon::sort_by_expert", mutates_args=())
def sort_by_expert(expert_TC: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts rows by expert, and within an expert by token.

    Returns, in int32, place_TC, the row of each choice, and stop_E, where the rows of each expert
    stop.
    """
    sorted_S, order_S = expert_TC.flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, dtype=expert_TC.dtype, device=expert_TC.device)
    # A histogram would wait for the GPU, or count by atomics.
    stop_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
    return _inverse(order_S).view(expert_TC.shape), stop_E


@sort_by_expert.register_fake
def _(expert_TC: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return expert_TC.new_empty(shape, dtype=torch.int32)

    return empty(*expert_TC.shape), empty(num_experts)


def _inverse(place_S: Tensor) -> Tensor:
    """Inverse of a permutation; int32."""
    rank_S = torch.arange(len(place_S), dtype=torch.int32, device=place_S.device)
    with in_any_order():
        return torch.empty_like(rank_S).scatter_(0, place_S.long(), rank_S)


@torch.library.custom_op("ratoon::to_rows", mutates_args=())
def to_rows(x_TD: Tensor, place_TC: Tensor) -> Tensor:
    """x_SD: each token at all of its places. The gradient is a sum like that of `to_tokens`."""
    if _has_kernels(x_TD):
        from ratoon_kernels.routed_experts import spread_rows

        return spread_rows(x_TD, place_TC)
    return x_TD[_inverse(place_TC.flatten()) // place_TC.shape[1]]


@to_rows.register_fake
def _(x_TD: Tensor, place_TC: Tensor) -> Tensor:
    return x_TD.new_empty((place_TC.numel(), x_TD.shape[1]))


@torch.library.custom_op("ratoon::to_tokens", mutates_args=())
def to_tokens(x_SD: Tensor, place_TC: Tensor) -> Tensor:
    """x_TD: the sum of each token's rows, one after the other in float32 at least.

    The gradient is a copy like that of `to_rows`.
    """
    if _has_kernels(x_SD):
        from ratoon_kernels.routed_experts import add_rows

        return add_rows(x_SD, place_TC)
    first_T, *others = place_TC.unbind(1)
    sum_TD = x_SD[first_T].to(accumulation_dtype(x_SD.dtype))
    for place_T in others:
        sum_TD = sum_TD + x_SD[place_T]
    return sum_TD.to(x_SD.dtype)


@to_tokens.register_fake
def _(x_SD: Tensor, place_TC: Tensor) -> Tensor:
    return x_SD.new_empty((place_TC.shape[0], x_SD.shape[1]))


def _save_places(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[1])


def _back_to_tokens(ctx: Any, dx_SD: Tensor) -> tuple[Tensor, None]:
    return to_tokens(dx_SD, *ctx.saved_tensors), None


def _back_to_rows(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None]:
    return to_rows(dx_TD, *ctx.saved_tensors), None


to_rows.register_autograd(_back_to_tokens, setup_context=_save_places)
to_tokens.register_autograd(_back_to_rows, setup_context=_save_places)


@torch.library.custom_op("ratoon::grouped_linear", mutates_args=())
def grouped_linear(x_SD: Tensor, weight_EFD: Tensor, stop_E: Tensor) -> Tensor:
    """y_SF: each row times the weight of its expert, whose rows stop at stop_E (int32).

    Differentiable in rows and weight. An expert without rows has a weight gradient of zeros.
    """
    if _has_grouped_products(x_SD, *weight_EFD.shape[1:]):
        return torch.nn.functional.grouped_mm(x_SD, weight_EFD.mT, offs=stop_E)
    y_SF = x_SD.new_empty((x_SD.shape[0], weight_EFD.shape[1]))
    for expert, rows in _rows_of_experts(stop_E):
        torch.mm(x_SD[rows], weight_EFD[expert].T, out=y_SF[rows])
    return y_SF


@grouped_linear.register_fake
def _(x_SD: Tensor, weight_EFD: Tensor, _stop_E: Tensor) -> Tensor:
    return x_SD.new_empty((x_SD.shape[0], weight_EFD.shape[1]))


@torch.library.custom_op("ratoon::grouped_weight_gradient", mutates_args=())
def _weight_gradient(dy_SF: Tensor, x_SD: Tensor, stop_E: Tensor) -> Tensor:
    features = (dy_SF.shape[1], x_SD.shape[1])
    if _has_grouped_products(x_SD, *features):
        dweight_EFD = torch.nn.functional.grouped_mm(dy_SF.mT, x_SD, offs=stop_E)
        if torch.cuda.get_device_capability(x_SD.device) not in _ZEROING_CAPABILITIES:
            is_empty_E = stop_E.diff(prepend=stop_E.new_zeros(1)) == 0
            dweight_EFD.masked_fill_(is_empty_E[:, None, None], 0)
        return dweight_EFD
    dweight_EFD = x_SD.new_zeros((len(stop_E), *features))
    for expert, rows in _rows_of_experts(stop_E):
        torch.mm(dy_SF[rows].T, x_SD[rows], out=dweight_EFD[expert])
    return dweight_EFD


@_weight_gradient.register_fake
def _(dy_SF: Tensor, x_SD: Tensor, stop_E: Tensor) -> Tensor:
    return x_SD.new_empty((stop_E.shape[0], dy_SF.shape[1], x_SD.shape[1]))


def _has_grouped_products(x: Tensor, *features: int) -> bool:
    """Whether torch has grouped products for these sizes; otherwise experts run one after the
    other."""
    is_aligned = all(count % _ROW_MULTIPLE == 0 for count in features)
    return x.is_cuda and x.dtype is torch.bfloat16 and is_aligned


def _rows_of_experts(stop_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (expert, its rows) for experts that have rows; waits for the device."""
    start = 0
    for expert, stop in enumerate(stop_E.tolist()):
        if stop > start:
            yield expert, slice(start, stop)
        start = stop


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy_SF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_SD, weight_EFD, stop_E = ctx.saved_tensors
    dx_SD = grouped_linear(dy_SF, weight_EFD.mT, stop_E) if ctx.needs_input_grad[0] else None
    dweight_EFD = None
    if ctx.needs_input_grad[1]:
        # A gradient in another layout than the parameter's would be copied.
        is_transposed = weight_EFD.stride(-1) != 1
        factors = (x_SD, dy_SF) if is_transposed else (dy_SF, x_SD)
        dweight_EFD = _weight_gradient(*factors, stop_E)
        dweight_EFD = dweight_EFD.mT if is_transposed else dweight_EFD
    return dx_SD, dweight_EFD, None


grouped_linear.register_autograd(_differentiate, setup_context=_setup_context)


@torch.library.custom_op("ratoon::gated_linear", mutates_args=())
def gated_linear(gate_up_SG: Tensor, weight_S1: Tensor, down_EDF: Tensor, stop_E: Tensor) -> Tensor:
    """y_SD: `grouped_linear` of silu(gate) * up * weight.

    `gate_up_SG`: [S, 2 F], gate and up of each row. Differentiable in all but stop_E; the backward
    recomputes the products between, with the gradients of gate and up.
    """
    return grouped_linear(_gated(gate_up_SG, weight_S1), down_EDF, stop_E)


@gated_linear.register_fake
def _(gate_up_SG: Tensor, _weight_S1: Tensor, down_EDF: Tensor, _stop_E: Tensor) -> Tensor:
    return gate_up_SG.new_empty((gate_up_SG.shape[0], down_EDF.shape[1]))


def _gated(gate_up_SG: Tensor, weight_S1: Tensor) -> Tensor:
    if _has_kernels(gate_up_SG):
        from ratoon_kernels.routed_experts import gate_rows

        return gate_rows(gate_up_SG, weight_S1)
    gate_SF, up_SF = gate_up_SG.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_SF) * up_SF * weight_S1).to(gate_up_SG.dtype)


@torch.library.custom_op("ratoon::gated_gradients", mutates_args=())
def _gated_gradients(
    dproduct_SF: Tensor, gate_up_SG: Tensor, weight_S1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputes the products, and returns the gradients of gates and weights."""
    if _has_kernels(gate_up_SG):
        from ratoon_kernels.routed_experts import differentiate_rows

        return differentiate_rows(dproduct_SF, gate_up_SG, weight_S1)
    gate_SF, up_SF = gate_up_SG.chunk(2, dim=-1)
    silu_SF, sigmoid_SF = torch.nn.functional.silu(gate_SF), gate_SF.sigmoid()
    drow_SF = dproduct_SF * weight_S1
    dgate_SF = drow_SF * up_SF * sigmoid_SF * (1 + gate_SF * (1 - sigmoid_SF))
    dgate_up_SG = torch.cat([dgate_SF, drow_SF * silu_SF], dim=-1)
    dweight_S1 = (dproduct_SF * silu_SF * up_SF).sum(-1, keepdim=True)
    product_SF, dtype = silu_SF * up_SF * weight_S1, gate_up_SG.dtype
    return product_SF.to(dtype), dgate_up_SG.to(dtype), dweight_S1.to(weight_S1.dtype)


@_gated_gradients.register_fake
def _(dproduct_SF: Tensor, gate_up_SG: Tensor, weight_S1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        dproduct_SF.new_empty(dproduct_SF.shape),
        gate_up_SG.new_empty(gate_up_SG.shape),
        weight_S1.new_empty(weight_S1.shape),
    )


def _has_kernels(x: Tensor) -> bool:
    """Whether there are Triton kernels for `x`; otherwise torch's own operations run."""
    return x.is_cuda and x.dtype is torch.bfloat16


def _differentiate_gated(ctx: Any, dy_SD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    gate_up_SG, weight_S1, down_EDF, stop_E = ctx.saved_tensors
    dproduct_SF = grouped_linear(dy_SD, down_EDF.mT, stop_E)
    product_SF, dgate_up_SG, dweight_S1 = _gated_gradients(dproduct_SF, gate_up_SG, weight_S1)
    ddown_EDF = _weight_gradient(dy_SD, product_SF, stop_E) if ctx.needs_input_grad[2] else None
    return dgate_up_SG, dweight_S1, ddown_EDF, None


gated_linear.register_autograd(_differentiate_gated, setup_context=_setup_context)
