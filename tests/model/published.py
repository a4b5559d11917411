"""Versions that copies of a model's weights write, and the deltas between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ratoon.model.delta_runs import DeltaPart
from ratoon.model.export import WeightsCopy
from ratoon.model.policy_model import PolicyModel
from ratoon.stream.deltas import join_delta, write_delta
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import WeightFile, WeightKind


def change(model: PolicyModel, share: float, seed: int) -> None:
    """Change about this share of each parameter's values, by a step of their dtype or a draw."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.named_trainable().values():
        flat = parameter.detach().view(-1)
        is_changed = torch.rand(len(flat), generator=generator) < share
        step = torch.randint(-1, 2, flat.shape, generator=generator)
        is_drawn = (is_changed & (step == 0)).to(flat.device)
        words = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
        words += (step * is_changed).to(words)
        flat.copy_(torch.where(is_drawn, 1.5 * flat, flat))


class Published:
    """Versions that a policy's ranks write to folders, and the deltas between them."""

    def __init__(self, root: Path, copies: Sequence[WeightsCopy]) -> None:
        self.root, self.copies = root, copies
        self.manifests: list[WeightManifest] = []

    def folder(self, version: int) -> Path:
        return self.root / str(version)

    def take(self) -> WeightManifest:
        """Take and write the next version."""
        for copy in self.copies:
            copy.take()
        return self.write()

    def write(self) -> WeightManifest:
        """Write what was taken."""
        folder = self.folder(len(self.manifests))
        folder.mkdir()
        digests = {n: d for copy in self.copies for n, d in copy.write(folder).items()}
        manifest = WeightManifest(
            policy_id="p",
            version=len(self.manifests),
            kind=WeightKind.FULL,
            files=tuple(
                WeightFile(name=n, size_bytes=(folder / n).stat().st_size, digest=digests[n])
                for n in sorted(digests)
            ),
            created_at=0.0,
        )
        self.manifests.append(manifest)
        return manifest

    def parts(self, parent: WeightManifest) -> list[tuple[DeltaPart, dict[str, str]] | None]:
        digests = {file.name: file.digest for file in parent.files}
        return [
            copy.write_delta(self.root / f"part-{rank}", digests)
            for rank, copy in enumerate(self.copies)
        ]

    def check(self) -> tuple[bytes, float | None]:
        """The copies' delta of the last two versions, once it is known to be that of the files, and
        the share that has changed."""
        parent, newest = self.manifests[-2:]
        made = [each for each in self.parts(parent) if each is not None]
        assert len(made) == len(self.copies)
        digests = {name: digest for _, own in made for name, digest in own.items()}
        changed = {file.name: file.digest for file in newest.files if file not in parent.files}
        assert changed.items() <= digests.items()
        assert digests.items() <= {(file.name, file.digest) for file in newest.files}
        found, path = [part for part, _ in made], self.root / "delta"
        before, after = (self.folder(each.version) for each in (parent, newest))
        share = join_delta(path, before, parent, newest.files, found)
        expected = self.root / "of-files"
        assert share == write_delta(expected, before, parent, after, newest.files)
        assert path.exists() == expected.exists()
        assert not list(self.root.glob("part-*"))
        data = path.read_bytes() if path.exists() else b""
        assert data == (expected.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
        expected.unlink(missing_ok=True)
        return data, share
