"""The calls of a fault run: what clients ask of a policy, the same for the service and the oracle.

A call is a function of the seed and its number, so its batch can be recreated anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import RawGroup, RawRollout, RawSegment, SamplerLogprobsKind
from ratoon.rollout.validate import BatchLimits, validate_groups

LEARNING_RATE = 1e-3
# A version that no run reaches: the call fails at its turn.
NO_VERSION = 1_000_000
POLICY = "p"
# Every PublishVersion moves this name to the version of its place.
NAME = "named"
# File with all weights of a model as small as this one.
WEIGHTS_FILE = "model.safetensors"
_LIMITS = BatchLimits(
    vocab_size=256, max_sequence_tokens=4096, max_groups=64, max_sequences=1024, max_tokens=1 << 16
)


class Kind(StrEnum):
    UPDATE = "update"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    DISCARD_GRADIENTS = "discard_gradients"
    FORWARD = "forward"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    IMPORT_WEIGHTS = "import_weights"
    PUBLISH_VERSION = "publish_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call. `number` is its place in the whole run, from 1, and that of its batch.

    `from_forward`: number of the Forward whose log-probs the loss takes, and whose batch it has; 0:
    none. `includes`: numbers of the ForwardBackwards that an OptimStep lists. `is_refused`: its
    expected version is not the policy's. `is_infinite`: its loss is not finite.
    `is_without_store`: the object store takes nothing while it runs. `replaces`: an import that is
    not added. `resets`: it clears the optimizer. `is_taught`: the policy answers for its KL term,
    whose coefficient is 0: it is reported, and moves nothing.
    """

    number: int
    kind: Kind
    num_groups: int = 2
    from_forward: int = 0
    includes: tuple[int, ...] = ()
    checkpoint_id: str = ""
    is_refused: bool = False
    is_infinite: bool = False
    is_cancelled: bool = False
    is_without_store: bool = False
    replaces: bool = False
    resets: bool = False
    is_taught: bool = False

    @property
    def has_batch(self) -> bool:
        return self.kind in (Kind.UPDATE, Kind.FORWARD_BACKWARD, Kind.FORWARD)

    @property
    def entropy_coefficient(self) -> float:
        """Times an entropy above 1.2, 3e38 is no float32."""
        return 3e38 if self.is_infinite else 0.0

    @property
    def batch_number(self) -> int:
        return self.from_forward or self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A rollout as sampled: int32 [R], float32 [R], and its reward."""

    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    group_id: str
    prompt: NDArray[np.int32]
    rollouts: tuple[Sampled, ...]


def groups_of(call: Call, seed: int) -> list[SampledGroup]:
    """The batch of a call, rollouts of a few tokens below 64."""
    rng = np.random.default_rng((seed, call.batch_number))
    return [
        SampledGroup(
            group_id=f"{call.batch_number}-{index}",
            prompt=rng.integers(0, 64, int(rng.integers(1, 6)), np.int32),
            rollouts=tuple(_rollout(rng) for _ in range(int(rng.integers(2, 5)))),
        )
        for index in range(call.num_groups)
    ]


def _rollout(rng: np.random.Generator) -> Sampled:
    length = int(rng.integers(1, 8))
    logprobs = rng.normal(-4.0, 0.3, length).astype(np.float32)
    return Sampled(
        response=rng.integers(0, 64, length, np.int32),
        logprobs=np.minimum(logprobs, -1e-3),
        reward=float(rng.normal()),
    )


def batch_of(call: Call, seed: int) -> RolloutBatch:
    """The batch as the service validates it."""
    return validate_groups([_raw(group) for group in groups_of(call, seed)], _LIMITS)


def _raw(group: SampledGroup) -> RawGroup:
    rollouts = tuple(
        RawRollout(
            segments=(RawSegment(tokens=sampled.response, trained=True),),
            loss_mask=None,
            sampler_logprobs=sampled.logprobs,
            old_logprobs=None,
            reference_logprobs=None,
            reward=sampled.reward,
            advantages=None,
            token_weights=None,
            temperature=1.0,
            sampler_logprobs_kind=SamplerLogprobsKind.UNSPECIFIED,
            top_p=None,
            top_k=None,
            policy_version=None,
            truncated=False,
        )
        for sampled in group.rollouts
    )
    return RawGroup(group_id=group.group_id, prompt=group.prompt, rollouts=rollouts)


def imported_values(call: Call, seed: int, model_folder: Path) -> dict[str, NDArray[np.float32]]:
    """What an import brings, by the names of the model's file: small, or the model's and that."""
    rng = np.random.default_rng((seed, call.number))
    return {
        name: rng.normal(0.0, 1e-3, value.shape).astype(np.float32) + call.replaces * value
        for name, value in load_file(model_folder / WEIGHTS_FILE).items()
    }


def import_folder(call: Call, seed: int) -> str:
    """Its folder's name below the models root."""
    return f"import-{seed}-{call.number}"


