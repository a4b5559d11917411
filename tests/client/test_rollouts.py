"""Builders: what numpy reads, in the dtypes of the wire."""

from __future__ import annotations

import numpy as np
import pytest

from ratoon_client import InvalidArgumentError, Segment, group, rollout
from ratoon_client.wire.encode import group_message
from ratoon_proto.codec import decode_tensor


def test_lists_and_arrays_of_any_width_are_the_same_message():
    lists = group(
        "g",
        [1, 2],
        [
            rollout(
                response=[3, 4, 5],
                sampler_logprobs=[-0.5, -1.0, -1.5],
                loss_mask=[True, False, True],
                reward=1,
            )
        ],
    )
    arrays = group(
        "g",
        np.array([1, 2], np.uint8),
        [
            rollout(
                response=np.array([3, 4, 5], np.int64)[::1],
                sampler_logprobs=np.array([-0.5, -1.0, -1.5], np.float64),
                loss_mask=np.array([1, 0, 1]),
                reward=float(np.float32(1.0)),
            )
        ],
    )
    message = group_message(lists)
    assert message == group_message(arrays)
    sent = message.rollouts[0]
    tokens = decode_tensor(sent.response, max_bytes=100)
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [3, 4, 5])
    logprobs = decode_tensor(sent.sampler_logprobs, max_bytes=100)
    assert (logprobs.dtype, logprobs.tolist()) == (np.float32, [-0.5, -1.0, -1.5])
    assert decode_tensor(sent.loss_mask, max_bytes=100).tolist() == [True, False, True]
    assert (sent.WhichOneof("outcome"), sent.reward) == ("reward", 1.0)


def test_what_is_left_out_is_absent_and_zero_is_not():
    sent = group_message(group("g", [], [rollout(response=[], reward=0.0)])).rollouts[0]
    assert sent.HasField("reward")
    absent = {"sampler_logprobs", "loss_mask", "temperature", "policy_version", "top_k"}
    assert not {field.name for field, _ in sent.ListFields()} & absent
    assert list(sent.response.shape) == [0]
    zero = rollout(response=[1], policy_version=0, temperature=0.0, top_k=0)
    sent = group_message(group("g", [], [zero])).rollouts[0]
    assert all(sent.HasField(name) for name in ("policy_version", "temperature", "top_k"))
    assert sent.WhichOneof("outcome") is None


def test_segments_keep_their_order_and_what_is_trained():
    built = rollout(
        segments=[Segment([1, 2], False), Segment([3], True), Segment([], True)],
        advantages=[0.0, 0.0, 0.5],
    )
    sent = group_message(group("g", [9], [built])).rollouts[0]
    assert [
        (decode_tensor(segment.tokens, max_bytes=100).tolist(), segment.trained)
        for segment in sent.segments.segments
    ] == [([1, 2], False), ([3], True), ([], True)]
    assert decode_tensor(sent.advantages, max_bytes=100).tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"response": [1.5]}, "response"),
        ({"response": [1, 2**31]}, "response[1]"),
        ({"response": [[1, 2]]}, "response"),
        ({"response": [[1], [1, 2]]}, "response"),
        ({"response": [True]}, "response"),
        ({"response": [1], "segments": []}, "response"),
        ({}, "response"),
        ({"response": [1], "reward": 1.0, "advantages": [1.0]}, "advantages"),
        ({"response": [1], "loss_mask": [2]}, "loss_mask[0]"),
        ({"response": [1], "loss_mask": [0.5]}, "loss_mask"),
        ({"response": [1], "sampler_logprobs": ["a"]}, "sampler_logprobs"),
        ({"segments": [Segment([1], True), Segment(["x"], True)]}, "segments[1].tokens"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_has_no_form_on_the_wire_is_refused_by_field(arguments, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        rollout(**arguments)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: got ")
