"""Null, absent and mistyped fields: each wire names group, rollout and field."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import http_error, refused_by

_COLUMN = [-0.5, -0.25]
_COLUMNS = ("sampler_logprobs", "old_logprobs", "reference_logprobs")
_ROLLOUT = {
    "response": [4, 5],
    **dict.fromkeys(_COLUMNS, _COLUMN),
    "loss_mask": [True, True],
    "reward": 1.0,
    "policy_version": 0,
}
_BODY = {
    "seq": 1,
    "batch": {
        "groups": [
            {"group_id": f"g{g}", "prompt": [1, 2], "rollouts": [_ROLLOUT, {**_ROLLOUT}]}
            for g in range(4)
        ]
    },
    "loss": {"kind": "grpo", "kl": {"kind": "k3", "coefficient": 0.1, "reference": "given"}},
    "optim": {"learning_rate": 1e-3},
}
_LAST = "groups[3].rollouts[1]"
_FIRST = "groups[0].rollouts[0]"
_NUMBERS = (True, "1", [], {}, [1.0])
_INTEGERS = (*_NUMBERS, 1.5)
_MESSAGES = (5, "x", True, [])
_PENALTY = {"max_tokens": 4, "buffer_tokens": 2, "scale": 1}


def _tensor_json(**changes: Any) -> dict[str, Any]:
    """Two tokens, but for what is changed."""
    return {"dtype": "int32", "shape": [2], "data": "BAAAAAUAAAA="} | changes


def _lists(item: Any) -> dict[str, tuple[Any, ...]]:
    """What a list of such items is not, by the end of the field that is named."""
    return {
        "": ("ab", 5, True),
        ".dtype": ({},),
        "[0]": ([None], ["1"], [[item, item]]),
        "[1]": ([item, None], [item, "1"]),
    }


# A field, and what it does not take, by the end of the field that is named.
JSON_CASES: dict[str, dict[str, tuple[Any, ...]]] = {
    "groups[3]": {"": (None, *_MESSAGES)},
    "groups[3].group_id": {"": (None, 5, True, [], "")},
    "groups[3].prompt": _lists(1)
    | {"[2]": ([1, 1, 1.5], [1, 1, 2**31], [1, 1, 2**70], [1, 1, -(2**80)])},
    "groups[3].rollouts": {"": (None, 5, "x", [], {})},
    _LAST: {"": (None, *_MESSAGES)},
    f"{_LAST}.response": _lists(4)
    | {
        "[1]": ([4, None], [4, "1"], [4, True]),
        "[2]": ([4, 4, 0.5], [4, 4, 2**31], [4, 4, 2**70]),
        ".dtype": ({}, _tensor_json(dtype="int8")),
        ".data": (_tensor_json(data="%%%"),),
        ".shape[0]": (_tensor_json(shape=[-2]),),
    },
    f"{_FIRST}.response": {"": (None,)},
    f"{_LAST}.loss_mask": _lists(True) | {"[0]": ([1, 0],), "[2]": ([True, True, 1],)},
    **{
        f"{_LAST}.{name}": _lists(-0.5)
        | {"": (None, [], [-0.5], "ab", 5, True), "[2]": ([-0.5, -0.5, 10**400],)}
        for name in _COLUMNS
    },
    **{f"{_FIRST}.{name}": {"": (None,)} for name in (*_COLUMNS, "reward")},
    f"{_LAST}.reward": {"": (None, *_NUMBERS, float("inf"))},
    f"{_LAST}.advantages": {"": ([1.0, 2.0],)},
    f"{_LAST}.temperature": {"": (*_NUMBERS, 0)},
    f"{_LAST}.top_p": {"": (*_NUMBERS, 0)},
    f"{_LAST}.top_k": {"": (*_INTEGERS, -1, 2**31)},
    f"{_LAST}.policy_version": {"": (*_INTEGERS, -1, 2**63)},
    f"{_LAST}.sampler_logprobs_kind": {"": (5, "RAW", [])},
    f"{_LAST}.truncated": {"": (1, "no", [])},
    f"{_LAST}.version_spans": {"": (5, "x")},
    f"{_LAST}.version_spans[0]": {
        "": (None, *_MESSAGES),
        ".first_token": ({"first_token": None, "version": 0},),
        ".version": ({"first_token": 0},),
    },
    f"{_LAST}.routed_experts": {"": (5, "x", [[[0]]])},
    f"{_LAST}.sampling_mask": {
        "": _MESSAGES,
        ".token_ids": ({"lengths": [1]}, {"token_ids": None, "lengths": [1]}),
        ".lengths": ({"token_ids": [4]},),
        ".token_ids[0]": ({"token_ids": ["1"], "lengths": [1]},),
        ".untrain_outside": ({"token_ids": [4], "lengths": [1], "untrain_outside": 1},),
    },
    # Beside a response.
    f"{_LAST}.segments": {"": ([{"tokens": [1], "trained": True}],)},
    "loss": {"": (None, *_MESSAGES)},
    "loss.kind": {"": (None, 5, "GRPO")},
    "loss.clip_low": {"": _NUMBERS},
    "loss.kl": {"": _MESSAGES},
    "loss.kl.coefficient": {"": (None, *_NUMBERS)},
    "loss.kl.reference": {"": (None, 5, "x")},
    "optim": {"": (None, *_MESSAGES)},
    "optim.learning_rate": {"": (None, *_NUMBERS, "1e-3")},
    "seq": {"": (None, *_INTEGERS, 0, 2**63)},
    "sequence": {"": (1,)},
    # Beside a seq, and beside a batch.
    "request_id": {"": ("x",)},
    "upload": {"": ({"upload_id": "x", "num_parts": 1},)},
    # Beside a filter.
    "loss.overlong_penalty": {"": (_PENALTY,)},
}


async def test_json_of_another_type_is_refused_by_place(api: Api) -> None:
    await api.create_policy()
    for path, faults in JSON_CASES.items():
        for ending, values in faults.items():
            for value in values:
                body: Any = copy.deepcopy(_BODY)
                if value is _PENALTY:
                    body["loss"] = {"kind": "dapo", "overlong_filter": {}}
                _put(body, path, value)
                await _refused(api, body, path + ending)


async def test_json_segments_of_another_type_are_refused_by_place(api: Api) -> None:
    await api.create_policy()
    segment = {"tokens": [4, 5], "trained": True}
    for value, ending in (
        (None, ".response"),
        (5, ".segments"),
        ([segment, None], ".segments[1]"),
        ([{"trained": True}], ".segments[0].tokens"),
        ([segment, {**segment, "tokens": None}], ".segments[1].tokens"),
        ([segment, {**segment, "tokens": [4, "5"]}], ".segments[1].tokens[1]"),
        ([segment, {**segment, "trained": 1}], ".segments[1].trained"),
    ):
        body: Any = copy.deepcopy(_BODY)
        rollout = body["batch"]["groups"][3]["rollouts"][1]
        del rollout["response"]
        rollout["segments"] = value
        await _refused(api, body, _LAST + ending)


async def _refused(api: Api, body: Any, field: str) -> None:
    response = await api.http.client.post(
        f"/v1/policies/{requests.POLICY}/update",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    detail = http_error(response).detail
    assert (detail.field, response.status_code) == (field, 422), detail
    assert field in detail.message
    assert api.engine.log == []


def _put(body: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path of groups, which are in `batch`, making lists longer by one."""
    names = re.findall(r"\w+", path)
    steps: list[Any] = [int(name) if name.isdecimal() else name for name in names]
    place: Any = body["batch"] if steps[0] == "groups" else body
    for step in steps[:-1]:
        place = place.setdefault(step, []) if isinstance(place, dict) else place[step]
    if isinstance(place, list) and steps[-1] == len(place):
        place.append(None)
    place[steps[-1]] = value


