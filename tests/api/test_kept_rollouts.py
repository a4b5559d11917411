"""ListRollouts and GetRollout over both wires: what is in them is data, and who may read it."""

from __future__ import annotations

import json
import math

import grpc
import pytest

from ratoon.auth.keys import Scope
from ratoon_proto.json_form import from_json, to_json
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.rollout_pb2 import KeptRollout, StepRollouts
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.test_access import MINE, OTHER, refusal
from tests.api.wires import refused_by

NASTY = "<script>alert(1)</script>\x1b[2J\x00\u202e"
TOKENS = list("<b>\x1b[31m é".encode())


def _kept() -> KeptRollout:
    return KeptRollout(
        group=1,
        group_id=NASTY,
        rollout=2,
        prompt_tokens=1,
        response_tokens=len(TOKENS) - 1,
        reward=0.5,
        gap_max=7.0,
        gap_max_token=3,
        tokens=TOKENS,
        gaps=[math.nan, 7.0],
    )


def _list(seq: int = 4, policy_id: str = MINE) -> service_pb2.ListRolloutsRequest:
    return service_pb2.ListRolloutsRequest(policy_id=policy_id, seq=seq)


def _get(group: int = 1, seq: int = 4, policy_id: str = MINE) -> service_pb2.GetRolloutRequest:
    return service_pb2.GetRolloutRequest(policy_id=policy_id, seq=seq, group=group, rollout=2)


async def test_a_rollout_comes_as_it_is_with_its_text(api: Api, wire_name: str) -> None:
    await api.create_policy()
    api.engine.kept[4] = [_kept()]
    wire = api.wire(wire_name)
    (listed,) = (await wire.call("ListRollouts", _list())).rollouts
    assert (listed.group_id, listed.gap_max, list(listed.tokens)) == (NASTY, 7.0, [])
    assert not listed.HasField("ratio_max")
    if wire_name == "http":
        answer = await api.http.client.get(f"/v1/policies/{MINE}/steps/4/rollouts/1/2")
        assert answer.headers["content-type"] == "application/json"
        assert NASTY not in answer.text
        # Null stands for what is no number.
        assert answer.json()["gaps"] == [None, 7.0]
        whole = from_json(KeptRollout, answer.json())
    else:
        whole = await wire.call("GetRollout", _get())
    assert math.isnan(whole.gaps[0])
    assert list(whole.tokens) == TOKENS
    assert list(whole.texts) == [*"<b>", "\x1b", *"[31m ", "", "é"]


async def test_a_broken_tokenizer_gives_no_text(api: Api) -> None:
    """And no error: the folder of the policy is what it is."""
    folder = api.models_root / "real"
    (folder / "tokenizer.json").write_bytes(b'{"model": 1}')
    spec = service_pb2.CreatePolicyRequest()
    spec.spec.policy_id, spec.spec.model_folder = OTHER, "real"
    await api.service.create_policy(spec)
    api.engine.kept[4] = [_kept()]
    whole = await api.grpc.call("GetRollout", _get(policy_id=OTHER))
    assert (list(whole.tokens), list(whole.texts)) == (TOKENS, [])


@pytest.mark.parametrize(
    ("rpc", "request_", "code", "field"),
    [
        ("ListRollouts", _list(seq=5), "ROLLOUTS_NOT_FOUND", "seq"),
        ("GetRollout", _get(group=0), "ROLLOUTS_NOT_FOUND", "rollout"),
        ("GetRollout", _get(seq=5), "ROLLOUTS_NOT_FOUND", "seq"),
        ("ListRollouts", _list(policy_id="nowhere"), "POLICY_NOT_FOUND", "policy_id"),
        ("GetRollout", _get(policy_id="nowhere"), "POLICY_NOT_FOUND", "policy_id"),
        ("ListRollouts", _list(seq=0), "INVALID_ARGUMENT", "seq"),
        ("GetRollout", _get(group=-1), "INVALID_ARGUMENT", "group"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(
    api: Api,
    wire_name: str,
    rpc: str,
    request_: service_pb2.ListRolloutsRequest | service_pb2.GetRolloutRequest,
    code: str,
    field: str,
) -> None:
    await api.create_policy()
    api.engine.kept[4] = [_kept()]
    error = await refused_by(api.wire(wire_name), rpc, request_)
    assert (error.detail.code, error.detail.field.rpartition(".")[2]) == (code, field)


async def test_no_scope_but_its_own_sees_rollouts(
    api: Api, guarded: Guarded, wire_name: str
) -> None:
    await api.create_policy()
    await api.create_policy(policy_id=OTHER)
    api.engine.kept[4] = [_kept()]
    denied = 403 if wire_name == "http" else grpc.StatusCode.PERMISSION_DENIED
    for scope in (Scope.READ, Scope.TRAIN, Scope.ADMIN):
        wire = guarded.wire(wire_name, guarded.key(scope))
        for rpc, request in (("ListRollouts", _list()), ("GetRollout", _get())):
            assert (await refusal(wire, rpc, request))[:2] == ("PERMISSION_DENIED", denied)
    wire = guarded.wire(wire_name, guarded.key(Scope.READ, (MINE,), reads_rollouts=True))
    assert (await wire.call("ListRollouts", _list())).rollouts
    assert (await wire.call("GetRollout", _get())).tokens
    got = await refusal(wire, "ListRollouts", _list(policy_id=OTHER))
    assert got[:2] == ("PERMISSION_DENIED", denied)


def test_lists_of_numbers_survive_json() -> None:
    """A number that is none is null in a list too."""
    step = StepRollouts(rollouts=[_kept()])
    step.forest.reward_mean.extend([math.nan, 0.5, math.inf])
    text = json.dumps(to_json(step), allow_nan=False)
    back = from_json(StepRollouts, json.loads(text))
    assert math.isnan(back.forest.reward_mean[0])
    assert back.forest.reward_mean[1] == 0.5
    assert back.rollouts[0].group_id == NASTY
