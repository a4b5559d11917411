#!/usr/bin/env python3
"""Writes the table of docs/what-fits.md by the formulas that the service plans by.

    python scripts/what_fits.py            # prints it
    python scripts/what_fits.py --write    # into the page

Models are built without weights; nothing is measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Parameter
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.released_models import RELEASED, released
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.families import family_of
from ratoon.model.loader import placed_bytes
from ratoon.model.lora import attach_adapter
from ratoon.model.policy_model import decoder_sizes, muon_matrices, names_by_layer
from ratoon.planner.activation_plan import DecoderSizes
from ratoon.planner.device_costs import token_limits
from ratoon.shards.parts import NO_MATRICES, Matrices
from ratoon.train.numerics import plannable_bytes
from ratoon.train.ranks.layout import Layout, choose_layout, needed_bytes
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import AdamWConfig, LoraTuning, MuonConfig, Shard

PAGE = Path(__file__).parents[1] / "docs" / "what-fits.md"
BEGIN = "<!-- what fits: written by scripts/what_fits.py -->"
END = "<!-- end of what fits -->"
BEGIN_TOGETHER = "<!-- what fits together: written by scripts/what_fits.py -->"
END_TOGETHER = "<!-- end of what fits together -->"
GIB = 2**30
# By the memory that torch reports of them, rounded down.
GPUS = {"24 GB": 23.5, "48 GB": 44.0, "80 GB": 79.0, "141 GB": 139.5}
LORA_RANK = 32
# Several of a kind, for models that one is not enough for.
RANKS = (2, 4, 8, 16)
# GPUs of a node, over which weights are shared.
NODE = 8
RANKS_GPUS = ("80 GB", "141 GB")
RANKS_MODELS = (
    *("Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B"),
    "Qwen3.5-35B-A3B",
)
# It fits nowhere in these tables.
TOO_LARGE = "GLM-4.5-Air"
STATES = (
    OptimizerStates.BF16_SPLIT,
    OptimizerStates.BF16_SPLIT_8BIT,
    OptimizerStates.BF16_8BIT,
)
# GPUs that run one micro-batch together, and what is shown of them.
GROUPS = (1, 2, 4, 8)
TOGETHER = ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B")
NOTHING = "–"
# Fewer are no use.
LEAST_TOKENS = 1024


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, *, ties: bool = False) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, intermediate_size=mlp, tie_word_embeddings=ties,
    )  # fmt: skip


MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, ties=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, ties=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, ties=True),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=14_336, tie_word_embeddings=False,
    ),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12_288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 17_408),
    "Qwen3-32B": _qwen3(5120, 64, 64, 25_600),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768,
        head_dim=128,  # pyright: ignore[reportCallIssue] - taken, and not in its signature
        num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False,
    ),
    **{name: released(name) for name in RELEASED if name != TOO_LARGE},
}  # fmt: skip


def table() -> list[str]:
    """The lines between the page's marks."""
    lines = ["| model | kept | " + " | ".join(GPUS) + " |", "|---|---|" + "---:|" * len(GPUS)]
    for name, config in MODELS.items():
        for kept, cells in _rows(config):
            lines.append(f"| {name} | {kept} | {' | '.join(cells)} |")
    heads = [
        f"{count} x {gpu}" if count <= NODE else f"{count // NODE} x {NODE} x {gpu}"
        for gpu in RANKS_GPUS
        for count in RANKS
    ]
    lines += ["", "Several GPUs, by what they shard:", ""]
    lines += ["| model | shard | " + " | ".join(heads) + " |", "|---|---|" + "---:|" * len(heads)]
    for name in RANKS_MODELS:
        for shard, cells in _rows_of_ranks(_without_weights(MODELS[name])):
            lines.append(f"| {name} | `{shard}` | {' | '.join(cells)} |")
    return lines


