"""TRL's GRPOConfig as the loss and the step of an Update. Imports neither TRL nor torch.

In: a GRPOConfig, and what of a window its numbers depend on. Out: `Loss`, `Optim` and `AdamW`.
Invariant: every field of a GRPOConfig is in exactly one of the tables below, so that none is
passed over: its meaning is here, or stays TRL's, or other values than some are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, cast

from ratoon_client.errors import InvalidArgumentError
from ratoon_client.values import AdamW, Correction, Kl, Loss, Optim


@dataclass(frozen=True, slots=True)
class LossType:
    """What a `loss_type` is at the level of tokens.

    `by_sequence`: its kind at `importance_sampling_level="sequence"`; "": refused there.
    """

    kind: str
    token_weight: str
    divide_by: str
    by_sequence: str = "gspo"


# A divisor of tokens is theirs over the batch that was generated, as TRL counts, so that it is a
# constant of the window; bnpo counts its only micro-batch.
LOSS_TYPES: Mapping[str, LossType] = MappingProxyType(
    {
        "dapo": LossType("dapo", "per_token", "tokens"),
        "grpo": LossType("grpo", "per_sequence", "sequences"),
        "bnpo": LossType("dapo", "per_token", "tokens"),
        "dr_grpo": LossType("dr_grpo", "per_token", "constant"),
        "cispo": LossType("cispo", "per_token", "tokens", by_sequence=""),
        "sapo": LossType("sapo", "per_sequence", "sequences", by_sequence=""),
        "luspo": LossType("grpo", "per_token", "sequences"),
    }
)
_LEVELS: Mapping[str, str] = MappingProxyType({"token": "token", "sequence": "sequence"})
_MODES: Mapping[str, str] = MappingProxyType({"truncate": "truncate", "mask": "mask"})

# Fields that an Update says: docs/from-other-trainers.md has how.
MAPPED = frozenset(
    re.findall(
        r"\w+",
        """
adam_beta1 adam_beta2 adam_epsilon beta delta epsilon epsilon_high generation_batch_size
gradient_accumulation_steps importance_sampling_level learning_rate loss_type lr_scheduler_kwargs
lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm num_iterations
per_device_train_batch_size resume_from_checkpoint sapo_temperature_neg sapo_temperature_pos
save_total_limit steps_per_generation temperature top_k top_p use_bias_correction_kl
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode warmup_steps weight_decay
""",
    )
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The values that a field may have, and why no others."""

    allowed: tuple[object, ...]
    why: str


_OTHER_LOSS = "this term of the loss has no counterpart"
# Fields of which other values are refused when the trainer is made.
REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "optim": Refusal(("adamw_torch", "adamw_torch_fused"), "the service steps AdamW"),
        "optim_args": Refusal((None, ""), "the service steps AdamW"),
        "optim_target_modules": Refusal((None,), "the service steps AdamW"),
        "off_policy_mask_threshold": Refusal((None,), _OTHER_LOSS),
        "top_entropy_quantile": Refusal(
            (1.0,), "its threshold is a micro-batch's there, an operation's here"
        ),
        "entropy_coef": Refusal(
            (0.0,), "its mean is over a micro-batch's tokens there, whatever the loss divides by"
        ),
        "use_adaptive_entropy": Refusal((False,), "as `entropy_coef`"),
        "router_aux_loss_coef": Refusal(
            (None, 0), "its balance loss is over a micro-batch; say 0 for a model with experts"
        ),
        "cast_lm_head_to_fp32": Refusal((False,), "versions have one dtype"),
        "use_liger_kernel": Refusal((False,), "it replaces the model's forward"),
        "neftune_noise_alpha": Refusal((None, 0), "the service adds no noise"),
        "fp16": Refusal((False,), "policies are float32 or bfloat16"),
        "deepspeed": Refusal((None,), "the module must be whole; `parallel` shards the policy"),
        "fsdp": Refusal((None, "", ()), "as `deepspeed`"),
        "parallelism_config": Refusal((None,), "as `deepspeed`"),
        "load_best_model_at_end": Refusal((False,), "it would load the module and not the policy"),
    }
)

