"""The pure part of the Tinker wire: names, losses, datums there and log-probs back."""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64encode
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from ratoon.api.convert.groups import raw_groups
from ratoon.api.tinker.answers import error_answer, json_answer, logprobs_answer
from ratoon.api.tinker.datums import Batch, batch_of, future_id, split_future
from ratoon.api.tinker.errors import renamed, status_of
from ratoon.api.tinker.losses import LOSSES, loss_of
from ratoon.api.tinker.names import (
    NOBODY,
    Model,
    checked_session,
    model_of,
    model_of_policy,
    new_session,
    weights_of,
)
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.kinds import LOSSES as DIVIDED
from ratoon_proto.codec import decode_tensor, encode_array
from ratoon_proto.tinker import tinker_pb2 as wire
from ratoon_proto.types import DivideBy, LossKind
from ratoon_proto.v1 import operation_pb2, training_pb2
from tests.api.tinker_requests import chunk, datum, forward_backward, tensor
from tests.builders import limits

OPERATION = "tinker-0123456789ab-0123456789abcdef-0.0123"


def converted(request: wire.ForwardBackwardRequest, *, most: int = 8) -> Batch:
    loss, _ = loss_of(request)
    return batch_of(request.data, loss, forward_only=request.forward_only, max_datums=most)


def refusal(request: wire.ForwardBackwardRequest) -> str:
    with pytest.raises(RatoonError) as caught:
        converted(request)
    assert caught.value.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    return caught.value.message


def arrays(batch: Batch, name: str) -> list[list[Any]]:
    rollouts = [group.rollouts[0] for group in batch.groups]
    return [decode_tensor(getattr(r, name), max_bytes=1000).tolist() for r in rollouts]


def test_a_datum_is_a_group_whose_response_tokens_are_its_targets() -> None:
    parts = datum([], weights=[0, 0.5, -2, 0], targets=[11, 12, 13, 14])
    parts.model_input[0].CopyFrom(chunk([10, 11]))
    parts.model_input.append(chunk([12, 13]))
    batch = converted(forward_backward(parts, datum([5], weights=[1])))
    prompts = [decode_tensor(group.prompt, max_bytes=100).tolist() for group in batch.groups]
    assert prompts == [[10], [5]]
    assert arrays(batch, "response") == [[11, 12, 13, 14], [7]]
    assert arrays(batch, "token_weights") == [[0, 0.5, -2, 0], [1]]
    assert arrays(batch, "loss_mask") == [[False, True, True, False], [True]]
    assert batch.note == wire.FutureNote(is_mean=True)


@pytest.mark.parametrize(("num_sampled", "least"), [(11, 4.5), (12, 4.38)])
def test_prompts_of_flat_datums_are_run_once_in_any_order(num_sampled: int, least: float) -> None:
    """Exactly the distinct prefixes are run; with longer answers a prompt saves a smaller share."""
    draw = np.random.default_rng(0)
    data: list[wire.Datum] = []
    for prompt in draw.integers(0, 256, (4, 90)).tolist():
        for sampled in draw.integers(0, 256, (8, num_sampled)).tolist():
            tokens = [*prompt, *sampled]
            zeros = [0.0] * 89
            advantages = [*zeros, *[1.0] * num_sampled]
            data.append(
                datum(
                    tokens[:-1],
                    [*[0] * 89, *sampled],
                    advantages=advantages,
                    logprobs=[*zeros, *[-5.5] * num_sampled],
                )
            )
    plans: list[tuple[int, int]] = []
    for order in (range(32), draw.permutation(32)):
        groups = converted(
            forward_backward(*(data[i] for i in order), loss_fn="importance_sampling"), most=32
        ).groups
        batch = validate_groups(raw_groups(groups, max_tokens=10_000), limits(vocab_size=256))
        is_run = np.ones(32, np.bool_)
        plan = cpu_planner(16_384).plan(batch, sort_sequences(batch), is_run)
        plans.append((plan.unshared_tokens, plan.packed_tokens))
    paths = [batch.sequence_tokens(sequence).tolist() for sequence in range(32)]
    distinct = {tuple(path[: stop + 1]) for path in paths for stop in range(len(path))}
    assert plans == [(32 * (90 + num_sampled), len(distinct))] * 2
    assert plans[0][0] / plans[0][1] >= least