def write_import(call: Call, seed: int, model_folder: Path, root: Path) -> Path:
    """The folder of an import below `root`, written anew."""
    folder = root / import_folder(call, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(imported_values(call, seed, model_folder), folder / WEIGHTS_FILE)
    return folder


def in_any_order(calls: list[Call]) -> Iterator[list[Call]]:
    """Runs of the calls that may arrive in any order: none names another of its own run."""
    run: list[Call] = []
    for call in calls:
        if {call.from_forward, *call.includes} & {other.number for other in run}:
            yield run
            run = []
        run.append(call)
    yield run


def segments(seed: int) -> Iterator[list[Call]]:
    """Segments without end; each begins and ends with no window open."""
    rng = np.random.default_rng((seed, 0))
    number, saved = 1, list[str]()
    for index in range(1 << 30):
        calls = _segment(rng, number, index, saved)
        number += len(calls)
        yield calls


def _segment(rng: np.random.Generator, first: int, index: int, saved: list[str]) -> list[Call]:
    """Windows with what may befall them, imports, a name for a version, Updates, a Forward and two
    losses taking it."""
    calls: list[Call] = []

    def add(kind: Kind, **fields: object) -> Call:
        calls.append(replace(Call(number=first + len(calls), kind=kind), **fields))
        return calls[-1]

    add(Kind.UPDATE)
    add(Kind.IMPORT_WEIGHTS, is_refused=index % 5 == 4)
    kept = [add(Kind.FORWARD_BACKWARD).number for _ in range(3)]
    name = f"mid-{first}"
    add(Kind.SAVE_CHECKPOINT, checkpoint_id=name)
    kept.append(add(Kind.FORWARD_BACKWARD).number)
    add(Kind.PUBLISH_VERSION)
    add(Kind.FORWARD_BACKWARD, is_cancelled=True)
    if index % 2:
        add(Kind.FORWARD_BACKWARD, is_refused=True)
        add(Kind.OPTIM_STEP)  # Poisoned: it fails.
    add(Kind.OPTIM_STEP, includes=tuple(kept[:: 1 + int(rng.integers(0, 2))]))
    if index % 2:
        add(Kind.DISCARD_GRADIENTS)
    forward = add(Kind.FORWARD).number
    for _ in range(2):
        add(Kind.UPDATE, from_forward=forward)
    add(Kind.UPDATE, is_infinite=True)
    if index % 2:
        add(Kind.IMPORT_WEIGHTS, replaces=True, resets=index % 4 == 3)
    add(Kind.UPDATE, is_cancelled=bool(rng.integers(0, 2)))
    if index % 3 == 2:
        add(Kind.LOAD_CHECKPOINT, checkpoint_id=str(rng.choice(saved)))
    saved[:] = [*saved, name][-1:]
    add(Kind.FORWARD_BACKWARD)
    add(Kind.DISCARD_GRADIENTS if rng.integers(0, 2) else Kind.OPTIM_STEP)
    return calls
