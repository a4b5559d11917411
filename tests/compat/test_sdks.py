"""SDKs of the Tinker API, oldest to newest, against the real service: docs/tinker-compat.md.

`make compat` writes the page anew; without it the page must be what is found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.tinker_site import SITES, VERSIONS, are_installed, environment
from ratoon_client import RatoonClient
from tests.running_service import Service

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
PAGE = ROOT / "docs" / "tinker-compat.md"
FOLDERS = [SITES / f"tinker-{version}" for version in VERSIONS]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.more,
    pytest.mark.skipif(
        not are_installed(FOLDERS),
        reason="SDKs of the Tinker API are not installed: make env-compat",
    ),
]
HEAD = """# SDKs of the Tinker API

What became of each call of five versions of the SDK, made to a running service with URL and key
alone. `make compat` makes the calls and writes this page.

- **served**: with the result that the call asks for.
- **refused**: with an error that the SDK raises; the second table has its text.
- **ignored**: accepted, and without an effect.
- **absent**: this SDK has no such call.
"""
# Every SDK imports torch, which takes seconds: each has a process forked from one that has it.
START = """
import os, runpy, sys, torch
driver, base_model, *sites = sys.argv[1:]
for site in sites:
    if process := os.fork():
        if os.waitpid(process, 0)[1]:
            sys.exit(f"with {site}")
    else:
        sys.path.insert(0, site)
        sys.argv = [driver, base_model]
        runpy.run_path(driver, run_name="__main__")
        break
"""


def test_calls_of_every_sdk(service: Service, pytestconfig: pytest.Config) -> None:
    found = dict[str, dict[str, str]](zip(VERSIONS, _calls(service), strict=True))
    for version, calls in found.items():
        assert not [call for call in calls.items() if call[1].startswith("fails")], version
    page = _page(found)
    if pytestconfig.getoption("--write-golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


def _calls(service: Service) -> list[dict[str, str]]:
    """What the driver tells with each SDK. All models are tenants of one process until the end."""
    with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
        others = {policy.spec.policy_id for policy in client.list_policies()}
        try:
            done = subprocess.run(
                [sys.executable, "-c", START, str(DRIVER), "tiny", *map(str, FOLDERS)],
                env=environment(service.addresses.http),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        finally:
            for policy in client.list_policies():
                if policy.spec.policy_id not in others:
                    client.delete_policy(policy.spec.policy_id)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _page(found: dict[str, dict[str, str]]) -> str:
    names = dict.fromkeys(name for calls in reversed(found.values()) for name in calls)
    lines = [HEAD, "| call | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    texts: dict[str, str] = {}
    for name in names:
        cells: list[str] = []
        for calls in found.values():
            outcome, _, text = calls.get(name, "absent").partition(": ")
            cells.append(outcome)
            if text:
                texts[name] = _anonymous(text)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", "| refused | text, of the newest SDK that has the call |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in texts.items()]
    return "\n".join(lines) + "\n"


def _anonymous(text: str) -> str:
    """The text in one line of a table, without what differs from run to run."""
    text = re.sub(r"[0-9a-f]{12}-[0-9a-f]{16}", "SESSION", text)
    # An SDK adds what it asked with.
    text = text.partition(" for self.request_id")[0]
    return " ".join(text.replace("|", "/").split())[:200]
