"""The API key of a client: sent with every call, shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon.api.gate import build_gate
from ratoon.auth.keys import Scope
from ratoon.config import AuthConfig, RatoonConfig
from ratoon_client import ClientConfig, InvalidArgumentError, RatoonApiError, RatoonClient
from ratoon_client.cli.app import main
from ratoon_client.config import with_api_key
from tests.api.guarded import make_key
from tests.client.real_wires import serving_wires

KEY = f"ratoon_{'1' * 12}_{'2' * 64}"


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_key_opens_every_kind_of_call(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RATOON_API_KEY", raising=False)
    gate = build_gate(RatoonConfig(data_root=tmp_path / "data", auth=AuthConfig(required=True)))
    admin, reader = (make_key(tmp_path / "data", scope) for scope in (Scope.ADMIN, Scope.READ))
    with serving_wires(tmp_path, gate=gate) as service:
        url = service.url(wire)
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
    said = capsys.readouterr().err
    assert "UNAUTHENTICATED" in said
    assert "RATOON_API_KEY or --api-key-file" in said
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
