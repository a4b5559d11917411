"""Handles: waiting is reading, so it survives what goes wrong on the way."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import LimitsConfig
from ratoon_client import (
    ClientConfig,
    ImportResult,
    IntegrityError,
    InvalidArgumentError,
    RatoonApiError,
    RatoonClient,
    ResultTimeoutError,
    TransportError,
)
from ratoon_client import operation as operations
from ratoon_proto.v1 import service_pb2
from tests.client.fake_service import CHUNK_BYTES, FakeService, Fault, LostAnswerError, RefusalError
from tests.client.samples import LOSS, OPTIM, one_group


def test_a_result_survives_dropped_long_polls(service: FakeService, client: RatoonClient):
    service.polls_until_done = 4
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.faults = [Fault(name="GetOperation", error=LostAnswerError()) for _ in range(3)]
    step = handle.result()
    assert (step.version, step.report.loss, step.report.seconds.forward) == (1, 0.5, 0.25)
    assert service.calls["GetOperation"] == 3 + 4 + 1
    assert service.calls["Update"] == 1


def test_a_failed_operation_raises_its_error(service: FakeService, client: RatoonClient):
    service.polls_until_done = 1
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.fail(handle.operation_id, RefusalError("WORKER_LOST", retryable=True, worker="w-1"))
    with pytest.raises(RatoonApiError) as caught:
        handle.result()
    assert (caught.value.code, caught.value.retryable) == ("WORKER_LOST", True)
    assert caught.value.details == {"worker": "w-1"}
    state = handle.status()
    assert (state.state, state.error and state.error.code) == ("failed", "WORKER_LOST")


def test_a_cancelled_operation_without_an_error_raises_too(
    service: FakeService, client: RatoonClient
):
    service.polls_until_done = 1
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.cancel(handle.operation_id)
    assert handle.cancel().state == "running"
    with pytest.raises(RatoonApiError, match="is cancelled") as caught:
        handle.result()
    assert caught.value.code == "CANCELLED"
    assert handle.wait().state == "cancelled"


def test_a_wait_that_is_over_says_where_the_operation_is(
    service: FakeService, client: RatoonClient
):
    service.is_holding = True
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    with pytest.raises(ResultTimeoutError, match=r"is running after 0\.2 s"):
        handle.result(0.2)
    with pytest.raises(ResultTimeoutError, match=r"is running after 0\.1 s"):
        handle.result(0.1, progress=True)
    with pytest.raises(TimeoutError):
        handle.result(0.0)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_gap_is_named_and_not_waited_for_again(
    service: FakeService, client: RatoonClient, is_drawn: bool
):
    """It was, until no time was left, and then it was an answer that did not come; where it was
    drawn, for ever.
    """
    service.is_holding = True
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    gap = RefusalError("SEQ_GAP", retryable=True, missing_seq="1")
    waits: list[Callable[[], object]] = [
        lambda: handle.result(progress=is_drawn),
        handle.wait,
        lambda: client.get_operation(handle.operation_id, wait_s=20.0),
    ]
    for wait in waits:
        service.calls.clear()
        service.faults = [Fault(name="GetOperation", error=gap) for _ in range(1000)]
        with pytest.raises(RatoonApiError, match="SEQ_GAP") as caught:
            wait()
        assert (caught.value.retryable, caught.value.details) == (True, {"missing_seq": "1"})
        assert service.calls["GetOperation"] == 1
    service.faults = [Fault(name="WatchOperation", error=gap)]
    with pytest.raises(RatoonApiError, match="SEQ_GAP"):
        list(handle.watch())

    service.faults = []
    service.is_holding = False
    assert handle.result(5.0, progress=is_drawn).version == 1


def test_a_poll_is_longer_than_the_service_waits_behind_a_gap(
    service: FakeService, client: RatoonClient
):
    """A service that counts from each poll would never have waited so long."""
    service.polls_until_done = 1
    client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM).wait()
    (wait_s, *_) = [
        request.wait_s
        for _, request in service.requests
        if isinstance(request, service_pb2.GetOperationRequest)
    ]
    assert LimitsConfig().gap_wait_s < wait_s < LimitsConfig().max_wait_s


@pytest.mark.parametrize("wire", ["http"])
@pytest.mark.parametrize("seconds", [math.nan, -0.1, "1", True, [1.0]])
def test_a_timeout_that_is_none_is_refused(
    service: FakeService, client: RatoonClient, seconds: float
):
    """NaN hung, for no deadline is later than it."""
    service.is_holding = True
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    waits: list[tuple[str, Callable[[], object]]] = [
        ("timeout_s", lambda: handle.result(seconds)),
        ("timeout_s", lambda: handle.result(seconds, progress=True)),
        ("timeout_s", lambda: handle.wait(seconds)),
        ("wait_s", lambda: client.get_operation(handle.operation_id, wait_s=seconds)),
        ("timeout_s", lambda: RatoonClient("127.0.0.1:1", timeout_s=seconds)),
        ("attempt_timeout_s", lambda: RatoonClient("127.0.0.1:1", attempt_timeout_s=seconds)),
        ("timeout_s", lambda: ClientConfig(timeout_s=seconds)),
    ]
    for field, wait in waits:
        with pytest.raises(InvalidArgumentError, match="seconds, 0 or more") as caught:
            wait()
        assert caught.value.field == field


def test_a_deadline_that_no_wire_can_say_is_refused(service: FakeService, client: RatoonClient):
    for seconds in (math.inf, 1e10):
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            RatoonClient("127.0.0.1:1", timeout_s=seconds)
    service.polls_until_done = 1
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    assert handle.result(math.inf).version == 1


def test_a_service_that_stays_away_ends_a_watch(service: FakeService, url: str):
    config = ClientConfig(timeout_s=0.3, attempt_timeout_s=0.3)
    with RatoonClient(url, config=config) as client:
        handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
        service.faults = [Fault(name="WatchOperation", error=LostAnswerError()) for _ in range(99)]
        with pytest.raises(TransportError):
            list(handle.watch())


def test_a_watch_goes_on_after_a_dropped_stream(service: FakeService, client: RatoonClient):
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.polls_until_done = 3
    service.faults = [Fault(name="WatchOperation", error=LostAnswerError(), is_after=True)]
    states = [(state.state, state.progress.micro_batches_done) for state in handle.watch()]
    assert states == [("running", 1), ("running", 1), ("done", 0)]


def test_a_watch_may_be_left_early(service: FakeService, client: RatoonClient):
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.polls_until_done = 10**6
    assert next(iter(handle.watch())).state == "running"
    assert client.health().is_ok


def test_a_watch_of_nothing_is_a_typed_error(service: FakeService, client: RatoonClient):
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.operations.clear()
    with pytest.raises(RatoonApiError, match="OPERATION_NOT_FOUND"):
        list(handle.watch())


def test_the_progress_bar_is_on_standard_error(
    service: FakeService, client: RatoonClient, capsys: pytest.CaptureFixture[str]
):
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    service.polls_until_done = 2
    assert handle.result(progress=True).version == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert "update done" in written.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_wait_is_drawn_on_a_terminal_alone(
    service: FakeService, client: RatoonClient, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(operations, "_LONG_S", 0.0)
    service.is_holding = True
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(handle.result)
        deadline = time.monotonic() + (30.0 if is_terminal else 0.3)
        while "update running" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        service.is_holding = False
        assert ended.result(30.0).version == 1
    assert ("update running" in terminal.getvalue()) == is_terminal
    assert not operations._DRAWING.locked()


def test_forward_gives_one_array_a_rollout(client: RatoonClient):
    handle = client.forward("p", one_group(num_tokens=2))
    assert handle.seq == 0
    assert [array.tolist() for array in handle.result().logprobs] == [[-0.0, -1.0], [-2, -3, -4]]


def test_a_large_forward_is_fetched_in_verified_chunks(service: FakeService, client: RatoonClient):
    service.forward_in_file = True
    groups = one_group(num_tokens=20)
    result = client.forward("p", groups).result()
    flat = [value for array in result.logprobs for value in array.tolist()]
    assert flat == [-float(n) for n in range(41)]
    assert service.calls["FetchWeights"] > 160 // CHUNK_BYTES

    service.tamper = lambda data, offset: bytes(len(data)) if offset else data
    with pytest.raises(IntegrityError, match=f"chunk at {CHUNK_BYTES}"):
        client.forward("p", groups).result()


def test_a_folder_is_imported(service: FakeService, client: RatoonClient):
    """The session gives it a seq; defaults are the service's to complete, but for the mode."""
    session = client.policy("p")
    done = session.import_weights("outer/step-1", expected_version=0).result()
    assert done == ImportResult(
        version=1, num_tensors=3, size_bytes=2**40, dtypes=("BF16", "F32"), digest="0" * 32
    )
    delta = session.import_weights("outer/step-2", mode="delta", reset_optimizer=True)
    operation = delta.wait()
    assert (operation.kind, operation.imported) == ("import_weights", delta.result())
    client.policy("p").import_weights("outer/step-3", seq=3).result()
    first, second, third = (r for name, r in service.requests if name == "ImportWeights")
    assert first == service_pb2.ImportWeightsRequest(
        policy_id="p",
        key=service_pb2.OperationKey(seq=1),
        model_folder="outer/step-1",
        mode=service_pb2.IMPORT_MODE_FULL,
        expected_version=0,
    )
    assert second == service_pb2.ImportWeightsRequest(
        policy_id="p",
        key=service_pb2.OperationKey(seq=2),
        model_folder="outer/step-2",
        mode=service_pb2.IMPORT_MODE_DELTA,
        reset_optimizer=True,
    )
    assert third.key.seq == 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("wire", ["http"])