Change = Callable[[service_pb2.UpdateRequest], object]


def _of_last(change: Callable[[rollout_pb2.Rollout], object]) -> Change:
    return lambda request: change(request.batch.groups[3].rollouts[1])


def _tensor(values: Any) -> Tensor:
    return encode_array(np.asarray(values))


# A field, and changes of a right request after which it is named.
GRPC_CASES: dict[str, tuple[Change, ...]] = {
    "groups[3].group_id": (lambda request: request.batch.groups[3].ClearField("group_id"),),
    "groups[3].rollouts": (lambda request: request.batch.groups[3].ClearField("rollouts"),),
    "groups[3].prompt.dtype": (
        lambda request: request.batch.groups[3].prompt.CopyFrom(_tensor([1.0])),
        lambda request: request.batch.groups[3].prompt.ClearField("dtype"),
    ),
    f"{_LAST}.response": (
        _of_last(lambda rollout: rollout.Clear()),
        _of_last(lambda rollout: rollout.ClearField("response")),
    ),
    f"{_LAST}.response.dtype": (
        _of_last(lambda rollout: rollout.response.CopyFrom(_tensor([1.0, 2.0]))),
        _of_last(lambda rollout: rollout.response.CopyFrom(_tensor([True, True]))),
    ),
    f"{_LAST}.response.shape": (
        _of_last(lambda rollout: rollout.response.CopyFrom(_tensor([[4, 5]]))),
    ),
    f"{_LAST}.segments[1].tokens": (
        _of_last(lambda rollout: _segments(rollout).add(trained=True)),
        _of_last(lambda rollout: _segments(rollout).add()),
    ),
    f"{_LAST}.reward": (_of_last(lambda rollout: rollout.ClearField("reward")),),
    f"{_FIRST}.reward": (lambda request: request.batch.groups[0].rollouts[0].ClearField("reward"),),
    f"{_LAST}.advantages": (
        _of_last(lambda rollout: rollout.advantages.CopyFrom(_tensor([1.0, 2.0]))),
    ),
    f"{_LAST}.advantages.dtype": (
        _of_last(lambda rollout: rollout.advantages.CopyFrom(_tensor([1, 2]))),
    ),
    f"{_LAST}.sampler_logprobs": (
        _of_last(lambda rollout: rollout.ClearField("sampler_logprobs")),
        _of_last(lambda rollout: rollout.sampler_logprobs.CopyFrom(_tensor([-0.5]))),
    ),
    f"{_LAST}.sampler_logprobs.dtype": (
        _of_last(lambda rollout: rollout.sampler_logprobs.Clear()),
        _of_last(lambda rollout: rollout.sampler_logprobs.CopyFrom(_tensor([-1, -1]))),
    ),
    f"{_LAST}.loss_mask.dtype": (
        _of_last(lambda rollout: rollout.loss_mask.Clear()),
        _of_last(lambda rollout: rollout.loss_mask.CopyFrom(_tensor([1, 0]))),
    ),
    f"{_LAST}.routed_experts.dtype": (
        _of_last(lambda rollout: rollout.routed_experts.SetInParent()),
    ),
    f"{_LAST}.sampling_mask.token_ids": (
        _of_last(lambda rollout: rollout.sampling_mask.SetInParent()),
    ),
    f"{_LAST}.sampling_mask.lengths.dtype": (
        _of_last(
            lambda rollout: (
                rollout.sampling_mask.token_ids.CopyFrom(_tensor([1])),
                rollout.sampling_mask.lengths.CopyFrom(_tensor([0.5])),
            )
        ),
    ),
    f"{_LAST}.sampler_logprobs_kind": (
        _of_last(lambda rollout: setattr(rollout, "sampler_logprobs_kind", 9)),
    ),
    f"{_LAST}.version_spans[1].first_token": (
        _of_last(lambda rollout: [rollout.version_spans.add() for _ in range(2)]),
    ),
    "source": (lambda request: request.ClearField("batch"),),
    "groups": (lambda request: request.batch.ClearField("groups"),),
    "upload.upload_id": (lambda request: request.upload.SetInParent(),),
    "loss": (lambda request: request.ClearField("loss"),),
    "loss.kind": (lambda request: request.loss.Clear(), lambda request: _set_loss(request, 99)),
    "loss.kl.kind": (lambda request: request.loss.kl.Clear(),),
    "loss.kl.coefficient": (lambda request: request.loss.kl.ClearField("coefficient"),),
    "loss.correction.mode": (lambda request: request.loss.correction.SetInParent(),),
    "loss.staleness.action": (lambda request: request.loss.staleness.SetInParent(),),
    "loss.overlong_penalty.scale": (lambda request: request.loss.overlong_penalty.SetInParent(),),
    "optim": (lambda request: request.ClearField("optim"),),
    "optim.learning_rate": (lambda request: request.optim.Clear(),),
    "key.seq": (
        lambda request: request.ClearField("key"),
        lambda request: request.key.SetInParent() or request.key.Clear(),
    ),
}


