"""Real rollouts of byte tokens through the whole room: nothing lost, and sharing found."""

from __future__ import annotations

import numpy as np
import pytest

from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.prefixes import sort_sequences
from tests.builders import batch_from_jsonl
from tests.plans import make_plan
from tests.recorded import RecordedGroup


@pytest.mark.parametrize("name", ["gsm8k_groups", "airline_groups"])
def test_recorded_rollouts_are_packed_without_loss(
    name: str, request: pytest.FixtureRequest
) -> None:
    groups: tuple[RecordedGroup, ...] = request.getfixturevalue(name)
    batch = batch_from_jsonl(groups[:20], limit_tokens=8192)
    forest = build_forest(batch, sort_sequences(batch), None)
    packed = pack(batch, forest, batch.loss_mask)
    assert len(packed.term_token) == np.count_nonzero(batch.loss_mask)
    for s, conversation in enumerate(c for g in groups[:20] for c in g.rollouts):
        text = b"".join(segment.text.encode() for segment in conversation.segments)[:8192]
        node, pieces = int(forest.sequence_node[s]), []
        while node >= 0:
            pieces.append(forest.tokens[forest.node_start[node] : forest.node_stop[node]])
            node = int(forest.node_parent[node])
        assert bytes(np.concatenate(pieces[::-1]).astype(np.uint8)) == text


def test_tasks_of_one_system_prompt_share_it(airline_groups: tuple[RecordedGroup, ...]) -> None:
    """All tasks begin with the same policy text: one tree, and its root holds most of it."""
    batch = batch_from_jsonl(airline_groups)
    forest = build_forest(batch, sort_sequences(batch), None)
    policy = airline_groups[0].rollouts[0].segments[0].text.encode()
    assert np.count_nonzero(forest.node_parent < 0) == 1
    assert forest.node_stop[0] >= len(policy)
    assert forest.tokens[: len(policy)].astype(np.uint8).tobytes() == policy
    # Every task of four conversations reads it once where each read it alone.
    assert forest.num_tokens <= forest.sequence_length.sum() - 99 * len(policy)


def test_recorded_groups_are_planned_whole(gsm8k_groups: tuple[RecordedGroup, ...]) -> None:
    batch = batch_from_jsonl(gsm8k_groups)
    plan = make_plan(batch, sort_sequences(batch), np.ones(batch.num_sequences, np.bool_), 16_384)
    micro_batch_of = {s: i for i, part in enumerate(plan.micro_batches) for s in part.sequences}
    assert len(micro_batch_of) == batch.num_sequences
    for start, stop in zip(batch.group_offsets[:-1], batch.group_offsets[1:], strict=True):
        assert len({micro_batch_of[s] for s in range(start, stop)}) == 1
    assert max(part.packed_tokens for part in plan.micro_batches) <= 16_384
    assert plan.unshared_tokens / plan.packed_tokens > 1.5
