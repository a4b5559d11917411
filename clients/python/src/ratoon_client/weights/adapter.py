"""What brings a verified version from a local folder to what samples from it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ratoon_proto.types import WeightManifest


class Adapter(Protocol):
    """One engine. A receiver calls one method at a time, and none once it was cancelled."""

    async def tag(self) -> str | None:
        """Another text once the engine has lost what was committed last; None: it cannot tell.

        Raises EngineError where the engine does not answer.
        """
        ...

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        """Serve the version in `folder`; gives the seconds in which nothing was sampled.

        Has ended, one way or the other, when its caller goes on, cancelled or not. Raises
        EngineError where the engine did not take it, and has then loaded `previous` again, the
        folder of the version committed before, as far as it could.
        """
        ...


class FolderAdapter:
    """Readers of the folder follow its `latest`, which a receiver sets after each commit."""

    async def tag(self) -> str | None:
        return "folder"

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        return 0.0
