"""Policy specs from the wire, policies to it.

Enters `PolicySpec` with what the server adds (models root, default micro-batch), leaves a complete
`engine.types.PolicySpec`. Invariant: a model folder that leaves here lies below the models root,
every symbolic link followed, and every default is written out, on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratoon.api.convert.checks import (
    INT32_MAX,
    POLICY_ID,
    at_least,
    matched,
    not_negative,
    positive,
    required,
    shown,
)
from ratoon.api.convert.enums import from_wire, to_wire
from ratoon.api.convert.times import set_time
from ratoon.engine.types import (
    OnChangedNumerics,
    Policy,
    PolicySpec,
    PublishConfig,
    PublishKind,
    Recovery,
    ReferencePolicy,
    Sequencing,
)
from ratoon.errors import invalid
from ratoon.model.spec import (
    PRESET_NAMES,
    FolderBase,
    FullTuning,
    LoraTuning,
    ModelDtype,
    ModelSpec,
    PresetBase,
)
from ratoon.train.config import DEFAULT_GUARD, AdamWConfig, NumericsGuard
from ratoon_proto.v1 import policy_pb2 as wire

KEEP_VERSIONS = 2
NUM_WORKERS = 1
_GUARD_LIMITS = (
    "max_grad_norm_to_step",
    "max_reference_kl_to_step",
    "max_sampler_kl_to_step",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDefaults:
    """What the server's config adds to a spec; `models_root` is absolute.

    `micro_batch_tokens` None: plans choose.
    """

    models_root: Path
    micro_batch_tokens: int | None


def policy_spec(message: wire.PolicySpec, defaults: SpecDefaults) -> PolicySpec:
    """Raises INVALID_ARGUMENT naming the field below `spec`."""
    deterministic = message.deterministic if message.HasField("deterministic") else True
    recovery = from_wire("spec.recovery", message.recovery, wire.Recovery, Recovery)
    if recovery is Recovery.REPLAY and not deterministic:
        raise invalid("spec.recovery", "replay with deterministic false", "fail, or deterministic")
    keep = message.keep_versions if message.HasField("keep_versions") else KEEP_VERSIONS
    tokens = (
        message.micro_batch_tokens
        if message.HasField("micro_batch_tokens")
        else defaults.micro_batch_tokens
    )
    return PolicySpec(
        policy_id=matched("spec.policy_id", message.policy_id, POLICY_ID),
        model=ModelSpec(
            base=_base(message, defaults.models_root),
            tuning=_tuning(message),
            dtype=from_wire("spec.dtype", message.dtype, wire.ModelDtype, ModelDtype),
            seed=message.seed,
        ),
        optimizer=_optimizer(message.optimizer),
        sequencing=from_wire("spec.sequencing", message.sequencing, wire.Sequencing, Sequencing),
        deterministic=deterministic,
        recovery=recovery,
        on_changed_numerics=from_wire(
            "spec.on_changed_numerics",
            message.on_changed_numerics,
            wire.OnChangedNumerics,
            OnChangedNumerics,
        ),
        publish=_publish(message.publish),
        keep_versions=at_least("spec.keep_versions", keep, 1),
        micro_batch_tokens=(
            None if tokens is None else at_least("spec.micro_batch_tokens", tokens, 1)
        ),
        reference=from_wire(
            "spec.reference", message.reference, wire.ReferencePolicy, ReferencePolicy
        ),
        num_workers=at_least(
            "spec.parallel.num_workers", message.parallel.num_workers or NUM_WORKERS, 1
        ),
        attention_backend=message.attention_backend,
        numerics_guard=_guard(message.numerics_guard),
    )


def model_folder(field: str, given: str, models_root: Path) -> Path:
    """The folder that a caller names, absolute, with its files below `models_root` after following
    links.

    Raises INVALID_ARGUMENT; the message says nothing of folders outside the root.
    """
    expected = "a model folder below the server's models root, given relative to it"
    if not given or "\0" in given or Path(given).is_absolute():
        raise invalid(field, shown(given), expected)
    root = models_root.resolve()
    try:
        folder = (root / given).resolve()
        is_folder = folder.is_relative_to(root) and folder != root and folder.is_dir()
        # Its files may be links too, as in a cache of Hugging Face.
        is_inside = is_folder and all(
            file.resolve().is_relative_to(root) for file in folder.iterdir()
        )
    except (OSError, RuntimeError) as err:
        raise invalid(field, shown(given), expected) from err
    if not is_inside:
        raise invalid(field, shown(given), expected)
    return folder


def _base(message: wire.PolicySpec, models_root: Path) -> PresetBase | FolderBase:
    match message.WhichOneof("base"):
        case "preset":
            if message.preset not in PRESET_NAMES:
                expected = "one of " + ", ".join(PRESET_NAMES)
                raise invalid("spec.preset", shown(message.preset), expected)
            return PresetBase(name=message.preset)
        case "model_folder":
            folder = model_folder("spec.model_folder", message.model_folder, models_root)
            return FolderBase(folder=str(folder))
        case None:
            raise required("spec.base", "preset or model_folder")


def _tuning(message: wire.PolicySpec) -> FullTuning | LoraTuning:
    if message.WhichOneof("tuning") != "lora":
        return FullTuning()
    return LoraTuning(
        rank=at_least("spec.lora.rank", message.lora.rank, 1),
        alpha=positive("spec.lora.alpha", message.lora.alpha),
        target_modules=tuple(message.lora.target_modules),
    )


def _optimizer(message: wire.AdamWConfig) -> AdamWConfig:
    defaults = AdamWConfig()
    beta1 = message.beta1 if message.HasField("beta1") else defaults.beta1
    beta2 = message.beta2 if message.HasField("beta2") else defaults.beta2
    eps = message.eps if message.HasField("eps") else defaults.eps
    decay = message.weight_decay if message.HasField("weight_decay") else defaults.weight_decay
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise invalid(f"spec.optimizer.{name}", beta, "a number in [0, 1)")
    return AdamWConfig(
        beta1=beta1,
        beta2=beta2,
        eps=positive("spec.optimizer.eps", eps),
        weight_decay=not_negative("spec.optimizer.weight_decay", decay),
    )


def _publish(message: wire.PublishConfig) -> PublishConfig:
    kind = from_wire("spec.publish.kind", message.kind, wire.PublishKind, PublishKind)
    if kind is PublishKind.EVERY_N:
        return PublishConfig(
            kind=kind, every_n=at_least("spec.publish.every_n", message.every_n, 1)
        )
    if message.every_n not in (0, 1):
        raise invalid("spec.publish.every_n", message.every_n, f"absent: kind is {kind}")
    return PublishConfig(kind=kind, every_n=1)


def _guard(message: wire.NumericsGuard) -> NumericsGuard:
    run = DEFAULT_GUARD.max_skipped_in_row
    if message.HasField("max_skipped_in_row"):
        run = message.max_skipped_in_row
    limits = {
        name: positive(f"spec.numerics_guard.{name}", getattr(message, name))
        for name in _GUARD_LIMITS
        if message.HasField(name)
    }
    return NumericsGuard(
        max_skipped_in_row=at_least("spec.numerics_guard.max_skipped_in_row", run, 0), **limits
    )


def spec_message(spec: PolicySpec, models_root: Path) -> wire.PolicySpec:
    """The wire form, every default written out; a model folder is relative to the models root."""
    message = wire.PolicySpec(
        policy_id=spec.policy_id,
        optimizer=wire.AdamWConfig(
            beta1=spec.optimizer.beta1,
            beta2=spec.optimizer.beta2,
            eps=spec.optimizer.eps,
            weight_decay=spec.optimizer.weight_decay,
        ),
        dtype=to_wire(wire.ModelDtype, spec.model.dtype),
        seed=spec.model.seed,
        sequencing=to_wire(wire.Sequencing, spec.sequencing),
        deterministic=spec.deterministic,
        recovery=to_wire(wire.Recovery, spec.recovery),
        on_changed_numerics=to_wire(wire.OnChangedNumerics, spec.on_changed_numerics),
        publish=wire.PublishConfig(
            kind=to_wire(wire.PublishKind, spec.publish.kind), every_n=spec.publish.every_n
        ),
        keep_versions=min(spec.keep_versions, INT32_MAX),
        micro_batch_tokens=spec.micro_batch_tokens,
        reference=to_wire(wire.ReferencePolicy, spec.reference),
        parallel=wire.ParallelLayout(num_workers=spec.num_workers),
        attention_backend=spec.attention_backend,
        numerics_guard=wire.NumericsGuard(
            max_grad_norm_to_step=spec.numerics_guard.max_grad_norm_to_step,
            max_reference_kl_to_step=spec.numerics_guard.max_reference_kl_to_step,
            max_sampler_kl_to_step=spec.numerics_guard.max_sampler_kl_to_step,
            max_skipped_in_row=spec.numerics_guard.max_skipped_in_row,
        ),
    )
    match spec.model.base:
        case PresetBase(name=name):
            message.preset = name
        case FolderBase(folder=folder):
            message.model_folder = _relative(Path(folder), models_root)
    match spec.model.tuning:
        case FullTuning():
            message.full.SetInParent()
        case LoraTuning(rank=rank, alpha=alpha, target_modules=modules):
            message.lora.rank, message.lora.alpha = rank, alpha
            message.lora.target_modules.extend(modules)
    return message


def _relative(folder: Path, models_root: Path) -> str:
    """`folder` below the root, or its last name where the root has moved since."""
    root = models_root.resolve()
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else folder.name


def policy_message(policy: Policy, models_root: Path) -> wire.Policy:
    message = wire.Policy(
        spec=spec_message(policy.spec, models_root),
        state=to_wire(wire.PolicyState, policy.state),
        version=policy.version,
        next_seq=policy.next_seq,
        failure=policy.failure,
    )
    set_time(message.created_at, policy.created_at)
    if policy.info is not None:
        message.num_parameters = policy.info.num_parameters
        message.num_trainable_parameters = policy.info.num_trainable_parameters
        message.vocab_size = policy.info.vocab_size
        message.max_sequence_tokens = policy.info.max_sequence_tokens
        message.attention_backend = policy.info.attention_backend
        message.optimizer_states = policy.info.optimizer_states
    if policy.published_version is not None:
        message.published_version = policy.published_version
    return message
