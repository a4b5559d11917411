"""verl's ActorConfig as the loss and the step of an Update. Imports neither verl nor torch.

In: an ActorConfig with its optimizer and engine, and a model's configuration. Out: `Loss`, `Optim`
and `AdamW`. Invariant: what an Update cannot express exactly is refused by the setting's full name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from ratoon_client.errors import InvalidArgumentError
from ratoon_client.values import AdamW, Kl, Lora, Loss, Optim

# `policy_loss.loss_mode`, and the kind that has its formula.
LOSS_MODES: Mapping[str, str] = MappingProxyType(
    {
        "vanilla": "ppo_clip",
        "gspo": "gspo",
        "sapo": "sapo",
        "gpg": "reinforce",
        "cispo": "cispo",
    }
)
# `loss_agg_mode`, and what `token_weight` and `divide_by` it is.
AGGREGATIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "token-mean": ("per_token", "tokens"),
        "token-sum": ("per_token", "none"),
        "seq-mean-token-sum": ("per_token", "sequences"),
        "seq-mean-token-mean": ("per_sequence", "sequences"),
        "seq-mean-token-sum-norm": ("per_token", "constant"),
    }
)
# `kl_loss_type`, and the estimator; one with "+" has the gradient of k2.
KL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("kl", "k1"), "k1"),
        **dict.fromkeys(("kl+", "k1+"), "k1_plus"),
        **dict.fromkeys(("mse", "k2", "mse+", "k2+"), "k2"),
        **dict.fromkeys(("low_var_kl", "k3"), "k3"),
        **dict.fromkeys(("low_var_kl+", "k3+"), "k3_plus"),
    }
)
_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
        **dict.fromkeys(("float32", "fp32"), "float32"),
    }
)


def check_actor(actor: Any) -> None:
    """Check an ActorConfig. Raises InvalidArgumentError naming the first setting that is refused.

    One that only runs forward, as a reference does, steps no optimizer.
    """
    dtype_of(actor.engine)
    for name, is_on in (
        ("fsdp_config.qat.enable", actor.engine.qat.enable),
        ("calculate_sum_pi_squared", actor.calculate_sum_pi_squared),
        ("freeze_vision_tower", actor.freeze_vision_tower),
    ):
        if is_on:
            raise _refused(name, True, "False: the service has no counterpart")
    if "lora" in actor.policy_options:
        raise _refused("policy_options", "lora", "actor_rollout_ref.model.lora_rank")
    loss_of(actor)
    if not actor.engine.forward_only:
        adamw_of(actor.optim)


def check_model(model: Any) -> None:
    """Check a model's configuration. Raises InvalidArgumentError, as `check_actor` does."""
    lora: dict[str, Any] = model.get("lora") or {}
    mtp: dict[str, Any] = model.get("mtp") or {}
    for name, value in (
        ("lora.rank", lora.get("rank")),
        ("lora_adapter_path", model.get("lora_adapter_path")),
        ("target_parameters", model.get("target_parameters")),
        ("exclude_modules", model.get("exclude_modules")),
        ("mtp.enable", mtp.get("enable")),
    ):
        if value:
            raise _refused(name, value, "none: the service has no counterpart", "model")
    lora_of(model)
    # How verl's own engine computes attention.
    other = set(model.get("override_config") or {}) - {"attn_implementation"}
    if other:
        expected = "attn_implementation alone: the service reads config.json of model.path"
        raise _refused("override_config", sorted(other), expected, "model")


def lora_of(model: Any) -> Lora | None:
    """The adapter that is trained; None: every parameter of the folder is.

    Raises:
        InvalidArgumentError: `target_modules` is a pattern.
    """
    rank = model.get("lora_rank")
    if not rank:
        return None
    targets = model.get("target_modules", "all-linear")
    if isinstance(targets, str) and targets != "all-linear":
        expected = "all-linear, or a list of projections"
        raise _refused("target_modules", targets, expected, "model")
    modules = (targets,) if isinstance(targets, str) else tuple(map(str, targets or ()))
    return Lora(rank=rank, alpha=model.get("lora_alpha", 16), target_modules=modules)


def check_processes(num_processes: int) -> None:
    """Check how many processes train. Raises InvalidArgumentError for several."""
    if num_processes > 1:
        expected = "1, with nnodes 1: policy_options.parallel has the policy's GPUs"
        raise InvalidArgumentError("trainer.n_gpus_per_node", str(num_processes), expected)


