"""A request is sent again only where that is the same as sending it once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest
from google.protobuf.message import Message

from ratoon_client import ClientConfig, RatoonApiError, RatoonClient, TransportError
from tests.client.conftest import CONFIG, serving
from tests.client.fake_service import FakeService, Fault, LostAnswerError, RefusalError
from tests.client.samples import LOSS, OPTIM, bad_group, one_group


def test_a_read_is_tried_again(service: FakeService, client: RatoonClient):
    service.faults = [Fault(name="GetPolicy", error=LostAnswerError()) for _ in range(3)]
    assert client.get_policy("p").next_seq == 1
    assert service.calls["GetPolicy"] == 4


def test_retried_post_is_no_second_step(service: FakeService, client: RatoonClient):
    """Trap 9, 'Retried POST = a second Adam step': the answer is lost after the step was taken."""
    service.faults = [Fault(name="Update", error=LostAnswerError(), is_after=True)]
    handle = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    assert service.calls["Update"] == 2
    assert (handle.seq, handle.result().version, service.steps) == (1, 1, 1)
    assert len(service.policies["p"].keys) == 1


@pytest.mark.parametrize("name", ["SaveCheckpoint", "DiscardGradients", "UploadPart"])
def test_keyed_calls_are_tried_again(service: FakeService, client: RatoonClient, name: str):
    service.faults = [Fault(name=name, error=LostAnswerError(), is_after=True)]
    session = client.policy("p")
    match name:
        case "SaveCheckpoint":
            session.save_checkpoint().result()
        case "DiscardGradients":
            session.discard_gradients().result()
        case _:
            client.upload_part("p", "u", 0, one_group())
    assert service.calls[name] == 2
    assert len(service.policies["p"].keys) == (0 if name == "UploadPart" else 1)


def test_a_delete_is_never_tried_again(service: FakeService, client: RatoonClient):
    service.faults = [Fault(name="DeletePolicy", error=LostAnswerError(), is_after=True)]
    with pytest.raises(TransportError):
        client.delete_policy("p")
    assert service.calls["DeletePolicy"] == 1


def test_a_health_probe_is_sent_once(service: FakeService, client: RatoonClient):
    service.faults = [Fault(name="Health", error=LostAnswerError())]
    with pytest.raises(TransportError):
        client.health()
    assert client.health().is_ok
    assert service.calls["Health"] == 2


@pytest.mark.parametrize("code", ["INTERNAL", "WINDOW_POISONED", "KEY_REUSED"])
def test_what_the_service_refuses_for_good_is_not_tried_again(
    service: FakeService, client: RatoonClient, code: str
):
    service.faults = [
        Fault(name="Update", error=RefusalError(code, field="key.seq", missing_seq="3"))
    ]
    with pytest.raises(RatoonApiError) as caught:
        client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    error = caught.value
    assert (error.code, error.field, error.retryable) == (code, "key.seq", False)
    assert (error.got, error.expected) == ("what was sent", "something else")
    assert error.details == {"missing_seq": "3"}
    assert service.calls["Update"] == 1


def test_errors_of_validation_name_the_field(client: RatoonClient):
    with pytest.raises(RatoonApiError) as caught:
        client.policy("p").update([*one_group(), *bad_group()], loss=LOSS, optim=OPTIM)
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "groups[1].rollouts")


def test_a_refusal_that_may_pass_is_tried_within_the_timeout(
    service: FakeService, client: RatoonClient, hasty_client: RatoonClient
):
    refusal = RefusalError("UNAVAILABLE", retryable=True, wanted="2", free="1")
    service.faults = [Fault(name="Update", error=refusal) for _ in range(2)]
    client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    assert service.calls["Update"] == 3

    service.faults = [Fault(name="Update", error=refusal) for _ in range(1000)]
    with pytest.raises(RatoonApiError) as caught:
        hasty_client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    assert caught.value.details == {"wanted": "2", "free": "1"}
    assert 5 < service.calls["Update"] < 1000


def test_nobody_there_is_a_transport_error_after_the_timeout(wire: str):
    scheme = "" if wire == "grpc" else "http://"
    with (
        RatoonClient(f"{scheme}127.0.0.1:9", timeout_s=0.3) as client,
        pytest.raises(TransportError, match=r"127\.0\.0\.1:9"),
    ):
        client.list_policies()
    with RatoonClient(f"{scheme}127.0.0.1:9", timeout_s=0.3) as client:
        start = time.monotonic()
        with pytest.raises(TransportError):
            client.weight_manifest("p")
        assert time.monotonic() - start < 10.0


def test_a_service_that_was_never_there_is_asked_about_at_once(wire: str):
    """A minute of silence, then a text about a socket."""
    assert ClientConfig().connect_timeout_s <= 2.0, "with a start of the process: three seconds"
    target, config = f"{wire}://127.0.0.1:9", ClientConfig(connect_timeout_s=0.3)
    with RatoonClient(target, config=config) as client:
        start = time.monotonic()
        for call in (client.list_policies, client.health, lambda: client.weight_manifest("p")):
            with pytest.raises(TransportError) as caught:
                call()
            assert str(caught.value) == (
                f"nothing answers at {target} (Connection refused); is `ratoon serve` running?"
            )
        assert time.monotonic() - start < config.timeout_s / 2


@pytest.mark.parametrize("wire", ["grpc"])
def test_a_service_that_comes_back_is_waited_for(service: FakeService, wire: str):
    """Longer than for one that was never there: the run goes on."""
    with serving(service, wire) as url:
        client = RatoonClient(url, config=ClientConfig(connect_timeout_s=0.1))
        client.get_policy("p")
    with client, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.list_policies)
        time.sleep(0.5)
        assert not asked.done()
        with serving(service, wire, int(url.rpartition(":")[2])):
            assert len(asked.result(60.0)) == 1


def test_a_proxy_without_routes_is_asked_again():
    """Serve's, while the service comes back: its 404 is not in our form."""
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b"Path '/v1/policies' not found." if len(asked) < 3 else b'{"policies": []}'
            self.send_response(404 if len(asked) < 3 else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with RatoonClient(f"http://127.0.0.1:{server.server_port}", timeout_s=20.0) as client:
            assert client.list_policies() == []
        server.shutdown()
    assert len(asked) == 3


def test_a_hung_service_is_left_after_the_attempts_timeout(service: FakeService, url: str):
    with service.lock, RatoonClient(url, timeout_s=0.5, attempt_timeout_s=0.2) as client:
        start = time.monotonic()
        with pytest.raises(TransportError):
            client.get_policy("p")
        assert time.monotonic() - start >= 0.2


def test_reads_that_have_their_turn_are_waited_for(service: FakeService, url: str, root: Path):
    """Behind an update, or a publication, each try ended before the answer."""
    service.publish(1, {"a": b"1"})
    with RatoonClient(url, config=CONFIG) as client:
        client.pull_weights("p", root)
    handle = service.handle

    def late(name: str, request: Message) -> Message:
        time.sleep(0.3)
        return handle(name, request)

    service.handle = late
    service.calls.clear()
    with RatoonClient(url, timeout_s=0.2) as client:
        assert client.weight_manifest("p").version == 1
        assert client.gradient_manifest("p", ["a"]).version == 3
        assert client.sample("p", [1], timeout_s=1.0).version == 7
        assert client.pull_weights("p", root).version == 1
    assert service.calls == {"GetWeightManifest": 2, "GetGradientManifest": 1, "Sample": 1}


def test_a_version_is_waited_for_longer_than_a_try(service: FakeService, url: str):
    """Who had a version before had no more time than for any other call."""
    service.publish(1, {"a": b"1"})
    answer: Any = service._get_weight_manifest

    def written(request: Any) -> Message:
        service.published.wait_for(lambda: service.policies["p"].version == 2)
        return answer(request)

    service._get_weight_manifest = written
    later = Timer(2.5, service.publish, (2, {"a": b"2"}))
    later.start()
    with RatoonClient(url, timeout_s=2.0, attempt_timeout_s=1.5) as client:
        assert client.weight_manifest("p", known_version=1).version == 2
    later.join()


@pytest.mark.parametrize("known_version", [None, 1])
def test_a_version_of_a_hung_service_is_not_waited_for(
    service: FakeService, url: str, known_version: int | None
):
    """It was, for ten minutes, on a connection that nothing came over any more."""
    with service.lock, RatoonClient(url, timeout_s=0.5, attempt_timeout_s=0.2) as client:
        start = time.monotonic()
        with pytest.raises(TransportError):
            client.weight_manifest("p", known_version=known_version)
        assert time.monotonic() - start < 20.0


def test_a_try_waits_as_long_as_the_service_asks(service: FakeService, client: RatoonClient):
    refused = RefusalError("RESOURCE_EXHAUSTED", retryable=True, retry_after_s="1")
    service.faults = [Fault(name="GetPolicy", error=refused)]
    start = time.monotonic()
    assert client.get_policy("p").next_seq == 1
    assert time.monotonic() - start >= 1.0


def test_what_is_exhausted_with_no_time_to_come_back_is_said_at_once(
    service: FakeService, client: RatoonClient
):
    """It was tried again for a minute, which said nothing and freed no GPU."""
    refused = RefusalError("RESOURCE_EXHAUSTED", retryable=True, resource="policies")
    service.faults = [Fault(name="CreatePolicy", error=refused)]
    with pytest.raises(RatoonApiError) as caught:
        client.create_policy("q", preset="tiny")
    assert (caught.value.retryable, caught.value.details) == (True, {"resource": "policies"})
    assert service.calls["CreatePolicy"] == 1


def test_a_wait_past_the_timeout_is_not_begun(service: FakeService, client: RatoonClient):
    refused = RefusalError("RESOURCE_EXHAUSTED", retryable=True, retry_after_s="3600")
    service.faults = [Fault(name="GetPolicy", error=refused)]
    start = time.monotonic()
    with pytest.raises(RatoonApiError) as caught:
        client.get_policy("p")
    assert caught.value.retry_after_s == 3600
    assert time.monotonic() - start < 1.0
