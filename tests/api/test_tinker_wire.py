"""The Tinker wire over a fake engine: keys, seqs, futures, refusals, listings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import zstandard

from ratoon.api.gate import Gate, build_gate
from ratoon.api.http.app import create_app
from ratoon.api.service import PolicyService
from ratoon.api.tinker import bodies, calls, samples
from ratoon.api.tinker.datums import future_id, split_future
from ratoon.api.tinker.routes import tinker_routes
from ratoon.auth.access import Presented
from ratoon.auth.keys import Scope
from ratoon.config import AuthConfig, RatoonConfig, TinkerConfig
from ratoon.engine.commands import (
    ForwardBackwardCommand,
    OptimStepCommand,
    PublishVersionCommand,
    RefusedCommand,
)
from ratoon.engine.refusals import checkpoint_not_found
from ratoon.engine.types import (
    CheckpointInfo,
    NamedVersion,
    Operation,
    OperationResult,
    Policy,
    PolicyResult,
    PolicySpec,
)
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon.metrics import TINKER_UNKNOWN_FIELDS, Sample
from ratoon_proto import types
from ratoon_proto.codec import encode_array
from ratoon_proto.tinker import tinker_pb2 as wire
from ratoon_proto.types import (
    LogprobsOf,
    OperationKind,
    OperationState,
    PolicyState,
    PublishKind,
    SampleResult,
    VersionInfo,
    VersionList,
)
from ratoon_proto.v1.training_pb2 import ForwardOutput
from tests.api.conftest import LIMITS
from tests.api.fake_engine import INFO, FakeEngine, FakeSampler, service_of
from tests.api.guarded import make_key
from tests.api.tinker_requests import datum, forward_backward
from tests.until import until

PROTOBUF = {"Content-Type": "application/x-protobuf"}
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "grad_clip_norm": 0.0}
NO_ROUTE = ("copy_weights", "cancel_future", "save_weights_external")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One key's client of the wire."""

    client: httpx.AsyncClient

    async def post(self, call: str, status: int = 200, /, **body: Any) -> dict[str, Any]:
        response = await self.client.post(f"/api/v1/{call}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def get(self, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
        response = await self.client.get(f"/api/v1/{path}", params=query)
        assert response.status_code == status, response.text
        return response.json()

    async def forward_backward(
        self, message: wire.ForwardBackwardRequest, status: int = 200
    ) -> dict[str, Any]:
        data = message.SerializeToString()
        response = await self.client.post(
            "/api/v1/forward_backward", content=data, headers=PROTOBUF
        )
        assert response.status_code == status, response.text
        return response.json()

    async def future(self, begun: Mapping[str, Any]) -> httpx.Response:
        body = {"request_id": begun["request_id"], "allow_metadata_only": True}
        return await self.client.post("/api/v1/retrieve_future", json=body)

    async def result(self, begun: Mapping[str, Any]) -> dict[str, Any]:
        response = await self.future(begun)
        assert response.status_code == 200, response.text
        return response.json()

    async def model(self, **changes: Any) -> str:
        session = (await self.post("create_session", sdk_version="0.38.0", tags=[]))["session_id"]
        lora = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}
        body = {"model_seq_id": 0, "base_model": "tiny", "lora_config": lora} | changes
        begun = await self.post("create_model", session_id=session, **body)
        done = await self.result(begun)
        assert done == {"model_id": begun["model_id"], "type": "create_model"}
        return str(begun["model_id"])

    async def sampler(self, model_id: str, seq_id: int = 1) -> str:
        """A sampling session of the model as it is."""
        body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": 0}
        begun = await self.post("save_weights_for_sampler", **body)
        return str((await self.result(begun))["sampling_session_id"])

    async def asample(self, sampler: str, status: int = 200, /, **changes: Any) -> dict[str, Any]:
        return await self.post("asample", status, **asked(sampler, **changes))

    async def sampled(self, begun: Mapping[str, Any]) -> wire.SampleResponse:
        response = await self.future(begun)
        assert response.headers["content-type"] == "application/x-protobuf", response.text
        return wire.SampleResponse.FromString(response.content)

    async def step(self, model_id: str, seq_id: int, status: int = 200) -> dict[str, Any]:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": ADAM}
        return await self.post("optim_step", status, **body)


def asked(sampler: str, *, tokens: tuple[int, ...] = (5, 6, 7), **changes: Any) -> dict[str, Any]:
    """The body of an asample, as the SDK sends it; what a change has in `params` is added."""
    params = {"max_tokens": 9, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    params |= changes.pop("params", {})
    return {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [*tokens], "type": "encoded_text"}]},
        "sampling_params": params,
        "sampling_session_id": sampler,
        "seq_id": 2_000_000_000_000,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    } | changes


def targets(
    data: list[int],
    *,
    shape: list[int] | None = None,
    dtype: str = "int64",
    crow: list[int] | None = None,
    col: list[int] | None = None,
) -> dict[str, Any]:
    """Ids to score, as the SDK sends them; a column beside a prompt of 3 tokens."""
    sparse = {"sparse_crow_indices": crow, "sparse_col_indices": [0] if col is None else col}
    whole = {"data": data, "dtype": dtype, "shape": [2, 1] if shape is None else shape}
    return whole if crow is None else whole | sparse


