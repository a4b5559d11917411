"""Ports that stay free until they are used."""

from __future__ import annotations

import socket

import pytest

from ratoon import sole_service as ports
from ratoon.sole_service import free_port


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
        monkeypatch.setattr(ports, "_LOWEST", port - 99)
        monkeypatch.setattr(ports, "_HIGHEST", port)
        assert port not in {free_port() for _ in range(500)}


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
