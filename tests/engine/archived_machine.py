"""A machine whose bodies and checkpoints have copies in a store that may be away."""

from __future__ import annotations

import shutil
from pathlib import Path

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.files.archive import ArchivedBodyFiles, BlobArchive
from ratoon.engine.policy.controller import Controller
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import Recovery
from tests.engine.fake_trainer import Faults
from tests.engine.harness import Machine, policy_spec
from tests.engine.local_ports import LocalWorker
from tests.stream.local_store import LocalStore

OFTEN = CheckpointConfig(every_operations=3, every_s=0, every_bytes=0)


class Store(LocalStore):
    """Object store that may be unreachable."""

    is_away = False
    num_asked = 0

    @property
    def path(self) -> Path:
        return self._root

    def put(self, key: str, data: bytes) -> None:
        self._ask()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._ask()
        super().delete(key)

    def put_folder(self, key: str, source: Path) -> None:
        self._ask()
        super().put_folder(key, source)

    def get(self, key: str, digest: str) -> bytes:
        self._ask()
        return super().get(key, digest)

    def get_folder(self, key: str, target: Path) -> None:
        self._ask()
        super().get_folder(key, target)

    def names(self, key: str) -> tuple[str, ...]:
        self._ask()
        return super().names(key)

    def folder_names(self, key: str) -> tuple[str, ...]:
        self._ask()
        return super().folder_names(key)

    def remove_leftovers(self, key: str) -> None:
        self._ask()
        super().remove_leftovers(key)

    def _ask(self) -> None:
        self.num_asked += 1
        if self.is_away:
            raise RatoonError(ErrorCode.UNAVAILABLE, "the object store is away")


class ArchivedMachine(Machine):
    """A machine whose disk may be lost, and a store that is not."""

    def __init__(
        self,
        root: Path,
        store: Store,
        url: str,
        checkpoints: CheckpointConfig = OFTEN,
        **changes: object,
    ) -> None:
        self.store = store
        spec = policy_spec(**{"recovery": Recovery.REPLAY, **changes})
        super().__init__(root, spec, LimitsConfig(), url, checkpoints=checkpoints)

    def _controller(self) -> Controller:
        super()._controller()
        archive = BlobArchive(self.store, self.paths)
        self.run.archive, self.run.bodies = archive, ArchivedBodyFiles(self.paths, archive)
        return Controller(self.run)

    async def lose_disk(self) -> None:
        """Another machine takes over, with the journal and the store, and nothing else."""
        # What writes there would go on here, on the disk of the other machine.
        await self.landed()
        shutil.rmtree(self.paths.root)
        self.worker = LocalWorker(Faults())
        self.worker.reach = self.crashes.reach
        await self.restart_controller()
