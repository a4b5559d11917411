"""Figures of optimizer steps: as rows of the journal, and as points of a curve.

A row has the figures of its step's report to the bit: a bit for each that is stored, a bit for each
that is zero, then the stored ones as little-endian float64. The place of a figure's bits is the
number of its field, so rows of reports with fewer or more fields are read alike. A row without
figures is no step: something else set the weights there, or the step was rolled back.

A curve is built while rows are read, whatever their number: when it has more points than are asked
for, neighbours are joined, so that all points stand for equally many steps, and only the last one
for fewer.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import NDArray

from ratoon.engine.commands import effect_of
from ratoon.engine.types import OperationResult
from ratoon.errors import invalid, shown
from ratoon_proto.fields import fields_of
from ratoon_proto.types import (
    OperationKind,
    SkipReason,
    StepHistory,
    StepMark,
    StepReport,
    StepResult,
    StepSeries,
)
from ratoon_proto.v1 import training_pb2

_NUMBERS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)
# Fields of PhaseSeconds are numbered from here on, below all fields of StepReport.
_SECONDS = 128
_MASK_BYTES = 17


def _numbers() -> dict[str, int]:
    report, seconds = training_pb2.StepReport.DESCRIPTOR, training_pb2.PhaseSeconds.DESCRIPTOR
    own = {f.name: f.number for f in fields_of(report) if _is_figure(f)}
    phases = {f"seconds.{f.name}": _SECONDS + f.number for f in fields_of(seconds) if _is_figure(f)}
    assert max(own.values()) < _SECONDS, "fields of StepReport reach those of its seconds"
    assert max(phases.values()) < 8 * _MASK_BYTES, "more figures than the masks have bits"
    return own | phases


def _is_figure(field: FieldDescriptor) -> bool:
    return field.type in _NUMBERS and not field.is_repeated


# Names of all figures, with the places of their bits.
FIGURES: Mapping[str, int] = MappingProxyType(_numbers())
_READ = tuple((name, operator.attrgetter(name)) for name in FIGURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One row. `version`: the policy's afterwards. `finished_at`: seconds since the epoch.

    `figures` None: it is no step.
    """

    seq: int
    version: int
    finished_at: float
    kind: OperationKind
    figures: bytes | None
    warnings: tuple[str, ...]
    skip_reason: SkipReason | None

    @property
    def stands_out(self) -> bool:
        """Whether it has something to say beyond its figures."""
        return self.figures is None or bool(self.warnings) or self.skip_reason is not None


def step_row(
    kind: OperationKind, seq: int, result: OperationResult, version: int, finished_at: float
) -> StepRow | None:
    """The row of an applied operation; None: it has none. `version`: the policy's afterwards."""
    if not effect_of(kind).changes_weights:
        return None
    report = result.report if isinstance(result, StepResult) else None
    return StepRow(
        seq=seq,
        version=version,
        finished_at=finished_at,
        kind=kind,
        figures=None if report is None else pack(figures_of(report)),
        warnings=() if report is None else warning_kinds(report),
        skip_reason=None if report is None else report.skip_reason,
    )


def figures_of(report: StepReport) -> dict[str, float | None]:
    """All figures of a report; None: it lacks that one."""
    return {name: read(report) for name, read in _READ}


def warning_kinds(report: StepReport) -> tuple[str, ...]:
    """Kinds of the report's warnings, each once."""
    return tuple(dict.fromkeys(each.kind for each in report.warnings))


def pack(figures: Mapping[str, float | None]) -> bytes:
    """The bytes of figures by name; others than those of `FIGURES` are left out."""
    stored = zeros = 0
    values: list[float] = []
    for name, place in FIGURES.items():
        value = figures.get(name)
        if value is None:
            continue
        if value == 0 and str(value)[0] != "-":
            zeros |= 1 << place
        else:
            stored |= 1 << place
            values.append(value)
    masks = b"".join(mask.to_bytes(_MASK_BYTES, "little") for mask in (stored, zeros))
    # In order of their places, in which the names are too.
    return masks + struct.pack(f"<{len(values)}d", *values)


