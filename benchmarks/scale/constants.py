"""Inputs of the simulation of many GPUs: models, GPUs, and constants with their sources.

Of a constant `kind` says how far to trust it: `measured` is in a committed result file, `noted` was
measured on two H100 and has no file, `cited` is a data sheet's or another project's, `default` is a
server's setting, `assumed` is none of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.step.run import FULL
from benchmarks.step.workload import (
    PEAK_FLOPS,
    QWEN3_8B,
    QWEN3_30B_A3B,
    ModelSize,
    RoutedSize,
    sizes_of,
)
from harness.environment import ROOT
from ratoon.config import LimitsConfig
from ratoon.planner.activation_plan import DecoderSizes
from ratoon.planner.device_costs import H200_RATES

GIB = 2**30
NODE = 8
# Bytes that torch reports, rounded down.
GPU_BYTES = {"H100": int(79.0 * GIB), "H200": int(139.5 * GIB)}
_RESULTS = "benchmarks/results/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as the simulation sees it."""

    size: ModelSize

    @property
    def num_parameters(self) -> int:
        """All of them, embedding, head, routers and experts that a token does not pass included."""
        size, other = self.size, 0
        if isinstance(size, RoutedSize):
            own, visited = 3 * size.hidden_size * size.intermediate_size, size.experts_per_token
            other = own * (size.num_experts - visited) // visited
        embeddings = 2 * size.vocab_size * size.hidden_size
        return size.layer_parameters + size.num_layers * other + embeddings

    @property
    def sizes(self) -> DecoderSizes:
        """Sizes that decide the activations' bytes."""
        return sizes_of(self.size)


