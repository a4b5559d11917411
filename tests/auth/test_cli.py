"""`ratoon keys`, `ratoon health` and the help of all commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import ratoon
from ratoon.auth.keys import KeyFile, Scope, is_secret_of, split_key
from ratoon.cli import cli, main
from ratoon.config import KeyLimits
from ratoon.edge.tls import CertificateFiles
from ratoon.sole_service import free_port
from tests.certificates import make_authority
from tests.client.real_wires import serving_wires


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_DATA_ROOT", str(tmp_path))


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *arguments])


def test_a_created_key_is_shown_once_and_works(tmp_path: Path) -> None:
    options = ("--policy", "b", "--policy", "a", "--expires-days", "2", "--note", "[red]x")
    made = _run("create", "--scope", "train", "--scope", "read:rollouts", *options)
    assert made.exit_code == 0
    pair = split_key(made.stdout.strip())
    assert pair is not None
    key = KeyFile(tmp_path).keys()[pair[0]]
    assert is_secret_of(pair[1], key)
    assert (key.scope, key.policies, key.note) == (Scope.TRAIN, ("a", "b"), "[red]x")
    assert key.expires_at == pytest.approx(key.created_at + 2 * 86_400)
    assert key.reads_rollouts
    listed = _run("list")
    assert key.key_id in listed.stdout
    assert "train, read:rollouts" in listed.stdout
    assert "[red]x" in listed.stdout
    assert pair[1] not in listed.output
    assert pair[1] not in made.stderr


def test_a_revoked_key_is_listed_as_such(tmp_path: Path) -> None:
    made = _run("create", "--scope", "admin")
    (key_id,) = KeyFile(tmp_path).keys()
    assert _run("revoke", key_id).exit_code == 0
    assert "revoked" in _run("list").stdout
    lines = (tmp_path / "access" / "audit.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [(entry["call"], entry["key_id"]) for entry in entries] == [
        ("keys.create", key_id),
        ("keys.revoke", key_id),
    ]
    assert made.stdout.strip()[-64:] not in "".join(lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ["create"],
        ["create", "--scope", "root"],
        ["create", "--scope", "read", "--policy", "../x"],
        ["create", "--scope", "read", "--rate", "0"],
        ["revoke", "absent"],
    ],
)
def test_wrong_arguments_exit_2_and_make_nothing(tmp_path: Path, arguments: list[str]) -> None:
    assert _run(*arguments).exit_code == 2
    assert KeyFile(tmp_path).keys() == {}


def test_a_damaged_file_of_keys_is_said(tmp_path: Path) -> None:
    (tmp_path / "access").mkdir()
    (tmp_path / "access" / "keys.json").write_text("{")
    listed = _run("list")
    assert listed.exit_code == 2
    assert "the API keys cannot be read" in listed.stderr


def test_limits_are_kept_and_listed(tmp_path: Path) -> None:
    options = ("--rate", "2.5", "--burst", "9", "--tokens-per-day", "1000")
    assert _run("create", "--scope", "train", *options).exit_code == 0
    (key,) = KeyFile(tmp_path).keys().values()
    assert key.limits == KeyLimits(requests_per_second=2.5, burst=9, tokens_per_day=1000)
    assert "requests_per_second 2.5, burst 9, tokens_per_day 1000" in _run("list").stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--expires-days", "-1"),
        ("--rate", "0"),
        ("--burst", "0"),
        ("--tokens-per-minute", "0"),
        ("--tokens-per-hour", "0"),
        ("--tokens-per-day", "x"),
        ("--max-open-operations", "0"),
        ("--max-queued-bytes", "1"),
        ("--config", "/nowhere/ratoon.yaml"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_option(
    tmp_path: Path, option: str, value: str
) -> None:
    """A limit had no range: it was refused by the name of a setting."""
    done = _run("create", "--scope", "read", option, value)
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.stderr
    assert KeyFile(tmp_path).keys() == {}


def test_the_version_is_said() -> None:
    done = CliRunner().invoke(cli, ["--version"])
    assert done.exit_code == 0
    version = re.escape(ratoon.__version__)
    assert re.fullmatch(rf"ratoon {version}( \([0-9a-f]{{12}}.*\))?\n", done.stdout)


def _health(port: int, monkeypatch: pytest.MonkeyPatch, files: CertificateFiles | None) -> int:
    monkeypatch.setenv("RATOON_HTTP__PORT", str(port))
    # As the image binds.
    monkeypatch.setenv("RATOON_HTTP__HOST", "0.0.0.0")
    if files is not None:
        monkeypatch.setenv("RATOON_TLS__CERT_FILE", str(files.cert))
        monkeypatch.setenv("RATOON_TLS__KEY_FILE", str(files.key))
        if files.client_ca is not None:
            monkeypatch.setenv("RATOON_TLS__CLIENT_CA_FILE", str(files.client_ca))
    return CliRunner().invoke(cli, ["health"]).exit_code


@pytest.mark.parametrize("asks_clients", [False, True])
def test_a_service_with_tls_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_clients: bool
) -> None:
    """The image asked in plain text: a container with TLS was never healthy."""
    cert, key, client_ca = (tmp_path / name for name in ("cert.pem", "key.pem", "clients.pem"))
    make_authority("servers").issue(cert, key, "ratoon.example", addresses=())
    client_ca.write_bytes(make_authority("clients").pem)
    files = CertificateFiles(cert=cert, key=key, client_ca=client_ca if asks_clients else None)
    with serving_wires(tmp_path, files=files) as service:
        assert _health(service.port("http"), monkeypatch, files) == 0
        # What speaks no TLS is not this service.
        assert _health(service.port("http") + 1, monkeypatch, files) == 1


def test_nobody_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _health(free_port(), monkeypatch, None) == 1


def test_a_flag_shows_no_type(capsys: pytest.CaptureFixture[str]) -> None:
    for each in ([], ["serve"], ["keys", "create"]):
        with pytest.raises(SystemExit) as ended:
            main([*each, "--help"])
        shown = capsys.readouterr().out
        assert (ended.value.code, "--help" in shown, "bool>" in shown) == (0, True, False)
