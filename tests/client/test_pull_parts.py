"""What a weight pull is made of: manifests that are judged, chunks on the wire, work in threads."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import xxhash

from ratoon_client import ClientConfig, IntegrityError, TransportError
from ratoon_client.transport.grpc_wire import GrpcTransport
from ratoon_client.weights.chunks import PartialFile, chunk_ranges
from ratoon_client.weights.disk import in_thread
from ratoon_client.weights.folder import check_manifest
from ratoon_proto.types import WeightFile
from ratoon_proto.v1 import service_pb2
from tests.client.samples import manifest

FILE = WeightFile(name="a.bin", size_bytes=3, digest="0" * 32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"policy_id": "q"}, "asked for p"),
        ({"version": 4}, "asked for p version 3"),
        ({"files": ()}, "names no files"),
        ({"digest": "0" * 31 + "/"}, "no valid digest"),
        ({"digest": "A" * 32}, "no valid digest"),
        ({"size_bytes": -1}, "no valid digest or size"),
        ({"twice": True}, r"names a\.bin twice"),
    ],
)
def test_a_manifest_that_lies_is_refused(changes: dict[str, Any], text: str):
    file = replace(FILE, **{n: changes[n] for n in {"digest", "size_bytes"} & changes.keys()})
    lying = manifest(
        changes.get("version", 3),
        changes.get("files", [file] * (2 if "twice" in changes else 1)),
        policy_id=changes.get("policy_id", "p"),
    )
    with pytest.raises(IntegrityError, match=text):
        check_manifest(lying, policy_id="p", version=3)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff" * 9, TransportError),
        (service_pb2.FetchWeightsResponse(data=b"abc", digest="0" * 32), IntegrityError),
        (service_pb2.FetchWeightsResponse(), IntegrityError),
    ],
)
async def test_an_answer_that_is_not_the_chunk_is_refused(
    answer: bytes | service_pb2.FetchWeightsResponse, error: type[Exception]
):
    """Bytes that are no message may be a proxy's, and are asked for again."""
    is_message = isinstance(answer, service_pb2.FetchWeightsResponse)
    sent = answer.SerializeToString() if is_message else answer

    async def call(_request: bytes, _context: Any) -> bytes:
        return sent

    handler = grpc.unary_unary_rpc_method_handler(call)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "ratoon.v1.PolicyService", {"FetchWeights": handler}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{port}", ClientConfig(), None)
    try:
        with pytest.raises(error):
            await transport.read_file("p", 1, FILE, offset=0, length=3, timeout_s=10.0)
    finally:
        await transport.close()
        await server.stop(None)


async def test_disk_work_has_ended_when_its_caller_goes_on():
    """Otherwise a cancelled pull would close a file that a thread still writes to."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(10)
        ended.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_disk_work_that_fails_raises_its_error():
    def work() -> None:
        raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        await in_thread(work)


def test_nothing_of_a_new_file_is_read_to_find_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All of its holes were, before the first byte was asked for."""

    def refuse(*_: object) -> bytes:
        raise AssertionError("a hole was read")

    monkeypatch.setattr(os, "pread", refuse)
    ranges = list(chunk_ranges(100, 16))
    with PartialFile(tmp_path / "a", size_bytes=100) as partial:
        assert partial.missing(ranges) == ranges


def test_the_digest_of_a_file_follows_its_chunks_in_any_order(tmp_path: Path):
    """What an interrupted pull left is between them; a byte that changed on the disk is seen."""
    data = bytes(range(100))
    parts = [(part.offset, data[part.offset :][: part.length]) for part in chunk_ranges(100, 16)]
    digest = xxhash.xxh3_128_hexdigest(data)
    path = tmp_path / "a"
    with PartialFile(path, size_bytes=100) as partial:
        partial.write(*parts[2])
    with PartialFile(path, size_bytes=100) as partial:
        for index in (4, 1, 0, 6, 3, 5):
            partial.write(*parts[index])
        partial.finish(digest)
    assert path.read_bytes() == data
    with PartialFile(path, size_bytes=100) as partial:
        for part in parts[::-1]:
            partial.write(*part)
            os.pwrite(partial._data, b"?", 50)
        with pytest.raises(IntegrityError, match="nothing is kept"):
            partial.finish(digest)
    assert not path.exists()