def test_tokens_without_advantage_and_logprob_are_masked_except_where_the_loss_has_a_term() -> None:
    """Placeholders of a prompt would count as log-probs of a sampler that knew every token."""
    columns = {"advantages": [0, 0, 1, 0], "logprobs": [0, 0, -1, -1]}
    for loss_fn, mask in (("ppo", [False, False, True, True]), ("dro", [True] * 4)):
        batch = converted(forward_backward(datum([1, 2, 3, 4], **columns), loss_fn=loss_fn))
        assert arrays(batch, "loss_mask") == [mask]
    # A batch without any term is run for its log-probs.
    nothing = datum([1, 2], advantages=[0, 0], logprobs=[0, 0])
    batch = converted(forward_backward(nothing, loss_fn="ppo"))
    assert arrays(batch, "loss_mask") == [[True, True]]


def test_a_target_that_is_not_the_next_token_weighs_nothing_and_has_no_logprob() -> None:
    first = datum([1, 2, 3], targets=[0, 3, 4], weights=[0, 1, 1])
    batch = converted(forward_backward(first, datum([1, 2], weights=[1, 1])))
    assert arrays(batch, "loss_mask") == [[False, True, True], [True, True]]
    guessed = datum([1, 2, 3], targets=[0, 3, 4], advantages=[0, 1, 1], logprobs=[-1, -1, -1])
    masks = arrays(converted(forward_backward(guessed, loss_fn="ppo")), "loss_mask")
    assert masks == [[False, True, True]]
    logprobs = np.array([-1, -2, -3, -4, np.nan], np.float32)
    answer = answered(logprobs, [0, 3, 5], batch.note, loss=9.0, trained_tokens=1)
    assert values_of(answer) == [[0, -2, -3], [-4, 0]]
    assert answer.metrics["loss:sum"] == 9.0


def answered(
    logprobs: np.ndarray, offsets: list[int], note: wire.FutureNote, **report: Any
) -> wire.ForwardBackwardOutput:
    output = training_pb2.ForwardOutput(
        logprobs=encode_array(logprobs), offsets=encode_array(np.array(offsets, np.int64))
    )
    # The note comes back in the future's id.
    operation_id, note = split_future(future_id(OPERATION, note))
    assert operation_id == OPERATION
    data = logprobs_answer(output, training_pb2.StepReport(**report), note, max_bytes=10_000)
    return wire.ForwardBackwardOutput.FromString(data)


def values_of(answer: wire.ForwardBackwardOutput) -> list[list[float]]:
    (record,) = answer.loss_fn_outputs
    found = record.fields["logprobs"]
    offsets = np.frombuffer(found.offsets, np.int64)
    assert (len(offsets) - 1, found.dtype) == (record.num_datums, wire.DTYPE_FLOAT32)
    return [
        np.frombuffer(found.data[start:stop], np.float32).tolist()
        for start, stop in pairwise(offsets)
    ]


def test_sums_of_losses_whatever_the_report_divides_by() -> None:
    logprobs = np.array([-1, -2, -3, -4], np.float32)
    mean = converted(
        forward_backward(datum([1], advantages=[1], logprobs=[-1]), loss_fn="cispo")
    ).note
    answer = answered(logprobs, [0, 4], mean, loss=0.5, trained_tokens=3, ratio_max=2.0)
    assert answer.metrics["loss:sum"] == 1.5
    assert answer.metrics["ratio:max"] == 2.0
    assert all(name.count(":") == 1 for name in answer.metrics)
    assert "entropy:mean" not in answer.metrics
    weights = [0, 1, 0.5, -1]
    only = forward_backward(datum([1, 2, 3, 4], weights=weights), forward_only=True)
    assert answered(logprobs, [0, 4], converted(only).note).metrics["loss:sum"] == -0.5
    unweighted = forward_backward(datum([1, 2, 3, 4], weights=[0] * 4), forward_only=True)
    batch = converted(unweighted)
    assert arrays(batch, "loss_mask") == [[True] * 4]
    assert answered(logprobs, [0, 4], batch.note).metrics["loss:sum"] == 0


