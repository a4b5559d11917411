"""Commands: one class for each kind of operation, with its key and its submission.

A command states all facts of its kind: the journal's name, its effect on weights and gradients,
whether it has a body, and the version, Forward or checkpoint that it names. Values are validated
before they get here. No torch, no wire.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.rollout.questions import teachers_of
from ratoon_proto.types import (
    BadRolloutAction,
    ImportMode,
    LogprobsOf,
    LossConfig,
    OperationKind,
    OptimStepConfig,
    Sequencing,
    Teacher,
)

if TYPE_CHECKING:
    # Workers have no settings: they import no pydantic.
    from ratoon.config import KeyLimits
    from ratoon.rollout.serial import BatchBytes

REQUEST_ID = re.compile(r"[a-zA-Z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqKey:
    """Client sequencing: seqs are contiguous from 1."""

    seq: int

    def check(self, sequencing: Sequencing) -> None:
        """Raises INVALID_ARGUMENT unless the policy's sequencing takes this key."""
        if sequencing is not Sequencing.CLIENT:
            raise invalid("key.seq", "a seq", "a request_id: sequencing is server")
        if self.seq < 1:
            raise invalid("key.seq", self.seq, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Server sequencing: the caller's own idempotency key."""

    request_id: str

    def check(self, sequencing: Sequencing) -> None:
        """Raises INVALID_ARGUMENT unless the policy's sequencing takes this key."""
        if sequencing is not Sequencing.SERVER:
            raise invalid("key.request_id", "a request_id", "a seq: sequencing is client")
        if REQUEST_ID.fullmatch(self.request_id) is None:
            expected = f"text of the form {REQUEST_ID.pattern}"
            raise invalid("key.request_id", shown(self.request_id), expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoKey:
    """The key of a Forward that is not sequenced and reads the newest version."""

    def check(self, sequencing: Sequencing) -> None:
        """Raises INVALID_ARGUMENT: only a Forward may go without a key."""
        name = "seq" if sequencing is Sequencing.CLIENT else "request_id"
        expected = f"a {name}: the policy's sequencing is {sequencing}"
        raise invalid(f"key.{name}", "nothing", expected)


OperationKey = SeqKey | RequestKey | NoKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """How an applied operation of one kind changes its policy; by default it changes nothing."""

    # It computes the gradients of a batch.
    computes_gradients: bool = False
    # It takes an optimizer step.
    takes_step: bool = False
    # It sets weights that were computed elsewhere or earlier.
    replaces_weights: bool = False
    # It discards the gradients of the open window.
    discards_gradients: bool = False

    @property
    def changes_weights(self) -> bool:
        return self.takes_step or self.replaces_weights

    @property
    def closes_window(self) -> bool:
        return self.changes_weights or self.discards_gradients

    @property
    def adds_to_window(self) -> bool:
        """Whether its gradients stay in the window for a later step."""
        return self.computes_gradients and not self.takes_step

    @property
    def is_replayed(self) -> bool:
        """Whether it changes weights or gradients, so that a recovery runs it again."""
        return self.closes_window or self.computes_gradients

    @property
    def depends_on_numerics(self) -> bool:
        """Whether its bits depend on the hardware and the software that it runs on."""
        return self.computes_gradients or self.takes_step


class BaseCommand:
    """What an operation asks of the worker; every command class states its facts here.

    The fields of a command are journaled and hashed, its class attributes are not. A command with a
    batch names the serialized RolloutBatch (`rollout.serial`), a file beside the journal, by its
    SHA-256 in `body_digest`; it is "" for all others.
    """

    __slots__ = ()

    kind: OperationKind
    effect: ClassVar[Effect] = Effect()
    body_digest: str
    # The version that the policy must be at when the command runs; None: any.
    expected_version: int | None

    @property
    def forward_id(self) -> str:
        """Id of the Forward whose log-probs the command uses; "": none."""
        return ""

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """Policies that answer before the command runs."""
        return ()

    @property
    def own_checkpoint_id(self) -> str | None:
        """Id of the caller's own checkpoint that the command names; None: it names none."""
        return None

    def check_version(self, version: int) -> None:
        """Raises VERSION_MISMATCH where the policy is not at the expected version."""
        expected = self.expected_version
        if expected is None or expected == version:
            return
        raise RatoonError(
            ErrorCode.VERSION_MISMATCH,
            f"expected_version: got {expected}, the policy is at {version}",
            field="expected_version",
            got=str(expected),
            expected=str(version),
            details={"version": str(version)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommand(BaseCommand):
    kind = OperationKind.UPDATE
    effect = Effect(computes_gradients=True, takes_step=True)

    loss: LossConfig
    optim: OptimStepConfig
    expected_version: int | None
    body_digest: str
    on_bad_rollout: BadRolloutAction = BadRolloutAction.REFUSE

    @property
    def forward_id(self) -> str:
        return _forward_id(self.loss)

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        return teachers_of(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardCommand(BaseCommand):
    kind = OperationKind.FORWARD_BACKWARD
    effect = Effect(computes_gradients=True)

    loss: LossConfig
    expected_version: int | None
    body_digest: str
    # None: no log-probs are answered.
    with_logprobs: LogprobsOf | None = None
    with_entropy: bool = False
    on_bad_rollout: BadRolloutAction = BadRolloutAction.REFUSE

    @property
    def forward_id(self) -> str:
        return _forward_id(self.loss)

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        return teachers_of(self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepCommand(BaseCommand):
    kind = OperationKind.OPTIM_STEP
    effect = Effect(takes_step=True)
    body_digest = ""

    optim: OptimStepConfig
    expected_version: int | None
    # Empty: the whole window, none of whose operations may have failed.
    include_seqs: tuple[int, ...]
    allow_empty: bool = False
    discard_on_poison: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardGradientsCommand(BaseCommand):
    kind = OperationKind.DISCARD_GRADIENTS
    effect = Effect(discards_gradients=True)
    body_digest = ""
    expected_version = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCommand(BaseCommand):
    kind = OperationKind.FORWARD

    with_entropy: bool
    use_reference: bool
    expected_version: int | None
    body_digest: str
    num_teacher_tokens: int = 0
    with_teacher_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpointCommand(BaseCommand):
    kind = OperationKind.SAVE_CHECKPOINT
    body_digest = ""
    expected_version = None

    # "": named after seq and version when it runs.
    checkpoint_id: str
    overwrite: bool = False
    pinned: bool = False
    # None: it does not expire.
    ttl_s: float | None = None
    # 0: all.
    keep_last: int = 0

    @property
    def own_checkpoint_id(self) -> str | None:
        return self.checkpoint_id or None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishVersionCommand(BaseCommand):
    kind = OperationKind.PUBLISH_VERSION
    body_digest = ""
    expected_version = None

    name: str
    overwrite: bool = False
    # None: it does not expire.
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpointCommand(BaseCommand):
    kind = OperationKind.LOAD_CHECKPOINT
    effect = Effect(replaces_weights=True)
    body_digest = ""
    expected_version = None

    checkpoint_id: str

    @property
    def own_checkpoint_id(self) -> str | None:
        return self.checkpoint_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportWeightsCommand(BaseCommand):
    kind = OperationKind.IMPORT_WEIGHTS
    effect = Effect(replaces_weights=True)
    body_digest = ""

    # Relative to the models root.
    folder: str
    mode: ImportMode
    reset_optimizer: bool
    expected_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedCommand(BaseCommand):
    """A call of any kind that is refused for what it says, and takes its seq.

    `error`: `RatoonError.to_dict()`, with which it fails at its turn. `request_digest`: of the
    request without its key.
    """

    body_digest = ""
    expected_version = None

    kind: OperationKind
    error: dict[str, object]
    request_digest: str


Command = (
    UpdateCommand
    | ForwardBackwardCommand
    | OptimStepCommand
    | DiscardGradientsCommand
    | ForwardCommand
    | SaveCheckpointCommand
    | PublishVersionCommand
    | LoadCheckpointCommand
    | ImportWeightsCommand
    | RefusedCommand
)


# The classes that have a kind of their own.
COMMANDS: tuple[type[Command], ...] = tuple(
    command for command in typing.get_args(Command) if command is not RefusedCommand
)
_EFFECTS = {command.kind: command.effect for command in COMMANDS}
_NO_EFFECT = Effect()


def effect_of(kind: OperationKind) -> Effect:
    """The effect of an applied operation, whose command the journal may not keep any more.

    A lifecycle operation has no command, and no effect on weights or gradients.
    """
    return _EFFECTS.get(kind, _NO_EFFECT)


def _forward_id(loss: LossConfig) -> str:
    return loss.old_logprobs.forward_operation_id if loss.old_logprobs is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The API key that a call came with. `key_id` "": none; `limits` do not apply then.

    `policies`: those that it is for; None: all.
    """

    key_id: str
    limits: KeyLimits | None
    policies: tuple[str, ...] | None = None


NOBODY = Holder(key_id="", limits=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBody:
    """A body that its sender has written beside the policy's bodies; it is not durable yet.

    `name`: that of the file, which the sender deletes once the call has returned.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One sequenced call, validated: what the controller accepts, journals and hashes.

    `body` is b"" for commands without a batch, and where it was sent ahead (`sent`). The command
    has its digest from who sends it (`named`). The payload hash covers command and body, not the
    key. `num_tokens` counts prompt and response of each
    rollout alone, and again for each teacher that is asked about it. `is_awaited`: an operation
    that was accepted waits for it, so that it bypasses the bounds of queues. `policy_created_at`:
    of the policy that validated it, in seconds since the epoch; None: whichever has the id now.
    """

    policy_id: str
    key: OperationKey
    command: Command
    body: bytes | BatchBytes
    num_tokens: int = 0
    holder: Holder = NOBODY
    is_awaited: bool = False
    policy_created_at: float | None = None
    sent: SentBody | None = None

    @property
    def body_bytes(self) -> int:
        return len(self.body) if self.sent is None else self.sent.num_bytes

    def named(self, digest: str) -> Submission:
        """The submission, whose command names its body by the body's digest."""
        return replace(self, command=replace(self.command, body_digest=digest))