def _segments(rollout: rollout_pb2.Rollout) -> Any:
    """One right segment in place of the response."""
    segments = rollout.segments.segments
    segments.add(tokens=requests.tokens([4, 5]), trained=True)
    return segments


def _set_loss(request: service_pb2.UpdateRequest, kind: int) -> None:
    request.loss.kind = kind  # pyright: ignore[reportAttributeAccessIssue] - no such kind


def _right() -> service_pb2.UpdateRequest:
    rollout = rollout_pb2.Rollout(
        response=requests.tokens([4, 5]), reward=1.0, loss_mask=_tensor([True, True])
    )
    for name in _COLUMNS:
        getattr(rollout, name).CopyFrom(requests.floats(_COLUMN))
    groups = [requests.group(f"g{g}", rollout, rollout) for g in range(4)]
    request = requests.update(batch=groups)
    request.loss.kl.CopyFrom(
        training_pb2.KlConfig(
            kind=training_pb2.KL_KIND_K3,
            coefficient=0.1,
            reference=training_pb2.REFERENCE_KIND_GIVEN,
        )
    )
    return request


async def test_a_message_that_lacks_a_field_is_refused_by_place(api: Api) -> None:
    await api.create_policy()
    for field, changes in GRPC_CASES.items():
        for number, change in enumerate(changes):
            request = _right()
            change(request)
            refused = await refused_by(api.grpc, "Update", request)
            detail = refused.detail
            expected = ("INVALID_ARGUMENT", field)
            assert (detail.code, detail.field) == expected, (field, number, detail)
            assert api.engine.log == []


async def test_what_the_cases_change_is_right_before(api: Api) -> None:
    await api.create_policy()
    assert (await api.grpc.call("Update", _right())).step.version == 1
    response = await api.http.client.post(
        f"/v1/policies/{requests.POLICY}/update", json={**_BODY, "seq": 2}
    )
    assert response.status_code == 202