class OwnEngine(FakeEngine):
    """A fake engine whose operations have ids as the real one's, and create a policy once."""

    async def create_policy(self, spec: PolicySpec) -> Operation:
        for operation in self.operations.values():
            if operation.result == PolicyResult(policy=replace(CREATED, spec=spec)):
                return operation
        return await super().create_policy(spec)

    def _add(
        self, policy_id: str, kind: OperationKind, result: OperationResult | None
    ) -> Operation:
        operation = super()._add(policy_id, kind, result)
        del self.operations[operation.operation_id]
        operation = replace(operation, operation_id=f"{policy_id}.{len(self.operations)}")
        self.operations[operation.operation_id] = operation
        return operation

    async def list_versions(self, policy_id: str) -> VersionList:
        results = [each.result for each in self.operations.values() if each.policy_id == policy_id]
        at = datetime.fromtimestamp(2.5, UTC)
        names = tuple(
            types.NamedVersion(name=named.name, version=0, size_bytes=20, created_at=at)
            for named in results
            if isinstance(named, NamedVersion)
        )
        version = VersionInfo(
            version=0, size_bytes=20, delta_bytes=0, published_at=at, is_held=False, names=names
        )
        return VersionList(versions=(version,), receivers=())

    async def list_checkpoints(self, policy_id: str) -> list[CheckpointInfo]:
        await self.policy(policy_id)
        done = [each for each in self.operations.values() if each.policy_id == policy_id]
        return [each.result for each in done if isinstance(each.result, CheckpointInfo)]

    async def delete_checkpoint(self, policy_id: str, name: str) -> CheckpointInfo:
        for each in await self.list_checkpoints(policy_id):
            if each.name == name:
                return each
        raise checkpoint_not_found(name)


CREATED = Policy(
    spec=cast("PolicySpec", None),
    state=PolicyState.READY,
    version=0,
    next_seq=1,
    created_at=1.5,
    info=INFO,
    published_version=0,
)


