"""`ratoonctl` in the process of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratoon_client.cli import main


class Ctl:
    """Runs `ratoonctl` in this process."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str], timeout_s: float = 2) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._capsys = capsys

    def __call__(self, *arguments: str, url: str | None = None) -> tuple[int, str, str]:
        """(exit status, standard output, standard error)."""
        with pytest.raises(SystemExit) as caught:
            main(["--url", url or self._url, "--timeout-s", str(self._timeout_s), *arguments])
        written = self._capsys.readouterr()
        status = caught.value.code
        return (int(status) if status else 0), written.out, written.err

    def json(self, *arguments: str) -> Any:
        status, out, _ = self("--json", *arguments)
        assert status == 0
        return json.loads(out)
