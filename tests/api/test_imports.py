"""What each process of the service imports: less is a quicker start, and less memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH = ("torch", "transformers", "ratoon_kernels", "peft")
DATABASE = ("sqlalchemy", "alembic", "psycopg")
SERVER = ("fastapi", "uvicorn", "ray.serve")
OURS = ("ratoon_client",)


@pytest.mark.parametrize(
    "steps",
    [
        (
            # Who looks an actor up imports its module; then the gateway, a replica of Serve and the
            # command, and at last the engine itself, on SQLite.
            ("ratoon.api.gateway", (*TORCH, *DATABASE, *SERVER, *OURS)),
            ("ratoon.cluster.bootstrap", (*TORCH, *DATABASE, *SERVER, *OURS)),
            ("ratoon.cluster.worker_process", (*TORCH, *DATABASE, *SERVER, *OURS)),
            ("ratoon.api.edges", (*TORCH, *DATABASE, "ray.serve", *OURS)),
            ("ratoon.app", (*TORCH, *DATABASE, *OURS)),
        ),
        (("ratoon.cluster.ray_cluster", (*TORCH, "psycopg", *SERVER, *OURS)),),
        # What the worker's constructor imports.
        (("ratoon.engine.worker.worker, ratoon.train.trainer", (*DATABASE, *SERVER, *OURS)),),
    ],
    ids=["edges", "engine", "worker"],
)
def test_a_process_imports_what_it_uses(steps: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """A process of its own imports the modules, one after the other: this one may have any."""
    code = "import sys\n" + "".join(
        f"import {modules}\nprint([name for name in {without} if name in sys.modules])\n"
        for modules, without in steps
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout.split("\n") == [*["[]"] * len(steps), ""]