def sampler_of(tinker: Wire) -> FakeSampler:
    return cast("FakeSampler", tinker.service._sampler)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The wire for two keys of its own, and for callers that show another or none."""

    engine: OwnEngine
    service: PolicyService
    gate: Gate
    root: Path
    one: Caller
    other: Caller
    bare: httpx.AsyncClient


@pytest.fixture
async def tinker(tmp_path: Path) -> AsyncIterator[Wire]:
    models_root, root = tmp_path / "models", tmp_path / "data"
    for folder in (models_root / "real", tmp_path / "outside", tmp_path / "version"):
        folder.mkdir(parents=True)
    (models_root / "escape").symlink_to(tmp_path / "outside")
    engine = OwnEngine(folder=tmp_path / "version", gap_wait_s=0.1)
    service = service_of(engine, LIMITS, models_root)
    config = RatoonConfig(
        data_root=root,
        models_root=models_root,
        limits=LIMITS,
        tinker=TinkerConfig(enabled=True),
        auth=AuthConfig(required=True),
    )
    gate = build_gate(config)
    routes = tinker_routes(service, gate, config)
    app = create_app(service, LIMITS, gate=gate, tinker=routes)

    def client(key: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app)
        headers = {"X-API-Key": key} if key else {}
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    keys = make_key(root, Scope.TINKER), make_key(root, Scope.TINKER)
    async with client(keys[0]) as one, client(keys[1]) as other, client("") as bare:
        yield Wire(
            engine=engine,
            service=service,
            gate=gate,
            root=root,
            one=Caller(client=one),
            other=Caller(client=other),
            bare=bare,
        )


def ours(model_id: str) -> str:
    return f"tinker-{model_id.replace(':train:', '-')}"


def output(*lengths: int) -> bytes:
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    logprobs = -np.arange(1, offsets[-1] + 1, dtype=np.float32)
    return ForwardOutput(
        logprobs=encode_array(logprobs), offsets=encode_array(offsets)
    ).SerializeToString()


async def test_a_script_creates_trains_saves_and_lists(tinker: Wire) -> None:
    caller = tinker.one
    config = await caller.post("client/config", sdk_version="1")
    assert (config["fwdbwd_max_chunk_len"], config["create_model_via_load_weights"]) == (8, True)
    model_id = await caller.model()
    spec = tinker.engine.known_policies[ours(model_id)].spec
    assert (spec.publish.kind, spec.idle_ttl_s) == (PublishKind.ON_REQUEST, 3600.0)
    info = await caller.post("get_info", model_id=model_id)
    assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 4, "tiny")

    tinker.engine.forward_output = output(3, 2)
    data = (datum([1, 2, 3], targets=[0, 3, 4], weights=[0, 1, 1]), datum([5, 6], weights=[1, 1]))
    begun = await caller.forward_backward(forward_backward(*data, model_id=model_id))
    response = await caller.future(begun)
    assert response.headers["content-type"] == "application/x-protobuf"
    answer = wire.ForwardBackwardOutput.FromString(response.content)
    values = np.frombuffer(answer.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
    assert values.tolist() == [0, -2, -3, -4, -5]
    assert answer.metrics["loss:sum"] == 0.5 * 2
    command = tinker.engine.log[-1].command
    assert isinstance(command, ForwardBackwardCommand)
    assert command.with_logprobs is LogprobsOf.ALL

    assert (await caller.result(await caller.step(model_id, 2)))["metrics"]["grad_norm"] == 1.25
    command = tinker.engine.log[-1].command
    assert isinstance(command, OptimStepCommand)
    assert (command.allow_empty, command.discard_on_poison) == (True, True)
    assert (command.optim.max_grad_norm, command.optim.eps) == (0.0, 1e-12)

    saved = await caller.post("save_weights", model_id=model_id, seq_id=3, path="final")
    assert await caller.result(saved) == {
        "path": f"tinker://{model_id}/weights/final",
        "type": "save_weights",
    }
    runs = (await caller.get("training_runs", limit=5))["training_runs"]
    assert [run["training_run_id"] for run in runs] == [model_id]
    session = model_id.partition(":")[0]
    assert (await caller.get(f"sessions/{session}"))["training_run_ids"] == [model_id]
    await caller.post("session_heartbeat", session_id=session)
    await caller.post("telemetry", events=[{}] * 100)


async def test_calls_run_in_their_order_and_a_retry_is_the_first(tinker: Wire) -> None:
    """A client sends the first part of a batch last, and anything again whose answer is lost."""
    caller = tinker.one
    model_id = await caller.model()
    tinker.engine.forward_output = output(2)

    def message(seq: int, token: int = 1) -> wire.ForwardBackwardRequest:
        data = datum([token, 2], weights=[1, 1])
        return forward_backward(data, model_id=model_id, seq_id=seq)

    late = [await caller.forward_backward(message(seq)) for seq in (2, 3)]
    blocked = await caller.result(late[0])
    assert blocked["category"] == "user"
    assert "has not arrived" in blocked["error"]
    await caller.forward_backward(message(1))
    for begun in late:
        assert (await caller.future(begun)).headers["content-type"] == "application/x-protobuf"
    assert await caller.forward_backward(message(2)) == late[0]
    for bad in (message(2, token=9), message(2, token=999)):
        refusal = await caller.forward_backward(bad, 400)
        assert refusal["code"] in ("KEY_REUSED", "INVALID_ARGUMENT")
    assert (await caller.future(late[0])).headers["content-type"] == "application/x-protobuf"
    assert len([each for each in tinker.engine.log if each.policy_id == ours(model_id)]) == 3


async def test_what_is_refused_takes_its_seq(tinker: Wire) -> None:
    """Its client counts up after a refusal: every later call of the model would wait for ever."""
    caller = tinker.one
    model_id = await caller.model()
    fine = datum([1, 2], weights=[1, 1])
    bad = [
        (forward_backward(fine, datum([1, 300], weights=[1, 1])), "data[1].loss_fn_inputs."),
        (forward_backward(fine, datum([1], weights=[np.nan])), "data[1].loss_fn_inputs.weights[0]"),
        (forward_backward(fine, loss_fn="gspo"), "write loss_fn=ppo"),
        (forward_backward(fine, loss_fn="ppo", forward_only=True), "loss_fn"),
        (forward_backward(), "data: got 0 datums"),
        (forward_backward(*[fine] * 9), "data: got 9 datums"),
        (forward_backward(datum(range(70), weights=[1] * 70)), "data[0]"),
        (forward_backward(fine, _sparse()), "data[1].loss_fn_inputs.weights: several values"),
        (forward_backward(fine, datum([1, 2], weights=[1])), "data[1].loss_fn_inputs.weights"),
    ]
    for seq, (message, said) in enumerate(bad, start=1):
        message.model_id, message.seq_id = model_id, seq
        for _ in range(2):
            refusal = await caller.forward_backward(message, 400)
            assert said in refusal["detail"]
            assert refusal["category"] == "user"
    wanted = {"model_id": model_id, "adam_params": ADAM | {"learning_rate": -1}}
    refusal = await caller.post("optim_step", 400, seq_id=10, **wanted)
    assert "adam_params.learning_rate" in refusal["detail"]
    names = ("a/b", "..", "a" * 65, "", "%2f", "a" * 10_000)
    for seq, name in enumerate(names, start=11):
        await caller.post("save_weights", 400, model_id=model_id, seq_id=seq, path=name)
    other = f"tinker://{model_id}/weights/x"
    body = {"model_id": model_id, "seq_id": 17, "path": other, "optimizer": False}
    refusal = await caller.post("load_weights", 400, **body)
    assert "create_training_client_from_state" in refusal["detail"]
    assert "metrics" in await caller.result(await caller.step(model_id, 18))
    commands = [each.command for each in tinker.engine.log]
    assert [type(command) for command in commands[:-1]] == [RefusedCommand] * 17


def _sparse() -> wire.Datum:
    """A datum whose weights are a sparse tensor with a column out of range."""
    found = datum([1, 2], weights=[1, 1])
    indices = np.array([[0, 1, 2], [0, 10**9, 0]], np.int64)
    found.loss_fn_inputs["weights"].sparse_csr.CopyFrom(
        wire.SparseCsr(
            values=np.ones(2, np.float32).tobytes(),
            crow_indices=indices[0].tobytes(),
            col_indices=indices[1, :2].tobytes(),
        )
    )
    return found


async def test_a_message_cut_anywhere_is_refused(tinker: Wire) -> None:
    """Each cut is no message, one that names no model, or a call refused for what it lacks."""
    caller = tinker.one
    model_id = await caller.model()
    message = forward_backward(datum([1, 2], weights=[1, 1]), model_id=model_id)
    # Without its model a cut could take the seq of the whole message.
    nowhere = wire.ForwardBackwardRequest.FromString(message.SerializeToString())
    nowhere.ClearField("model_id")
    whole = nowhere.SerializeToString()
    for end in range(len(whole)):
        response = await caller.client.post(
            "/api/v1/forward_backward", content=whole[:end], headers=PROTOBUF
        )
        assert response.status_code in (400, 404), (end, response.text)
        assert response.json()["category"] == "user"
    data = message.SerializeToString()
    for end in range(len(data)):
        response = await caller.client.post(
            "/api/v1/forward_backward", content=data[:end], headers=PROTOBUF
        )
        assert response.status_code in (400, 404), (end, response.text)
    assert not any(isinstance(each.command, ForwardBackwardCommand) for each in tinker.engine.log)


async def test_bodies_that_are_none_take_no_seq(tinker: Wire) -> None:
    caller = tinker.one
    model_id = await caller.model()
    fine = forward_backward(datum([1, 2], weights=[1, 1]), model_id=model_id).SerializeToString()
    bomb = zstandard.compress(b"\0" * 2**24)
    for data, headers, status in (
        (fine[:-1], {}, 400),
        (b"\xff" * 9, {}, 400),
        (b"\0" * 20_000, {}, 413),
        (bomb, {"Content-Encoding": "zstd"}, 413),
        (bomb[:20], {"Content-Encoding": "zstd"}, 400),
        (zstandard.compress(fine), {"Content-Encoding": "zstd"}, 200),
    ):
        path = "/api/v1/forward_backward"
        response = await caller.client.post(path, content=data, headers={**PROTOBUF, **headers})
        assert response.status_code == status, (data[:10], response.text)
        taken = [each for each in tinker.engine.log if each.policy_id == ours(model_id)]
        assert len(taken) == (status == 200)
    for body, said in (
        ("{", "the body is not JSON"),
        ('{"model_id": 3}', "model_id"),
        ('{"model_id": "x", "seq_id": 0, "adam_params": {}}', "seq_id"),
        ('{"model_id": "x", "seq_id": 1, "adam_params": {"learning_rate": NaN}}', "learning_rate"),
    ):
        response = await caller.client.post("/api/v1/optim_step", content=body)
        assert response.status_code == 400
        assert said in response.json()["detail"]


async def test_nothing_of_another_key_can_be_told_from_nothing(tinker: Wire) -> None:
    caller, other = tinker.one, tinker.other
    model_id = await caller.model()
    begun = await caller.step(model_id, 1)
    saved = await caller.post("save_weights", model_id=model_id, seq_id=2, path="a")
    await caller.result(saved)
    session, nothing = model_id.partition(":")[0], "0" * 12 + "-" + "0" * 16
    path = f"tinker://{model_id}/weights/a"

    def theirs(session: str, path: str, request_id: str) -> list[tuple[str, dict[str, Any]]]:
        model_id = f"{session}:train:0"
        return [
            ("get_info", {"model_id": model_id}),
            ("session_heartbeat", {"session_id": session}),
            ("retrieve_future", {"request_id": request_id}),
            ("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": ADAM}),
            ("save_weights", {"model_id": model_id, "seq_id": 3, "path": "b"}),
            ("weights_info", {"tinker_path": path}),
            (
                "load_weights",
                {"session_id": "", "model_seq_id": 5, "path": path, "optimizer": True},
            ),
            ("create_model", {"session_id": session, "model_seq_id": 5, "base_model": "tiny"}),
            ("save_weights_for_sampler", {"model_id": model_id, "seq_id": 3, "path": "b"}),
            (
                "create_sampling_session",
                {"session_id": "", "model_path": f"tinker://{model_id}/sampler_weights/b"},
            ),
            ("create_sampling_session", {"session_id": session, "base_model": "tiny"}),
            ("asample", asked(f"{model_id}:sample:b")),
            ("asample", asked(f"{session}:sample:dGlueQ==")),
            (f"sessions/{session}/finish", {}),
        ]

    own = (await other.post("create_session"))["session_id"]
    told: list[list[str]] = []
    for session_id, weights, request_id in (
        (session, path, begun["request_id"]),
        (nothing, path.replace(session, nothing), f"{ours(model_id)}.0".replace(session, nothing)),
    ):
        told.append([])
        for call, body in theirs(session_id, weights, request_id):
            if "session_id" in body and not body["session_id"]:
                body["session_id"] = own
            answer = await other.post(call, 404, **body)
            told[-1].append(answer["detail"])
        for place in (
            f"training_runs/{session_id}:train:0",
            f"sessions/{session_id}",
            f"samplers/{session_id}:train:0:sample:b",
            f"samplers/{session_id}:sample:dGlueQ==",
        ):
            told[-1].append((await other.get(place, 404))["detail"])
    assert told[0] == told[1]
    # The owner's own that does not exist has the same texts.
    unknown = await caller.post("get_info", 404, model_id=f"{session}:train:7")
    assert unknown["detail"] == told[0][0]
    unknown = await caller.post("retrieve_future", 404, request_id=f"{ours(model_id)}.nothing")
    assert unknown["detail"] == told[0][2]
    assert (await other.get("training_runs"))["training_runs"] == []
    assert (await other.get("checkpoints"))["checkpoints"] == []
    delete = f"/api/v1/training_runs/{model_id}/checkpoints/weights/a"
    assert (await other.client.delete(delete)).status_code == 404
    forward = forward_backward(datum([1], weights=[1]), model_id=model_id, seq_id=3)
    await other.forward_backward(forward, 404)
    assert len(tinker.engine.log) == 2


async def test_saved_weights_expire_when_their_caller_says(tinker: Wire) -> None:
    caller, other = tinker.one, tinker.other
    model_id = await caller.model()
    for seq, call in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
        begun = await caller.post(call, model_id=model_id, seq_id=seq, path="a")
        await caller.result(begun)
    run = f"/api/v1/training_runs/{model_id}/checkpoints"
    for kind, of_version in (("weights", False), ("sampler_weights", True)):
        for ttl_s in (3600, None):
            body = {"ttl_seconds": ttl_s}
            response = await caller.client.put(f"{run}/{kind}/a/ttl", json=body)
            assert (response.status_code, response.content) == (204, b"")
            assert tinker.engine.ttls.pop() == (ours(model_id), "a", ttl_s, of_version)
        for path, body, status in (
            (f"{kind}/a/ttl", {}, 400),
            (f"{kind}/a/ttl", {"ttl_seconds": 0}, 400),
            (f"{kind}/a/ttl", {"ttl_seconds": 10**12}, 400),
            (f"{kind}/none/ttl", {"ttl_seconds": 60}, 404),
            ("others/a/ttl", {"ttl_seconds": 60}, 400),
            (f"{kind}/a/b/ttl", {"ttl_seconds": 60}, 400),
        ):
            response = await caller.client.put(f"{run}/{path}", json=body)
            assert response.status_code == status, (path, response.text)
        response = await other.client.put(f"{run}/{kind}/a/ttl", json={"ttl_seconds": 60})
        assert response.status_code == 404
    assert tinker.engine.ttls == []


async def test_a_key_of_this_wire_opens_nothing_else(tinker: Wire) -> None:
    key = tinker.one.client.headers["X-API-Key"]
    assert key.startswith("tml-")
    for path in ("/v1/policies", "/v1/info", "/metrics"):
        # The header is this wire's alone.
        assert (await tinker.one.client.get(path)).status_code == 401
        bearer = {"Authorization": f"Bearer {key}"}
        assert (await tinker.bare.get(path, headers=bearer)).status_code == 403
    assert (await tinker.bare.post("/api/v1/create_session", json={})).status_code == 401
    assert (await tinker.bare.get("/api/v1/healthz")).status_code == 200
    for scope, status in ((Scope.TRAIN, 403), (Scope.ADMIN, 200)):
        headers = {"X-API-Key": make_key(tinker.root, scope)}
        response = await tinker.bare.post("/api/v1/create_session", json={}, headers=headers)
        assert response.status_code == status
    for path in NO_ROUTE:
        answer = await tinker.one.client.post(f"/api/v1/{path}", json={})
        assert answer.status_code == 404
        assert "tinker.enabled" not in answer.text
    assert "tinker_create_session" in (tinker.root / "access" / "audit.jsonl").read_text()


async def test_a_future_is_held_and_outlasts_an_engine_that_is_away(
    tinker: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK asks again at once: each answer in between is a turn of a busy loop."""
    caller = tinker.one
    model_id = await caller.model()
    tinker.engine.hold = True
    begun = await caller.step(model_id, 1)
    monkeypatch.setattr(calls, "HOLD_S", 0.2)
    held = await caller.result(begun)
    assert held["type"] == "try_again"
    assert held["queue_state"] == "active"
    monkeypatch.setattr(calls, "HOLD_S", 5.0)
    monkeypatch.setattr(calls, "_AWAY_S", 0.01)
    get_operation, away = tinker.service.get_operation, 3

    async def flaky(request: Any) -> Any:
        nonlocal away
        if away:
            away -= 1
            raise RatoonError(ErrorCode.UNAVAILABLE, "the engine is away")
        return await get_operation(request)

    monkeypatch.setattr(tinker.service, "get_operation", flaky)
    waiting = asyncio.create_task(caller.result(begun))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await tinker.engine.release()
    assert "metrics" in await waiting
    assert away == 0


