"""Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464) of packed tokens, as transformers has it.

A layer's module keeps its parameters and their names; only its forward is replaced. What mixes
tokens along their paths, the convolution and the recurrence, is asked of the argument
`ratoon_tree`, as attention is. Everything else is done token by token.

T tokens, C channels of the convolution, N heads of values, V elements of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ratoon_kernels import TreeLayout, causal_convolution, gated_delta_rule

# A layer's module and its input [1, T, D] -> rows of the convolution [1, T, C], gates [1, T, N, V],
# and the inputs of strengths and decays, [1, T, N] each.
Project = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


class PathMixing(Protocol):
    """Lets the tokens of one forward take from their paths."""

    def mix(
        self,
        module: nn.Module,
        x_TC: Tensor,
        weight_CW: Tensor,
        g_TN: Tensor,
        beta_TN: Tensor,
        /,
    ) -> Tensor:
        """out_TNV in the dtype of x, differentiable: the gated delta rule over what the convolution
        makes of x; `module` is the layer's module of linear attention."""
        ...


class LinearAttention(nn.Module):
    """Replaces a `GatedDeltaNet` of transformers, and takes over its parameters and modules."""

    def __init__(self, module: nn.Module, project: Project) -> None:
        super().__init__()
        source = cast("Any", module)
        self.num_k_heads: int = source.num_k_heads
        self.head_k_dim: int = source.head_k_dim
        self.head_v_dim: int = source.head_v_dim
        self.layer_idx: int = source.layer_idx
        self._project = project
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in module.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states: Tensor, *, ratoon_tree: PathMixing, **_: object) -> Tensor:
        """[1, T, D] -> [1, T, D]."""
        own = cast("Any", self)
        rows, gates, strengths, decays = self._project(self, hidden_states)
        # As transformers has it: in float32, because exp(A_log) may be large.
        g = -own.A_log.float().exp() * nn.functional.softplus(decays.float() + own.dt_bias)
        weight_CW = own.conv1d.weight.squeeze(1)
        out_TNV = ratoon_tree.mix(self, rows[0], weight_CW, g[0], strengths.sigmoid()[0])
        flat = own.norm(out_TNV.flatten(0, 1), gates.reshape(-1, self.head_v_dim))
        return own.out_proj(flat.view(*hidden_states.shape[:2], -1))


def project_apart(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four projections, of Qwen3.5."""
    gates = module.in_proj_z(hidden_states).unflatten(-1, (-1, module.head_v_dim))
    rows = module.in_proj_qkv(hidden_states)
    return rows, gates, module.in_proj_b(hidden_states), module.in_proj_a(hidden_states)


def project_by_head(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two projections, of Qwen3-Next; their outputs are grouped by heads of keys."""
    by_key = (module.num_k_heads, -1)
    qkvz = module.in_proj_qkvz(hidden_states).unflatten(-1, by_key)
    ba = module.in_proj_ba(hidden_states).unflatten(-1, by_key)
    values = (qkvz.shape[-1] - 2 * module.head_k_dim) // 2
    parts = qkvz.split([module.head_k_dim, module.head_k_dim, values, values], dim=-1)
    queries, keys, values, gates = (part.flatten(-2) for part in parts)
    strengths, decays = (part.flatten(-2) for part in ba.chunk(2, dim=-1))
    rows = torch.cat([queries, keys, values], dim=-1)
    return rows, gates.unflatten(-1, (-1, module.head_v_dim)), strengths, decays


def replace_linear_attention(module: nn.Module, source: type[nn.Module], project: Project) -> None:
    """Make every layer of a transformers model that has a `source` run packed forests."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, source):
                setattr(parent, name, LinearAttention(child, project))


def split_rows(
    x_TC: Tensor, num_key_heads: int, key_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [T, K, D], values [T, N, V], as views."""
    key_size = num_key_heads * key_dim
    q_TE, k_TE, v_TE = x_TC.split([key_size, key_size, x_TC.shape[1] - 2 * key_size], dim=1)
    by_key = (num_key_heads, key_dim)
    return q_TE.unflatten(1, by_key), k_TE.unflatten(1, by_key), v_TE.unflatten(1, (num_heads, -1))


def mix_whole(
    module: nn.Module,
    x_TC: Tensor,
    weight_CW: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    layout: TreeLayout,
    *,
    deterministic: bool,
) -> Tensor:
    """`PathMixing.mix` of a whole packed forest at once."""
    own = cast("LinearAttention", module)
    x_TC = causal_convolution(x_TC, weight_CW, layout, deterministic=deterministic)
    q_TKD, k_TKD, v_TNV = split_rows(x_TC, own.num_k_heads, own.head_k_dim, g_TN.shape[1])
    scale = own.head_k_dim**-0.5
    return gated_delta_rule(
        q_TKD, k_TKD, v_TNV, g_TN, beta_TN, layout, scale, deterministic=deterministic
    )
