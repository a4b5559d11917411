"""Journal text: every value comes back equal, by tags that outlive the names of classes."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace

import pytest

from ratoon.engine.commands import Command, OptimStepCommand, SeqKey
from ratoon.engine.journal.codec import TAGS, from_text, payload_hash, to_text
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    OperationResult,
    PolicyResult,
    PolicySpec,
)
from ratoon.engine.worker.tasks import Choices
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelInfo
from ratoon_proto.types import (
    EmptyResult,
    ImportMode,
    ImportResult,
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    Offender,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    OverlongFilter,
    OverlongPenalty,
    PhaseSeconds,
    ReferenceKind,
    RouterReport,
    SelfCheckReport,
    StalenessAction,
    StalenessConfig,
    StepReport,
    StepResult,
    StepWarning,
)
from tests.engine.harness import (
    DISCARD,
    SAVE,
    forward,
    forward_backward,
    import_weights,
    load,
    optim_step,
    policy_spec,
    update,
)
from tests.plans import PLAN

LOSS = LossConfig(
    kind=LossKind.DAPO,
    clip_high=0.28,
    old_logprobs=OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.1"),
    kl=KlConfig(kind=KlKind.K3, coefficient=0.1, reference=ReferenceKind.FROZEN),
    overlong=OverlongPenalty(max_tokens=10, buffer_tokens=2, scale=1.0),
    staleness=StalenessConfig(max_versions=2, action=StalenessAction.DROP),
)
REPORT = StepReport(
    ratio_max=math.inf,
    kl=0.25,
    seconds=PhaseSeconds(plan=0.5),
    warnings=(
        StepWarning(kind="a", message="b"),
        StepWarning(
            kind="c",
            message="d",
            offenders=(Offender(group=1, group_id="e", rollout=2, token=3, value=math.inf),),
        ),
    ),
    self_check=SelfCheckReport(
        sequence=3,
        tokens=4,
        logprob_max_difference=math.inf,
        logprob_mean_difference=0.5,
        worst_parameter="w",
    ),
    routers=(RouterReport(layer=1, max_load=1.5, unused_experts=2, entropy=0.25),),
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
        import_weights(1, expected_version=0),
        StepResult(version=3, report=REPORT),
        ForwardResult(version=4, digest="00", size_bytes=3, report=REPORT),
        CheckpointInfo(
            checkpoint_id="c", version=1, seq=2, replay_from_seq=1, created_at=1.5, size_bytes=9
        ),
        ImportResult(version=5, num_tensors=2, size_bytes=9, dtypes=("BF16", "F32"), digest="00"),
        EmptyResult(),
        Choices(
            plan=PLAN,
            old_logprobs="00.1",
            next_version=3,
            folder_digest="00",
        ),
        FailedResult(error=RatoonError(ErrorCode.SEQ_GAP, "m", details={"type": "x"}).to_dict()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_equal(value: object) -> None:
    back = from_text(to_text(value))
    assert back == value
    assert type(back) is type(value)
    assert to_text(back) == to_text(value)


def test_a_class_without_a_tag_is_neither_written_nor_built() -> None:
    with pytest.raises(TypeError, match="SeqKey'> has no tag"):
        to_text(SeqKey(seq=1))
    for tag in ("Popen", "EmptyResult"):
        with pytest.raises(ValueError, match="no such tag"):
            from_text(json.dumps({"$": tag}))
    with pytest.raises(ValueError, match="has no"):
        from_text(json.dumps({"$": "result.empty", "extra": 1}))


@pytest.fixture
def rename() -> Iterator[Callable[[], None]]:
    """Renames every class that has a tag."""
    names = {cls: cls.__name__ for cls in TAGS.values()}

    def change() -> None:
        for number, cls in enumerate(names):
            cls.__name__ = f"Renamed{number}"

    yield change
    for cls, name in names.items():
        cls.__name__ = name


def test_the_name_of_a_class_is_nowhere_in_the_journal(rename: Callable[[], None]) -> None:
    """A class that was renamed made a journal unreadable, and retries new payloads."""
    step = OptimStepConfig(learning_rate=0.5, beta2=0.99)
    command = OptimStepCommand(optim=step, expected_version=None, include_seqs=(2,))
    text = (
        '{"$":"command.optim_step","allow_empty":false,"discard_on_poison":false,'
        '"expected_version":null,"include_seqs":[2],"optim":{"$":"optim",'
        '"beta1":null,"beta2":0.99,"changed_share":false,"divide_by":null,"divide_constant":null,'
        '"eps":null,"learning_rate":0.5,"max_grad_norm":null,'
        '"step_on_zero_gradient":false,"tensor_grad_norms":false,"weight_decay":null}}'
    )
    values = (command, policy_spec(), update(1, loss=LOSS), StepResult(version=3, report=REPORT))
    before = [to_text(value) for value in values]
    hashed = payload_hash(command)
    rename()
    assert [to_text(value) for value in values] == before
    assert before[0] == text
    assert tuple(map(from_text, before)) == values
    assert payload_hash(command) == hashed


def test_all_that_is_journaled_has_one_tag() -> None:
    journaled = set(_classes(PolicySpec | ModelInfo | Command | Choices | OperationResult))
    assert journaled == set(TAGS.values())
    assert len(TAGS) == len(journaled)


def _classes(hint: object) -> Iterator[type]:
    """Dataclasses in a type and in the fields of those."""
    for arm in typing.get_args(hint):
        yield from _classes(arm)
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
        hints = typing.get_type_hints(hint)
        for field in fields(hint):
            yield from _classes(hints[field.name])


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
            import_weights(1),
            import_weights(2),
            import_weights(1, mode=ImportMode.FULL),
            import_weights(1, reset_optimizer=True),
        )
    }
    assert len(hashes) == 12
    assert payload_hash(update(1)) == payload_hash(update(1))


def test_a_policy_inside_a_result_comes_back_equal() -> None:
    from ratoon.engine.journal.records import PolicyRow
    from ratoon_proto.types import PolicyState

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
        position=5,
    )
    result = PolicyResult(policy=row.to_policy())
    assert from_text(to_text(result)) == result
    assert result.policy.published_version == 2
