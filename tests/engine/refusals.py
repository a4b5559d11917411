"""Calls that must be refused with a typed error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ratoon.errors import ErrorCode, RatoonError


@contextmanager
def raises(
    code: ErrorCode, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[RatoonError]]:
    """As `pytest.raises`, of a `RatoonError` with this code."""
    with pytest.raises(RatoonError, match=match) as caught:
        yield caught
    assert caught.value.code is code