def unpack(packed: Sequence[bytes], names: Sequence[str]) -> NDArray[np.float64]:
    """Figures of N rows, [N, F] in the order of `names`; NaN where a row has none."""
    split = 2 * _MASK_BYTES
    masks = np.frombuffer(b"".join(each[:split] for each in packed), np.uint8)
    bits = np.unpackbits(masks.reshape(-1, 2, _MASK_BYTES), axis=2, bitorder="little")
    stored, zeros = bits.astype(bool).swapaxes(0, 1)
    values = np.full(stored.shape, np.nan)
    values[stored] = np.frombuffer(b"".join(each[split:] for each in packed), "<f8")
    values[zeros] = 0.0
    return values[:, [FIGURES[name] for name in names]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    """Sums, numbers of values, least and greatest values [P, F]; columns of the last steps [P]."""

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    seq: NDArray[np.int64]
    version: NDArray[np.int64]
    finished_at: NDArray[np.float64]

    @staticmethod
    def of(steps: Sequence[StepRow], names: Sequence[str]) -> _Points:
        """A point a step."""
        values = unpack([step.figures for step in steps if step.figures is not None], names)
        is_there = ~np.isnan(values)
        return _Points(
            sums=np.where(is_there, values, 0.0),
            counts=is_there.astype(np.int64),
            low=values,
            high=values,
            seq=np.array([step.seq for step in steps], np.int64),
            version=np.array([step.version for step in steps], np.int64),
            finished_at=np.array([step.finished_at for step in steps], np.float64),
        )

    def __len__(self) -> int:
        return len(self.seq)

    def followed_by(self, other: _Points) -> _Points:
        names = [field.name for field in fields(_Points)]
        return _Points(
            **{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        )

    def joined(self, starts: NDArray[np.intp]) -> _Points:
        """One point of those from each start to the next; the first start is 0."""
        lasts = np.append(starts[1:], len(self)) - 1
        return _Points(
            sums=np.add.reduceat(self.sums, starts),
            counts=np.add.reduceat(self.counts, starts),
            low=np.fmin.reduceat(self.low, starts),
            high=np.fmax.reduceat(self.high, starts),
            seq=self.seq[lasts],
            version=self.version[lasts],
            finished_at=self.finished_at[lasts],
        )


class Curves:
    """Curves of figures over rows that are added in seq order; at most `max_points` points each."""

    def __init__(self, names: Collection[str], max_points: int) -> None:
        """`names` empty: all figures that any step has. Raises INVALID_ARGUMENT for others."""
        for index, name in enumerate(names):
            if name not in FIGURES:
                raise invalid(f"figures[{index}]", shown(name), f"one of {', '.join(FIGURES)}")
        self._names = tuple(dict.fromkeys(names)) or tuple(FIGURES)
        self._is_all = not names
        self._max_points = max_points
        self._points = _Points.of((), self._names)
        # How many steps each point stands for, the last one perhaps for fewer, and all together.
        self._stride = 1
        self._num_steps = 0
        # By the point that they belong to, and by what they say.
        self._marks: dict[tuple[int, OperationKind, SkipReason | None], StepMark] = {}

    def add(self, rows: Sequence[StepRow]) -> None:
        """Add the rows that come next."""
        num_steps = self._num_steps
        for row in rows:
            if row.stands_out:
                self._mark(num_steps // self._stride, row)
            num_steps += row.figures is not None
        if num_steps == self._num_steps:
            return
        place_N = np.arange(self._num_steps, num_steps) // self._stride
        new = _Points.of([row for row in rows if row.figures is not None], self._names)
        new = new.joined(np.flatnonzero(np.diff(place_N, prepend=-1)))
        both, num_before = self._points.followed_by(new), len(self._points)
        if self._num_steps % self._stride:
            # The first of the new steps belong to the last point.
            both = both.joined(np.delete(np.arange(len(both)), num_before))
        self._points, self._num_steps = both, num_steps
        while len(self._points) > self._max_points:
            self._halve()

    def history(self) -> StepHistory:
        """The curves of all that was added."""
        points = self._points
        mean = np.full(points.sums.shape, np.nan)
        np.divide(points.sums, points.counts, out=mean, where=points.counts > 0)
        has_any_F: NDArray[np.bool_] = np.any(~np.isnan(points.low), axis=0)
        is_joined = self._stride > 1
        return StepHistory(
            seq=tuple(points.seq.tolist()),
            version=tuple(points.version.tolist()),
            finished_at=tuple(points.finished_at.tolist()),
            series=tuple(
                StepSeries(
                    figure=name,
                    mean=tuple(mean[:, column].tolist()),
                    low=tuple(points.low[:, column].tolist()) if is_joined else (),
                    high=tuple(points.high[:, column].tolist()) if is_joined else (),
                )
                for column, name in enumerate(self._names)
                if has_any_F[column] or not self._is_all
            ),
            marks=tuple(sorted(self._marks.values(), key=lambda mark: mark.seq)),
            num_steps=self._num_steps,
        )

    def _halve(self) -> None:
        """Join each two neighbours."""
        self._points = self._points.joined(np.arange(0, len(self._points), 2))
        self._stride *= 2
        marks, self._marks = self._marks, {}
        for (place, _, _), mark in marks.items():
            self._mark(place // 2, mark)

    def _mark(self, place: int, mark: StepRow | StepMark) -> None:
        key = place, mark.kind, mark.skip_reason
        earlier = self._marks[key].warnings if key in self._marks else ()
        self._marks[key] = StepMark(
            seq=mark.seq,
            version=mark.version,
            kind=mark.kind,
            warnings=tuple(dict.fromkeys((*earlier, *mark.warnings))),
            skip_reason=mark.skip_reason,
        )
