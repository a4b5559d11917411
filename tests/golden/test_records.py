"""Values on disk and on the wire: payload hashes, journal rows, bodies, the API document."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
from sqlalchemy import create_engine, select

from ratoon.api.http.app import create_app
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.engine.commands import Command
from ratoon.engine.journal.codec import from_text, payload_hash, to_text
from ratoon.engine.journal.integrity import insert_row
from ratoon.engine.journal.records import Checkpoint, JournalState, OperationRecord
from ratoon.engine.journal.tables import (
    CHECKPOINTS,
    METADATA,
    OPERATIONS,
    POLICIES,
    insert_checkpoint,
    to_columns,
)
from ratoon.engine.types import CheckpointInfo, FailedResult, ForwardResult
from ratoon.engine.worker.tasks import Choices, TeacherAnswer
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase
from ratoon.rollout.serial import batch_to_bytes
from ratoon_proto.types import (
    AdamWConfig,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    DistillationConfig,
    Divergence,
    EmptyResult,
    ImportMode,
    ImportResult,
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OperationKind,
    OptimStepConfig,
    OverlongFilter,
    OverlongPenalty,
    PublishConfig,
    PublishKind,
    ReferenceKind,
    RolloutCorrection,
    StalenessAction,
    StalenessConfig,
    StepResult,
    Teacher,
)
from tests import builders
from tests.api.open_gate import OPEN_GATE
from tests.engine import harness
from tests.engine.test_codec import REPORT
from tests.golden.conftest import Golden
from tests.plans import PLAN

LOSSES = {
    **{kind.value: LossConfig(kind=kind) for kind in LossKind},
    "full": LossConfig(
        kind=LossKind.DAPO,
        clip_low=0.2,
        clip_high=0.28,
        old_logprobs=OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.1"),
        kl=KlConfig(kind=KlKind.K3, coefficient=0.1, reference=ReferenceKind.FROZEN),
        correction=RolloutCorrection(
            mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.TOKEN, low=0.0, high=2.0
        ),
        correction_mask=CorrectionMask(level=CorrectionLevel.SEQUENCE, low=0.5, high=2.0),
        overlong=OverlongPenalty(max_tokens=10, buffer_tokens=2, scale=1.0),
        staleness=StalenessConfig(max_versions=2, action=StalenessAction.DROP),
        entropy_coefficient=0.01,
    ),
    "taught": LossConfig(
        kind=LossKind.GRPO,
        distillation=DistillationConfig(
            Divergence.REVERSE_KL,
            teachers=[Teacher("t"), Teacher("u", version=3, group_ids=["g"])],
            num_teacher_tokens=4,
        ),
        kl=KlConfig(KlKind.K3, 0.1, ReferenceKind.TEACHER, teachers=[Teacher("t")]),
    ),
    "overlong_filter": LossConfig(kind=LossKind.GRPO, overlong=OverlongFilter()),
}
STEP = OptimStepConfig(
    learning_rate=1e-3,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=1.0,
    tensor_grad_norms=True,
)
COMMANDS: dict[str, Command] = {
    **{f"update.{name}": harness.update(1, loss=loss) for name, loss in LOSSES.items()},
    "update.step": harness.update(1, optim=STEP, expected_version=0),
    "forward_backward": harness.forward_backward(2),
    "forward": harness.forward(3),
    "forward.reference": replace(harness.forward(3), with_entropy=True, use_reference=True),
    "optim_step": harness.optim_step(),
    "optim_step.seqs": harness.optim_step(1, 2),
    "discard": harness.DISCARD,
    "save": harness.save("before"),
    "publish": harness.publish("before", ttl_s=60.0),
    "load": harness.load("before"),
    "import": harness.import_weights(1, expected_version=0),
    "import.full": harness.import_weights(1, mode=ImportMode.FULL, reset_optimizer=True),
}
SPEC = harness.policy_spec()
SPECS = {
    "plain": SPEC,
    "lora": replace(
        SPEC,
        model=replace(
            SPEC.model,
            base=FolderBase(folder="/models/x"),
            tuning=LoraTuning(rank=4, alpha=8.0, target_modules=("q_proj",)),
        ),
        optimizer=AdamWConfig(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2),
        publish=PublishConfig(kind=PublishKind.EVERY_N, every_n=3, deltas=True),
    ),
    "lora.merged": replace(
        SPEC,
        model=replace(SPEC.model, tuning=LoraTuning(rank=4, alpha=8.0, use_rslora=True)),
        publish=PublishConfig(merged=True),
    ),
}
CHECKPOINT = CheckpointInfo(
    checkpoint_id="c", version=1, seq=2, replay_from_seq=1, created_at=1.5, size_bytes=9
)
ERROR = RatoonError(ErrorCode.SEQ_GAP, "m", details={"type": "x"})
RESULTS = {
    "step": StepResult(version=3, report=REPORT),
    "step.taught": StepResult(version=3, report=REPORT, teachers=(Teacher("t", version=2),)),
    "forward": ForwardResult(version=4, digest="00", size_bytes=3, report=REPORT),
    "checkpoint": CHECKPOINT,
    "import": ImportResult(version=5, num_tensors=2, size_bytes=9, dtypes=("BF16",), digest="00"),
    "empty": EmptyResult(),
    "failed": FailedResult(error=ERROR.to_dict()),
}


def test_payload_hashes_and_texts(golden: Golden) -> None:
    """A retry across an upgrade is known by its hash, and a journal read by its text."""
    hashes = {name: [payload_hash(each), to_text(each)] for name, each in COMMANDS.items()}
    texts = {name: to_text(each) for name, each in (SPECS | RESULTS).items()}
    golden.check("payloads", {"commands": hashes, "texts": texts})


def test_choices_of_the_journal(golden: Golden) -> None:
    """With a plan: a replay runs what this text says."""
    choices = Choices(
        plan=PLAN,
        old_logprobs="00.1",
        old_version=2,
        next_version=3,
        checkpoint=CHECKPOINT,
        folder_digest="00",
    )
    answer = TeacherAnswer(policy_id="t", version=2, digest="00")
    taught = replace(Choices(next_version=3), teachers=(answer,))
    for each in (choices, taught):
        assert from_text(to_text(each)) == each
    golden.check("choices", [to_text(choices), to_text(taught)])


def _operation(**changes: Any) -> OperationRecord:
    plain = OperationRecord(
        operation_id="p.1",
        policy_id="p",
        kind=OperationKind.UPDATE,
        seq=1,
        request_id="",
        payload_hash=payload_hash(COMMANDS["update.full"]),
        command=COMMANDS["update.full"],
        body_digest="00",
        body_bytes=3,
        key_id="key",
        state=JournalState.ACCEPTED,
        choices=None,
        result=None,
        version=None,
        weights_digest="",
        numerics="",
        created_at=1.0,
        started_at=None,
        finished_at=None,
    )
    return replace(plain, **changes)


def test_rows_of_the_journal(golden: Golden) -> None:
    """With the digests that seal them."""
    rows = [
        _operation(),
        _operation(
            operation_id="p.2",
            seq=2,
            request_id="mine",
            state=JournalState.APPLIED,
            choices=Choices(old_logprobs="00.1", next_version=3, folder_digest="00"),
            result=RESULTS["step"],
            version=3,
            weights_digest="11",
            numerics="22",
            started_at=2.0,
            finished_at=3.0,
        ),
    ]
    policy = {
        "policy_id": "p",
        "spec": to_text(SPECS["lora"]),
        "state": "ready",
        "version": 3,
        "max_version": 4,
        "next_seq": 3,
        "token": 2,
        "created_at": 0.5,
        "info": None,
        "failure": None,
        "published": "[2,3]",
        "position": None,
    }
    engine = create_engine("sqlite://")
    METADATA.create_all(engine)
    with engine.begin() as connection:
        insert_row(connection, POLICIES, policy)
        for row in rows:
            insert_row(connection, OPERATIONS, to_columns(row))
        insert_checkpoint(connection, "p", Checkpoint(info=CHECKPOINT, weights_digest="11"))
        found = {
            table.name: [dict(row) for row in connection.execute(select(table)).mappings()]
            for table in (POLICIES, OPERATIONS, CHECKPOINTS)
        }
    golden.check("rows", found)


def test_bodies(golden: Golden) -> None:
    """A batch's canonical bytes, which its digest names."""
    digests = {
        str(seed): hashlib.sha256(
            batch_to_bytes(builders.random_batch(np.random.default_rng(seed), policy_version=seed))
        ).hexdigest()
        for seed in range(4)
    }
    golden.check("bodies", digests)


def test_the_api_document(golden: Golden) -> None:
    app = create_app(create_autospec(PolicyService), LimitsConfig(), gate=OPEN_GATE)
    golden.check("openapi", app.openapi())
