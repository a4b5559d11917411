"""A policy's steps one by one, from the service's history: what `log` prints and exports send.

The history is the buffer: whoever reads goes on behind the last seq that it has, after whatever
pause of its own or of the service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ratoon_client.blocking import RatoonClient
from ratoon_client.errors import RatoonApiError, RatoonClientError, TransportError
from ratoon_proto.fields import fields_of
from ratoon_proto.types import Policy, StepHistory
from ratoon_proto.v1 import training_pb2

# Steps of one answer, each a point of its own.
_WINDOW = 10_000
# Seconds between two looks; a step is told within a second.
_LOOK_S = 0.4
_MOST_PAUSE_S = 30.0
_STEP_KINDS = ("update", "optim_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An optimizer step, or another operation that set the weights, which has no figures.

    Attributes:
        seq: Its place in the policy's order.
        version: The policy's version after it.
        kind: The operation's kind.
        finished_at: Unix seconds; NaN of an operation that is no step.
        figures: Figures of the report that it has, by name.
        warnings: Kinds of its warnings.
        skip_reason: Why the step was skipped; None unless it was.
    """

    seq: int
    version: int
    kind: str
    finished_at: float
    figures: Mapping[str, float]
    warnings: tuple[str, ...]
    skip_reason: str | None

    @property
    def is_step(self) -> bool:
        """Whether it is an optimizer step."""
        return self.kind in _STEP_KINDS


def figure_names() -> tuple[str, ...]:
    """Every figure that a step may have: numbers of a StepReport, `seconds.forward` and such."""
    message = training_pb2.StepReport.DESCRIPTOR
    numbers = [
        field.name
        for field in fields_of(message)
        if not field.is_repeated and field.message_type is None and field.enum_type is None
    ]
    phases = [f"seconds.{field.name}" for field in fields_of(training_pb2.PhaseSeconds.DESCRIPTOR)]
    return (*numbers, *phases)


def read_steps(
    client: RatoonClient, policy: Policy, *, after_seq: int, figures: Sequence[str] = ()
) -> Iterator[list[Step]]:
    """Every step of a policy behind `after_seq`, oldest first, in batches of at most 10,000."""
    newest = policy.next_seq - 1
    while after_seq < newest:
        stop = after_seq + _WINDOW + 1
        history = client.steps(
            policy.spec.policy_id,
            figures=tuple(figures),
            after_seq=after_seq,
            before_seq=stop,
            max_points=_WINDOW,
        )
        found = _steps_of(history)
        if found:
            yield found
        # The newest may end while the answer is made: only a window behind it is done with.
        after_seq = stop - 1 if stop <= newest else max([after_seq, *(each.seq for each in found)])
        if stop > newest:
            return


def follow_steps(
    client: RatoonClient,
    policy: Policy,
    *,
    after_seq: int,
    figures: Sequence[str] = (),
    tell: Callable[[str], None],
) -> Iterator[list[Step]]:
    """Batches of `read_steps`, then each step within a second of its end.

    While the service is away it is asked again, and `tell` gets a line of it.

    Raises:
        RatoonApiError: The policy is gone, or the service refuses to show it.
    """
    created_at, pause_s = policy.created_at, _LOOK_S
    while True:
        try:
            for steps in read_steps(client, policy, after_seq=after_seq, figures=figures):
                yield steps
                after_seq = steps[-1].seq
            time.sleep(_LOOK_S)
            policy = client.get_policy(policy.spec.policy_id)
            pause_s = _LOOK_S
        except (TransportError, RatoonApiError) as error:
            if isinstance(error, RatoonApiError) and not error.retryable:
                raise
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            tell(f"{error} (again in {pause_s:.1f} s)")
            time.sleep(pause_s)
        if policy.created_at != created_at:
            raise RatoonClientError(f"policy {policy.spec.policy_id} was deleted and created anew")


def _steps_of(history: StepHistory) -> list[Step]:
    """Points of one step each, and marks of other operations between them."""
    marks = {mark.seq: mark for mark in history.marks}
    found: list[Step] = []
    for place, seq in enumerate(history.seq):
        mark = marks.pop(seq, None)
        values = ((series.figure, series.mean[place]) for series in history.series)
        found.append(
            Step(
                seq=seq,
                version=history.version[place],
                kind="update" if mark is None else mark.kind,
                finished_at=history.finished_at[place],
                figures={name: value for name, value in values if not math.isnan(value)},
                warnings=() if mark is None else mark.warnings,
                skip_reason=None if mark is None or not mark.skip_reason else mark.skip_reason,
            )
        )
    others = (
        Step(
            seq=mark.seq,
            version=mark.version,
            kind=mark.kind,
            finished_at=math.nan,
            figures={},
            warnings=mark.warnings,
            skip_reason=None,
        )
        for mark in marks.values()
    )
    return sorted([*found, *others], key=lambda step: step.seq)
