"""Contents of the step benchmark: models, groups and cases, full size on a GPU, tiny on a CPU.

A case's name says its shape, and stands for the same rollouts in every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.forests import PAPER_LENGTHS
from benchmarks.step.subjects import Way, build_module
from benchmarks.step.varlen import FA2
from benchmarks.step.workload import QWEN3_1_7B, QWEN3_8B, TINY, AnySize, CutGroup, Group, ModelSize
from ratoon.planner.device_costs import H200_RATES, KNOWN_RATES, DeviceRates
from ratoon.train.numerics import device_model

Row = dict[str, Any]
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of the models and shapes of the rollouts, by section.

    Attributes:
        dtype: For weights, activations and gradients.
        packed: Backends for packed rollouts, ours first.
        replicated: Backend for replicated rollouts.
        cuts: Sequences per replicated micro-batch to try; the fastest is used.
        waves: Responses per wave of the recorded group, streamed.
        model: For `paper`, `memory` and `profile`.
        paper: The recorded group.
        table2: (P, N) of `table2`; responses are the first N of the recorded group.
        memory: Prompts of the sweep, ascending; its N; and its R.
        activations: The group whose activation peak is compared.
        many: The group of many responses, run in waves of `many_wave`.
        crossover_model: For `crossover`.
        crossover: N; prompts, ascending; and R.
        cost_model: For `costs`.
        costs: The groups of `costs`, and how each is cut.
        update_models: For `updates`.
        updates: Groups per algorithm; `-kl` adds a reference pass, `-muon` is by Muon.
    """

    dtype: torch.dtype
    packed: tuple[str, ...]
    replicated: str
    cuts: tuple[int, ...]
    waves: tuple[int, ...]
    model: ModelSize
    paper: Group
    table2: tuple[tuple[int, int], ...]
    memory: tuple[tuple[int, ...], int, int]
    activations: Group
    many: Group
    many_wave: int
    crossover_model: ModelSize
    crossover: tuple[tuple[int, ...], tuple[int, ...], int]
    cost_model: ModelSize
    costs: tuple[CutGroup, ...]
    update_models: tuple[ModelSize, ...]
    updates: dict[str, tuple[Group, ...]]

    @property
    def ours(self) -> Way:
        return Way(backend=self.packed[0], is_packed=True)

    @property
    def streamed(self) -> tuple[Way, ...]:
        """Our ways to stream the recorded group in waves."""
        return tuple(replace(self.ours, wave=wave) for wave in self.waves)

    @property
    def baseline(self) -> Way:
        return Way(backend=self.replicated, is_packed=False)


_PAPER = Group(prompt=5059, responses=PAPER_LENGTHS)


def _group(prompt: int, length: int, count: int) -> Group:
    """A group of `count` responses of `length` tokens."""
    return Group(prompt=prompt, responses=(length,) * count)


