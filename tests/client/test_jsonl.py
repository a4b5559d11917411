"""Groups from JSON lines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ratoon_client import InvalidArgumentError, Segment, group, rollout
from ratoon_client.jsonl import parse_jsonl
from ratoon_client.wire import group_messages


def messages(lines: list[str], *, byte_tokens: bool = False):
    return group_messages(parse_jsonl(lines, byte_tokens=byte_tokens))


def test_tokens_of_a_line_are_those_of_the_builders():
    record = {
        "group_id": "a",
        "prompt": [1, 2],
        "rollouts": [
            {"response": [3, 4], "sampler_logprobs": [-0.5, -0.25], "reward": 1.0},
            {"response": [], "reward": 0, "truncated": True, "policy_version": 0},
            {
                "segments": [
                    {"tokens": [7], "trained": True},
                    {"tokens": [8, 9], "trained": False},
                ],
                "advantages": [0.5, 0, 0],
                "temperature": 0.7,
                "sampler_logprobs_kind": "raw",
            },
        ],
    }
    expected = group(
        "a",
        [1, 2],
        [
            rollout(response=[3, 4], sampler_logprobs=[-0.5, -0.25], reward=1.0),
            rollout(response=[], reward=0.0, truncated=True, policy_version=0),
            rollout(
                segments=[Segment([7], True), Segment([8, 9], False)],
                advantages=[0.5, 0, 0],
                temperature=0.7,
                sampler_logprobs_kind="raw",
            ),
        ],
    )
    assert messages([json.dumps(record), "", "  \n"]) == group_messages([expected])


def test_text_is_its_bytes_and_the_assistants_is_trained():
    segments = [
        {"role": "user", "text": "1+1="},
        {"role": "assistant", "text": "zwölf"},
        {"role": "tool", "text": ""},
    ]
    line = json.dumps({"group_id": "t", "rollouts": [{"reward": 0.5, "segments": segments}]})
    expected = group(
        "t",
        [],
        [
            rollout(
                segments=[
                    Segment(np.frombuffer(b"1+1=", np.uint8), False),
                    Segment(list("zwölf".encode()), True),
                    Segment([], False),
                ],
                reward=0.5,
            )
        ],
    )
    assert messages([line], byte_tokens=True) == group_messages([expected])
    with pytest.raises(InvalidArgumentError, match="--byte-tokens"):
        messages([line])


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"rollouts": []}', "line 2: group_id"),
        ('{"group_id": 3}', "line 2: group_id"),
        ('{"group_id": "a", "colour": 1}', "line 2: colour"),
        ('{"group_id": "a", "prompt": [0.5]}', "line 2: prompt"),
        ('{"group_id": "a", "rollouts": {}}', "line 2: rollouts"),
        ('{"group_id": "a", "rollouts": [3]}', "line 2: rollouts[0]"),
        ('{"group_id": "a", "rollouts": [{}]}', "line 2: rollouts[0].response"),
        (
            '{"group_id": "a", "rollouts": [{"response": [1], "reward": "1"}]}',
            "line 2: rollouts[0].reward",
        ),
        (
            '{"group_id": "a", "rollouts": [{"response": [1], "reward": true}]}',
            "line 2: rollouts[0].reward",
        ),
        (
            '{"group_id": "a", "rollouts": [{"response": [1], "truncated": 1}]}',
            "line 2: rollouts[0].truncated",
        ),
        (
            '{"group_id": "a", "rollouts": [{"response": "abc"}]}',
            "line 2: rollouts[0].response",
        ),
        (
            '{"group_id": "a", "rollouts": [{"segments": [{"tokens": [1]}]}]}',
            "line 2: rollouts[0].segments[0]",
        ),
        (
            '{"group_id": "a", "rollouts": [{"segments": [{"tokens": 1, "trained": true}]}]}',
            "line 2: rollouts[0].segments[0].tokens",
        ),
    ],
)
def test_an_error_names_the_line_and_the_field(line: str, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        messages(['{"group_id": "fine"}', line])
    assert caught.value.field == field


def test_recorded_conversations_are_read(gsm8k_groups):
    """The recorded files' own form, byte for byte."""
    recorded = gsm8k_groups[0]
    line = json.dumps(
        {
            "group_id": recorded.group_id,
            "rollouts": [
                {
                    "reward": item.reward,
                    "segments": [{"role": s.role, "text": s.text} for s in item.segments],
                }
                for item in recorded.rollouts
            ],
        }
    )
    (built,) = parse_jsonl([line], byte_tokens=True)
    for ours, theirs in zip(built.rollouts, recorded.rollouts, strict=True):
        assert isinstance(ours.content, tuple)
        for segment, expected in zip(ours.content, theirs.segments, strict=True):
            np.testing.assert_array_equal(segment.tokens, expected.tokens)
            assert segment.trained == expected.is_trained