def _rows_of_ranks(module: PreTrainedModel) -> Iterator[tuple[str, list[str]]]:
    """What is shared out, and a cell for each number of GPUs; what is taken by itself is bold."""
    trained, sizes = _trained(module), decoder_sizes(module)
    layers = names_by_layer(module, trained)
    weights = {
        count: {
            each: placed_bytes(
                module,
                min(count, NODE) if each is Shard.WEIGHTS else 1,
                num_nodes=max(1, count // NODE),
            )
            for each in Shard
        }
        for count in RANKS
    }

    def layout(gpu: str, count: int, shards: Iterable[Shard]) -> Layout | None:
        held = {shard: weights[count][shard] for shard in shards}
        try:
            return choose_layout(trained, layers, held, _total(gpu), num_ranks=count)
        except RatoonError:
            return None

    def cell(gpu: str, count: int, shard: Shard) -> str:
        own = layout(gpu, count, [shard])
        if own is None:
            return NOTHING
        needed = needed_bytes(trained, own[0], count, shard, layers)
        room = _cell(sizes, weights[count][shard] + needed, gpu)
        is_taken = own == layout(gpu, count, Shard) and room != NOTHING
        return f"**{room}**" if is_taken else room

    for shard in Shard:
        yield shard, [cell(gpu, count, shard) for gpu in RANKS_GPUS for count in RANKS]


def table_together() -> list[str]:
    """The same of the other table: several GPUs, each with its share of states and of tokens."""
    head = " | ".join(f"{gpu} x {size}" for gpu in ("80 GB", "141 GB") for size in GROUPS)
    lines = [f"| model | kept | {head} |", "|---|---|" + "---:|" * 2 * len(GROUPS)]
    kind = OptimizerStates.BF16_SPLIT_8BIT
    for name in TOGETHER:
        module = _without_weights(MODELS[name])
        trained, weight_bytes = _trained(module), placed_bytes(module)
        cells = [
            _cell(
                decoder_sizes(module).over(size),
                weight_bytes + needed_bytes(trained, kind, size),
                gpu,
            )
            for gpu in ("80 GB", "141 GB")
            for size in GROUPS
        ]
        lines.append(f"| {name} | `{kind}` | {' | '.join(cells)} |")
    return lines


def _rows(config: PreTrainedConfig) -> Iterator[tuple[str, list[str]]]:
    """What is kept, and a cell for each GPU; what `auto` takes is bold."""
    module = _without_weights(config)
    trained, weight_bytes = _trained(module), placed_bytes(module)
    sizes = decoder_sizes(module)
    by_muon = muon_matrices(AdamWConfig(muon=MuonConfig()), module, trained)
    # Muon keeps one moment of a matrix, which saves most where moments are float32.
    for matrices, by, kinds in ((NO_MATRICES, "", STATES), (by_muon, ", Muon", STATES[:1])):
        chosen = {gpu: _chosen(trained, weight_bytes, gpu, matrices) for gpu in GPUS}
        for kind in kinds:
            allocated = weight_bytes + needed_bytes(trained, kind, matrices=matrices)
            cells = {gpu: _cell(sizes, allocated, gpu) for gpu in GPUS}
            bold = {gpu for gpu, cell in cells.items() if chosen[gpu] is kind and cell != NOTHING}
            yield f"`{kind}`{by}", [f"**{c}**" if gpu in bold else c for gpu, c in cells.items()]
    of_attention: list[str] = []
    if sizes.experts.is_routed:
        of_attention = _lora_cells(config, tuple(family_of(config).adapted))
        yield "LoRA of attention", of_attention
    try:
        everywhere = _lora_cells(config, ())
    except RatoonError as error:
        # No adapter reaches dense layers or a shared expert beside routed ones.
        assert error.code is ErrorCode.UNSUPPORTED
    else:
        if everywhere != of_attention:
            yield "LoRA", everywhere


def _lora_cells(config: PreTrainedConfig, targets: tuple[str, ...]) -> list[str]:
    module = _without_weights(config)
    tuning = LoraTuning(rank=LORA_RANK, alpha=LORA_RANK, target_modules=targets)
    with torch.device("meta"):
        attach_adapter(module, tuning, "")
    # The adapter is part of the module.
    allocated = placed_bytes(module) + needed_bytes(_trained(module), OptimizerStates.BF16_SPLIT)
    return [_cell(decoder_sizes(module), allocated, gpu) for gpu in GPUS]


def _chosen(
    trained: dict[str, Parameter], weight_bytes: int, gpu: str, matrices: Matrices
) -> OptimizerStates | None:
    """What `auto` takes; None: nothing."""
    held = {Shard.STATES: weight_bytes}
    try:
        return choose_layout(trained, [], held, _total(gpu), matrices=matrices)[0]
    except RatoonError:
        return None


def _total(gpu: str) -> int:
    return int(GPUS[gpu] * GIB)


def _cell(sizes: DecoderSizes, allocated_bytes: int, gpu: str) -> str:
    """Packed tokens of a micro-batch that runs at once / that are held at a time in stages."""
    budget = plannable_bytes(_total(gpu), allocated_bytes)
    limits = token_limits(sizes, budget, host_bytes=0)
    if limits.streamed < LEAST_TOKENS:
        return NOTHING
    return f"{limits.at_once // 1000}K / {limits.streamed // 1000}K"


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)


def _trained(module: PreTrainedModel) -> dict[str, Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def main() -> None:
    tables = ((BEGIN, table(), END), (BEGIN_TOGETHER, table_together(), END_TOGETHER))
    page = PAGE.read_text(encoding="utf-8")
    for begin, lines, end in tables:
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end)[1]}"
        if "--write" not in sys.argv[1:]:
            print("\n".join(lines))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
