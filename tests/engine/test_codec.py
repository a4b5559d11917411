"""Journal text: every value comes back equal, and nothing but known classes is built."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ratoon.engine.codec import from_text, payload_hash, to_text
from ratoon.engine.types import (
    CheckpointInfo,
    EmptyResult,
    FailedResult,
    ForwardResult,
    PolicyResult,
    StepResult,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, LoraTuning
from ratoon.train.config import (
    KlConfig,
    KlKind,
    LossKind,
    LossRequest,
    OldLogprobs,
    OldLogprobsKind,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    Staleness,
    StalenessAction,
)
from ratoon.train.report import CanaryReport, PhaseSeconds, StepReport
from tests.engine.harness import (
    DISCARD,
    SAVE,
    forward,
    forward_backward,
    load,
    optim_step,
    policy_spec,
    update,
)

LOSS = LossRequest(
    kind=LossKind.DAPO,
    clip_high=0.28,
    old_logprobs=OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.1"),
    kl=KlConfig(kind=KlKind.K3, coefficient=0.1, reference=ReferenceKind.FROZEN),
    overlong=OverlongPenalty(max_tokens=10, buffer_tokens=2, scale=1.0),
    staleness=Staleness(max_versions=2, action=StalenessAction.DROP),
)
REPORT = StepReport(
    ratio_max=math.inf,
    kl=0.25,
    seconds=PhaseSeconds(plan=0.5),
    warnings=("a", "b"),
    canary=CanaryReport(
        sequence=3,
        tokens=4,
        logprob_max_difference=math.inf,
        logprob_mean_difference=0.5,
        worst_parameter="w",
    ),
)


@pytest.mark.parametrize(
    "value",
    [
        policy_spec(),
        replace(
            policy_spec(),
            model=replace(
                policy_spec().model,
                base=FolderBase(folder="/models/x"),
                tuning=LoraTuning(rank=4, alpha=8.0, target_modules=("q_proj",)),
            ),
        ),
        update(1, loss=LOSS, expected_version=0),
        update(1, loss=replace(LOSS, overlong=OverlongFilter())),
        forward_backward(2),
        forward(3),
        optim_step(1, 2),
        DISCARD,
        SAVE,
        load("x"),
        StepResult(version=3, report=REPORT),
        ForwardResult(version=4, digest="00", size_bytes=3, report=REPORT),
        CheckpointInfo(
            checkpoint_id="c", version=1, seq=2, replay_from_seq=1, created_at=1.5, size_bytes=9
        ),
        EmptyResult(),
        FailedResult(error=RatoonError(ErrorCode.SEQ_GAP, "m", details={"type": "x"}).to_dict()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_equal(value: object) -> None:
    back = from_text(to_text(value))
    assert back == value
    assert type(back) is type(value)
    assert to_text(back) == to_text(value)


def test_a_class_outside_the_table_is_not_built() -> None:
    with pytest.raises(ValueError, match="no such value"):
        from_text(json.dumps({"$": "Popen", "args": "x"}))
    with pytest.raises(ValueError, match="EmptyResult has no"):
        from_text(json.dumps({"$": "EmptyResult", "extra": 1}))


def test_the_payload_hash_covers_the_command_and_its_body() -> None:
    hashes = {
        payload_hash(command)
        for command in (
            update(1),
            update(2),
            update(1, loss=LOSS),
            update(1, expected_version=0),
            forward_backward(1),
            forward(1),
            optim_step(),
            optim_step(1),
        )
    }
    assert len(hashes) == 8
    assert payload_hash(update(1)) == payload_hash(update(1))


def test_a_policy_inside_a_result_comes_back_equal() -> None:
    from ratoon.engine.journal import PolicyRow
    from ratoon.engine.types import PolicyState

    row = PolicyRow(
        spec=policy_spec(),
        state=PolicyState.READY,
        version=2,
        max_version=3,
        next_seq=4,
        token=1,
        created_at=0.5,
        info=None,
        failure="",
        published=(1, 2),
    )
    result = PolicyResult(policy=row.to_policy())
    assert from_text(to_text(result)) == result
    assert result.policy.published_version == 2
