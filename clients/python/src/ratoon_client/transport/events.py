"""Server-sent events; one that is cut off is not given out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    name: str
    data: str


async def read_events(lines: AsyncIterator[str]) -> AsyncGenerator[Event, None]:
    name, data = "message", list[str]()
    async for line in lines:
        if not line:
            if data:
                yield Event(name=name, data="\n".join(data))
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
