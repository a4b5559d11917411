"""Compiles for a model before its first policy: for an image, or for a data root.

What is compiled depends on the model's geometry, its adapter and the kind of GPU, and not on values
of weights. A worker of the same finds it in `data_root/compiled`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.kernels import CompileCache
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.layers import most_tokens
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import AdamWConfig, FullTuning, LoraTuning

DEVICE = "cuda:0"


def warm(
    settings: EngineSettings,
    folder: Path,
    tuning: FullTuning | LoraTuning,
    *,
    deterministic: bool,
    tokens: Sequence[int],
) -> Iterator[tuple[int, float]]:
    """Compile for micro-batches of each of these numbers of packed tokens, on one GPU.

    Yields each number with the seconds that it took, once it is compiled. Raises `RatoonError`:
    UNSUPPORTED without a GPU, RESOURCE_EXHAUSTED for more tokens than it has room for, and what a
    creation of the policy raises.
    """
    if not torch.cuda.is_available():
        raise RatoonError(
            ErrorCode.UNSUPPORTED, "no GPU: layers of a CPU's policies run uncompiled"
        )
    cache = CompileCache.of_device(settings.compiled, DEVICE)
    spec = TrainerSpec(
        model=ModelSpec(
            base=FolderBase(folder=str(folder.resolve())),
            tuning=tuning,
            dtype=ModelDtype.BFLOAT16,
            seed=0,
        ),
        optimizer=AdamWConfig(),
        deterministic=deterministic,
        micro_batch_tokens=None,
        keep_reference=False,
        attention_backend="",
        device=DEVICE,
        num_threads=max(1, settings.num_threads),
        optimizer_states=settings.optimizer_states,
        host_activation_bytes=settings.host_activation_bytes,
        models_root=settings.models_root,
    )
    trainer = Trainer.create(spec, rates_folder=settings.compiled)
    # The next digest of a state is compiled, too.
    trainer.state_digest()
    for each in tokens:
        started = time.perf_counter()
        trainer.warm_up(each)
        cache.keep(trainer, {most_tokens(each): each})
        yield each, time.perf_counter() - started
