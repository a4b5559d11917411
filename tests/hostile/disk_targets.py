"""Targets that read files: of a disk that may be damaged, or of a caller's.

In: an empty folder. Out: what takes one hostile file, as `Target` says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file, save_file

from ratoon.engine.files.results import read_old_logprobs, write_forward_output
from ratoon.model.folder import ModelFolder
from ratoon.model.loader import read_model
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.stream.files import seal_bytes, seal_document, unseal_document
from ratoon.stream.object_store import decode_manifest, encode_manifest
from ratoon.stream.versions import MANIFEST_NAME, publish_version, read_manifest, version_folder
from ratoon.train import checkpoint, imported, saved_state
from ratoon.train.optim.state import OptimizerState
from ratoon.train.spec import OptimizerStates
from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_proto.types import FullTuning, WeightFile, WeightKind
from tests import builders
from tests.hostile.mutate import mutated_bytes, mutated_json
from tests.stream.samples import NAME, flipped, safetensors
from tests.tiny_models import write_folder

_ZEROS = "0" * 32


def bad_files(folder: Path) -> Callable[[random.Random], None]:
    """Results, manifests of weights and of blobs: what the server reads of its own disk."""
    root = folder / "files"
    (root / "results").mkdir(parents=True)
    batch = builders.random_batch(np.random.default_rng(0), num_groups=2)
    logprobs = np.zeros(len(batch.response_tokens), np.float32)
    digest, _ = write_forward_output(
        root / "results", "p.7", batch, logprobs, logprobs, is_reference=False
    )
    keys = root / "results" / f"{digest}.7"

    def write(version: Path) -> dict[str, str]:
        (version / "model").write_bytes(b"weights")
        return {}

    publish_version(root / "weights", "p", 0, WeightKind.FULL, write, 1.5)
    manifest = version_folder(root / "weights", 0) / MANIFEST_NAME
    whole = {path: path.read_bytes() for path in (keys, keys.with_suffix(""), manifest)}
    listing = encode_manifest([WeightFile(name="a", size_bytes=1, digest=_ZEROS)])

    def take(dice: random.Random) -> None:
        path = dice.choice([*whole, None])
        if path is None:
            decode_manifest("key", mutated_bytes(dice, [listing]))
            return
        path.write_bytes(mutated_bytes(dice, [whole[path]]))
        try:
            if path == manifest:
                read_manifest(root / "weights", 0)
            else:
                read_old_logprobs(keys, batch)
        finally:
            path.write_bytes(whole[path])

    return take


def bad_deltas(folder: Path) -> Callable[[random.Random], None]:
    """Deltas whose header has the right seal, so that its reader has to say no."""
    root = folder / "delta"
    old = bytes(range(200)) * 40
    new = flipped(flipped(old, 2, range(0, 3000, 7), 0), 2, [3999], 1)
    for version, data in enumerate((old, new)):
        content = safetensors([("BF16", data)])

        def write(version: Path, content: bytes = content) -> dict[str, str]:
            (version / NAME).write_bytes(content)
            return {}

        publish_version(root, "p", version, WeightKind.FULL, write, 1.5, deltas=True)
    (offered,) = read_manifest(root, 1).deltas
    path, parent = version_folder(root, 1) / offered.file.name, version_folder(root, 0) / NAME
    whole = path.read_bytes()
    place = len(whole) - 8 - int.from_bytes(whole[-8:], "little")
    payload, header = whole[:place], json.loads(whole[place:-24])
    digest, made = header["files"][0]["digest"], root / "made"

    def take(dice: random.Random) -> None:
        data, text = payload, json.dumps(header).encode()
        if dice.random() < 0.5:
            # The length must not change, or the streams are not looked at.
            data = mutated_bytes(dice, [payload])[:place].ljust(place, b"\0")
        else:
            text = mutated_json(dice, [header])
        sealed = seal_bytes(text)
        path.write_bytes(data + sealed + len(sealed).to_bytes(8, "little"))
        for file in read_delta(path):
            if file.digest == digest:
                rebuild(file, parent, made)
                assert made.read_bytes() == (version_folder(root, 1) / NAME).read_bytes()

    return take


def bad_checkpoints(folder: Path) -> Callable[[random.Random], None]:
    """Safetensors whose digests are right, so that the parser itself has to say no."""
    model = ModelSpec(
        base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0
    )
    state = OptimizerState(
        kind=OptimizerStates.FP32,
        weights={"a": torch.ones(3, 2)},
        weight_remainder={},
        exp_avg={"a": torch.zeros(3, 2)},
        exp_avg_sq={"a": torch.zeros(3, 2)},
        exp_avg_scale={},
        exp_avg_sq_scale={},
        num_steps=1,
    )
    saved = folder / "checkpoint"
    snapshot = checkpoint.Snapshot(
        write_files=lambda temporary: [checkpoint.write_states(temporary, state, 0, 1)],
        kind=state.kind,
        num_steps=state.num_steps,
        model=model,
        version=1,
        digest=_ZEROS,
    )
    snapshot.write(saved)
    path, listing = saved / checkpoint.states_name(0, 1), saved / saved_state.MANIFEST_NAME
    whole, right = path.read_bytes(), listing.read_bytes()

    def take(dice: random.Random) -> None:
        if dice.random() < 0.3:
            listing.write_bytes(mutated_bytes(dice, [right]))
        else:
            data = mutated_bytes(dice, [whole])
            path.write_bytes(data)
            fields = unseal_document(right)
            fields["files"][0] |= {
                "size_bytes": len(data),
                "digest": xxhash.xxh3_128_hexdigest(data),
            }
            listing.write_bytes(seal_document(fields))
        try:
            manifest = checkpoint.read_manifest(saved, state.kind, model)
            checkpoint.read_states(saved, manifest, state)
        finally:
            path.write_bytes(whole)
            listing.write_bytes(right)

    return take


def bad_imports(folder: Path) -> Callable[[random.Random], None]:
    """A folder of weights that a caller names."""
    base = FolderBase(folder=str(write_folder(folder / "base", "qwen3")))
    spec = ModelSpec(base=base, tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0)
    model = read_model(spec).place(torch.device("cpu"))
    path = Path(base.folder) / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    whole = path.read_bytes()

    def take(dice: random.Random) -> None:
        path.write_bytes(mutated_bytes(dice, [whole]))
        imported.read_weights(model, ModelFolder.of(path.parent), "")

    return take
