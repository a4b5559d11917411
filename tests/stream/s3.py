"""An S3-compatible server in a process of its own, behind a network that can be cut.

In: nothing. Out: `s3://` URLs of empty prefixes, and the proxy in front. Invariant: it listens on
the loopback alone, holds everything in memory and is gone afterwards.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from s3fs import S3FileSystem

from ratoon.sole_service import free_port
from ratoon_client.blocking import LoopThread
from tests.network.proxy import Fault, Proxy

BUCKET = "ratoon-tests"
START_S = 280.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """`endpoint` leads through the proxy, `direct` past it."""

    endpoint: str
    direct: str
    _proxy: Proxy
    _loop: LoopThread

    def url(self) -> str:
        """A prefix that nobody has used."""
        return f"s3://{BUCKET}/{secrets.token_hex(4)}"

    def store(self) -> Any:
        """A look at the objects themselves."""
        return S3FileSystem(
            endpoint_url=self.direct, use_listings_cache=False, skip_instance_cache=True
        )

    def arm(self, fault: Fault | None) -> None:
        async def arm() -> None:
            self._proxy.arm(fault)

        self._loop.run(arm())

    @property
    def num_hits(self) -> int:
        return self._proxy.num_hits

    @contextmanager
    def outage_at(self, at_byte: int) -> Iterator[None]:
        """Whoever sends byte `at_byte` from now on is the last one, until the block ends."""
        hits = self.num_hits
        self.arm(Fault(kind="outage", direction="up", at_byte=at_byte))
        yield
        assert self.num_hits == hits + 1
        self._loop.run(self._proxy.start())


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """The server, its proxy, and an environment that leads to it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | _KEYS
    )
    try:
        _wait_for(process, port)
        with _proxied(port) as server, mock.patch.dict(os.environ, _environment(server)):
            server.store().mkdir(BUCKET)
            yield server
    finally:
        process.kill()
        process.wait()


_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def _environment(server: S3Server) -> dict[str, str]:
    """What a user of such a store sets. No proxy and no profile of this machine."""
    return {
        **_KEYS,
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def _proxied(port: int) -> Iterator[S3Server]:
    loop = LoopThread()
    proxy = Proxy(host="127.0.0.1", far_port=port)
    loop.run(proxy.start())
    server = S3Server(
        endpoint=f"http://{proxy.address}",
        direct=f"http://127.0.0.1:{port}",
        _proxy=proxy,
        _loop=loop,
    )
    try:
        yield server
    finally:
        loop.run(proxy.stop())
        loop.stop()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the S3 server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the S3 server does not listen")
