"""Policy specs from the wire, policies to it.

A returned model folder lies below the models root, with all symbolic links followed. Defaults are
written out in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratoon.api.convert.checks import (
    CHECKPOINT_ID,
    DIGEST,
    FILE_NAME,
    INT32_MAX,
    POLICY_ID,
    at_least,
    matched,
    positive,
    read,
    required,
    write,
)
from ratoon.engine.files.paths import model_folder
from ratoon.engine.files.sent_models import MAX_FILES
from ratoon.engine.types import Policy, PolicySpec
from ratoon.errors import invalid, shown
from ratoon.model.spec import PRESET_NAMES, FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.train.loss.kinds import require
from ratoon.train.optim.resolve import check_adamw, check_groups, check_muon, check_schedule
from ratoon_proto import types
from ratoon_proto.types import (
    AdamWConfig,
    CheckpointSource,
    FullTuning,
    LoraTuning,
    NumericsGuard,
    ParallelLayout,
    PublishConfig,
    PublishKind,
    Recovery,
    SentModel,
    WeightFile,
)
from ratoon_proto.v1 import policy_pb2 as wire

# peft's name of all linear maps but the head.
_ALL_LINEAR = "all-linear"
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
    spec = read(message, types.PolicySpec, "spec")
    if spec.recovery is Recovery.REPLAY and not spec.deterministic:
        raise invalid("spec.recovery", "replay with deterministic false", "fail, or deterministic")
    tokens = spec.micro_batch_tokens
    tokens = defaults.micro_batch_tokens if tokens is None else tokens
    return PolicySpec(
        policy_id=matched("spec.policy_id", spec.policy_id, POLICY_ID),
        model=ModelSpec(
            base=_base(spec, defaults.models_root),
            tuning=_tuning(spec.lora),
            dtype=ModelDtype(spec.dtype),
            seed=spec.seed,
            value_head=spec.value_head,
        ),
        optimizer=_optimizer(spec.optimizer, spec.lora),
        sequencing=spec.sequencing,
        deterministic=spec.deterministic,
        recovery=spec.recovery,
        on_changed_numerics=spec.on_changed_numerics,
        publish=_publish(spec.publish, spec.lora),
        keep_versions=at_least("spec.keep_versions", spec.keep_versions, 1),
        micro_batch_tokens=(
            None if tokens is None else at_least("spec.micro_batch_tokens", tokens, 1)
        ),
        reference=spec.reference,
        parallel=_parallel(spec.parallel),
        attention_backend=spec.attention_backend or "",
        numerics_guard=_guard(spec.numerics_guard),
        keep_rollouts=spec.keep_rollouts,
        keep_rollouts_bytes=at_least("spec.keep_rollouts_bytes", spec.keep_rollouts_bytes, 1),
        from_checkpoint=_source(spec.from_checkpoint),
        idle_release_s=_seconds("spec.idle_release_s", spec.idle_release_s),
        idle_ttl_s=_seconds("spec.idle_ttl_s", spec.idle_ttl_s),
    )


def _base(spec: types.PolicySpec, models_root: Path) -> PresetBase | FolderBase:
    if spec.preset is not None:
        if spec.preset not in PRESET_NAMES:
            expected = "one of " + ", ".join(PRESET_NAMES)
            raise invalid("spec.preset", shown(spec.preset), expected)
        return PresetBase(name=spec.preset)
    if spec.model_folder is not None:
        folder = model_folder("spec.model_folder", spec.model_folder, models_root)
        return FolderBase(folder=str(folder))
    if spec.sent_model is not None:
        return FolderBase(folder="", files=_sent_files(spec.sent_model.files))
    raise required("spec.base", "preset, model_folder or sent_model")


def _sent_files(files: Sequence[WeightFile]) -> tuple[WeightFile, ...]:
    """The files by name, so that a retry may have another order."""
    if not 1 <= len(files) <= MAX_FILES:
        raise invalid("spec.sent_model.files", len(files), f"1 to {MAX_FILES} files")
    names = set[str]()
    for index, file in enumerate(files):
        field = f"spec.sent_model.files[{index}]"
        matched(f"{field}.name", file.name, FILE_NAME)
        matched(f"{field}.digest", file.digest, DIGEST)
        at_least(f"{field}.size_bytes", file.size_bytes, 0)
        if file.name in names:
            raise invalid(f"{field}.name", shown(file.name), "a name that no other file has")
        names.add(file.name)
    return tuple(sorted(files, key=lambda file: file.name))


def _tuning(lora: LoraTuning | None) -> FullTuning | LoraTuning:
    if lora is None:
        return FullTuning()
    at_least("spec.lora.rank", lora.rank, 1)
    positive("spec.lora.alpha", lora.alpha)
    # It means what no targets mean, and has one form.
    return replace(lora, target_modules=()) if lora.target_modules == (_ALL_LINEAR,) else lora


def _optimizer(config: AdamWConfig, lora: LoraTuning | None) -> AdamWConfig:
    check_adamw("spec.optimizer", config)
    if config.muon is not None:
        if lora is not None:
            # The two factors of an adapter are no matrix that the model computes with.
            raise invalid("spec.optimizer.muon", "muon", "absent: the policy trains an adapter")
        check_muon("spec.optimizer.muon", config.muon)
    check_groups("spec.optimizer.groups", config.groups)
    if config.schedule is not None:
        check_schedule("spec.optimizer.schedule", config.schedule)
    return config


def _publish(publish: PublishConfig, lora: LoraTuning | None) -> PublishConfig:
    if publish.merged and lora is None:
        raise invalid("spec.publish.merged", "true", "false: the policy has no adapter")
    every_n = publish.every_n
    if publish.kind is PublishKind.EVERY_N:
        at_least("spec.publish.every_n", every_n, 1)
        return publish
    if every_n not in (0, 1):
        raise invalid("spec.publish.every_n", every_n, f"absent: kind is {publish.kind}")
    return replace(publish, every_n=1)


def _seconds(field: str, seconds: float | None) -> float | None:
    return None if seconds is None else positive(field, seconds)


def _parallel(parallel: ParallelLayout) -> ParallelLayout:
    ranks = at_least("spec.parallel.num_workers", parallel.num_workers, 1)
    together = parallel.sequence_ranks
    if together is not None and (together < 1 or ranks % together):
        expected = f"a divisor of num_workers, {ranks}"
        raise invalid("spec.parallel.sequence_ranks", together, expected)
    return parallel


def _source(source: CheckpointSource | None) -> CheckpointSource | None:
    if source is not None:
        matched("spec.from_checkpoint.policy_id", source.policy_id, POLICY_ID)
        matched("spec.from_checkpoint.checkpoint_id", source.checkpoint_id, CHECKPOINT_ID)
    return source


def _guard(guard: NumericsGuard) -> NumericsGuard:
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
    write(
        message,
        {"lora" if isinstance(spec.model.tuning, LoraTuning) else "full": spec.model.tuning},
    )
    message.keep_versions = min(spec.keep_versions, INT32_MAX)
    match spec.model.base:
        case FolderBase(files=files) if files:
            write(message, {"sent_model": SentModel(files)})
        case base:
            field = "preset" if isinstance(base, PresetBase) else "model_folder"
            setattr(message, field, base_name(base, models_root))
    return message


def base_name(base: PresetBase | FolderBase, models_root: Path) -> str:
    """A preset's name, or a folder relative to the root: its last name if the root has moved."""
    if isinstance(base, PresetBase):
        return base.name
    folder, root = Path(base.folder), models_root.resolve()
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
            "num_nodes",
            "sliding_window",
            "media_tokens",
        )
        write(message, policy.info, skip=own)
    return message
