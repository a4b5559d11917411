"""Everything that reads what a peer or a damaged disk may have written.

In: a generator and a folder. Out: targets, each of which makes one hostile input and takes it.
Invariant: a target returns, or raises one of the errors that it may raise, or has found something.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import xxhash
import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel

from ratoon.api import submissions
from ratoon.api.contract import SERVICE
from ratoon.api.convert.policy import SpecDefaults, policy_spec
from ratoon.api.http.app import create_app
from ratoon.api.http.bodies import fill_request
from ratoon.api.http.schema import body_of
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.engine.types import Policy
from ratoon.errors import RatoonError
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon_client.caller import Caller
from ratoon_client.errors import IntegrityError, RatoonClientError
from ratoon_client.operation import outcome
from ratoon_client.wire import decode
from ratoon_proto.codec import CodecError, decode_tensor
from ratoon_proto.types import Operation, PolicyState
from ratoon_proto.v1 import operation_pb2, service_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor
from tests.api import requests
from tests.api.fake_engine import INFO, FakeEngine, FakeSampler
from tests.api.open_gate import OPEN_GATE
from tests.hostile import corpus
from tests.hostile.disk_targets import bad_checkpoints, bad_deltas, bad_files, bad_imports
from tests.hostile.folder_targets import bad_configs
from tests.hostile.mutate import mutated_bytes, mutated_json, mutated_message
from tests.hostile.trainer_targets import trainer_requests

POLICY = requests.POLICY
UPDATE_BODY = cast("type[BaseModel]", body_of(SERVICE.methods_by_name["Update"]))
LIMITS = LimitsConfig(
    max_body_bytes=65_536,
    max_fetch_bytes=1024,
    max_groups=64,
    max_sequences=256,
    max_tokens=10_000,
    max_wait_s=0.001,
)
# Bytes of arrays that a target may make from one input.
_MAX_ARRAY_BYTES = 2**20
_ANSWERED = (DecodeError, RatoonClientError)
_ZEROS = "0" * 32
DEFAULTS = SpecDefaults(models_root=Path("models"), micro_batch_tokens=64)
_POLICY = Policy(
    spec=policy_spec(requests.spec(), DEFAULTS),
    state=PolicyState.READY,
    version=0,
    next_seq=1,
    created_at=1.5,
    info=replace(INFO, max_sequence_tokens=4096),
    published_version=0,
)
# Small results are inline: nobody is asked for more.
_NOBODY = cast("Caller", None)


class ServerFaultError(Exception):
    """An answer with a status of 500 or more, or that is not of the one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`take` makes an input and takes it; `weight` is its share of all inputs."""

    name: str
    weight: int
    take: Callable[[random.Random], None]
    may_raise: tuple[type[Exception], ...]


def all_targets(folder: Path) -> list[Target]:
    """`folder` is empty, and ours."""
    loop = asyncio.new_event_loop()
    return [
        Target(name="codec", weight=24, take=_codec(), may_raise=(DecodeError, CodecError)),
        Target(name="batch", weight=20, take=_batch(), may_raise=(DecodeError, RatoonError)),
        Target(name="json", weight=20, take=_json(), may_raise=(ValueError, RatoonError)),
        Target(name="serial", weight=16, take=_serial(), may_raise=(RatoonError,)),
        Target(name="spec", weight=6, take=_spec(loop, folder), may_raise=(RatoonError,)),
        Target(name="http", weight=4, take=_http(loop, folder), may_raise=()),
        Target(name="files", weight=3, take=bad_files(folder), may_raise=(RatoonError,)),
        Target(name="delta", weight=2, take=bad_deltas(folder), may_raise=(IntegrityError,)),
        Target(name="checkpoint", weight=1, take=bad_checkpoints(folder), may_raise=(RatoonError,)),
        Target(name="config", weight=6, take=bad_configs(folder), may_raise=(RatoonError,)),
        Target(name="imported", weight=1, take=bad_imports(folder), may_raise=(RatoonError,)),
        Target(name="trainer", weight=2, take=trainer_requests(folder), may_raise=(RatoonError,)),
        Target(
            name="answers",
            weight=6,
            take=_answers(loop),
            may_raise=(DecodeError, RatoonClientError),
        ),
    ]


def _codec() -> Callable[[random.Random], None]:
    messages = corpus.tensors()
    data = [message.SerializeToString() for message in messages]

    def take(dice: random.Random) -> None:
        if dice.random() < 0.5:
            tensor = Tensor.FromString(mutated_bytes(dice, data))
        else:
            tensor = mutated_message(dice, messages)
        assert isinstance(tensor, Tensor)
        array = decode_tensor(tensor, max_bytes=_MAX_ARRAY_BYTES)
        assert array.nbytes == len(tensor.data) <= _MAX_ARRAY_BYTES

    return take


def judge(request: service_pb2.UpdateRequest) -> None:
    """All that is done to a batch before it takes a seq, and its body read back."""
    submission = submissions.with_batch(request, _POLICY, request.batch.groups, LIMITS)
    body = bytes(submission.body)
    assert batch_to_bytes(batch_from_bytes(body)) == body


def _batch() -> Callable[[random.Random], None]:
    messages = corpus.updates()
    data = [message.SerializeToString() for message in messages]

    def take(dice: random.Random) -> None:
        if dice.random() < 0.3:
            request = service_pb2.UpdateRequest.FromString(mutated_bytes(dice, data))
        else:
            request = mutated_message(dice, messages)
        assert isinstance(request, service_pb2.UpdateRequest)
        judge(request)

    return take


def judge_json(document: bytes | dict[str, Any]) -> None:
    """Judge the body of a request over HTTP."""
    data = document if isinstance(document, bytes) else json.dumps(document)
    request = service_pb2.UpdateRequest(policy_id=POLICY)
    fill_request(request, UPDATE_BODY.model_validate_json(data))
    judge(request)


def _json() -> Callable[[random.Random], None]:
    documents = corpus.update_documents()

    def take(dice: random.Random) -> None:
        judge_json(mutated_json(dice, documents))

    return take


def _serial() -> Callable[[random.Random], None]:
    bodies = corpus.batches()

    def take(dice: random.Random) -> None:
        data = mutated_bytes(dice, bodies)
        if dice.random() < 0.8:
            data = data[:-16] + xxhash.xxh3_128_digest(data[:-16])
        batch = batch_from_bytes(data)
        assert batch_to_bytes(batch) == data

    return take


def _service(folder: Path) -> tuple[PolicyService, FakeEngine]:
    folder.mkdir()
    engine = FakeEngine(folder=folder, gap_wait_s=0.0)
    service = PolicyService(
        engine=engine,
        sampler=FakeSampler(),
        limits=LIMITS,
        defaults=SpecDefaults(models_root=folder, micro_batch_tokens=64),
        device="cpu",
    )
    return service, engine


def _spec(loop: asyncio.AbstractEventLoop, folder: Path) -> Callable[[random.Random], None]:
    messages = corpus.specs()
    service, engine = _service(folder / "specs")

    def take(dice: random.Random) -> None:
        request = mutated_message(dice, messages)
        assert isinstance(request, service_pb2.CreatePolicyRequest)
        try:
            loop.run_until_complete(service.create_policy(request))
        finally:
            engine.known_policies.clear()
            engine.operations.clear()

    return take


_PATHS = (
    ("POST", f"/v1/policies/{POLICY}/update"),
    ("POST", f"/v1/policies/{POLICY}/forward_backward"),
    ("POST", f"/v1/policies/{POLICY}/forward"),
    ("POST", f"/v1/policies/{POLICY}/optim_step"),
    ("PUT", f"/v1/policies/{POLICY}/uploads/u-1/parts/0"),
    ("POST", "/v1/policies"),
)
_READS = (
    f"/v1/policies/{POLICY}/weights/0/files/model.safetensors",
    f"/v1/policies/{POLICY}/files/{_ZEROS}?offset=0&length=10",
    f"/v1/operations/{POLICY}.1?wait_s=0",
    f"/v1/policies/{POLICY}/checkpoints",
)


def _http(loop: asyncio.AbstractEventLoop, folder: Path) -> Callable[[random.Random], None]:
    """Bodies, plain and compressed, and addresses, through the whole application."""
    documents = corpus.update_documents()
    service, engine = _service(folder / "served")
    app = create_app(service, LIMITS, gate=OPEN_GATE)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://test")

    def take(dice: random.Random) -> None:
        # A request leaves things behind in the fake engine, by which it would grow.
        for kept in (engine.operations, engine.submissions, engine.uploads, engine.known_policies):
            kept.clear()
        engine.log.clear()
        engine.metrics.clear()
        loop.run_until_complete(one(dice))

    async def one(dice: random.Random) -> None:
        await service.create_policy(service_pb2.CreatePolicyRequest(spec=requests.spec()))
        if dice.random() < 0.25:
            response = await client.get(*_odd_address(dice))
        else:
            method, path = dice.choice(_PATHS)
            body, headers = _compressed(dice, mutated_json(dice, documents))
            headers["Content-Type"] = "application/json"
            response = await client.request(method, path, content=body, headers=headers)
        is_shaped = response.is_success or set(response.json()) == {"error"}
        if response.status_code >= 500 or not is_shaped:
            raise ServerFaultError(f"{response.request.url}: {response.status_code}")

    return take


def _odd_address(dice: random.Random) -> tuple[str]:
    text = mutated_bytes(dice, [path.encode() for path in _READS]).decode("latin-1")
    plain = "".join(c for c in text if c.isascii() and c.isprintable() and c not in ' #\\^`{|}<>"')
    return ("/" + plain.lstrip("/"),)


def _compressed(dice: random.Random, body: bytes) -> tuple[bytes, dict[str, str]]:
    """As it is, or compressed and then damaged, or many times what it may be."""
    coding = dice.choice(("", "", "gzip", "zstd", "deflate, gzip"))
    if not coding:
        return body, {}
    if dice.random() < 0.05:
        body = bytes(dice.choice((2**16, 2**22)))
    data = zstandard.compress(body) if coding == "zstd" else gzip.compress(body, 1)
    return (mutated_bytes(dice, [data]) if dice.random() < 0.5 else data), {
        "Content-Encoding": coding
    }


def _answers(loop: asyncio.AbstractEventLoop) -> Callable[[random.Random], None]:
    """What a client makes of what something else than the service says."""
    messages = corpus.operations()
    data = [message.SerializeToString() for message in messages]

    def take(dice: random.Random) -> None:
        if dice.random() < 0.5:
            message = operation_pb2.Operation.FromString(mutated_bytes(dice, data))
        else:
            message = mutated_message(dice, messages)
        assert isinstance(message, operation_pb2.Operation)
        decode(message, Operation)
        if message.forward.WhichOneof("output") != "file":
            loop.run_until_complete(outcome(_NOBODY, message))

    return take
