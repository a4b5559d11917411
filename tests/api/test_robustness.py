"""Damaged requests: whatever a peer sends, the answer is typed and the service goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.errors import ERROR_TABLE, RatoonError
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2
from tests.api import requests
from tests.api.fake_engine import FakeEngine, service_of


def _rich_update() -> service_pb2.UpdateRequest:
    """With something in most fields, so that damage has much to hit."""
    request = requests.update()
    request.loss.kl.kind = training_pb2.KL_KIND_K3
    request.loss.correction.high = 2.0
    request.loss.allow_truncated_sampling = True
    request.loss.old_logprobs.kind = training_pb2.OLD_LOGPROBS_KIND_SAMPLER
    request.loss.overlong_penalty.max_tokens = 9
    segments = [rollout_pb2.Segment(tokens=requests.tokens([1, 2]), trained=True)]
    rollout = rollout_pb2.Rollout(
        segments=rollout_pb2.SegmentList(segments=segments),
        advantages=requests.floats([1.0, -1.0]),
        sampler_logprobs=requests.floats([-1.0, -2.0]),
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        policy_version=1,
    )
    request.batch.groups.append(requests.group("rich", rollout))
    return request


GOOD = (requests.update().SerializeToString(), _rich_update().SerializeToString())
SPEC = service_pb2.CreatePolicyRequest(spec=requests.spec()).SerializeToString()
DAMAGE = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> PolicyService:
    folder: Path = tmp_path_factory.mktemp("damage")
    engine = FakeEngine(folder=folder, gap_wait_s=0.01)
    service = service_of(engine, LimitsConfig(max_tokens=10_000), folder)
    request = service_pb2.CreatePolicyRequest(spec=requests.spec())
    asyncio.run(service.create_policy(request))
    return service


def _damaged(data: bytes, damage: list[tuple[int, int]]) -> bytes:
    damaged = bytearray(data)
    for position, value in damage:
        damaged[position % len(damaged)] = value
    return bytes(damaged)


@settings(max_examples=300, deadline=None)
@given(data=st.sampled_from(GOOD), damage=DAMAGE)
def test_a_damaged_batch_is_taken_or_refused_by_name(
    service: PolicyService, data: bytes, damage: list[tuple[int, int]]
) -> None:
    try:
        request = service_pb2.UpdateRequest.FromString(_damaged(data, damage))
    except DecodeError:
        return
    try:
        asyncio.run(service.update(request))
    except RatoonError as error:
        assert ERROR_TABLE[error.code].grpc != grpc.StatusCode.INTERNAL.name, error
        assert error.field or error.code in ("KEY_REUSED", "UPLOAD_NOT_FOUND"), error


@settings(max_examples=100, deadline=None)
@given(damage=DAMAGE)
def test_a_damaged_spec_is_taken_or_refused_by_name(
    service: PolicyService, damage: list[tuple[int, int]]
) -> None:
    try:
        request = service_pb2.CreatePolicyRequest.FromString(_damaged(SPEC, damage))
    except DecodeError:
        return
    try:
        asyncio.run(service.create_policy(request))
    except RatoonError as error:
        assert error.field.startswith("spec"), error
