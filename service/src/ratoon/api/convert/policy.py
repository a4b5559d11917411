"""Policy specs from the wire, policies to it.

A returned model folder lies below the models root, with all symbolic links followed. Defaults are
written out in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratoon.api.convert.checks import (
    INT32_MAX,
    POLICY_ID,
    at_least,
    matched,
    positive,
    required,
)
from ratoon.api.convert.enums import from_wire
from ratoon.api.convert.records import read, write
from ratoon.engine.files.model_folders import model_folder
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
from ratoon.errors import invalid, shown
from ratoon.model.spec import (
    PRESET_NAMES,
    FolderBase,
    FullTuning,
    LoraTuning,
    ModelDtype,
    ModelSpec,
    PresetBase,
)
from ratoon.train.config import AdamWConfig, NumericsGuard, ParallelLayout, Shard
from ratoon.train.loss.checks import require
from ratoon.train.optim.resolve import check_adamw
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
    recovery = from_wire(message, "recovery", Recovery, "spec.recovery")
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
            dtype=from_wire(message, "dtype", ModelDtype, "spec.dtype"),
            seed=message.seed,
        ),
        optimizer=_optimizer(message.optimizer),
        sequencing=from_wire(message, "sequencing", Sequencing, "spec.sequencing"),
        deterministic=deterministic,
        recovery=recovery,
        on_changed_numerics=from_wire(
            message, "on_changed_numerics", OnChangedNumerics, "spec.on_changed_numerics"
        ),
        publish=_publish(message.publish),
        keep_versions=at_least("spec.keep_versions", keep, 1),
        micro_batch_tokens=(
            None if tokens is None else at_least("spec.micro_batch_tokens", tokens, 1)
        ),
        reference=from_wire(message, "reference", ReferencePolicy, "spec.reference"),
        parallel=_parallel(message.parallel),
        attention_backend=message.attention_backend,
        numerics_guard=_guard(message.numerics_guard),
    )


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
    config = read(message, AdamWConfig, "spec.optimizer")
    check_adamw("spec.optimizer", config)
    return config


def _publish(message: wire.PublishConfig) -> PublishConfig:
    kind = from_wire(message, "kind", PublishKind, "spec.publish.kind")
    if kind is PublishKind.EVERY_N:
        every_n = at_least("spec.publish.every_n", message.every_n, 1)
        return PublishConfig(kind=kind, every_n=every_n, deltas=message.deltas)
    if message.every_n not in (0, 1):
        raise invalid("spec.publish.every_n", message.every_n, f"absent: kind is {kind}")
    return PublishConfig(kind=kind, every_n=1, deltas=message.deltas)


def _parallel(message: wire.ParallelLayout) -> ParallelLayout:
    path = "spec.parallel"
    ranks = at_least(f"{path}.num_workers", message.num_workers or NUM_WORKERS, 1)
    shard = None
    if message.HasField("shard"):
        shard = from_wire(message, "shard", Shard, f"{path}.shard")
    together = message.sequence_ranks if message.HasField("sequence_ranks") else None
    if together is not None and (together < 1 or ranks % together):
        expected = f"a divisor of num_workers, {ranks}"
        raise invalid(f"{path}.sequence_ranks", together, expected)
    return ParallelLayout(num_workers=ranks, shard=shard, sequence_ranks=together)


def _guard(message: wire.NumericsGuard) -> NumericsGuard:
    guard = read(message, NumericsGuard, "spec.numerics_guard")
    at_least("spec.numerics_guard.max_skipped_in_row", guard.max_skipped_in_row, 0)
    for name in _GUARD_LIMITS:
        limit = getattr(guard, name)
        if limit is not None:
            require(f"spec.numerics_guard.{name}", limit, limit > 0, "a finite float32 above 0")
    return guard


def spec_message(spec: PolicySpec, models_root: Path) -> wire.PolicySpec:
    """The wire form, every default written out; a model folder is relative to the models root."""
    message = write(wire.PolicySpec(), spec, skip=("model", "keep_versions"))
    write(message, spec.model, skip=("base", "tuning"))
    message.keep_versions = min(spec.keep_versions, INT32_MAX)
    match spec.model.base:
        case PresetBase(name=name):
            message.preset = name
        case FolderBase(folder=folder):
            message.model_folder = _relative(Path(folder), models_root)
    match spec.model.tuning:
        case FullTuning():
            message.full.SetInParent()
        case LoraTuning() as lora:
            write(message.lora, lora)
    return message


def _relative(folder: Path, models_root: Path) -> str:
    """`folder` relative to the root, or its last name if the root has moved since."""
    root = models_root.resolve()
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else folder.name


def policy_message(policy: Policy, models_root: Path) -> wire.Policy:
    message = write(wire.Policy(), policy, skip=("spec", "info"))
    message.spec.CopyFrom(spec_message(policy.spec, models_root))
    if policy.info is not None:
        # These are for the validation of rollouts alone, and for a start.
        own = (
            "route_layers",
            "num_experts",
            "experts_per_token",
            "uses_gpu",
            "sliding_window",
        )
        write(message, policy.info, skip=own)
    return message
