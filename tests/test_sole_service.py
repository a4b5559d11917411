"""A second service on the folders or the ports of the first is refused; ports that stay free."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon import sole_service as module
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig, ServeConfig
from ratoon.errors import ErrorCode, RatoonError
from ratoon.sole_service import LOCK_NAME, free_port, is_free, sole_service


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RatoonConfig:
    monkeypatch.setattr(module, "PORT_PATIENCE_S", 0.3)
    return RatoonConfig(
        data_root=tmp_path / "data",
        weights_root=tmp_path / "weights",
        http=HttpConfig(port=free_port()),
        grpc=GrpcConfig(port=free_port()),
        serve=ServeConfig(http_port=free_port()),
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """As Ray Serve's: it would share its port with another of the kind."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        yield taken


def _refusal(config: RatoonConfig) -> RatoonError:
    with pytest.raises(RatoonError) as caught, sole_service(config):
        pass
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return caught.value


@pytest.mark.parametrize("field", ["data_root", "weights_root"])
def test_folders_are_of_one_service_at_a_time(
    config: RatoonConfig, tmp_path: Path, field: str
) -> None:
    other = "weights_root" if field == "data_root" else "data_root"
    second = config.model_copy(update={other: tmp_path / "another"})
    with sole_service(config):
        assert _refusal(second).field == field
    with sole_service(second):
        pass


def test_the_hold_ends_with_its_process(config: RatoonConfig) -> None:
    """Killed, it can clean nothing up."""
    config.data_root.mkdir()
    lock = config.data_root / LOCK_NAME
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    hold += "print('held', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert _refusal(config).field == "data_root"
        holder.kill()
        holder.wait()
    with sole_service(config):
        pass


def test_a_folder_that_cannot_be_made_is_refused_by_its_setting(config: RatoonConfig) -> None:
    """Red before: a traceback of the file system's error."""
    in_a_file = Path(__file__) / "data"
    refused = _refusal(config.model_copy(update={"data_root": in_a_file}))
    assert (refused.field, refused.expected) == ("data_root", "a folder to write to")


@pytest.mark.parametrize("field", ["http.port", "grpc.port", "serve.http_port"])
def test_a_port_that_somebody_listens_on_is_refused(
    config: RatoonConfig, listener: socket.socket, field: str
) -> None:
    section, name = field.split(".")
    port = int(listener.getsockname()[1])
    changed = getattr(config, section).model_copy(update={name: port})
    taken = config.model_copy(update={section: changed})
    assert _refusal(taken).field == field
    listener.close()
    with sole_service(taken):
        pass


def test_a_port_is_waited_for(
    config: RatoonConfig, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose service was killed a moment ago."""
    port = int(listener.getsockname()[1])
    looks: list[bool] = []

    def look(host: str, port: int) -> bool:
        looks.append(is_free(host, port))
        listener.close()
        return looks[-1]

    monkeypatch.setattr(module, "is_free", look)
    taken = config.model_copy(update={"http": HttpConfig(port=port)})
    with sole_service(taken):
        assert looks[:2] == [False, True]


def test_an_address_of_another_machine_is_refused(config: RatoonConfig) -> None:
    away = config.model_copy(update={"http": HttpConfig(host="192.0.2.1", port=8000)})
    assert _refusal(away).field == "http.port"
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


def test_a_port_is_free_and_none_that_the_system_gives() -> None:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        given = int(any_port.getsockname()[1])
    chosen = {free_port() for _ in range(50)}
    assert len(chosen) > 40
    assert max(chosen) < 32_768 <= given
    for port in chosen:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(module, "_LOWEST", port - 99)
        monkeypatch.setattr(module, "_HIGHEST", port)
        assert port not in {free_port() for _ in range(500)}
