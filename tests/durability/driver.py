"""The process that is recorded: one policy's life, and what it promised to whom, as marks.

    python -m tests.durability.driver FOLDER BASE

Enters a folder for the data root and a model folder, leaves files and marks: JSON objects that
`promises.py` reads. Invariant: a mark comes after what it promises was answered, and before
anything else is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from ratoon.auth.keys import KeyFile, Scope, new_key
from ratoon.engine.types import Operation, file_of
from ratoon.stream.files import digest_bytes
from tests.durability.machine import DurableMachine, commands, spec_of
from tests.durability.recorder import mark


def promise(kind: str, **fields: object) -> None:
    mark(json.dumps({"kind": kind, **fields}))


class Caller:
    """All the callers of one service."""

    def __init__(self, root: Path, base: Path) -> None:
        self._root, self._spec = root, spec_of(base)
        self._commands = commands()
        self._abandoned: list[DurableMachine] = []
        self.machine = DurableMachine(root, self._spec, creates=True)
        promise("created")

    async def start(self) -> None:
        await self.machine.start()
        promise("started")
        await self.published()

    async def restart(self, *, closes: bool) -> None:
        """Lose the processes, as a crash would, and start them again."""
        promise("lost")
        await self.machine.abandon(closes=closes)
        # What is not closed is not to be closed by the collector at some other moment.
        self._abandoned.append(self.machine)
        self.machine = DurableMachine(self._root, self._spec, creates=False)
        await self.start()

    async def run(self, *seqs: int) -> None:
        """Ask for all of them, then wait for each."""
        accepted: list[Operation] = []
        for seq in seqs:
            command, number = self._commands[seq]
            operation = await self.machine.submit(seq, command, number)
            promise(
                "accepted",
                seq=seq,
                operation_id=operation.operation_id,
                body=command.body_digest,
            )
            accepted.append(operation)
        for operation in accepted:
            await self.ended(operation)

    async def ended(self, operation: Operation) -> None:
        ended = await self.machine.end(operation)
        promise(
            "ended",
            seq=ended.seq,
            state=ended.state,
            version=getattr(ended.result, "version", None),
            digests=self.machine.training.digests.get(ended.seq),
        )
        file = file_of(ended.result)
        if file is not None:
            operation_id = ended.operation_id
            promise("result", digest=file.digest, operation_id=operation_id, seq=ended.seq)
        await self.published()

    async def published(self) -> None:
        manifest = await self.machine.controller.weight_manifest(None)
        files = {file.name: file.digest for file in manifest.files}
        promise("published", version=manifest.version, files=files)

    async def delete(self, checkpoint_id: str) -> None:
        """Delete a checkpoint that an operation which is not covered has loaded."""
        await self.machine.controller.delete_checkpoint(checkpoint_id)
        promise("deleted", checkpoint_id=checkpoint_id)

    async def unname(self, name: str) -> None:
        """Take a version's name away."""
        await self.machine.controller.delete_version(name)
        promise("unnamed", name=name)

    async def upload(self, upload_id: str, part_index: int, body: bytes) -> None:
        await self.machine.controller.put_upload_part(upload_id, part_index, body)
        promise("uploaded", upload=upload_id, part=part_index, digest=digest_bytes(body))


async def live(root: Path, base: Path) -> None:
    caller = Caller(root, base)
    await caller.start()
    await caller.run(1)
    await caller.run(2, 3, 4, 5, 6, 7)
    keys = KeyFile(root)
    first, _ = new_key(scope=Scope.TRAIN, policies=None, note="", created_at=1.0, expires_at=None)
    keys.add(first)
    promise("key", key_id=first.key_id)
    await caller.upload("u1", 0, b"part 0" * 1000)
    await caller.run(8, 9)
    keys.revoke(first.key_id, 1.0)
    promise("revoked", key_id=first.key_id)
    await caller.upload("u1", 1, b"part 1" * 1000)
    await caller.restart(closes=False)
    await caller.run(10, 11)
    await caller.run(12, 13, 14, 15)
    await caller.run(16, 17)
    await caller.delete("first")
    await caller.run(18)
    await caller.restart(closes=True)
    await caller.run(19, 20)
    await caller.run(21)
    await caller.run(22)
    await caller.run(23, 24, 25)
    await caller.run(26, 27)
    await caller.run(28, 29, 30)
    await caller.run(31)
    await caller.unname("gone")


if __name__ == "__main__":
    folder, base_folder = sys.argv[1:]
    asyncio.run(live(Path(folder) / "data", Path(base_folder)))
    # Nothing is closed: the end is one more crash.
    os._exit(0)