async def test_unknown_fields_are_counted_and_change_nothing(tinker: Wire) -> None:
    caller = tinker.one
    model_id = await caller.model(new_field=1)
    adam = {**ADAM, "momentum_schedule": "x"}
    await caller.post("optim_step", model_id=model_id, seq_id=1, adam_params=adam)
    counted = [each for each in tinker.engine.metrics if isinstance(each, Sample)]
    calls_of = [each.labels for each in counted if each.metric == TINKER_UNKNOWN_FIELDS.name]
    assert calls_of == [("create_model",), ("optim_step",)]


def test_the_wire_is_off_unless_it_is_asked_for(tinker: Wire) -> None:
    assert tinker_routes(tinker.service, tinker.gate, RatoonConfig()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_model": "../outside"}, "base_model"),
        ({"base_model": "escape"}, "base_model"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank"),
        ({"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False}}, "lora_config"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type"),
        ({"model_seq_id": -1}, "model_seq_id"),
    ],
)
async def test_a_model_that_cannot_be_is_refused(
    tinker: Wire, changes: dict[str, Any], said: str
) -> None:
    session = (await tinker.one.post("create_session"))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"} | changes
    assert said in (await tinker.one.post("create_model", 400, **body))["detail"]


async def test_a_model_is_made_once_and_of_saved_weights(tinker: Wire) -> None:
    caller = tinker.one
    model_id = await caller.model(base_model="tiny")
    session = model_id.partition(":")[0]
    lora = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    again = await caller.post("create_model", **body, lora_config=lora)
    assert again["model_id"] == model_id
    await caller.post("create_model", 400, **body, lora_config=lora | {"rank": 8})
    path = f"tinker://{model_id}/weights/a"
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    begun = await caller.post("load_weights", **body)
    assert begun["model_id"] == f"{session}:train:1"
    assert (await caller.result(begun))["path"] == path
    spec = tinker.engine.known_policies[ours(begun["model_id"])].spec
    assert spec.from_checkpoint is not None
    assert (spec.from_checkpoint.checkpoint_id, spec.from_checkpoint.with_optimizer) == ("a", True)
    assert spec.model == tinker.engine.known_policies[ours(model_id)].spec.model
    assert spec.publish.kind is PublishKind.ON_REQUEST
    assert tinker.engine.operations[begun["request_id"]].state is OperationState.DONE


async def test_samples_come_from_a_version_that_stays(tinker: Wire) -> None:
    caller = tinker.one
    model_id = await caller.model()
    unnamed = await caller.sampler(model_id)
    begun = await caller.post("save_weights_for_sampler", model_id=model_id, seq_id=2, path="s")
    path = f"tinker://{model_id}/sampler_weights/s"
    saved = await caller.result(begun)
    assert (saved["path"], saved["sampling_session_id"]) == (path, None)
    first, second = (each.command for each in tinker.engine.log)
    assert isinstance(first, PublishVersionCommand)
    assert isinstance(second, PublishVersionCommand)
    assert (first.ttl_s, second.ttl_s, second.name) == (86_400.0, None, "s")
    body = {"session_id": model_id.partition(":")[0], "sampling_session_seq_id": 1}
    made = await caller.post("create_sampling_session", **body, model_path=path)
    named = made["sampling_session_id"]
    assert await caller.get(f"samplers/{named}") == {
        "sampler_id": named,
        "base_model": "tiny",
        "model_path": path,
    }
    assert (await caller.get(f"samplers/{unnamed}"))["model_path"] is None
    shown = await caller.get(f"sessions/{body['session_id']}")
    assert shown["sampler_ids"] == [unnamed, named]
    kept = (await caller.get("checkpoints"))["checkpoints"]
    assert [(each["tinker_path"], each["checkpoint_type"]) for each in kept] == [(path, "sampler")]
    await caller.result(await caller.step(model_id, 3))
    for sampler in (unnamed, named):
        answer = await caller.sampled(await caller.asample(sampler, num_samples=2))
        assert len(answer.sequences) == 2
    named_as = [each.result for each in tinker.engine.operations.values()]
    expected = [each.version for each in named_as if isinstance(each, NamedVersion)]
    assert tinker.engine.known_policies[ours(model_id)].version > max(expected)
    assert [weights.version for weights, _, _ in sampler_of(tinker).asked] == expected
    delete = f"/api/v1/training_runs/{model_id}/checkpoints/sampler_weights/s"
    assert (await tinker.other.client.delete(delete)).status_code == 404
    assert (await caller.client.delete(delete)).status_code == 204


async def test_weights_that_move_are_sampled_as_they_are_then(tinker: Wire) -> None:
    """A model's newest ones, and the target that `inflight` saves share."""
    caller = tinker.one
    model_id = await caller.model()
    path = f"tinker://{model_id}"
    session = {"session_id": model_id.partition(":")[0], "sampling_session_seq_id": 0}
    made = await caller.post("create_sampling_session", **session, model_path=path)
    newest = made["sampling_session_id"]
    assert (await caller.get(f"samplers/{newest}"))["model_path"] == path
    await tinker.other.get(f"samplers/{newest}", 404)
    inflight: list[str] = []
    for seq in (1, 3):
        body = {"model_id": model_id, "seq_id": seq, "kind": "inflight"}
        begun = await caller.post("save_weights_for_sampler", **body, sampling_session_seq_id=seq)
        saved = await caller.result(begun)
        assert saved["path"] is None
        inflight.append(saved["sampling_session_id"])
        command = tinker.engine.log[-1].command
        assert isinstance(command, PublishVersionCommand)
        assert (command.overwrite, command.ttl_s) == (True, 86_400.0)
        await caller.result(await caller.step(model_id, seq + 1))
        for sampler in (newest, inflight[0], inflight[-1]):
            await caller.sampled(await caller.asample(sampler))
    versions = [weights.version for weights, _, _ in sampler_of(tinker).asked]
    # A step and a save of the fake engine count one each.
    assert versions == [2, 1, 1, 4, 3, 3]
    assert (await caller.get("checkpoints"))["checkpoints"] == []


async def test_the_engine_is_asked_once_for_the_weights_of_a_sample(
    tinker: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its future takes what the request has found, unless another process answers it."""
    caller = tinker.one
    sampler = await caller.sampler(await caller.model())
    asked, manifest = list[str](), tinker.engine.weight_manifest

    async def counted(policy_id: str, *rest: Any) -> object:
        asked.append(policy_id)
        return await manifest(policy_id, *rest)

    monkeypatch.setattr(tinker.engine, "weight_manifest", counted)
    begun = [await caller.asample(sampler) for _ in range(3)]
    for each in begun:
        await caller.sampled(each)
    assert len(asked) == 3
    # The one that is asked for again is another process's, for all that this one knows.
    await caller.sampled(begun[0])
    assert len(asked) == 4
    assert len(sampler_of(tinker).asked) == 4


async def test_a_sample_is_asked_for_and_answered_as_the_wire_has_it(tinker: Wire) -> None:
    caller = tinker.one
    sampler = await caller.sampler(await caller.model())
    params = {"seed": 3, "stop": [11, 12], "temperature": 0.5, "top_k": 4, "top_p": 0.9}
    begun = await caller.asample(sampler, num_samples=3, params=params, prompt_logprobs=True)
    assert len(set(begun["sample_sequence_ids"])) == 3
    answer = await caller.sampled(begun)
    sequence = answer.sequences[0]
    assert np.frombuffer(sequence.tokens, "<i4").tolist() == [5, 6, 7]
    assert np.frombuffer(sequence.logprobs, "<f4").tolist() == [-0.5] * 3
    assert sequence.stop_reason == wire.STOP_REASON_STOP
    prompt = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(prompt[0])
    assert prompt[1:].tolist() == [-0.25] * 2
    given = sampler_of(tinker).asked[-1][2]
    assert (given.seed, given.stop_token_ids, given.temperature) == (3, (11, 12), 0.5)
    assert (given.top_k, given.top_p, given.max_tokens, given.ignore_eos) == (4, 0.9, 9, False)
    for stop, texts, ignores in (("ab", ("ab",), False), (["ab", "c"], ("ab", "c"), False)):
        await caller.sampled(await caller.asample(sampler, params={"stop": stop}))
        given = sampler_of(tinker).asked[-1][2]
        assert (given.stop, given.ignore_eos, given.seed, given.top_k) == (texts, ignores, None, 0)
    await caller.sampled(await caller.asample(sampler, params={"stop": []}))
    assert sampler_of(tinker).asked[-1][2].ignore_eos
    equal = [await caller.asample(sampler) for _ in range(2)]
    assert equal[0]["request_id"] != equal[1]["request_id"]


async def test_tokens_that_might_stand_in_the_prompt_are_scored(tinker: Wire) -> None:
    """The answer has the ids' own shape and layout; the fake's log-prob of a token is minus it."""
    caller = tinker.one
    sampler = await caller.sampler(await caller.model())
    dense = targets([8, -1, 9, 10], shape=[2, 2])
    answer = await caller.sampled(await caller.asample(sampler, target_prompt_logprobs=dense))
    found = answer.target_prompt_logprobs
    assert (found.dtype, [*found.shape]) == (wire.DTYPE_FLOAT32, [2, 2])
    assert np.frombuffer(found.dense, "<f4").tolist() == [-8, 0, -9, -10]
    given = sampler_of(tinker).asked[-1][2]
    assert (given.target_places, given.target_tokens) == ((1, 2, 2), (8, 9, 10))
    sparse = targets([8, -1, 9], shape=[2, 5], crow=[0, 1, 3], col=[4, 0, 2])
    answer = await caller.sampled(await caller.asample(sampler, target_prompt_logprobs=sparse))
    found = answer.target_prompt_logprobs.sparse_csr
    assert np.frombuffer(found.values, "<f4").tolist() == [-8, 0, -9]
    assert np.frombuffer(found.crow_indices, "<i8").tolist() == [0, 1, 3]
    assert np.frombuffer(found.col_indices, "<i8").tolist() == [4, 0, 2]
    given = sampler_of(tinker).asked[-1][2]
    assert (given.target_places, given.target_tokens) == ((1, 2), (8, 9))
    begun = await caller.asample(sampler, target_prompt_logprobs=dense)
    name, note = split_future(begun["request_id"])
    note.targets.dense = note.targets.dense[:8]
    await caller.post("retrieve_future", 404, request_id=future_id(name, note))


async def test_a_base_model_is_sampled_without_a_policy(tinker: Wire) -> None:
    caller = tinker.one
    session = (await caller.post("create_session"))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0}
    made = await caller.post("create_sampling_session", **body, base_model="tiny")
    sampler = made["sampling_session_id"]
    shown = {"sampler_id": sampler, "base_model": "tiny", "model_path": None}
    assert await caller.get(f"samplers/{sampler}") == shown
    await caller.sampled(await caller.asample(sampler))
    weights = sampler_of(tinker).asked[-1][0]
    assert (weights.policy_id, weights.base, weights.version) == ("", "tiny", None)
    direct = asked("") | {"sampling_session_id": None, "base_model": "tiny"}
    await caller.sampled(await caller.post("asample", **direct))
    for base in ("../outside", "escape", "nothing"):
        refusal = await caller.post("create_sampling_session", 400, **body, base_model=base)
        assert "base_model" in refusal["detail"]
    refusal = await caller.post("create_sampling_session", 400, **body)
    assert "model_path" in refusal["detail"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": ()}, "prompt"),
        ({"tokens": (5, 300)}, "prompt[1]"),
        ({"tokens": (-1,)}, "prompt.chunks"),
        ({"tokens": (1,) * 64}, "prompt: got 64 tokens"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt.chunks[0].type"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 2**21}, "num_samples"),
        ({"params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"params": {"max_tokens": 62}}, "sampling_params.max_tokens"),
        ({"params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"params": {"top_p": 0.0}}, "sampling_params.top_p"),
        ({"params": {"stop": [300]}}, "sampling_params.stop[0]"),
        ({"params": {"stop": ""}}, "sampling_params.stop[0]"),
        ({"params": {"seed": 2**63}}, "sampling_params.seed"),
        ({"topk_prompt_logprobs": 257}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 1}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": {}}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": targets([3], shape=[1])}, "target_prompt_logprobs.shape"),
        ({"target_prompt_logprobs": targets([3] * 3, shape=[3, 1])}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": targets([3])}, "target_prompt_logprobs.data: got 1 ids"),
        ({"target_prompt_logprobs": targets([-1, -1])}, "target_prompt_logprobs: got no id"),
        ({"target_prompt_logprobs": targets([3, 300])}, "target_prompt_logprobs[1]"),
        ({"target_prompt_logprobs": targets([3, -2])}, "target_prompt_logprobs.data"),
        ({"target_prompt_logprobs": targets([3, 4], dtype="float32")}, "dtype"),
        ({"target_prompt_logprobs": targets([3], crow=[0, 1])}, "sparse_crow_indices"),
        ({"target_prompt_logprobs": targets([3], crow=[0, 2, 1])}, "sparse_crow_indices"),
        ({"target_prompt_logprobs": targets([3], crow=[0, 0, 1], col=[1])}, "sparse_col_indices"),
        ({"target_prompt_logprobs": targets([3], crow=[0, 0, 1], col=[])}, "sparse_col_indices"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    ],
)
async def test_a_sample_that_cannot_be_is_refused(
    tinker: Wire, changes: dict[str, Any], said: str
) -> None:
    sampler = await tinker.one.sampler(await tinker.one.model())
    assert said in (await tinker.one.asample(sampler, 400, **changes))["detail"]
    assert sampler_of(tinker).asked == []


async def test_weights_to_sample_from_that_are_refused_take_their_seq(tinker: Wire) -> None:
    caller = tinker.one
    model_id = await caller.model()
    bad = [{"path": name} for name in ("a/b", "..", "a" * 65, "", "unnamed-1", "x" * 10_000)]
    kinds = [{"kind": "other"}, {"kind": "inflight", "path": "s"}]
    for seq, body in enumerate([*bad, *kinds], start=1):
        call = {"model_id": model_id, "seq_id": seq} | body
        refusal = await caller.post("save_weights_for_sampler", 400, **call)
        assert next(iter(body)) in refusal["detail"]
    assert "metrics" in await caller.result(await caller.step(model_id, len(bad) + 3))
    body = {"session_id": model_id.partition(":")[0]}
    for path in (f"tinker://{model_id}/weights/s", f"tinker://{model_id}/", "s"):
        refusal = await caller.post("create_sampling_session", 400, **body, model_path=path)
        assert "sampler_weights/NAME" in refusal["detail"]
    unknown = f"tinker://{model_id}/sampler_weights/s"
    await caller.post("create_sampling_session", 404, **body, model_path=unknown)


async def test_the_future_of_a_sample_is_its_own_keys(tinker: Wire) -> None:
    """It carries its request: what another key has put into one is judged again."""
    caller, other = tinker.one, tinker.other
    model_id = await caller.model()
    begun = await caller.asample(await caller.sampler(model_id))
    unknown = await other.post("retrieve_future", 404, request_id="nothing")
    assert await other.post("retrieve_future", 404, request_id=begun["request_id"]) == unknown
    own = (await other.post("create_session"))["session_id"]
    body = {"session_id": own, "base_model": "tiny", "sampling_session_seq_id": 0}
    made = await other.post("create_sampling_session", **body)
    theirs = await other.asample(made["sampling_session_id"])
    # A base is nobody's: only the id says whose future it is.
    assert await caller.post("retrieve_future", 404, request_id=theirs["request_id"]) == unknown
    name, note = split_future(begun["request_id"])
    forged = theirs["request_id"].partition("~")[0]
    for sample, base in ((note.sample, ""), (note.sample, "tiny"), (b"\xff", "tiny")):
        note.sample, note.base_model = sample, base
        request_id = future_id(forged, note)
        assert await other.post("retrieve_future", 404, request_id=request_id) == unknown
    assert name.startswith("sample.")
    assert sampler_of(tinker).asked == []


async def test_a_sample_is_held_shared_and_ended_with_its_last_reader(
    tinker: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, sampler = tinker.one, sampler_of(tinker)
    monkeypatch.setattr(calls, "HOLD_S", 0.05)
    monkeypatch.setattr(samples, "GRACE_S", 1.0)
    begun = await caller.asample(await caller.sampler(await caller.model()))
    sampler.hold = True
    for _ in range(3):
        held = await caller.result(begun)
        assert held == {
            "type": "try_again",
            "request_id": begun["request_id"],
            "queue_state": "active",
        }
    assert len(sampler.asked) == 1
    assert not sampler.cancelled.is_set()
    await asyncio.wait_for(sampler.cancelled.wait(), 5)
    # Another process, or this one after a restart, begins it anew.
    sampler.hold = False
    assert len((await caller.sampled(begun)).sequences) == 1


async def test_samples_that_half_of_their_callers_leave_are_answered_to_the_others(
    tinker: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 at once; all are under way when every other one is left."""
    wanted, sampler, go_on = 2000, sampler_of(tinker), asyncio.Event()
    monkeypatch.setattr(samples, "GRACE_S", 0.0)
    sample, ended = sampler.sample, {"answered": 0, "cancelled": 0}

    async def slow(*given: Any) -> SampleResult:
        answer = await sample(*given)
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            ended["cancelled"] += 1
            raise
        ended["answered"] += 1
        return answer

    monkeypatch.setattr(sampler, "sample", slow)
    presented = Presented(
        authorization=f"Bearer {tinker.one.client.headers['X-API-Key']}", peer="test"
    )
    authorized = tinker.gate.enter("tinker_retrieve_future", presented)
    wire_calls = calls.TinkerCalls(tinker.service, tinker.gate, RatoonConfig(limits=LIMITS))
    body = bodies.Asample(**asked(await tinker.one.sampler(await tinker.one.model())))
    begun = [await wire_calls.samples.asample(authorized, body) for _ in range(wanted)]
    futures = [
        asyncio.create_task(
            wire_calls.retrieve_future(
                authorized, bodies.RetrieveFuture(request_id=str(each["request_id"]))
            )
        )
        for each in begun
    ]
    await until(lambda: len(sampler.asked) == wanted)
    for future in futures[::2]:
        future.cancel()
    await until(lambda: ended["cancelled"] == wanted // 2)
    go_on.set()
    found = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found[::2])
    assert all(isinstance(each, bytes) for each in found[1::2])
    assert ended == {"answered": wanted // 2, "cancelled": wanted // 2}
    assert wire_calls.samples._running == {}


async def test_room_is_waited_for_and_a_lost_engine_is_an_error_of_the_server(
    tinker: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, sampler = tinker.one, sampler_of(tinker)
    begun = await caller.asample(await caller.sampler(await caller.model()))
    sample, told = sampler.sample, list[RatoonError]()

    async def flaky(*given: Any) -> SampleResult:
        if told:
            raise told.pop()
        return await sample(*given)

    monkeypatch.setattr(sampler, "sample", flaky)
    monkeypatch.setattr(samples, "_AGAIN_S", 0.001)
    full = exhausted(
        "full", resource="sampler_requests", wanted=1, free=0, limit=1, retry_after_s=1.0
    )
    away = RatoonError(ErrorCode.UNAVAILABLE, "the engine is away")
    told += [away] * 3
    assert (await caller.sampled(begun)).sequences
    monkeypatch.setattr(calls, "HOLD_S", 0.05)
    told += [full]
    held = await caller.result(begun)
    assert (held["type"], held["queue_state"]) == ("try_again", "paused_capacity")
    monkeypatch.setattr(calls, "HOLD_S", 5.0)
    assert (await caller.sampled(begun)).sequences
    assert told == []
    monkeypatch.setattr(samples, "AWAY_S", 0.0)
    for error in (away, RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "no memory")):
        told += [error]
        answer = await caller.result(begun)
        assert answer == {"error": error.message, "category": "server"}