def test_a_bfloat16_tensor_is_read_as_its_upper_half() -> None:
    found = datum([1, 2], weights=[0, 0])
    bits = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found.loss_fn_inputs["weights"].CopyFrom(
        wire.Tensor(dense=bits.tobytes(), dtype=wire.DTYPE_BFLOAT16, shape=[2])
    )
    assert arrays(converted(forward_backward(found)), "token_weights") == [[1.5, -2.0]]


def _given(**tensors: wire.Tensor) -> wire.Datum:
    found = datum([1, 2, 3], weights=[0, 1, 1])
    for name, each in tensors.items():
        found.loss_fn_inputs[name].CopyFrom(each)
    return found


def _chunks(*chunks: wire.Chunk) -> wire.Datum:
    found = datum([1, 2, 3], weights=[0, 1, 1])
    del found.model_input[:]
    found.model_input.extend(chunks)
    return found


LIES = tensor([1, 2, 3])
LIES.shape[:] = [2**40]
SPARSE = wire.Tensor(
    sparse_csr=wire.SparseCsr(values=b"\0" * 4, crow_indices=b"\0" * 8, col_indices=b"\xff" * 8),
    dtype=wire.DTYPE_FLOAT32,
    shape=[3, 2],
)
MATRIX = tensor([1, 2, 3])
MATRIX.shape[:] = [3, 1]
UNTYPED = wire.Tensor(dense=b"\0" * 12)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (_given(weights=tensor([0, 1])), "data[1].loss_fn_inputs.weights.shape: got 2 values"),
        (_given(weights=LIES), "data[1].loss_fn_inputs.weights.shape: got 1099511627776 values"),
        (
            _given(weights=wire.Tensor(dense=b"\0" * 11, dtype=wire.DTYPE_FLOAT32)),
            "weights: got 11 bytes",
        ),
        (_given(weights=SPARSE), "data[1].loss_fn_inputs.weights: several values a token"),
        (_given(weights=MATRIX), "data[1].loss_fn_inputs.weights: several values a token"),
        (_given(weights=UNTYPED), "data[1].loss_fn_inputs.weights.dtype: got 0"),
        (_given(weights=tensor([0, np.nan, 1])), "data[1].loss_fn_inputs.weights[1]: got nan"),
        (_given(weights=tensor([0, 1, np.inf])), "data[1].loss_fn_inputs.weights[2]: got inf"),
        (_given(target_tokens=tensor([2, 3, 4])), "target_tokens.dtype: got float32"),
        (_given(target_tokens=tensor([2, 9, 4], "int64")), "target_tokens[1]: got 9, expected 3"),
        (_given(target_tokens=tensor([2, 3, 2**40], "int64")), "target_tokens[2]: got 1099511"),
        (_given(mask=tensor([0, 1, 1])), "data[1].loss_fn_inputs: 'mask' cannot be used"),
        (_given(clip_low_threshold=tensor([0, 1, 1])), "'clip_low_threshold' cannot be used"),
        (_chunks(), "data[1].model_input: got no tokens"),
        (_chunks(wire.Chunk(encoded_text=wire.EncodedText(tokens=b"abc"))), "got 3 bytes"),
        (_chunks(chunk([1]), wire.Chunk(image=wire.OtherChunk())), "chunks[1]: image cannot"),
        (_chunks(wire.Chunk()), "data[1].model_input.chunks[0]: a chunk of an unknown kind"),
        (datum([1, 2, 3]), "data[1].loss_fn_inputs.weights: got nothing"),
    ],
)
def test_a_bad_datum_is_refused_by_its_index(bad: wire.Datum, said: str) -> None:
    good = datum([1, 2], weights=[1, 1])
    assert said in refusal(forward_backward(good, bad, good))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss_fn": "stable_reinforce"}, "write loss_fn=importance_sampling"),
        ({"loss_fn": "gspo"}, "write loss_fn=ppo"),
        ({"loss_fn": "custom"}, "write forward_backward_custom"),
        ({"loss_fn": "x" * 10_000}, "is not served"),
        ({"loss_fn_config": {"beta": 1.0}}, "cross_entropy has no numbers"),
        ({"loss_fn": "ppo", "loss_fn_config": {"clip": 1.0}}, "one of clip_low_threshold"),
        ({"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 1.2}}, "from 0 to 1"),
        ({"loss_fn": "cispo", "loss_fn_config": {"clip_high_threshold": np.nan}}, "above 1"),
        (
            {
                "loss_fn": "dro",
                "loss_fn_config": {"beta": 1.0},
                "loss_fn_config_v2": {"beta": wire.ConfigValue(number=2.0)},
            },
            "as the other map says",
        ),
        (
            {"loss_fn": "dro", "loss_fn_config_v2": {"beta": wire.ConfigValue(text="x")}},
            "expected a number",
        ),
    ],
)
def test_a_loss_that_would_be_another_is_refused(fields: dict[str, Any], said: str) -> None:
    message = refusal(forward_backward(datum([1], weights=[1]), **fields))
    assert said in message
    assert len(message) < 500


