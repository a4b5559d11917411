"""Teachers on the real service: tenants of one process, models of others, and what is carried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratoon_client import (
    Distillation,
    Group,
    Kl,
    Lora,
    Loss,
    Optim,
    RatoonApiError,
    RatoonClient,
    Teacher,
    group,
    rollout,
)
from tests.running_service import Service

pytestmark = pytest.mark.e2e
STEP = Optim(learning_rate=1e-3)


def _groups() -> list[Group]:
    """Two groups, whose rollouts share tokens."""
    return [
        group(
            f"g{index}",
            [5, 6, 7 + index],
            [
                rollout(response=[8, 9, 10 + last], sampler_logprobs=[-5.0] * 3, reward=last)
                for last in range(3)
            ],
        )
        for index in range(2)
    ]


def _taught(*teachers: Teacher, **options: object) -> Loss:
    distillation = Distillation("forward_kl", teachers=teachers, num_teacher_tokens=8)
    return Loss("grpo", distillation=distillation, **options)  # pyright: ignore[reportArgumentType]


def test_tenants_of_one_process_teach_each_other(service: Service) -> None:
    with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
        for seed, name in enumerate(("tenant-a", "tenant-b")):
            lora = Lora(rank=4, alpha=8.0)
            client.create_policy(name, preset="tiny", lora=lora, seed=seed).result()
        client.create_policy("elder", preset="tiny", seed=9).result()
        sessions = [client.policy(name) for name in ("tenant-a", "tenant-b")]
        for version in range(3):
            sent = [
                session.update(
                    _groups(),
                    loss=_taught(
                        Teacher(other),
                        Teacher("elder", version=0, group_ids=["g1"]),
                        kl=Kl("k3", 0.1, "teacher", teachers=[Teacher(other)]),
                    ),
                    optim=STEP,
                )
                for session, other in zip(sessions, ("tenant-b", "tenant-a"), strict=True)
            ]
            for operation, other in zip(sent, ("tenant-b", "tenant-a"), strict=True):
                result = operation.result()
                assert result.version == version + 1
                assert result.report.teacher_kl is not None
                assert result.report.kl is not None
                mine, elder, reference = result.teachers
                assert elder == Teacher("elder", version=0)
                for asked in (mine, reference):
                    assert asked.policy_id == other
                    assert asked.version in (version, version + 1)


def test_what_is_asked_has_the_bits_of_what_is_carried(service: Service, tmp_path: Path) -> None:
    with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
        client.create_policy("guide", preset="tiny", seed=9).result()
        for name in ("asks", "carries"):
            client.create_policy(name, preset="tiny", seed=4).result()
        asked = client.policy("asks").update(
            _groups(), loss=_taught(Teacher("guide", version=0)), optim=STEP
        )
        answers = client.forward("guide", _groups(), num_teacher_tokens=8).result()
        assert answers.teacher_tokens is not None
        assert answers.teacher_logprobs is not None
        columns = iter(zip(answers.teacher_tokens, answers.teacher_logprobs, strict=True))
        carried = [
            replace(
                each,
                rollouts=tuple(
                    replace(one, teacher_tokens=tokens, teacher_logprobs=logprobs)
                    for one, (tokens, logprobs) in zip(each.rollouts, columns, strict=False)
                ),
            )
            for each in _groups()
        ]
        given = client.policy("carries").update(
            carried, loss=Loss("grpo", distillation="forward_kl"), optim=STEP
        )
        assert asked.result().report.loss == given.result().report.loss
        weights = [
            client.pull_weights(name, tmp_path / name).folder / "model.safetensors"
            for name in ("asks", "carries")
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_teacher_that_cannot_be_asked_takes_no_seq(service: Service) -> None:
    with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
        client.create_policy("pupil", preset="tiny", seed=4).result()
        session = client.policy("pupil")
        for teacher, code in (
            (Teacher("nobody-here"), "POLICY_NOT_FOUND"),
            (Teacher("pupil", version=7), "VERSION_MISMATCH"),
        ):
            with pytest.raises(RatoonApiError) as caught:
                session.update(_groups(), loss=_taught(teacher), optim=STEP).result()
            assert caught.value.code == code
            assert caught.value.field.startswith("loss.distillation.teachers[0]")
        done = session.update(_groups(), loss=_taught(Teacher("pupil")), optim=STEP).result()
        assert done.teachers == (Teacher("pupil", version=0),)
