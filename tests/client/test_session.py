"""Seqs of one producer: contiguous, and taken only by what was accepted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from ratoon_client import (
    AsyncRatoonClient,
    InvalidArgumentError,
    PolicySession,
    RatoonApiError,
    RatoonClient,
    TransportError,
    sender,
)
from ratoon_proto.v1 import policy_pb2
from tests.client.conftest import CONFIG
from tests.client.fake_service import FakeService, Fault, LostAnswerError
from tests.client.samples import LOSS, OPTIM, bad_group, one_group


@pytest.fixture
def wire() -> str:
    """Keys are the same over both wires."""
    return "grpc"


def test_calls_of_many_threads_take_contiguous_seqs(service: FakeService, client: RatoonClient):
    session = client.policy("p")

    def update(number: int) -> int:
        return session.update(one_group(f"g{number}"), loss=LOSS, optim=OPTIM).seq

    with ThreadPoolExecutor(8) as pool:
        seqs = list(pool.map(update, range(24)))
    assert sorted(seqs) == list(range(1, 25))
    assert sorted(service.policies["p"].keys) == list(range(1, 25))
    assert service.calls["GetPolicy"] == 1
    assert session.next_seq() == 25


def test_a_call_refused_at_validation_takes_no_seq(client: RatoonClient):
    session = client.policy("p")
    assert session.update(one_group("a"), loss=LOSS, optim=OPTIM).seq == 1
    with pytest.raises(RatoonApiError):
        session.update(bad_group(), loss=LOSS, optim=OPTIM)
    assert session.next_seq() == 2
    assert session.discard_gradients().seq == 2


def test_a_session_that_consumes_counts_what_is_refused(client: RatoonClient):
    session = client.policy("p", consume=True)
    refused = session.update(bad_group(), loss=LOSS, optim=OPTIM)
    assert refused.seq == 1
    with pytest.raises(RatoonApiError) as caught:
        refused.result()
    assert caught.value.code == "INVALID_ARGUMENT"
    assert session.discard_gradients().seq == 2


def test_a_session_starts_where_the_policy_is(service: FakeService, client: RatoonClient):
    service.policies["p"].next_seq = 41
    session = client.policy("p")
    assert session.forward_backward(one_group(), loss=LOSS).seq == 41
    assert session.optim_step(optim=OPTIM).seq == 42


def test_a_seq_given_by_the_caller_is_used_and_leaves_no_gap(client: RatoonClient):
    """Calls after one far ahead went behind the gap."""
    session = client.policy("p")
    assert session.discard_gradients(seq=3).seq == 3
    assert [session.discard_gradients().seq for _ in range(3)] == [1, 2, 4]
    assert session.discard_gradients(seq=1).seq == 1
    assert session.discard_gradients(seq=5).seq == 5
    assert session.next_seq() == 6


def test_a_seq_that_another_has_taken_is_an_error_that_helps(client: RatoonClient):
    session = client.policy("p")
    session.next_seq()
    client.policy("p").discard_gradients(seq=1)
    with pytest.raises(RatoonApiError, match=r"KEY_REUSED: .*resync\(\)") as caught:
        session.update(one_group(), loss=LOSS, optim=OPTIM)
    assert (caught.value.code, caught.value.field) == ("KEY_REUSED", "key.seq")
    session.resync()
    assert session.update(one_group(), loss=LOSS, optim=OPTIM).seq == 2
    with pytest.raises(RatoonApiError) as own:
        session.discard_gradients(seq=2)
    assert "resync" not in str(own.value)


def test_after_a_lost_answer_the_same_call_is_the_same_operation(
    service: FakeService, hasty_client: RatoonClient
):
    session = hasty_client.policy("p")
    session.next_seq()
    _update_without_an_answer(service, session)
    with pytest.raises(RatoonApiError, match="KEY_REUSED"):
        session.update(one_group("b"), loss=LOSS, optim=OPTIM)
    assert session.update(one_group("a"), loss=LOSS, optim=OPTIM).seq == 1
    assert (service.steps, session.next_seq()) == (1, 2)


def _update_without_an_answer(service: FakeService, session: PolicySession) -> None:
    """Group `a`; the service has taken it."""
    with _lost_answers(service, "Update"), pytest.raises(TransportError):
        session.update(one_group("a"), loss=LOSS, optim=OPTIM)


@contextmanager
def _lost_answers(service: FakeService, name: str) -> Iterator[None]:
    """Calls of the block are taken, and not answered."""
    lost = Fault(name=name, error=LostAnswerError(), is_after=True)
    service.faults = [lost for _ in range(1000)]
    yield
    service.faults = []


def test_resync_asks_the_service(client: RatoonClient):
    session = client.policy("p")
    assert session.next_seq() == 1
    client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM, seq=1)
    assert session.resync() == 2


def test_under_server_sequencing_each_call_has_its_own_request_id(
    service: FakeService, client: RatoonClient
):
    service.policies["p"].sequencing = policy_pb2.SEQUENCING_SERVER
    session = client.policy("p")
    seqs = [session.update(one_group(), loss=LOSS, optim=OPTIM).seq for _ in range(3)]
    assert seqs == [1, 2, 3]
    keys = list(service.policies["p"].keys)
    assert len(set(keys)) == 3
    assert all(isinstance(key, str) and len(key) == 32 for key in keys)
    assert session.next_seq() == 0


def test_a_request_id_of_the_callers_own_is_the_key(service: FakeService, client: RatoonClient):
    """A call with a key of its own asks the service for nothing first."""
    service.policies["p"].sequencing = policy_pb2.SEQUENCING_SERVER
    session = client.policy("p")
    first = session.update(one_group(), loss=LOSS, optim=OPTIM, request_id="mine")
    again = session.update(one_group(), loss=LOSS, optim=OPTIM, request_id="mine")
    assert (again.operation_id, again.seq) == (first.operation_id, first.seq)
    assert list(service.policies["p"].keys) == ["mine"]
    assert service.calls["GetPolicy"] == 0
    with pytest.raises(InvalidArgumentError, match="one of them"):
        session.discard_gradients(seq=2, request_id="x")


def test_a_request_is_hashed_beside_the_event_loop(
    service: FakeService, client: RatoonClient, monkeypatch: pytest.MonkeyPatch
):
    """64 MiB were serialised and hashed on it, and all other calls stood still."""
    threads: list[str] = []

    def said(*call: Any) -> object:
        threads.append(threading.current_thread().name)
        return original(*call)

    original = sender._said
    monkeypatch.setattr(sender, "_said", said)
    service.policies["p"].sequencing = policy_pb2.SEQUENCING_SERVER
    client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    assert len(threads) == 1
    assert threads[0] not in ("ratoon-client", threading.current_thread().name)


@pytest.mark.parametrize("is_large", [False, True])
def test_under_server_sequencing_too_a_call_again_is_the_same_operation(
    service: FakeService, url: str, is_large: bool
):
    """It had a new request_id, and was a second step."""
    config = replace(CONFIG, timeout_s=0.5, upload_above_bytes=1 if is_large else 2**20)
    service.policies["p"].sequencing = policy_pb2.SEQUENCING_SERVER
    with RatoonClient(url, config=config) as client:
        session = client.policy("p")
        session.next_seq()
        _update_without_an_answer(service, session)
        assert session.update(one_group("a"), loss=LOSS, optim=OPTIM).seq == 1
        assert service.steps == 1
        # It was answered: the same once more is another step, as a caller may want.
        assert session.update(one_group("a"), loss=LOSS, optim=OPTIM).seq == 2
        with pytest.raises(RatoonApiError):
            session.update(bad_group(), loss=LOSS, optim=OPTIM)
        assert session.update(one_group("b"), loss=LOSS, optim=OPTIM).seq == 3


def test_an_optim_step_after_other_calls_is_another_step(service: FakeService, url: str):
    """It was the one that was not answered: a step less, and its gradients went into the next."""
    service.policies["p"].sequencing = policy_pb2.SEQUENCING_SERVER
    with RatoonClient(url, config=replace(CONFIG, timeout_s=0.5)) as client:
        session = client.policy("p")
        session.forward_backward(one_group("a"), loss=LOSS)
        with _lost_answers(service, "OptimStep"), pytest.raises(TransportError):
            session.optim_step(optim=OPTIM)
        # Again, with nothing in between, it is the same step.
        with _lost_answers(service, "OptimStep"), pytest.raises(TransportError):
            session.optim_step(optim=OPTIM)
        with _lost_answers(service, "Update"), pytest.raises(TransportError):
            session.update(one_group("c"), loss=LOSS, optim=OPTIM)
        assert service.steps == 2
        session.forward_backward(one_group("b"), loss=LOSS)
        assert session.optim_step(optim=OPTIM).seq == 5
        assert service.steps == 3
        # What has a batch says itself which call it is, whatever other threads have sent since.
        assert session.update(one_group("c"), loss=LOSS, optim=OPTIM).seq == 3
        assert service.steps == 3


async def test_tasks_of_one_loop_share_a_session(url: str):
    async with AsyncRatoonClient(url, config=CONFIG) as client:
        session = client.policy("p")
        handles = await asyncio.gather(
            *(session.update(one_group(f"g{n}"), loss=LOSS, optim=OPTIM) for n in range(10))
        )
        assert sorted(handle.seq for handle in handles) == list(range(1, 11))
        assert (await handles[0].result()).report.num_groups == 1
