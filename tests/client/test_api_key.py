"""The API key of a client: sent with every call, shown nowhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.service import PolicyService
from ratoon.auth.keys import Scope
from ratoon.config import LimitsConfig
from ratoon_client import ClientConfig, InvalidArgumentError, RatoonApiError, RatoonClient
from ratoon_client.cli.app import main
from ratoon_client.config import with_api_key
from tests.api.fake_engine import FakeEngine
from tests.api.guarded import Guarded, guarded_service

KEY = f"ratoon_{'1' * 12}_{'2' * 64}"


@contextmanager
def _on_thread(folder: Path) -> Iterator[tuple[Guarded, dict[str, str]]]:
    """The real wires, asking for keys, over a fake engine; addresses by wire."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready: Future[Any] = Future()
    over = asyncio.Event()

    async def serve() -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.safetensors").write_bytes(b"0123456789")
        engine = FakeEngine(folder=folder / "weights", gap_wait_s=0.1)
        engine.add_file(b"0123456789")
        service = PolicyService(
            engine=engine,
            limits=LimitsConfig(),
            defaults=SpecDefaults(models_root=folder, micro_batch_tokens=4096),
            device="cpu",
        )
        async with guarded_service(service, LimitsConfig(), folder / "data") as guarded:
            config = uvicorn.Config(guarded.app, port=0, log_level="error", lifespan="off")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            async with asyncio.timeout(20):
                while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            urls = {"http": f"http://127.0.0.1:{port}", "grpc": f"grpc://{guarded.address}"}
            ready.set_result((guarded, urls))
            await over.wait()
            server.should_exit = True
            await serving

    served = asyncio.run_coroutine_threadsafe(serve(), loop)
    try:
        yield ready.result(20)
    finally:
        loop.call_soon_threadsafe(over.set)
        served.result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_key_opens_every_kind_of_call(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RATOON_API_KEY", raising=False)
    with _on_thread(tmp_path) as (guarded, urls):
        admin, reader = guarded.key(Scope.ADMIN), guarded.key(Scope.READ)
        url = urls[wire]
        with RatoonClient(url) as client:
            assert client.health().is_ok
            with pytest.raises(RatoonApiError) as refused:
                client.list_policies()
        assert (refused.value.code, refused.value.retryable) == ("UNAUTHENTICATED", False)
        with RatoonClient(url, api_key=admin) as client:
            created = client.create_policy("p", preset="tiny")
            assert [change.state for change in created.watch()][-1] == "done"
            client.weight_manifest("p")
            client.pull_weights("p", tmp_path / "pulled")
        with (
            RatoonClient(url, config=ClientConfig(api_key=reader)) as client,
            pytest.raises(RatoonApiError) as refused,
        ):
            client.delete_policy("p")
        assert refused.value.code == "PERMISSION_DENIED"
        _check_command_line(url, admin, tmp_path, monkeypatch, capsys)


def _check_command_line(
    url: str,
    key: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """ratoonctl without a key, with a file, with the environment."""
    file = folder / "key"
    file.write_text(f"{key}\n")
    (folder / "empty").write_text("")
    listing = ("--url", url, "policies", "list")
    assert _status(*listing) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err
    assert _status("--api-key-file", str(file), *listing) == 0
    assert _status("--api-key-file", str(folder / "empty"), *listing) == 2
    monkeypatch.setenv("RATOON_API_KEY", key)
    assert _status(*listing) == 0
    written = capsys.readouterr()
    assert key[-60:] not in written.out + written.err


def _status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_the_nearest_key_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_API_KEY", "environment")
    own = ClientConfig(api_key="own")
    assert with_api_key(own, "given").authorization == "Bearer given"
    assert with_api_key(own, None).authorization == "Bearer own"
    assert with_api_key(ClientConfig(), None).authorization == "Bearer environment"
    monkeypatch.delenv("RATOON_API_KEY")
    assert with_api_key(ClientConfig(), None).authorization == ""


@pytest.mark.parametrize("key", [f"{KEY} {KEY}", f"{KEY}\r\nX: y", f"{KEY}é"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RatoonClient("127.0.0.1:1", api_key=key)
    assert caught.value.field == "api_key"
    assert KEY[-60:] not in f"{caught.value} {caught.value.got}"


def test_a_config_does_not_show_its_key() -> None:
    assert KEY not in repr(ClientConfig(api_key=KEY))


@pytest.mark.parametrize(
    "target",
    [
        "http://trainer.example:8000", "grpc://10.1.2.3:8443", "10.1.2.3:8443", "http://[fd00::1]:80",
        "http://localhost.example", "http://localhost@trainer.example",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_of_environment", [True, False])
def test_a_key_is_not_sent_in_plain_text(
    monkeypatch: pytest.MonkeyPatch, target: str, is_of_environment: bool
) -> None:
    """It went out readable to whoever is in between, and nothing said so."""
    if is_of_environment:
        monkeypatch.setenv("RATOON_API_KEY", KEY)
    key = None if is_of_environment else KEY
    with pytest.raises(InvalidArgumentError, match="plain text") as caught:
        RatoonClient(target, api_key=key)
    assert KEY not in str(caught.value)
    # By name it may: where something else encrypts, as a mesh of services does.
    RatoonClient(target, api_key=key, config=ClientConfig(plain_text_key=True)).close()
    monkeypatch.setenv("RATOON_PLAIN_TEXT_KEY", "1")
    RatoonClient(target, api_key=key).close()


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost:8000", "127.0.0.1:1", "grpc://[::1]:8443", "http://127.9.9.9",
        "unix:/run/ratoon.sock", "https://trainer.example", "grpcs://10.1.2.3:8443",
    ],
)  # fmt: skip
def test_a_key_may_go_to_this_machine_and_over_tls(target: str) -> None:
    RatoonClient(target, api_key=KEY).close()


def test_without_a_key_plain_text_is_the_callers_own_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RATOON_API_KEY", raising=False)
    RatoonClient("http://trainer.example:8000").close()
