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
    ("modules", "without"),
    [
        # The command, a replica of Serve and the gateway.
        ("ratoon.app", (*TORCH, *DATABASE, *OURS)),
        ("ratoon.api.build", (*TORCH, *DATABASE, *SERVER, *OURS)),
        ("ratoon.api.grpc.wiring", (*TORCH, *DATABASE, *SERVER, *OURS)),
        # How others reach the engine, and the engine a worker.
        ("ratoon.cluster.ray_worker", (*TORCH, *DATABASE, *SERVER, *OURS)),
        # Who looks an actor up imports its module.
        ("ratoon.cluster.engine_actor", (*TORCH, *DATABASE, *SERVER, *OURS)),
        ("ratoon.cluster.worker_process", (*TORCH, *DATABASE, *SERVER, *OURS)),
        # The engine itself, on SQLite.
        ("ratoon.cluster.ray_cluster", (*TORCH, "psycopg", *SERVER, *OURS)),
        # What the worker's constructor imports.
        ("ratoon.engine.worker.worker, ratoon.train.trainer", (*DATABASE, *SERVER, *OURS)),
    ],
)
def test_a_process_imports_what_it_uses(modules: str, without: tuple[str, ...]) -> None:
    """In a process of its own: this one may have imported anything."""
    code = f"import sys, {modules}; print([name for name in {without} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout.strip() == "[]"
