"""Step reports to the wire, field by field of the same name.

Enters `StepReport`, leaves its message. Invariant: the two have the same fields (a test compares
them), so a figure that the trainer adds cannot be lost here.
"""

from __future__ import annotations

from dataclasses import fields

from google.protobuf.message import Message

from ratoon.api.convert.enums import to_wire
from ratoon.train.report import CanaryReport, PhaseSeconds, SkipReason, StepReport
from ratoon_proto.v1 import training_pb2 as wire


def report_message(report: StepReport) -> wire.StepReport:
    message = wire.StepReport()
    for field in fields(StepReport):
        value = getattr(report, field.name)
        if isinstance(value, PhaseSeconds | CanaryReport):
            _set_fields(getattr(message, field.name), value)
        elif isinstance(value, SkipReason):
            message.skip_reason = to_wire(wire.SkipReason, value)
        elif isinstance(value, tuple):
            message.warnings.extend(report.warnings)
        elif value is not None:
            setattr(message, field.name, value)
    return message


def _set_fields(message: Message, part: PhaseSeconds | CanaryReport) -> None:
    for field in fields(part):
        value = getattr(part, field.name)
        if value is not None:
            setattr(message, field.name, value)
