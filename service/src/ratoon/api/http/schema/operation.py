"""`operation.proto` as JSON. Invariant: field for field the messages of the same names."""

from __future__ import annotations

from datetime import datetime

from ratoon.api.http.schema.base import WireModel
from ratoon.api.http.schema.policy import Policy
from ratoon.api.http.schema.training import ForwardOutput, StepReport
from ratoon.engine.types import OperationKind, OperationState


class Progress(WireModel):
    micro_batches_done: int
    micro_batches_planned: int
    tokens_per_second: float | None
    eta_s: float | None


class ErrorDetail(WireModel):
    """What went wrong, on which field; `details` is for programs. See the table of errors."""

    code: str
    message: str
    field: str
    got: str
    expected: str
    retryable: bool
    details: dict[str, str]


class ErrorBody(WireModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


class CheckpointInfo(WireModel):
    checkpoint_id: str
    version: int
    seq: int
    replay_from_seq: int
    created_at: datetime
    size_bytes: int


class ResultFile(WireModel):
    digest: str
    size_bytes: int


class ForwardResult(WireModel):
    inline: ForwardOutput | None
    file: ResultFile | None
    report: StepReport | None
    version: int


class StepResult(WireModel):
    version: int
    report: StepReport | None


class EmptyResult(WireModel):
    """Done, and nothing to say."""


class Operation(WireModel):
    """The last six fields: null until the operation is final, then one of them."""

    operation_id: str
    policy_id: str
    kind: OperationKind
    seq: int
    request_id: str
    state: OperationState
    blocked_by_seq: int
    progress: Progress | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: ErrorDetail | None
    policy: Policy | None
    step: StepResult | None
    forward: ForwardResult | None
    checkpoint: CheckpointInfo | None
    empty: EmptyResult | None
