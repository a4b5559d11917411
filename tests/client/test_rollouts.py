"""Builders: what numpy reads, in the dtypes of the wire."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon_client import (
    AdamW,
    FromForward,
    InvalidArgumentError,
    Kl,
    Lora,
    Loss,
    Optim,
    RatoonApiError,
    SamplingMask,
    Schedule,
    Segment,
    Staleness,
    VersionSpan,
    group,
    rollout,
)
from ratoon_client.sender import operation_key
from ratoon_client.wire import (
    group_message,
    group_messages,
    loss_message,
    optim_message,
    policy_spec_message,
)
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


@pytest.mark.parametrize(
    "mask",
    [
        [[3, 7], [], [5]],
        [np.array([3, 7]), np.array([], np.int64), [5]],
        SamplingMask(token_ids=[3, 7, 5], lengths=[2, 0, 1]),
        SamplingMask.of([[3, 7], [], [5]]),
    ],
)
def test_a_sampling_mask_is_sent_flat_with_the_lengths_of_its_rows(mask: Any):
    built = rollout(response=[3, 4, 5], reward=0.0, sampling_mask=mask)
    sent = group_message(group("g", [1], [built])).rollouts[0].sampling_mask
    for tensor, expected in ((sent.token_ids, [3, 7, 5]), (sent.lengths, [2, 0, 1])):
        array = decode_tensor(tensor, max_bytes=100)
        assert (array.dtype, array.tolist()) == (np.int32, expected)
    assert not sent.untrain_outside


def test_a_sampling_mask_of_one_length_and_its_option_are_sent():
    square = rollout(response=[3, 4], sampling_mask=np.array([[3, 7], [4, 9]]))
    rows = SamplingMask.of([[3], [4]], untrain_outside=True)
    other = rollout(response=[3, 4], sampling_mask=rows)
    one, two = group_message(group("g", [1], [square, other])).rollouts
    assert decode_tensor(one.sampling_mask.lengths, max_bytes=100).tolist() == [2, 2]
    assert (one.sampling_mask.untrain_outside, two.sampling_mask.untrain_outside) == (False, True)


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
        ({"response": [[1], [1, 2]]}, "response[0]"),
        ({"response": [True]}, "response"),
        ({"response": [1], "segments": []}, "response"),
        ({}, "response"),
        ({"response": [1], "reward": 1.0, "advantages": [1.0]}, "advantages"),
        ({"response": [1], "loss_mask": [2]}, "loss_mask[0]"),
        ({"response": [1], "loss_mask": [0.5]}, "loss_mask"),
        ({"response": [1], "sampler_logprobs": ["a"]}, "sampler_logprobs[0]"),
        ({"segments": [Segment([1], True), Segment(["x"], True)]}, "segments[1].tokens[0]"),  # pyright: ignore[reportArgumentType]
        ({"segments": [Segment(None, True)]}, "segments[0].tokens"),  # pyright: ignore[reportArgumentType]
        ({"segments": [Segment([1], True), [1]]}, "segments[1]"),
        ({"segments": 1}, "segments"),
        ({"response": "abc"}, "response"),
        ({"response": [None]}, "response[0]"),
        ({"response": [1, None]}, "response[1]"),
        ({"response": [1, "2"]}, "response[1]"),
        ({"response": [1, 2**70]}, "response[1]"),
        ({"response": np.array([1, None])}, "response"),
        ({"response": np.array(["1"])}, "response"),
        ({"response": torch.tensor([1.0])}, "response"),
        ({"response": torch.tensor(1)}, "response"),
        ({"response": [1, torch.tensor(2), None]}, "response[2]"),
        ({"response": [1], "sampler_logprobs": [[0.5], [0.5, 0.5]]}, "sampler_logprobs[0]"),
        ({"response": [1], "sampler_logprobs": [-0.5, [0.5]]}, "sampler_logprobs[1]"),
        ({"response": [1], "sampler_logprobs": [None]}, "sampler_logprobs[0]"),
        ({"response": [1], "sampler_logprobs": [-0.5, 1e39]}, "sampler_logprobs[1]"),
        ({"response": [1], "old_logprobs": np.array([-1e300])}, "old_logprobs[0]"),
        ({"response": [1], "advantages": [0.5, 10**400]}, "advantages[1]"),
        ({"response": [1], "loss_mask": [True, None]}, "loss_mask[1]"),
        ({"response": [1], "advantages": torch.ones(1, requires_grad=True)}, "advantages"),
        ({"response": [1], "advantages": torch.ones(1, dtype=torch.bfloat16)}, "advantages"),
        ({"response": [1], "temperature": "hot"}, "temperature"),
        ({"response": [1], "temperature": [1.0]}, "temperature"),
        ({"response": [1], "top_p": "1"}, "top_p"),
        ({"response": [1], "top_k": 1.5}, "top_k"),
        ({"response": [1], "top_k": True}, "top_k"),
        ({"response": [1], "policy_version": "7"}, "policy_version"),
        ({"response": [1], "policy_version": 7.0}, "policy_version"),
        ({"response": [1], "truncated": "no"}, "truncated"),
        ({"response": [1], "truncated": None}, "truncated"),
        ({"response": [1], "routed_experts_start": None}, "routed_experts_start"),
        ({"response": [1], "sampling_mask": 5}, "sampling_mask"),
        ({"response": [1], "sampling_mask": [[1, 2.5]]}, "sampling_mask[0]"),
        ({"response": [1, 2], "sampling_mask": [[1], None]}, "sampling_mask[1]"),
        ({"response": [1, 2], "sampling_mask": [[1], 2]}, "sampling_mask[1]"),
        (
            {"response": [1], "sampling_mask": SamplingMask(token_ids=[1], lengths=["1"])},  # pyright: ignore[reportArgumentType]
            "sampling_mask.lengths[0]",
        ),
        (
            {
                "response": [1],
                "sampling_mask": SamplingMask(
                    token_ids=[1],
                    lengths=[1],
                    untrain_outside=1,  # pyright: ignore[reportArgumentType]
                ),
            },
            "sampling_mask.untrain_outside",
        ),
        (
            {"response": [1], "version_spans": [VersionSpan(0, 1), VersionSpan(None, 1)]},  # pyright: ignore[reportArgumentType]
            "version_spans[1].first_token",
        ),
        ({"segments": [Segment([1], True), Segment([1], 1)]}, "segments[1].trained"),  # pyright: ignore[reportArgumentType]
        ({"response": [1], "advantages": "none"}, "advantages"),
        ({"response": [1], "reward": "1.0"}, "reward"),
        ({"response": [1], "reward": [1.0]}, "reward"),
        ({"response": [1], "reward": 10**400}, "reward"),
    ],
)
def test_what_has_no_form_on_the_wire_is_refused_by_field(arguments, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        rollout(**arguments)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: got ")


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: group("g", None, []), "prompt"),  # pyright: ignore[reportArgumentType]
        (lambda: group(7, [1], []), "group_id"),  # pyright: ignore[reportArgumentType]
        (lambda: group("g", [1], None), "rollouts"),  # pyright: ignore[reportArgumentType]
        (lambda: group("g", [1], rollout(response=[1])), "rollouts"),  # pyright: ignore[reportArgumentType]
        (lambda: group("g", [1], [rollout(response=[1]), {}]), "rollouts[1]"),  # pyright: ignore[reportArgumentType]
        (lambda: group_messages(None), "groups"),  # pyright: ignore[reportArgumentType]
        (lambda: group_messages(group("g", [1], [])), "groups"),  # pyright: ignore[reportArgumentType]
        (lambda: group_messages([group("g", [1], []), "g"]), "groups[1]"),  # pyright: ignore[reportArgumentType]
        (lambda: _sent_as(reward=None), "groups[1].rollouts[1].reward"),
        (lambda: _sent_as(truncated="no"), "groups[1].rollouts[1].truncated"),
        (lambda: _sent_as(temperature="hot"), "groups[1].rollouts[1].temperature"),
        (lambda: _sent_as(policy_version=0.5), "groups[1].rollouts[1].policy_version"),
        (lambda: _sent_as(top_k=2**40), "groups[1].rollouts[1].top_k"),
        (
            lambda: _sent_as(sampler_logprobs_kind="RAW?"),
            "groups[1].rollouts[1].sampler_logprobs_kind",
        ),
        (lambda: loss_message("grpo"), "loss"),  # pyright: ignore[reportArgumentType]
        (lambda: loss_message(Loss(None)), "loss.kind"),  # pyright: ignore[reportArgumentType]
        (lambda: loss_message(Loss("grpo", clip_low="0.2")), "loss.clip_low"),  # pyright: ignore[reportArgumentType]
        (lambda: loss_message(Loss("grpo", kl="k3")), "loss.kl"),  # pyright: ignore[reportArgumentType]
        (lambda: loss_message(Loss("grpo", kl=Staleness(1, "drop"))), "loss.kl"),  # pyright: ignore[reportArgumentType]
        (
            lambda: loss_message(Loss("grpo", old_logprobs=FromForward(5))),  # pyright: ignore[reportArgumentType]
            "loss.old_logprobs.forward_operation_id",
        ),
        (lambda: optim_message(1e-4), "optim"),  # pyright: ignore[reportArgumentType]
        (lambda: optim_message(Optim(learning_rate="1e-4")), "optim.learning_rate"),  # pyright: ignore[reportArgumentType]
        (lambda: policy_spec_message("p", {"lora": {"rank": 8}}), "lora"),  # pyright: ignore[reportArgumentType]
        (lambda: policy_spec_message("p", {"seeds": 1}), "seeds"),  # pyright: ignore[reportArgumentType]
        (
            lambda: policy_spec_message(
                "p",
                {"lora": Lora(rank=8, alpha=1.0, target_modules=3)},  # pyright: ignore[reportArgumentType]
            ),
            "lora.target_modules",
        ),
        (lambda: operation_key("1", None), "seq"),  # pyright: ignore[reportArgumentType]
        (lambda: operation_key(None, 1), "request_id"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_value_of_another_type_is_refused_by_field(build: Callable[[], object], field: str):
    """It was a TypeError or an AttributeError from deep inside."""
    with pytest.raises(InvalidArgumentError) as caught:
        build()
    assert caught.value.field == field


def _sent_as(**fields: Any) -> object:
    """Two groups, of which the last rollout has other fields, whoever made it."""
    right = rollout(response=[1], reward=1.0)
    if "reward" in fields:
        fields = {"outcome": fields["reward"]}
    wrong = replace(right, **fields)
    return group_messages([group("a", [1], [right, right]), group("b", [1], [right, wrong])])


def test_scalars_of_numpy_and_torch_are_taken():
    arguments: dict[str, Any] = {
        "response": torch.tensor([1, 2]),
        "sampler_logprobs": [np.float32(-0.5), torch.tensor(-0.25)],
        "loss_mask": [np.True_, np.False_],
        "reward": torch.tensor(0.5),
        "temperature": np.float32(1.0),
        "top_k": np.int32(0),
        "policy_version": torch.tensor(3),
        "truncated": np.True_,
    }
    built = rollout(**arguments)
    sent = group_message(group("g", [1], [built])).rollouts[0]
    assert (sent.reward, sent.temperature, sent.top_k, sent.policy_version) == (0.5, 1.0, 0, 3)
    assert sent.truncated
    logprobs = decode_tensor(sent.sampler_logprobs, max_bytes=100)
    assert logprobs.tolist() == [-0.5, -0.25]
    assert decode_tensor(sent.loss_mask, max_bytes=100).tolist() == [True, False]


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (
            lambda: policy_spec_message(
                "p",
                {"optimizer": AdamW(schedule=Schedule("cosine", None))},  # pyright: ignore[reportArgumentType]
            ),
            "optimizer.schedule.learning_rate",
        ),
        (lambda: loss_message(Loss("grpo", kl=Kl("k3", None, "given"))), "loss.kl.coefficient"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_has_no_default_cannot_be_left_out(build: Callable[[], object], field: str):
    """It was 0 to the service, which trained with it."""
    with pytest.raises(InvalidArgumentError, match="there is no default") as caught:
        build()
    assert caught.value.field == field


def test_floats_of_16_bits_are_refused():
    """Trap 2: a log-prob of -4.1 was sent as -4.1015625."""
    values = np.array([-4.1, -0.1], np.float16)
    with pytest.raises(InvalidArgumentError, match="float16, expected floats of at least 32 bits"):
        rollout(response=[1, 2], sampler_logprobs=values)


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_tensor_that_numpy_cannot_read_is_named(error: type[Exception]):
    """torch's in bfloat16 raises the one, one that needs a gradient the other."""

    class Tensor:
        def __array__(self, *_: object, **__: object) -> object:
            raise error("not to numpy")

    with pytest.raises(InvalidArgumentError, match="sampler_logprobs: got Tensor"):
        rollout(response=[1, 2], sampler_logprobs=Tensor())  # pyright: ignore[reportArgumentType]


def test_an_overlong_rule_of_another_type_is_refused():
    """It was passed over, and truncated rollouts were trained."""
    with pytest.raises(InvalidArgumentError, match="overlong: got 'filter'"):
        loss_message(Loss("grpo", overlong="filter"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "error",
    [
        RatoonApiError(
            "SEQ_GAP", "m", field="f", got="g", expected="e", retryable=True, details={"a": "b"}
        ),
        InvalidArgumentError("f", 5, "e"),
    ],
)
def test_errors_reach_other_processes_whole(error: Exception):
    """A pool of processes broke at one."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