@pytest.mark.parametrize(
    ("folder", "options", "field"),
    [
        (Path("outer"), {}, "model_folder"),
        ("outer", {"mode": "sum"}, "mode"),
        ("outer", {"expected_version": "new"}, "expected_version"),
    ],
)
def test_what_has_no_form_on_the_wire_is_refused_here(
    service: FakeService, client: RatoonClient, folder: Any, options: dict[str, Any], field: str
):
    with pytest.raises(InvalidArgumentError) as caught:
        client.policy("p").import_weights(folder, **options)
    assert caught.value.field == field
    assert service.calls["ImportWeights"] == 0


def test_the_handle_of_somebody_elses_operation(client: RatoonClient):
    first = client.policy("p").save_checkpoint("c-1")
    result = client.operation(first.operation_id).result()
    assert result == first.result()
    assert client.list_checkpoints("p")[0].size_bytes == 10


def test_a_checkpoint_is_saved_for_a_while_and_deleted(service: FakeService, client: RatoonClient):
    session = client.policy("p")
    session.save_checkpoint("c-1", overwrite=True, ttl_s=60.0, keep_last=3).result()
    session.save_checkpoint(pinned=True).result()
    first, second = [r for name, r in service.requests if name == "SaveCheckpoint"]
    sent: Any = first
    assert (sent.overwrite, sent.pinned, sent.ttl_s, sent.keep_last) == (True, False, 60.0, 3)
    assert second.pinned  # pyright: ignore[reportAttributeAccessIssue]
    assert not second.HasField("ttl_s")
    assert client.release_policy("p").state == "released"
    assert client.delete_checkpoint("p", "c-1").pinned
    with pytest.raises(RatoonApiError) as caught:
        client.delete_checkpoint("p", "c-2")
    assert caught.value.code == "CHECKPOINT_NOT_FOUND"


def test_a_version_is_published_under_a_name_and_deleted(
    service: FakeService, client: RatoonClient
):
    session = client.policy("p")
    named = session.publish_version(name="v-1", ttl_s=60.0).result()
    session.publish_version(name="v-1", overwrite=True).result()
    sent: Any = [r for name, r in service.requests if name == "PublishVersion"]
    assert [(r.name, r.overwrite, r.HasField("ttl_s"), r.key.seq) for r in sent] == [
        ("v-1", False, True, 1),
        ("v-1", True, False, 2),
    ]
    assert (named.name, named.version, named.expires_at) == ("v-1", 3, None)
    assert client.delete_version("p", "v-1") == named
    with pytest.raises(RatoonApiError) as caught:
        client.delete_version("p", "v-2")
    assert caught.value.code == "WEIGHTS_NOT_FOUND"
