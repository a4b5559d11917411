"""What the start of the engine's processes waits for, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from ratoon.cluster.bootstrap import start_engine
from ratoon.config import RatoonConfig, WorkerConfig
from ratoon.engine.engine import Engine
from ratoon.method_call import MethodCall


def test_a_start_asks_for_the_backends_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first GetServerInfo waited for seconds, while a process imported torch."""
    asked: list[MethodCall[object]] = []

    class Actor:
        call = SimpleNamespace(remote=lambda call: asked.append(call) or call)

    def remote(_actor_class: object) -> object:
        made = SimpleNamespace(remote=lambda *_arguments: Actor())
        return SimpleNamespace(options=lambda **_options: made)

    monkeypatch.setattr(ray, "remote", remote)
    config = RatoonConfig(data_root=tmp_path, worker=WorkerConfig(device="cuda"))
    recover, backends = MethodCall.of(Engine.recover), MethodCall.of(Engine.backends)
    assert start_engine(config) == recover
    assert asked == [recover, backends]