def test_losses_are_mapped_with_their_numbers() -> None:
    def config(loss_fn: str, **numbers: float) -> training_pb2.LossConfig:
        maps = {name: wire.ConfigValue(number=value) for name, value in numbers.items()}
        return loss_of(forward_backward(loss_fn=loss_fn, loss_fn_config_v2=maps))[1]

    ppo = config("ppo", clip_high_threshold=1.3)
    assert (ppo.kind, ppo.advantage) == (
        training_pb2.LOSS_KIND_PPO_CLIP,
        training_pb2.ADVANTAGE_KIND_GIVEN,
    )
    assert (ppo.clip_low, ppo.clip_high) == pytest.approx((0.2, 0.3))
    cispo = config("cispo")
    assert (cispo.clip_low, cispo.clip_high) == (0.8, 1.2)
    dro = config("dro", beta=0.25)
    assert (dro.kind, dro.kl.kind, dro.kl.coefficient, dro.kl.reference) == (
        training_pb2.LOSS_KIND_REINFORCE,
        training_pb2.KL_KIND_K2,
        0.25,
        training_pb2.REFERENCE_KIND_GIVEN,
    )
    names = {name: training_pb2.LossKind.Name(config(name).kind) for name in LOSSES}
    kinds = {
        name: LossKind(text.removeprefix("LOSS_KIND_").lower()) for name, text in names.items()
    }
    divided = {name for name in LOSSES if DIVIDED[kinds[name]].divide_by is DivideBy.TOKENS}
    assert {name for name, loss in LOSSES.items() if loss.is_mean} == divided


def test_number_of_datums_is_bounded() -> None:
    assert "got 0 datums" in refusal(forward_backward())
    assert "got 9 datums" in refusal(forward_backward(*[datum([1], weights=[1])] * 9))


def test_a_request_cut_anywhere_is_refused_or_another() -> None:
    data = forward_backward(datum([1, 2, 3], weights=[0, 1, 1])).SerializeToString()
    ends: set[str] = set()
    for at in range(len(data)):
        try:
            converted(wire.ForwardBackwardRequest.FromString(data[:at]))
        except RatoonError as error:
            ends.add(error.code)
        except DecodeError:
            ends.add("malformed")
    assert ends <= {"malformed", ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED}
    assert "malformed" in ends


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!!!!",
        "AAAA",
        urlsafe_b64encode(zlib.compress(b"\xff" * 9)).decode(),
        urlsafe_b64encode(zlib.compress(b"\0" * 2**26)).decode(),
        urlsafe_b64encode(zlib.compress(b"") + b"x").decode(),
    ],
)
def test_a_made_up_note_is_of_no_future(text: str) -> None:
    with pytest.raises(RatoonError) as caught:
        split_future(f"{OPERATION}~{text}")
    assert caught.value.code is ErrorCode.OPERATION_NOT_FOUND


@pytest.mark.parametrize(
    "note", [wire.FutureNote(not_next=b"\xff\xff"), wire.FutureNote(weights=b"\0" * 8)]
)
def test_the_note_of_another_future_is_refused(note: wire.FutureNote) -> None:
    with pytest.raises(RatoonError) as caught:
        answered(np.zeros(3, np.float32), [0, 3], note)
    assert caught.value.code is ErrorCode.OPERATION_NOT_FOUND


OWNER, OTHER = "0123456789ab", "ba9876543210"


