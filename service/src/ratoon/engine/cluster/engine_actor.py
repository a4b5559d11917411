"""The engine's process: a detached actor around `engine.Engine`.

After a restart it recovers by itself, from its settings and the journal. Processes that look the
actor up import this module, so the constructor imports the engine.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from ratoon.engine.client import Engine
from ratoon.engine.settings import EngineSettings
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging
from ratoon.method_call import MethodCall

# Shared by all policies, to read, write and hash files.
_NUM_THREADS = 64


class EngineActor:
    """Wraps `Engine`: `call` runs any of its public methods."""

    def __init__(self, settings: EngineSettings) -> None:
        configure_logging(settings.log_level)
        with frozen_imports():
            from ratoon.engine.cluster.ray_cluster import open_engine

            self._engine = open_engine(settings)
        self._threads: ThreadPoolExecutor | None = None
        # Nobody else would call it after a restart.
        ray.get_runtime_context().current_actor.call.remote(MethodCall.of(Engine.recover))

    @ray.method
    async def call(self, call: MethodCall[Awaitable[Any]]) -> Any:
        """Call a method of the engine. Raises what the method raises."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="files")
            asyncio.get_running_loop().set_default_executor(self._threads)
        return await call.on(self._engine)
