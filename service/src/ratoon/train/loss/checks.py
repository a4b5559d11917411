"""Checks of single numbers that a caller sent."""

from __future__ import annotations

import math

from ratoon.errors import invalid


def require(field: str, value: float, holds: bool, expected: str) -> None:
    """Raises `RatoonError` INVALID_ARGUMENT naming `field` unless `value` is finite and `holds`."""
    if not (math.isfinite(value) and holds):
        raise invalid(field, value, expected)


def require_finite(field: str, value: float) -> None:
    require(field, value, True, "a finite number")


def require_not_negative(field: str, value: float) -> None:
    require(field, value, value >= 0, "a finite number, at least 0")