# Fields that stay TRL's: sampling, rewards, data, logs, evaluation, its own files and processes,
# and what only a refused value would use.
KEPT = frozenset(
    re.findall(
        r"\w+",
        """
accelerator_config activation_checkpointing activation_checkpointing_kwargs auto_find_batch_size
average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval cache_implementation
chat_template_kwargs data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug disable_dropout
disable_tqdm do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint
entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target eval_accumulation_steps
eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object
fp16_full_eval fsdp_config full_determinism generation_kwargs gradient_checkpointing
gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo
hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
include_num_input_tokens_seen label_names label_smoothing_factor length_column_name
liger_kernel_config local_rank log_completions log_completions_hub_repo log_level
log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_first_step
logging_nan_inf_filter logging_steps logging_strategy max_steps max_tool_calling_iterations
metric_for_best_model min_p model_init_kwargs multi_objective_aggregation
num_completions_to_print num_generations num_generations_eval num_train_epochs output_dir
pad_to_multiple_of per_device_eval_batch_size prediction_loss_only project push_to_hub
ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty report_to
restore_callback_states_from_checkpoint reward_weights run_name save_on_each_node
save_only_model save_steps save_strategy scale_rewards seed shuffle_dataset skip_memory_metrics
sync_ref_model tf32 torch_compile torch_compile_backend torch_compile_mode
torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
train_sampling_strategy transformers_continuous_batching_config trust_remote_code use_cache
use_cpu use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg
vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization
vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
vllm_tensor_parallel_size
""",
    )
)


def check_config(args: Any, *, num_processes: int) -> None:
    """Check a GRPOConfig. Raises InvalidArgumentError naming the first field that is refused."""
    for name, refusal in REFUSED.items():
        value = getattr(args, name, refusal.allowed[0])
        plain = getattr(value, "value", value)
        if plain not in refusal.allowed and not (plain == [] and () in refusal.allowed):
            raise _refused(name, plain, f"{_one_of(refusal.allowed)}: {refusal.why}")
    for name, default in _unknown(args):
        if getattr(args, name) != default:
            raise _refused(name, getattr(args, name), f"{default!r}: it is newer than this trainer")
    _check_loss(args, num_processes)
    _check_correction(args)


def _check_loss(args: Any, num_processes: int) -> None:
    chosen = LOSS_TYPES.get(args.loss_type)
    if chosen is None:
        raise _refused("loss_type", args.loss_type, _one_of(LOSS_TYPES))
    if args.importance_sampling_level not in _LEVELS:
        raise _refused("importance_sampling_level", args.importance_sampling_level, "token")
    is_sequence = args.importance_sampling_level == "sequence"
    if is_sequence and not chosen.by_sequence:
        raise _refused("importance_sampling_level", "sequence", f"token, with {args.loss_type}")
    if is_sequence and args.delta is not None:
        raise _refused("delta", args.delta, "None at the level of sequences")
    if is_sequence and args.beta and args.use_bias_correction_kl:
        expected = "False at the level of sequences: here a token's ratio weights its KL"
        raise _refused("use_bias_correction_kl", True, expected)
    high = _clip_high(args)
    if args.loss_type == "cispo" and high <= 1:
        raise _refused("epsilon_high", high, "above 1: the ratio's upper bound of cispo")
    if args.delta is not None and not (
        args.loss_type in ("grpo", "dapo", "bnpo", "dr_grpo", "luspo") and args.delta > 1 + high
    ):
        raise _refused("delta", args.delta, "above 1 + epsilon_high, of a loss with a clip")
    if args.loss_type == "bnpo" and num_processes * args.gradient_accumulation_steps > 1:
        expected = "dapo: bnpo's mean is each micro-batch's own, and the window has several"
        raise _refused("loss_type", "bnpo", expected)


