"""What the wires' processes count of requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ratoon.config import load_config
from ratoon.engine import client as module
from ratoon.engine.client import EngineClient
from ratoon.engine.settings import EngineSettings
from ratoon.metrics import REQUESTS, Change
from tests.until import until


class Sink:
    def __init__(self) -> None:
        self.sent: list[Sequence[Change]] = []

    async def record_metrics(self, changes: Sequence[Change]) -> None:
        self.sent.append([*changes])


async def test_changes_of_many_requests_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load each request was a call to who counts them, which took 8% of two cores."""
    monkeypatch.setattr(module, "_RECORD_S", 0.05)
    sink = Sink()
    client = EngineClient(lambda call: call.on(sink), EngineSettings.from_config(load_config(None)))
    changes = [REQUESTS.sample(1, "http", "health", str(code)) for code in range(5)]
    for change in changes:
        client.record_metrics([change])
    assert sink.sent == []
    await until(lambda: sink.sent == [changes])
    client.record_metrics(changes[:1])
    await until(lambda: sink.sent == [changes, changes[:1]])
