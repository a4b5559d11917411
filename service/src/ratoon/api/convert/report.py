"""Step reports to the wire, field by field of the same name.

The two have the same fields (a test compares them), so a figure that the trainer adds cannot be
lost here.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, cast

from google.protobuf.message import Message

from ratoon.api.convert.enums import to_wire
from ratoon.train.report.step_report import StepReport
from ratoon_proto.v1 import training_pb2 as wire


def report_message(report: StepReport) -> wire.StepReport:
    message = wire.StepReport()
    _fill(message, report)
    return message


def _fill(message: Message, value: Any) -> None:
    """Every field that is there, those of parts too."""
    for field in fields(value):
        item = getattr(value, field.name)
        if is_dataclass(item):
            part = getattr(message, field.name)
            part.SetInParent()
            _fill(part, item)
        elif isinstance(item, tuple):
            _extend(getattr(message, field.name), cast("tuple[object, ...]", item))
        elif isinstance(item, StrEnum):
            setattr(message, field.name, to_wire(getattr(wire, type(item).__name__), item))
        elif item is not None:
            setattr(message, field.name, item)


def _extend(items: Any, values: tuple[object, ...]) -> None:
    for value in values:
        if is_dataclass(value):
            _fill(items.add(), value)
        else:
            items.append(value)
