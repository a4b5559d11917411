"""The gateway's server over a fake engine in a process of its own, whose memory can be read.

Run as a module: arguments are its data root and the settings, as JSON. It prints its port, then a
line for each line that it is sent: the request that the engine was last given.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedProcess:
    port: int
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@contextmanager
def served_process(root: Path, **settings: Any) -> Iterator[ServedProcess]:
    """A gateway with keys below `root`; `settings` are those of `RatoonConfig`."""
    command = [sys.executable, "-m", "tests.api.served_process", str(root), json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield ServedProcess(port=int(process.stdout.readline()), pid=process.pid)
        finally:
            process.kill()


async def _serve(root: Path, settings: dict[str, Any]) -> None:
    from ratoon.api.gate import build_gate
    from ratoon.api.grpc.server import start_grpc
    from ratoon.config import RatoonConfig
    from ratoon.log import configure_logging
    from ratoon_proto.v1 import service_pb2
    from tests.api import requests
    from tests.api.fake_engine import FakeEngine, service_of

    configure_logging("ERROR")
    config = RatoonConfig(data_root=root, models_root=root, **settings)
    service = service_of(FakeEngine(folder=root, gap_wait_s=0.1), config.limits, root)
    await service.create_policy(service_pb2.CreatePolicyRequest(spec=requests.spec()))
    running = await start_grpc(
        service,
        config.limits,
        gate=build_gate(config),
        host="127.0.0.1",
        port=0,
        max_message_bytes=config.grpc.max_message_bytes,
    )
    print(running.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
