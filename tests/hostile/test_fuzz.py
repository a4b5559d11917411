"""The short form of the fuzz; `make faults` runs the long one."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from ratoon.api import submissions
from ratoon.api.convert.policy import policy_spec
from ratoon.rollout.serial import batch_from_bytes
from ratoon.train.loss import kinds
from ratoon_client.wire import decode
from ratoon_proto.codec import decode_tensor
from ratoon_proto.types import EmptyResult, Operation
from tests.hostile import corpus
from tests.hostile.fuzz import FuzzCounts, fuzz, run
from tests.hostile.targets import DEFAULTS, Target, all_targets, judge, judge_json
from tests.hostile.trainer_targets import LIMITS, FaultError, SmallPolicy

# What allocators keep; a leak of a kilobyte an input would be as much again.
GROWTH_BYTES = 16 * 2**20


def test_the_corpus_is_taken():
    for tensor in corpus.tensors():
        decode_tensor(tensor, max_bytes=1000)
    for request in corpus.updates():
        judge(request)
    for document in corpus.update_documents():
        judge_json(document)
    for request in corpus.specs():
        policy_spec(request.spec, DEFAULTS)
    for body in corpus.batches():
        batch_from_bytes(body)
    for operation in corpus.operations():
        decode(operation, Operation)


def _check_fuzz(counts: FuzzCounts, num_inputs: int) -> None:
    assert (counts.crashes, counts.server_errors) == (0, 0), counts.findings
    assert counts.inputs == num_inputs
    assert 0.01 * num_inputs < counts.accepted < 0.5 * num_inputs
    assert counts.slowest_s < 100.0


def test_hostile_inputs_are_refused_by_name_and_nothing_else():
    _check_fuzz(fuzz(0, 2_000), 2_000)


@pytest.mark.more
def test_no_memory_is_kept_of_hostile_inputs():
    counts = _alone(partial(fuzz, seed=0, num_inputs=20_000))
    _check_fuzz(counts, 20_000)
    assert counts.peak_rss_growth_bytes < GROWTH_BYTES


def test_the_requests_that_train_are_taken(tmp_path: Path):
    small = SmallPolicy(tmp_path)
    for request in corpus.small_updates():
        small.take(submissions.with_batch(request, small.policy, request.batch.groups, LIMITS))


@pytest.mark.parametrize("num_inputs", [200, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_trainer_refuses_by_name_or_stays_finite(tmp_path: Path, num_inputs: int):
    """A clip of 1e308 ended in INTERNAL, a reward of 1e300 in a step on infinite figures."""
    (trainer,) = (target for target in all_targets(tmp_path) if target.name == "trainer")
    counts = run([trainer], 1, num_inputs)
    assert counts.crashes == 0, counts.findings
    assert counts.accepted > 0.2 * num_inputs


def test_what_a_trainer_cannot_compute_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kinds, "MAX_FLOAT32", math.inf)
    small = SmallPolicy(tmp_path)
    request = corpus.small_updates()[0]
    request.loss.clip_high = 1e308
    with pytest.raises(RuntimeError, match="without overflow"):
        small.take(submissions.with_batch(request, small.policy, request.batch.groups, LIMITS))
    small.trainer.model.lm_head_VD.data[0, 0] = math.inf
    with pytest.raises(FaultError, match="weights"):
        small.judge(EmptyResult(), small.trainer)


def test_the_same_seed_makes_the_same_inputs():
    seen: list[list[float]] = [[], []]

    def outcome(numbers: list[float]) -> FuzzCounts:
        def take(dice: random.Random) -> None:
            numbers.append(dice.random())

        return run([Target(name="dice", weight=1, take=take, may_raise=())], 5, 20)

    assert outcome(seen[0]).accepted == outcome(seen[1]).accepted == 20
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 20


def test_an_error_that_is_not_typed_is_found(tmp_path: Path):
    (codec, *_) = all_targets(tmp_path)
    untyped = replace(codec, may_raise=(DecodeError,))
    counts = run([untyped], 0, 200)
    assert counts.crashes > 0
    assert counts.findings[0].startswith("codec 0.")


@pytest.mark.more
def test_memory_that_is_kept_is_found():
    assert _alone(_run_leak).peak_rss_growth_bytes > GROWTH_BYTES


def _run_leak() -> FuzzCounts:
    kept: list[bytes] = []
    leak = Target(name="leak", weight=1, take=lambda _: kept.append(bytes(10_000)), may_raise=())
    return run([leak], 0, 6000)


def _alone(job: Callable[[], FuzzCounts]) -> FuzzCounts:
    """In a process of its own: the memory of one that ran other tests is theirs too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(job).result()
