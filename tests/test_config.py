"""Variables of the environment: settings, known others, what Kubernetes sets, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from ratoon.cli import cli
from ratoon.config import OTHER_VARIABLES, RatoonConfig, load_config, unknown_variables
from ratoon_client import config as client_config

# Variables of a Service named `ratoon`, and of the one that KubeRay makes for a cluster of that
# name.
OF_KUBERNETES = {
    "RATOON_SERVICE_HOST": "10.0.0.11",
    "RATOON_SERVICE_PORT": "8000",
    "RATOON_SERVICE_PORT_HTTP": "8000",
    "RATOON_PORT": "tcp://10.0.0.11:8000",
    "RATOON_PORT_8000_TCP": "tcp://10.0.0.11:8000",
    "RATOON_PORT_8000_TCP_PROTO": "tcp",
    "RATOON_PORT_8000_TCP_PORT": "8000",
    "RATOON_PORT_8000_TCP_ADDR": "10.0.0.11",
    "RATOON_HEAD_SVC_SERVICE_HOST": "10.0.0.12",
    "RATOON_HEAD_SVC_SERVICE_PORT_GCS_SERVER": "6379",
    "RATOON_HEAD_SVC_PORT": "tcp://10.0.0.12:10001",
    "RATOON_HEAD_SVC_PORT_6379_TCP_ADDR": "10.0.0.12",
}


@pytest.mark.parametrize(
    "name",
    [
        "RATOON_AUHT__REQUIRED",
        "RATOON_AUTH_REQUIRED",
        "RATOON_FOO",
        "RATOON_HTTP_PORT",
        "RATOON_DATA_ROOT__X",
        "ratoon_auht__required",
    ],
)
def test_a_variable_that_is_no_setting_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RATOON_AUHT__REQUIRED=true was passed over, and keys were not asked for."""
    monkeypatch.setenv(name, "s3cret")
    with pytest.raises(ValidationError) as refused:
        load_config(None)
    (error,) = refused.value.errors()
    assert (error["type"], error["loc"]) == ("extra_forbidden", (name,))
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ValidationError, match=name):
        RatoonConfig()


def test_an_unknown_name_inside_of_a_section_is_refused_likewise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RATOON_AUTH__REQUIERD", "true")
    with pytest.raises(ValidationError) as refused:
        load_config(None)
    (error,) = refused.value.errors()
    assert (error["type"], error["loc"]) == ("extra_forbidden", ("auth", "requierd"))


@pytest.mark.parametrize("command", [("doctor",), ("demo",), ("serve",)])
def test_commands_end_with_the_name_of_the_variable(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATOON_AUHT__REQUIRED", "true")
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 2
    said = "RATOON_AUHT__REQUIRED: no such setting; did you mean RATOON_AUTH__REQUIRED?"
    assert done.stderr == f"config: {said}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http: [8000", "expected ',' or ']'"),
        ("- http", "expected names with their values"),
        ("8000: http", "expected names with their values"),
        ("\xe9", "can't decode"),
        ("log_level: verbose", "'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL'"),
        ("http: {prt: 1}", "http.prt: no such setting; did you mean http.port?\n"),
        ("http: {port: 99999}", "http.port: got 99999, expected less than or equal to 65535\n"),
    ],
)
def test_a_file_that_holds_no_settings_is_said(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "ratoon.yaml"
    file.write_bytes(text.encode("latin-1"))
    done = CliRunner().invoke(cli, ["keys", "list", "--config", str(file)])
    assert done.exit_code == 2
    assert done.stderr.startswith("config: ")
    assert said in done.stderr


def test_a_list_in_the_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_HTTP__ALLOWED_HOSTS", '["ratoon"]')
    monkeypatch.setenv("RATOON_LOG_LEVEL", "debug")
    config = load_config(None)
    assert (config.http.allowed_hosts, config.log_level) == (("ratoon",), "DEBUG")
    monkeypatch.setenv("RATOON_HTTP__ALLOWED_HOSTS", "ratoon")
    done = CliRunner().invoke(cli, ["serve"])
    assert done.exit_code == 2
    assert "a list or a section is written as JSON" in done.stderr


def test_variables_of_the_projects_other_parts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {value for name, value in vars(client_config).items() if name.endswith("_VARIABLE")}
    # A setting, which both read.
    assert own - OTHER_VARIABLES == {"RATOON_WEIGHTS_ROOT"}
    for name in own | OTHER_VARIABLES:
        monkeypatch.setenv(name, "x")
    assert load_config(None).weights_root == Path("x")


def test_what_kubernetes_sets_for_services_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_KUBERNETES.items():
        monkeypatch.setenv(name, value)
    config = load_config(None)
    assert config == RatoonConfig()
    assert config.http.port == 8000


def test_the_port_of_a_service_is_told_from_a_setting_by_its_value() -> None:
    """RATOON_HTTP_PORT is what becomes of RATOON_HTTP__PORT, and of a Service `ratoon-http`."""
    assert unknown_variables({"RATOON_HTTP_PORT": "8000"}) == ["RATOON_HTTP_PORT"]
    assert unknown_variables({"RATOON_HTTP_PORT": "tcp://10.0.0.11:8000"}) == []


def test_settings_of_the_environment_pass_and_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_HTTP__PORT", "1234")
    monkeypatch.setenv("RATOON_GRPC", '{"port": 4321}')
    monkeypatch.setenv("ratoon_log_level", "DEBUG")
    config = RatoonConfig(log_level="ERROR")
    assert (config.http.port, config.grpc.port) == (1234, 4321)
    assert config.log_level == "DEBUG"


@pytest.mark.parametrize("device", ["gpu", "cuda:1", "CPU"])
def test_a_device_that_no_worker_could_use_is_refused_at_start(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken, and failed each policy when its worker had started."""
    monkeypatch.setenv("RATOON_WORKER__DEVICE", device)
    with pytest.raises(ValidationError, match="'auto', 'cpu' or 'cuda'"):
        load_config(None)


def test_the_models_root_follows_the_data_root(tmp_path: Path) -> None:
    """It did not: with another `data_root` models were still looked for in the current folder."""
    assert RatoonConfig(data_root=tmp_path).models_folder == tmp_path / "models"
    other = RatoonConfig(data_root=tmp_path, models_root=tmp_path / "other")
    assert other.models_folder == tmp_path / "other"
