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
import numpy as np
import torch
import xxhash
import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from ratoon.api import submissions
from ratoon.api.contract import SERVICE
from ratoon.api.convert.policy import SpecDefaults, policy_spec
from ratoon.api.http.app import create_app
from ratoon.api.http.bodies import fill_request
from ratoon.api.http.schema.models import body_of
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.engine.files.results import read_old_logprobs, write_forward_output
from ratoon.engine.types import Policy, PolicyState
from ratoon.errors import RatoonError
from ratoon.model.loader import load_model
from ratoon.model.spec import FolderBase, FullTuning, ModelDtype, ModelSpec, PresetBase
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.stream.blobs import decode_manifest, encode_manifest
from ratoon.stream.files import seal_bytes, seal_document, unseal_document
from ratoon.stream.manifest import WeightFile, WeightKind
from ratoon.stream.versions import MANIFEST_NAME, publish_version, read_manifest, version_folder
from ratoon.train import checkpoint, imported
from ratoon.train.config import OptimizerStates
from ratoon.train.optim.adamw import OptimizerState
from ratoon_client.caller import Caller
from ratoon_client.errors import IntegrityError, RatoonClientError
from ratoon_client.outcome import outcome
from ratoon_client.results import Operation
from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_client.wire.decode import decode
from ratoon_proto.codec import CodecError, decode_tensor
from ratoon_proto.v1 import operation_pb2, service_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor
from tests import builders
from tests.api import requests
from tests.api.fake_engine import INFO, FakeEngine
from tests.api.open_gate import OPEN_GATE
from tests.hostile import corpus
from tests.hostile.mutate import mutated_bytes, mutated_json, mutated_message
from tests.stream.samples import NAME, flipped, safetensors
from tests.tiny_models import write_folder

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
# Of arrays that a target may make of one input.
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
        Target(name="files", weight=3, take=_files(folder), may_raise=(RatoonError,)),
        Target(name="delta", weight=2, take=_delta(folder), may_raise=(IntegrityError,)),
        Target(name="checkpoint", weight=1, take=_checkpoint(folder), may_raise=(RatoonError,)),
        Target(name="imported", weight=1, take=_imported(folder), may_raise=(RatoonError,)),
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
    submission = submissions.update(request, _POLICY, request.batch.groups, LIMITS)
    assert batch_to_bytes(batch_from_bytes(submission.body)) == submission.body


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
    """The same for the body of a request over HTTP."""
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
            engine.policies.clear()
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
        for kept in (engine.operations, engine.submissions, engine.uploads, engine.policies):
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


def _files(folder: Path) -> Callable[[random.Random], None]:
    """Results, manifests of weights and of blobs: what the server reads of its own disk."""
    root = folder / "files"
    (root / "results").mkdir(parents=True)
    batch = builders.random_batch(np.random.default_rng(0), num_groups=2)
    logprobs = np.zeros(len(batch.response_tokens), np.float32)
    digest, _ = write_forward_output(
        root / "results", "p.7", batch, logprobs, logprobs, is_reference=False
    )
    keys = root / "results" / f"{digest}.7"

    def write(version: Path) -> None:
        (version / "model").write_bytes(b"weights")

    publish_version(root / "weights", "p", 0, WeightKind.FULL, write, 1.5)
    manifest = version_folder(root / "weights", 0) / MANIFEST_NAME
    whole = {path: path.read_bytes() for path in (keys, keys.with_suffix(""), manifest)}
    listing = encode_manifest([WeightFile(name="a", size_bytes=1, digest=_ZEROS)])

    def take(dice: random.Random) -> None:
        path = dice.choice([*whole, None])
        if path is None:
            decode_manifest("key", mutated_bytes(dice, [listing]))
            return
        path.write_bytes(mutated_bytes(dice, [whole[path]]))
        try:
            if path == manifest:
                read_manifest(root / "weights", 0)
            else:
                read_old_logprobs(keys, batch)
        finally:
            path.write_bytes(whole[path])

    return take