def _check_correction(args: Any) -> None:
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return
    prefix = "vllm_importance_sampling_"
    level, _, mode = args.vllm_importance_sampling_mode.partition("_")
    if level not in _LEVELS or mode not in _MODES:
        expected = _one_of(f"{level}_{mode}" for level in _LEVELS for mode in _MODES)
        raise _refused(f"{prefix}mode", args.vllm_importance_sampling_mode, expected)
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    if high is None or high < 1:
        raise _refused(f"{prefix}clip_max", high, "at least 1")
    if low is not None and (mode == "truncate" or not 0 <= low <= 1):
        raise _refused(f"{prefix}clip_min", low, "None, or of a mask 0 to 1")


def loss_of(args: Any, *, has_old_logprobs: bool) -> Loss:
    """The loss of a window; `has_old_logprobs`: TRL has computed them, else the ratio is 1."""
    chosen = LOSS_TYPES[args.loss_type]
    kind = chosen.by_sequence if args.importance_sampling_level == "sequence" else chosen.kind
    options: dict[str, Any] = {"clip_low": args.epsilon, "clip_high": _clip_high(args)}
    if kind == "cispo":
        options["clip_low"] = 0.0
    elif kind == "sapo":
        options = {
            "tau_positive": args.sapo_temperature_pos,
            "tau_negative": args.sapo_temperature_neg,
        }
    if args.delta is not None:
        options["dual_clip"] = args.delta
    if args.beta:
        options["kl"] = Kl(
            "k3", args.beta, "given", importance_weighted=bool(args.use_bias_correction_kl)
        )
    if args.use_vllm and args.vllm_importance_sampling_correction:
        level, _, mode = args.vllm_importance_sampling_mode.partition("_")
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        options["correction"] = Correction(mode, level, low=low or 0.0, high=high)
    return Loss(
        cast("Any", kind),
        advantage="given",
        old_logprobs="given" if has_old_logprobs else "on_policy",
        token_weight=cast("Any", chosen.token_weight),
        drop_zero_variance_groups=False,
        # TRL's means are over all completions, and its log-probs are those of the truncated
        # distribution, if it is truncated.
        count_untrained=True,
        allow_truncated_sampling=True,
        **options,
    )


def optim_of(
    args: Any, *, learning_rate: float, num_micro_batches: int, num_rows: int, num_items: float
) -> Optim:
    """The step of a window.

    Args:
        args: The GRPOConfig.
        learning_rate: The schedule's.
        num_micro_batches: Micro-batches of each process in the window.
        num_rows: Completions of the window, over all processes.
        num_items: Trained tokens of the batch that was generated, over all processes.
    """
    chosen = LOSS_TYPES[args.loss_type]
    constant, divide_by = None, chosen.divide_by
    if divide_by == "constant":
        constant = float(args.max_completion_length)
    elif divide_by == "tokens" and args.loss_type != "bnpo":
        share = num_micro_batches / args.steps_per_generation
        constant, divide_by = max(num_items, 1.0) * share / num_rows, "constant"
    return Optim(
        learning_rate=learning_rate,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        divide_by=cast("Any", divide_by),
        divide_constant=constant,
        # Its optimizer steps by moments and weight decay whatever the gradient is.
        step_on_zero_gradient=True,
    )


def adamw_of(args: Any) -> AdamW:
    """The optimizer of a policy, which decays what transformers' trainers decay."""
    return AdamW(
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        decay="matrices",
    )


def table() -> str:
    """The fields that are refused, as the rows of docs/trl.md."""
    return "\n".join(
        f"| `{name}` | only {_one_of(refusal.allowed, '`')}: {refusal.why} |"
        for name, refusal in REFUSED.items()
    )


def _clip_high(args: Any) -> float:
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


def _unknown(args: Any) -> Iterable[tuple[str, object]]:
    """Fields of a newer TRL, with their defaults."""
    if not is_dataclass(args):
        return
    for field in fields(args):
        if field.name in MAPPED or field.name in REFUSED or field.name in KEPT:
            continue
        if field.default is not MISSING:
            yield field.name, field.default


def _one_of(values: Iterable[object], quote: str = "") -> str:
    return " or ".join(f"{quote}{value}{quote}" for value in values if value not in ("", ()))


def _refused(field: str, got: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, repr(got), expected)
