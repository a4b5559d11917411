"""Seconds since the epoch to wire timestamps."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 10**9


def set_time(timestamp: Timestamp, seconds: float) -> None:
    """Write `seconds` (at least 0) into a message's timestamp field."""
    timestamp.FromNanoseconds(round(seconds * _NANOS))