def _delta(folder: Path) -> Callable[[random.Random], None]:
    """Deltas whose header has the right seal, so that its reader has to say no."""
    root = folder / "delta"
    old = bytes(range(200)) * 40
    new = flipped(flipped(old, 2, range(0, 3000, 7), 0), 2, [3999], 1)
    for version, data in enumerate((old, new)):
        content = safetensors([("BF16", data)])

        def write(version: Path, content: bytes = content) -> None:
            (version / NAME).write_bytes(content)

        publish_version(root, "p", version, WeightKind.FULL, write, 1.5, deltas=True)
    (offered,) = read_manifest(root, 1).deltas
    path, parent = version_folder(root, 1) / offered.file.name, version_folder(root, 0) / NAME
    whole = path.read_bytes()
    place = len(whole) - 8 - int.from_bytes(whole[-8:], "little")
    payload, header = whole[:place], json.loads(whole[place:-24])
    digest, made = header["files"][0]["digest"], root / "made"

    def take(dice: random.Random) -> None:
        data, text = payload, json.dumps(header).encode()
        if dice.random() < 0.5:
            # Of the same length, or its streams are not looked at.
            data = mutated_bytes(dice, [payload])[:place].ljust(place, b"\0")
        else:
            text = mutated_json(dice, [header])
        sealed = seal_bytes(text)
        path.write_bytes(data + sealed + len(sealed).to_bytes(8, "little"))
        for file in read_delta(path):
            if file.digest == digest:
                rebuild(file, parent, made)
                assert made.read_bytes() == (version_folder(root, 1) / NAME).read_bytes()

    return take


def _checkpoint(folder: Path) -> Callable[[random.Random], None]:
    """Safetensors whose digests are right, so that the parser itself has to say no."""
    model = ModelSpec(
        base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0
    )
    state = OptimizerState(
        kind=OptimizerStates.FP32,
        weights={"a": torch.ones(3, 2)},
        weight_remainder={},
        exp_avg={"a": torch.zeros(3, 2)},
        exp_avg_sq={"a": torch.zeros(3, 2)},
        exp_avg_scale={},
        exp_avg_sq_scale={},
        num_steps=1,
    )
    saved = folder / "checkpoint"
    snapshot = checkpoint.Snapshot(state=state, model=model, version=1, digest=_ZEROS)
    checkpoint.write_snapshot(saved, snapshot)
    path, listing = saved / checkpoint.WEIGHTS_NAME, saved / checkpoint.MANIFEST_NAME
    whole, right = path.read_bytes(), listing.read_bytes()

    def take(dice: random.Random) -> None:
        if dice.random() < 0.3:
            listing.write_bytes(mutated_bytes(dice, [right]))
        else:
            data = mutated_bytes(dice, [whole])
            path.write_bytes(data)
            fields = unseal_document(right)
            fields["files"][0] |= {
                "size_bytes": len(data),
                "digest": xxhash.xxh3_128_hexdigest(data),
            }
            listing.write_bytes(seal_document(fields))
        try:
            checkpoint.load_checkpoint(saved, state, model, lambda _: _ZEROS)
        finally:
            path.write_bytes(whole)
            listing.write_bytes(right)

    return take


def _imported(folder: Path) -> Callable[[random.Random], None]:
    """A folder of weights that a caller names."""
    base = FolderBase(folder=str(write_folder(folder / "base", "qwen3")))
    spec = ModelSpec(base=base, tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0)
    model = load_model(spec, device=torch.device("cpu"), attention_backend="", deterministic=True)
    path = Path(base.folder) / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    whole = path.read_bytes()

    def take(dice: random.Random) -> None:
        path.write_bytes(mutated_bytes(dice, [whole]))
        imported.read_weights(model, path.parent, "")

    return take


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