MODELS = (
    Model(size=QWEN3_8B),
    Model(size=QWEN3_30B_A3B),
    Model(
        size=ModelSize(
            name="Llama-3.1-70B", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8,
            head_dim=128, intermediate_size=28_672, vocab_size=128_256, ties_embeddings=False,
        ),
    ),
    Model(
        size=RoutedSize(
            name="Qwen3-235B-A22B", num_layers=94, hidden_size=4096, num_heads=64, num_kv_heads=4,
            head_dim=128, intermediate_size=8 * 1536, vocab_size=151_936, ties_embeddings=False,
            num_experts=128, experts_per_token=8,
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A value that the simulation computes with, and where it is from."""

    name: str
    value: float
    unit: str
    kind: str
    source: str


Values = Mapping[str, float]


def constants(planning: Mapping[str, Any]) -> list[Constant]:
    """All of them; `planning` is what `main.time_planning` measured."""
    step, experts, start, streams, floor = (
        json.loads((ROOT / _RESULTS / name).read_text(encoding="utf-8"))
        for name in (
            *("h200/step.json", "h200/experts.json", "h200/start.json"),
            *("h100/streams.json", "cpu/floor.json"),
        )
    )
    paper = next(row for row in step["paper"] if row["how"] == "cuda")
    update = next(row for row in step["updates"] if row["case"] == "grpo Qwen3-8B")
    parameters_8b = MODELS[0].num_parameters
    first = start["starts"]["warm"]["first_update"]
    waves = next(row for row in step["paper"] if row["how"] == "cuda-waves-of-8")
    written_s = streams["visible_s"] - streams["trainer_stall_s"]
    log_lengths = np.log(FULL.paper.responses)

    def measured(name: str, value: float, unit: str, source: str) -> Constant:
        return Constant(name=name, value=value, unit=unit, kind="measured", source=source)

    def noted(name: str, value: float, unit: str, source: str) -> Constant:
        return Constant(name=name, value=value, unit=unit, kind="noted", source=source)

    def cited(name: str, value: float, unit: str, source: str) -> Constant:
        return Constant(name=name, value=value, unit=unit, kind="cited", source=source)

    def assumed(name: str, value: float, unit: str, source: str) -> Constant:
        return Constant(name=name, value=value, unit=unit, kind="assumed", source=source)

    def chosen(name: str, value: float, unit: str, source: str) -> Constant:
        return Constant(name=name, value=value, unit=unit, kind="default", source=source)

    limits = LimitsConfig()
    own = "cpu/scale.json, `planning`: CPU time of one thread"
    return [
        measured("mfu", paper["hardware_mfu"], "of the peak",
                 "h200/step.json, `paper`, `cuda`: Qwen3-8B; assumed of 70B"),
        measured("mfu_experts", experts["hardware_mfu"], "of the peak",
                 "h200/experts.json: 16 layers of Qwen3-30B-A3B; assumed of all, and of 235B"),
        measured("streamed", waves["seconds"] / paper["seconds"] - 1, "of forward and backward",
                 "h200/step.json, `paper`: `cuda-waves-of-8` over `cuda`, less 1"),
        cited("peak", PEAK_FLOPS / 1e12, "TFLOP/s", "data sheet of H100 and H200, bf16"),
        measured("step_ms", 1e12 * update["optimizer_s"] / parameters_8b, "ms per 1e9 parameters",
                 "h200/step.json, `updates`, grpo Qwen3-8B, `bf16_8bit`"),
        measured("plan_ms", 1e3 * first["plan_s"], "ms per group",
                 "h200/start.json, warm: one group, on that machine's CPU"),
        measured("decode_ms", planning["decode_ms"], "ms per group", f"{own}: a body into arrays"),
        measured("deal_ms", planning["deal_ms"], "ms per group", f"{own}: longest first"),
        measured("body_mb", planning["body_bytes"] / 1e6, "MB per group",
                 "cpu/scale.json, `planning`: a journaled body"),
        measured("call_ms", floor["overhead_ms"], "ms per update",
                 "cpu/floor.json: a call, three transactions; on a CPU"),
        measured("write", streams["version_gb"] / written_s, "GB/s per process",
                 "h100/streams.json: 8B written into memory, once it is on the host"),
        noted("all_to_all", 254, "GB/s per GPU", "two H100, NVLink, 256 MiB; assumed of 8"),
        noted("all_gather", 230, "GB/s per GPU", "two H100, NVLink, 256 MiB; assumed of 8"),
        cited("between", 43, "GB/s per GPU",
              "DeepEP's README: dispatch over 2 nodes, NDR 400 Gb/s (50 GB/s); not measured here"),
        assumed("message_us", 2, "us per message",
                "what a rank needs to post one message to a peer in another node"),
        assumed("hop_us", 5, "us per hop", "one step of a ring of an all-gather"),
        assumed("status_us", 50, "us per message", "one small message over TCP at the leader"),
        cited("ray_ms", 0.1, "ms per call",
              "Ray enhancement 31: 400 actors called in turn with 10 bytes take 40.5 ms"),
        assumed("storage", 5, "GB/s per node", "a shared folder or an object store"),
        measured("to_host", 2 * parameters_8b / first["publish_s"] / 1e9, "GB/s per GPU",
                 "h200/start.json, warm: 8B into pinned memory"),
        cited("hbm", H200_RATES.memory_bytes / 1e12, "TB/s",
              "data sheet of the H200, less what is not reached (`planner/device_costs.py`)"),
        cited("collectives", 3.3, "GB per GPU",
              "NVIDIA/nccl issue 1685: the first all-to-all of 8 H100; pooled between nodes"),
        assumed("bucket", 256 * 2**20 / 1e6, "MB", "a message of Z1 and Z2; Z3's are layers"),
        assumed("backward", 2 / 3, "of a micro-batch", "what a reduction can hide behind"),
        measured("prompt", FULL.paper.prompt, "tokens", "the recorded group"),
        measured("responses", len(FULL.paper.responses), "per group", "the recorded group"),
        measured("response", float(np.mean(FULL.paper.responses)), "tokens, mean",
                 "the recorded group"),
        measured("spread", float(log_lengths.std()), "of the logarithm",
                 "responses of the recorded group"),
        assumed("group_spread", 0.4, "of the logarithm",
                "prompts differ in how long their responses are"),
        chosen("max_tokens", limits.max_tokens, "tokens per call", "`limits.max_tokens`"),
        chosen("max_sequences", limits.max_sequences, "rollouts per call",
               "`limits.max_sequences`"),
        assumed("longest", 8192, "tokens", "a sampler's limit; longer draws are cut"),
    ]  # fmt: skip
