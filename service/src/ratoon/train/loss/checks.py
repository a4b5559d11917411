"""Checks of single numbers that a caller sent.

Losses and steps are computed in float32, so a number that float32 does not hold is refused by name,
as one that is not finite.
"""

from __future__ import annotations

from ratoon.errors import invalid
from ratoon.rollout.raw import MAX_FLOAT32


def require(field: str, value: float, holds: bool, expected: str) -> None:
    """Raise INVALID_ARGUMENT naming `field` unless float32 holds `value`, and `holds`."""
    if not (abs(value) <= MAX_FLOAT32 and holds):
        raise invalid(field, value, expected)


def require_finite(field: str, value: float) -> None:
    require(field, value, True, "a finite float32")


def require_not_negative(field: str, value: float) -> None:
    require(field, value, value >= 0, "a finite float32, at least 0")
