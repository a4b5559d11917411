"""Reads of the open window's gradient sums, each at a moment between two turns.

Nothing changes by one: it is not journaled, and a worker that is lost meanwhile fails it.
"""

from __future__ import annotations

import asyncio

from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.worker.tasks import GradientRequest
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import GradientManifest, WeightFile

_FILE_NAME = "gradients.safetensors"


class GradientReads:
    """Those that wait, by names; the same names, such as a retry's, are read once."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run
        self._waiting: dict[tuple[str, ...], asyncio.Future[GradientManifest]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def ask(self, names: tuple[str, ...]) -> asyncio.Future[GradientManifest]:
        """The manifest once it is read; callers may share it. Raises as `_read`."""
        if names not in self._waiting:
            self._waiting[names] = asyncio.get_running_loop().create_future()
        return self._waiting[names]

    async def run_next(self) -> None:
        """Read what waits the longest. Propagates what no caller is to blame for."""
        names, future = next(iter(self._waiting.items()))
        del self._waiting[names]
        try:
            future.set_result(await self._read(names))
        except RatoonError as error:
            future.set_exception(error)
        except BaseException:
            lost = "the worker was lost; ask again"
            future.set_exception(RatoonError(ErrorCode.WORKER_LOST, lost))
            raise

    def end(self, error: RatoonError) -> None:
        """Fail all that wait."""
        for future in self._waiting.values():
            future.set_exception(error)
        self._waiting.clear()

    async def _read(self, names: tuple[str, ...]) -> GradientManifest:
        """Raises WINDOW_EMPTY, WINDOW_POISONED, and as the worker's `write_gradients`."""
        run = self._run
        seqs = run.window.select(())
        request = GradientRequest(
            names=names,
            folder=str(run.paths.results),
            max_bytes=run.limits.max_gradient_bytes,
            min_free_disk_bytes=run.limits.min_free_disk_bytes,
        )
        written = await run.ports.worker.write_gradients(run.token, request)
        return GradientManifest(
            policy_id=run.policy_id,
            version=run.version,
            file=WeightFile(name=_FILE_NAME, size_bytes=written.size_bytes, digest=written.digest),
            seqs=seqs,
            trained_tokens=written.counters.tokens,
            num_sequences=written.counters.sequences,
            num_groups=written.counters.groups,
        )