def dtype_of(engine: Any) -> str:
    """The policy's dtype: what verl's engine computes in, and else what it should."""
    mixed: dict[str, Any] = engine.mixed_precision or {}
    name = "mixed_precision.param_dtype" if "param_dtype" in mixed else "dtype"
    return _chosen(f"fsdp_config.{name}", str(mixed.get("param_dtype", engine.dtype)), _DTYPES)


def loss_of(actor: Any) -> Loss:
    """The loss of a mini-batch, whose advantages, old and reference log-probs are `given`.

    Raises:
        InvalidArgumentError: A field of the ActorConfig has no counterpart.
    """
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    kind = _chosen("policy_loss.loss_mode", mode, LOSS_MODES)
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    low = actor.clip_ratio if low is None else low
    high = actor.clip_ratio if high is None else high
    options: dict[str, Any] = {}
    if kind in ("ppo_clip", "gspo"):
        options |= {"clip_low": low, "clip_high": high}
    elif kind == "cispo":
        options |= {"clip_low": 1 - low, "clip_high": 1 + high}
    elif kind == "sapo":
        options |= {"tau_positive": actor.tau_pos, "tau_negative": actor.tau_neg}
    if kind == "ppo_clip":
        if actor.clip_ratio_c <= 1 + high:
            raise _refused("clip_ratio_c", actor.clip_ratio_c, "above 1 + clip_ratio_high")
        options["dual_clip"] = actor.clip_ratio_c
    if kind == "sapo" and actor.loss_agg_mode != "seq-mean-token-mean":
        expected = "seq-mean-token-mean: sapo takes this mean whatever the mode is"
        raise _refused("loss_agg_mode", actor.loss_agg_mode, expected)
    if kind != "reinforce":
        options["old_logprobs"] = "given"
    if actor.use_kl_loss:
        estimator = _chosen("kl_loss_type", actor.kl_loss_type, KL_TYPES)
        options["kl"] = Kl(estimator, actor.kl_loss_coef, "given")
    if actor.entropy_coeff:
        options["entropy_coefficient"] = actor.entropy_coeff
    token_weight, divide_by = _aggregation(actor)
    if divide_by == "constant" and actor.loss_scale_factor is None:
        expected = "a number: without it the loss depends on the width of the padding"
        raise _refused("loss_scale_factor", None, expected)
    return Loss(
        cast("Any", kind),
        advantage="given",
        token_weight=cast("Any", token_weight),
        drop_zero_variance_groups=False,
        # Means over sequences are over all rows there.
        count_untrained=True,
        **options,
    )


def optim_of(actor: Any, *, learning_rate: float) -> Optim:
    """The step of a mini-batch; `learning_rate` is the schedule's."""
    _, divide_by = _aggregation(actor)
    return Optim(
        learning_rate=learning_rate,
        max_grad_norm=actor.optim.clip_grad,
        divide_by=cast("Any", divide_by),
        divide_constant=float(actor.loss_scale_factor) if divide_by == "constant" else None,
        # Its optimizer steps by moments and weight decay whatever the gradient is.
        step_on_zero_gradient=True,
    )


def adamw_of(optim: Any) -> AdamW:
    """The optimizer of a policy, as torch's AdamW with verl's numbers: all parameters decay.

    Raises:
        InvalidArgumentError: `optimizer`, `optimizer_impl` or an override names another one.
    """
    _chosen("optim.optimizer", optim.optimizer, {"AdamW": ""})
    _chosen("optim.optimizer_impl", optim.optimizer_impl, {"torch.optim": ""})
    other = dict(optim.override_optimizer_config or {})
    eps = other.pop("eps", 1e-8)
    if other:
        raise _refused("optim.override_optimizer_config", sorted(other), "eps alone")
    beta1, beta2 = optim.betas
    return AdamW(beta1=beta1, beta2=beta2, eps=eps, weight_decay=optim.weight_decay, decay="all")


def _aggregation(actor: Any) -> tuple[str, str]:
    return _chosen("loss_agg_mode", actor.loss_agg_mode, AGGREGATIONS)


def _chosen(name: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise _refused(name, value, " or ".join(known))
    return known[value]


def _refused(name: str, got: object, expected: str, part: str = "actor") -> InvalidArgumentError:
    return InvalidArgumentError(f"actor_rollout_ref.{part}.{name}", repr(got), expected)
