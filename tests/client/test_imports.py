"""The client stays light: it lives in samplers, beside other people's pins."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "ray", "ratoon", "ratoon_kernels", "transformers", "safetensors", "fastapi"}


def test_importing_the_client_and_the_command_loads_nothing_heavy():
    code = (
        f"import sys, ratoon_client, ratoon_client.cli;print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_client_that_is_never_closed_lets_the_process_end_quietly():
    code = (
        "import ratoon_client as r\n"
        "client = r.RatoonClient('127.0.0.1:1', timeout_s=0.2)\n"
        "try: client.server_info()\n"
        "except r.TransportError: print('no answer')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no answer\n", "")
