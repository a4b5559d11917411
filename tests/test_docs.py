"""docs/settings.md and docs/operations.md against the settings and metrics that they list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ratoon.config import GIB, MIB, OTHER_VARIABLES, RatoonConfig
from ratoon.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"
SETTINGS = (DOCS / "settings.md").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")


def _rows(text: str, header: str) -> list[list[str]]:
    """Cells of all tables that begin with `header`, in order."""
    tables = [part.split("\n\n")[0].splitlines()[2:] for part in text.split(header)[1:]]
    rows = [row for table in tables for row in table]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, default as it is written) of every setting."""
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            yield from _settings(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _written(name, default)


def _written(name: str, default: Any) -> str:
    if default is None:
        return "none"
    if default == "":
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if name.endswith("_bytes") and default:
        unit, size = ("GiB", GIB) if default % GIB == 0 else ("MiB", MIB)
        assert default % size == 0
        return f"{default // size} {unit}"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_is_listed_with_its_default() -> None:
    documented = [(row[0].strip("`"), row[1]) for row in _rows(SETTINGS, "| setting | default |")]
    own = list(_settings(RatoonConfig))
    assert len(own) > 50
    # Scalars come first in the document as they do in the model.
    assert documented == own
    assert all(row[2] for row in _rows(SETTINGS, "| setting | default |"))


def test_variables_that_are_no_settings_are_listed() -> None:
    for name in OTHER_VARIABLES:
        assert f"`{name}`" in SETTINGS


def test_every_metric_is_listed_with_its_labels() -> None:
    documented = [
        (row[0].strip("`"), row[1], tuple(re.findall(r"`(\w+)`", row[2])))
        for row in _rows(OPERATIONS, "| metric | kind | labels |")
    ]
    assert documented == [(metric.name, str(metric.kind), metric.labels) for metric in METRICS]


def test_every_metric_that_is_named_exists() -> None:
    names = {metric.name for metric in METRICS}
    named = set(re.findall(r"\bratoon_[a-z_]+\b", OPERATIONS))
    # Of other kinds: packages of Python.
    assert named - names <= {"ratoon_client", "ratoon_kernels", "ratoon_proto"}
