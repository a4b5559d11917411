"""A Forward's files: what callers fetch, and old log-probs found by rollout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ratoon.engine.files.results import read_entropy, read_old_logprobs, write_forward_output
from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon_proto.codec import decode_tensor
from ratoon_proto.v1.training_pb2 import ForwardOutput
from tests import builders
from tests.engine.refusals import raises


def batch_of(*groups: tuple[list[int], list[list[int]]], temperature: float = 1.0) -> RolloutBatch:
    return validate_groups(
        [
            builders.group(
                prompt,
                [builders.rollout(tokens, temperature=temperature) for tokens in responses],
                f"g{index}",
            )
            for index, (prompt, responses) in enumerate(groups)
        ],
        builders.limits(),
    )


BATCH = batch_of(([1, 2], [[3, 4], [5]]), ([6], [[7, 8, 9], [3, 4]]))
ROUTED = replace(
    BATCH,
    routed_experts=np.zeros((1, 1, 1), np.uint8),
    route_first=np.zeros(4, np.int64),
    route_offsets=np.array([0, 1, 1, 1, 1]),
)
MASKED = replace(
    BATCH,
    sampling_mask=np.array([3, 4], np.int32),
    mask_offsets=np.array([0, 1, 2, 2, 2, 2, 2, 2, 2]),
)
LOGPROBS = -np.arange(1, 9, dtype=np.float32)


def keys_path(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.op"


def written(folder: Path, *, is_reference: bool = False) -> Path:
    digest, _ = write_forward_output(
        folder, "p.op", BATCH, LOGPROBS, None, is_reference=is_reference
    )
    return keys_path(folder, digest)


def test_the_file_is_a_forward_output(tmp_path: Path) -> None:
    entropy = np.ones(8, np.float32)
    digest, size = write_forward_output(
        tmp_path, "p.op", BATCH, LOGPROBS, entropy, is_reference=False
    )
    data = (tmp_path / digest).read_bytes()
    assert len(data) == size
    output = ForwardOutput.FromString(data)
    np.testing.assert_array_equal(decode_tensor(output.logprobs, max_bytes=100), LOGPROBS)
    np.testing.assert_array_equal(decode_tensor(output.entropy, max_bytes=100), entropy)
    np.testing.assert_array_equal(decode_tensor(output.offsets, max_bytes=100), [0, 2, 3, 6, 8])


def test_the_same_batch_gets_its_log_probs_back(tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_old_logprobs(written(tmp_path), BATCH), LOGPROBS)


def test_entropies_are_found_as_log_probs_are(tmp_path: Path) -> None:
    entropy = np.arange(8, dtype=np.float32)
    digest, _ = write_forward_output(tmp_path, "p.op", BATCH, LOGPROBS, entropy, is_reference=False)
    mini = batch_of(([6], [[3, 4], [7, 8, 9]]), ([1, 2], [[5]]))
    np.testing.assert_array_equal(
        read_entropy(keys_path(tmp_path, digest), mini), [6, 7, 3, 4, 5, 2]
    )


def test_a_forward_without_entropies_is_refused_for_them(tmp_path: Path) -> None:
    with raises(ErrorCode.INVALID_ARGUMENT) as caught:
        read_entropy(written(tmp_path), BATCH)
    assert caught.value.field == "loss.top_entropy_share"


def test_a_mini_batch_in_another_order_gets_its_own(tmp_path: Path) -> None:
    mini = batch_of(([6], [[3, 4], [7, 8, 9]]), ([1, 2], [[5]]))
    old = read_old_logprobs(written(tmp_path), mini)
    np.testing.assert_array_equal(old, [-7, -8, -4, -5, -6, -3])


@pytest.mark.parametrize(
    "other",
    [
        batch_of(([1, 2], [[3, 4], [5, 5]])),
        batch_of(([1], [[3, 4]])),
        batch_of(([1, 2], [[3, 4]]), temperature=1.5),
        batch_of(([1, 2, 3], [[4]])),
        ROUTED,
        MASKED,
    ],
)
def test_a_rollout_that_the_forward_did_not_see_is_refused(
    tmp_path: Path, other: RolloutBatch
) -> None:
    """One has the same tokens in all, cut elsewhere between prompt and response; the last have the
    same rollouts, sent to other experts or with other tokens kept."""
    with raises(ErrorCode.INVALID_ARGUMENT) as caught:
        read_old_logprobs(written(tmp_path), other)
    assert caught.value.field == "loss.old_logprobs.forward_operation_id"


def test_log_probs_of_the_reference_are_no_old_log_probs(tmp_path: Path) -> None:
    """At step 0 both have the same numbers, hence the same file: the keys tell them apart."""
    reference, policy = written(tmp_path, is_reference=True), tmp_path / "policy"
    policy.mkdir()
    with pytest.raises(RatoonError):
        read_old_logprobs(reference, BATCH)
    np.testing.assert_array_equal(read_old_logprobs(written(policy), BATCH), LOGPROBS)


@pytest.mark.parametrize("damage", ["longer", "shorter", "swapped"])
def test_damaged_rollouts_are_refused(tmp_path: Path, damage: str) -> None:
    """Keys that changed places gave each rollout the log-probs of another."""
    path = written(tmp_path)
    keys = path.read_bytes()
    swapped = keys[16:32] + keys[:16] + keys[32:]
    path.write_bytes({"longer": keys + b"x", "shorter": keys[:-16], "swapped": swapped}[damage])
    with pytest.raises(RatoonError) as caught:
        read_old_logprobs(path, BATCH)
    assert "damaged" in caught.value.message


def test_an_expired_forward_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.with_suffix("").unlink()
    with pytest.raises(RatoonError) as caught:
        read_old_logprobs(path, BATCH)
    assert "expired" in caught.value.message


def test_a_damaged_result_is_refused(tmp_path: Path) -> None:
    """Without a look at its digest a changed bit was an old log-prob like any other."""
    path = written(tmp_path)
    output = path.with_suffix("")
    whole = output.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        output.write_bytes(damaged)
        with pytest.raises(RatoonError) as caught:
            read_old_logprobs(path, BATCH)
        assert "damaged" in caught.value.message
