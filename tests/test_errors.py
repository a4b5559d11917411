"""What a caller is told of an exception that is not typed."""

from __future__ import annotations

import pytest

from ratoon.engine.refusals import unexpected
from ratoon.errors import ErrorCode, described

ROOT = "/srv/ratoon-data/policies/a"
TEXTS = {
    f"no file {ROOT}/bodies/0a": "no file 0a",
    f"[Errno 2] No such file or directory: '{ROOT}/x.bin'": (
        "[Errno 2] No such file or directory: 'x.bin'"
    ),
    f'cannot read "{ROOT}/x" (as {ROOT}/y:3)': 'cannot read "x" (as y:3)',
    f"{ROOT}/x -> {ROOT}/y": "x -> y",
    "/x": "x",
    "6.0 / 2, a/b, ./c and ../d": "6.0 / 2, a/b, ./c and ../d",
    "https://host/v1/x and grpc://host:1/y": "https://host/v1/x and grpc://host:1/y",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_servers_folders_are_in_no_text(text: str):
    """An INTERNAL error quoted an OSError, and with it where the service keeps its files."""
    assert described(RuntimeError(text)) == f"RuntimeError: {TEXTS[text]}"


def test_an_unexpected_error_of_a_file_names_the_file_alone():
    error = unexpected(FileNotFoundError(2, "No such file or directory", f"{ROOT}/x.bin"))
    assert error.code is ErrorCode.INTERNAL
    assert error.message == "FileNotFoundError: [Errno 2] No such file or directory: 'x.bin'"
    assert ROOT not in unexpected(MemoryError(f"{ROOT}/x")).message
