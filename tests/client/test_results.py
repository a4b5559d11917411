"""Answers of the service as values."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime

import numpy as np
import pytest

from ratoon_client import IntegrityError, Offender, Operation, StepReport, StepResult
from ratoon_client.wire import decode, decode_forward, decode_step
from ratoon_proto.bases import REPORT_GROUPS
from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import operation_pb2, training_pb2


def test_a_step_is_a_line_of_figures_and_says_which_are_missing():
    """README's own print of a missing figure was a TypeError, after the step had been taken."""
    bare = decode(operation_pb2.StepResult(version=3), StepResult)
    assert str(bare).startswith("version 3, reward none, loss ")
    assert "sampler KL none, gradient norm none" in str(bare)
    report = training_pb2.StepReport(
        loss=-1.5,
        reward_mean=0.25,
        sampler_kl=1.5e-3,
        grad_norm=12.0,
        kl=0.5,
        ratio_min=0.5,
        ratio_max=1.5,
        clip_fraction_low=0.125,
        clip_fraction_high=0.25,
        staleness_mean=1.5,
        staleness_max=2,
        dropped_stale=1,
        dropped_truncated=2,
        skipped=True,
        skip_reason=training_pb2.SKIP_REASON_REFERENCE_KL,
        warnings=[training_pb2.StepWarning(kind=kind) for kind in ("lag", "step_skipped")],
    )
    assert str(decode(report, StepReport)) == (
        "reward 0.25, loss -1.5, sampler KL 1.5e-03, gradient norm 12, KL 5.0e-01, "
        "ratio 0.500 to 1.500, clipped 37.5%, staleness 1.5, at most 2, dropped 3, "
        "skipped: reference_kl, warnings: lag step_skipped"
    )


def test_a_report_is_a_dictionary_without_what_is_missing():
    report = training_pb2.StepReport(loss=-1.5, kl=0.0, skipped=True)
    report.skip_reason = training_pb2.SKIP_REASON_REFERENCE_KL
    report.seconds.backward = 2.0
    report.tensor_grad_norms.add(name="w", norm=1.0)
    step = decode(operation_pb2.StepResult(version=3, report=report), StepResult)
    assert step.skipped
    figures = json.loads(json.dumps(step.report.to_dict()))
    assert (figures["loss"], figures["kl"], figures["skip_reason"]) == (-1.5, 0.0, "reference_kl")
    assert figures["seconds"]["backward"] == 2.0
    assert figures["tensor_grad_norms"] == [{"name": "w", "norm": 1.0, "max_abs": 0.0}]
    assert "grad_norm" not in figures
    grouped = step.report.to_dict(grouped=True)
    assert {name: value for group in grouped.values() for name, value in group.items()} == figures
    assert grouped["loss"] == {"loss": -1.5, "kl": 0.0}
    assert grouped["speed"]["seconds"]["backward"] == 2.0


def test_every_field_of_a_report_is_in_one_group():
    grouped = [name for names in REPORT_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(field.name for field in fields(StepReport))


def test_absent_is_none_and_zero_is_zero():
    offender = training_pb2.Offender(group_id="g", rollout=2, token=0)
    warning = training_pb2.StepWarning(kind="a", message="b", offenders=[offender])
    message = training_pb2.StepReport(loss=-1.5, kl=0.0, warnings=[warning])
    message.seconds.backward = 2.0
    report = decode(message, StepReport)
    assert (report.loss, report.kl, report.grad_norm) == (-1.5, 0.0, None)
    assert (report.seconds.backward, report.seconds.plan) == (2.0, 0.0)
    (told,) = report.warnings
    assert (told.kind, str(told)) == ("a", "b")
    assert told.offenders == (Offender(group_id="g", rollout=2, token=0, value=None),)


def test_times_are_utc_and_enum_values_short():
    message = operation_pb2.Operation(
        kind=operation_pb2.OPERATION_KIND_FORWARD_BACKWARD,
        state=operation_pb2.OPERATION_STATE_CANCELLED,
    )
    message.created_at.seconds = 1_700_000_000
    operation = decode(message, Operation)
    assert operation.created_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert (operation.kind, operation.state) == ("forward_backward", "cancelled")
    assert operation.started_at is None
    assert operation.is_final


def test_forward_output_is_cut_by_rollout():
    output = training_pb2.ForwardOutput(
        logprobs=encode_array(np.arange(5, dtype=np.float32)),
        entropy=encode_array(np.arange(5, dtype=np.float32) + 10),
        offsets=encode_array(np.array([0, 2, 2, 5], np.int64)),
    )
    result = decode_forward(
        output, operation_pb2.ForwardResult(version=3, report=training_pb2.StepReport(loss=1.0))
    )
    assert [array.tolist() for array in result.logprobs] == [[0, 1], [], [2, 3, 4]]
    assert result.entropy is not None
    assert [array.tolist() for array in result.entropy] == [[10, 11], [], [12, 13, 14]]
    assert (result.report.loss, result.version) == (1.0, 3)


def test_a_forward_backward_has_log_probs_where_they_were_asked_for():
    output = training_pb2.ForwardOutput(
        logprobs=encode_array(np.array([-1, np.nan, -3], np.float32)),
        offsets=encode_array(np.array([0, 1, 3], np.int64)),
    )
    step = operation_pb2.StepResult(version=3, report=training_pb2.StepReport(loss=1.0))
    result = decode_step(output, step)
    assert isinstance(result, StepResult)
    assert (result.version, result.report.loss, result.entropy) == (3, 1.0, None)
    assert result.logprobs is not None
    np.testing.assert_array_equal(np.concatenate(result.logprobs), [-1, np.nan, -3])
    assert [len(array) for array in result.logprobs] == [1, 2]
    plain = decode_step(None, step)
    assert (plain.logprobs, plain.entropy, plain.report) == (None, None, result.report)


@pytest.mark.parametrize("offsets", [[], [0, 4], [1, 5], [0, 6, 5], [0, 3, 2, 5]])
def test_offsets_that_do_not_cut_the_values_are_refused(offsets: list[int]):
    output = training_pb2.ForwardOutput(
        logprobs=encode_array(np.zeros(5, np.float32)),
        offsets=encode_array(np.array(offsets, np.int64)),
    )
    with pytest.raises(IntegrityError, match="do not cut 5 values"):
        decode_forward(output, operation_pb2.ForwardResult())


@pytest.mark.parametrize("shape", [(), (5, 1)])
def test_values_of_another_shape_are_refused(shape: tuple[int, ...]):
    """Such arrays ended in a TypeError of numpy."""
    output = training_pb2.ForwardOutput(
        logprobs=encode_array(np.ones(shape, np.float32)),
        offsets=encode_array(np.array([0, 5])),
    )
    with pytest.raises(IntegrityError):
        decode_forward(output, operation_pb2.ForwardResult())
    output.logprobs.CopyFrom(encode_array(np.ones(5, np.float32)))
    output.offsets.CopyFrom(encode_array(np.array([[0], [5]])))
    with pytest.raises(IntegrityError):
        decode_forward(output, operation_pb2.ForwardResult())


def test_a_time_that_is_none_is_refused():
    message = operation_pb2.Operation()
    message.created_at.seconds = 2**62
    with pytest.raises(IntegrityError, match="no Operation"):
        decode(message, Operation)