def test_names_tell_whose_they_are() -> None:
    session = new_session(OWNER)
    assert checked_session(session, OWNER) == session
    model = model_of(f"{session}:train:12", OWNER)
    assert model == Model(session=session, number=12)
    assert model_of_policy(model.policy_id, OWNER) == model
    assert weights_of(model.path("final.1"), OWNER) == (model, "final.1")
    texts: set[str] = set()
    for read, name in (
        (checked_session, session),
        (model_of, model.model_id),
        (model_of_policy, model.policy_id),
        # None of these exists, for whomever.
        (checked_session, "x"),
        (model_of, f"{session}:train:012"),
        (model_of, f"{session}:train:1\n"),
        (model_of_policy, "mine"),
    ):
        for owner in (OTHER, NOBODY):
            with pytest.raises(RatoonError) as caught:
                read(name, owner)
            assert caught.value.code is ErrorCode.POLICY_NOT_FOUND
            texts.add(caught.value.message)
    assert len(texts) == 1
    with pytest.raises(RatoonError) as caught:
        weights_of(model.path("final"), OTHER)
    assert caught.value.code is ErrorCode.CHECKPOINT_NOT_FOUND


@pytest.mark.parametrize(
    "name", ["..", ".", "a/b", "%2e%2e", "..%2f..", "a\0b", "", "a" * 65, "a" * 10_240, "x\n"]
)
def test_paths_lead_nowhere_else(name: str) -> None:
    model = Model(session=new_session(OWNER), number=0)
    for path in (model.path(name), f"{model.path('a')}/{name}", name):
        with pytest.raises(RatoonError) as caught:
            weights_of(path, OWNER)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert len(caught.value.message) < 200


def test_fields_have_the_names_of_this_wire() -> None:
    error = renamed(invalid("groups[3].rollouts[0].response[17]", 300, "a token below 256"))
    assert error.field == "data[3].loss_fn_inputs.target_tokens[17]"
    assert error.message.startswith(error.field)
    assert renamed(invalid("optim.max_grad_norm", -1, "x")).field == "adam_params.grad_clip_norm"
    assert renamed(invalid("groups[0].prompt[0]", 1, "x")).field == "data[0].model_input[0]"


def test_no_refusal_is_a_conflict_and_what_may_pass_is_asked_again() -> None:
    """An SDK asks for 300 s again after a 409."""
    statuses = {code: status_of(RatoonError(code, "")) for code in ErrorCode}
    assert 409 not in statuses.values()
    assert statuses[ErrorCode.KEY_REUSED] == statuses[ErrorCode.INVALID_ARGUMENT] == 400
    assert statuses[ErrorCode.POLICY_NOT_READY] == statuses[ErrorCode.UNAVAILABLE] == 503
    assert statuses[ErrorCode.RESOURCE_EXHAUSTED] == 429
    categories = {code: error_answer(RatoonError(code, ""))["category"] for code in ErrorCode}
    assert categories[ErrorCode.WINDOW_POISONED] == categories[ErrorCode.SEQ_GAP] == "user"
    assert categories[ErrorCode.INTERNAL] == categories[ErrorCode.WORKER_LOST] == "server"


def test_operations_are_answers_of_their_calls() -> None:
    model = Model(session=new_session(OWNER), number=2)
    operation = operation_pb2.Operation(policy_id=model.policy_id)
    operation.kind = operation_pb2.OPERATION_KIND_CREATE_POLICY
    operation.policy.spec.policy_id = model.policy_id
    assert json_answer(operation, OWNER) == {"model_id": model.model_id, "type": "create_model"}
    source = Model(session=new_session(OWNER), number=0)
    operation.policy.spec.from_checkpoint.policy_id = source.policy_id
    operation.policy.spec.from_checkpoint.checkpoint_id = "a"
    assert json_answer(operation, OWNER) == {
        "path": source.path("a"),
        "model_id": model.model_id,
        "type": "load_weights",
    }
    operation.kind = operation_pb2.OPERATION_KIND_SAVE_CHECKPOINT
    operation.checkpoint.checkpoint_id = "b"
    assert json_answer(operation, OWNER) == {"path": model.path("b"), "type": "save_weights"}
    operation.kind = operation_pb2.OPERATION_KIND_OPTIM_STEP
    operation.step.report.grad_norm = 2.0
    expected = {"metrics": {"grad_norm": 2.0, "skipped": 0.0}, "type": "optim_step"}
    assert json_answer(operation, OWNER) == expected
