"""TRL, which `make env-trl` installs beside .venv, for the tests that compare with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[1] / ".venv-trl"
NEEDS_TRL = pytest.mark.skipif(
    not (SITE / "trl").is_dir(), reason="TRL is not installed: make env-trl"
)


@contextmanager
def trl_on_path() -> Iterator[None]:
    """TRL behind everything else, for a while: torch and transformers are those of .venv, and what
    Ray starts for other tests does not see its packages."""
    sys.path.append(str(SITE))
    try:
        yield
    finally:
        sys.path.remove(str(SITE))


def write_model(folder: Path) -> Path:
    """A model of two layers with the presets' tokenizer; many tokens end a completion, so that
    lengths differ and some are not truncated."""
    from ratoon.model.presets import byte_tokenizer
    from tests.tiny_models import write_folder

    write_folder(folder, "llama", vocab_size=260)
    byte_tokenizer().save_pretrained(folder)
    ends = {"eos_token_id": [258, *range(40)], "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def grpo_config(output: Path, **changes: Any) -> Any:
    """A GRPOConfig of one step on this machine's CPU, of 16 completions in two micro-batches."""
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    return GRPOConfig(output_dir=str(output), **(settings | changes))