# GRPO runs the recorded group, DAPO groups of the sizes of the forest `forest16`.
FULL = Scale(
    dtype=torch.bfloat16,
    packed=("cuda", "flash", "flex"),
    replicated=FA2,
    cuts=(1, 2, 4),
    waves=(8, 4),
    model=QWEN3_8B,
    paper=_PAPER,
    table2=((5059, 32), (8192, 16), (16_384, 8), (32_768, 4), (65_536, 4), (131_072, 8)),
    memory=(tuple(8192 * 2**i for i in range(8)), 8, 1024),
    activations=Group(prompt=8192, responses=(1024,) * 32),
    many=Group(prompt=32_768, responses=(400,) * 512),
    many_wave=8,
    crossover_model=replace(QWEN3_8B, name="Qwen3-8B, 4 layers", num_layers=4),
    crossover=((2, 16), (8, 16, 32, 128, 512, 2048, 8192), 2048),
    cost_model=replace(QWEN3_8B, name="Qwen3-8B, 8 layers", num_layers=8),
    # Each is dominated by another rate: head rows, pairs of long prompts, small stages, launches.
    costs=(
        CutGroup(group=_PAPER),
        *(CutGroup(group=_PAPER, budget=budget) for budget in (24_000, 9700)),
        CutGroup(group=_group(30_000, 1000, 8)),
        CutGroup(group=_group(30_000, 1000, 8), budget=34_000),
        CutGroup(group=_group(60_000, 2000, 2)),
        CutGroup(group=_group(20_000, 64, 4)),
        CutGroup(group=_group(64, 1024, 40)),
        CutGroup(group=_group(1000, 500, 16)),
        CutGroup(group=_group(1000, 500, 16), is_shared=False),
        CutGroup(group=_group(512, 128, 8)),
        CutGroup(group=_group(16, 16, 2)),
    ),
    update_models=(QWEN3_8B, QWEN3_1_7B),
    updates={
        "grpo": (_PAPER,),
        "grpo-kl": (_PAPER,),
        "grpo-muon": (_PAPER,),
        "dapo": tuple(
            Group(prompt=2000, responses=tuple(200 + (1300 * (8 * g + i)) // 127 for i in range(8)))
            for g in range(16)
        ),
    },
)
SMALL = Scale(
    dtype=torch.float32,
    packed=("reference",),
    replicated="reference",
    cuts=(1, 2),
    waves=(2,),
    model=TINY,
    paper=Group(prompt=12, responses=(5, 3, 7, 2)),
    table2=((12, 4), (20, 2)),
    memory=((8, 16), 2, 3),
    activations=Group(prompt=8, responses=(3,) * 4),
    many=Group(prompt=16, responses=(3,) * 12),
    many_wave=2,
    crossover_model=TINY,
    crossover=((2, 4), (2, 32), 8),
    cost_model=TINY,
    costs=(
        CutGroup(group=Group(prompt=12, responses=(5, 3, 7, 2))),
        CutGroup(group=Group(prompt=12, responses=(5, 3, 7, 2)), budget=20),
        CutGroup(group=Group(prompt=12, responses=(5, 3, 7, 2)), is_shared=False),
    ),
    update_models=(TINY,),
    updates={
        "grpo": (Group(prompt=12, responses=(5, 3, 7)),),
        "grpo-kl": (Group(prompt=12, responses=(5, 3, 7)),),
        "grpo-muon": (Group(prompt=12, responses=(5, 3, 7)),),
        "dapo": (Group(prompt=9, responses=(2, 5)), Group(prompt=6, responses=(4, 3))),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        device: A CUDA device, or a CPU.
        scale: FULL or SMALL.
        num_samples: Per figure, if the budget allows.
        stop_at: `time.monotonic()` after which nothing new starts.
        seed: For weights, tokens and rewards.
        host_bytes: Lent to the activations of whole updates, as by `worker.host_activation_bytes`.
    """

    device: torch.device
    scale: Scale
    num_samples: int
    stop_at: float
    seed: int
    host_bytes: int = 0

    @property
    def is_out_of_time(self) -> bool:
        return time.monotonic() >= self.stop_at

    @property
    def rates(self) -> DeviceRates:
        """Rates by which seconds are predicted: the device's, or an H200's for an unknown one."""
        return KNOWN_RATES.get(device_model(self.device), H200_RATES)

    def module(self, size: AnySize) -> PreTrainedModel:
        """A model with random weights from this run's seed."""
        return build_module(size, self.device, self.scale.dtype, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the result that can be measured on its own.

    Attributes:
        cases: Names of its cases, in the result's order.
        measure: Yields each of the wanted cases with its rows, until the run is out of time.
    """

    cases: Callable[[Scale], list[str]]
    measure: Callable[[Run, list[str]], Iterator[tuple[str, list[Row]]]]


def figures_or_refusal(measure: Callable[[], Row]) -> Row:
    """Row that `measure` returns; if it raises, a row with the error."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001  whatever a library or the device says
        return refusal(error)


def refusal(error: Exception) -> Row:
    """The reason why a way has no figures."""
    return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}
