"""Calls are validated by a remembered policy, as if the engine were asked for it each time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratoon.engine.commands import RequestKey, SeqKey
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import Sequencing
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.conftest import Api


class Reads:
    """Counts how often the engine is asked for a policy."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, read = 0, api.engine.policy

        async def counted(policy_id: str) -> object:
            self.count += 1
            return await read(policy_id)

        monkeypatch.setattr(api.service._engine, "policy", counted)


def _create_anew(api: Api, **changes: object) -> None:
    """Delete the policy elsewhere, and create it with another spec."""
    policy = api.engine.known_policies[requests.POLICY]
    spec = replace(policy.spec, **changes)
    api.engine.known_policies[requests.POLICY] = replace(policy, spec=spec, created_at=99.0)


async def test_a_policy_is_read_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.create_policy()
    reads = Reads(api, monkeypatch)
    for seq in (1, 2, 3):
        await api.service.update(requests.update(seq=seq))
    key = service_pb2.OperationKey(seq=4)
    discard = service_pb2.DiscardGradientsRequest(policy_id=requests.POLICY, key=key)
    await api.service.discard_gradients(discard)
    # The fake engine reads its policies to submit, too.
    assert (reads.count, len(api.engine.log)) == (1 + 4, 4)


async def test_a_policy_that_is_not_loaded_is_not_remembered(api: Api) -> None:
    await api.create_policy()
    policy = api.engine.known_policies[requests.POLICY]
    api.engine.known_policies[requests.POLICY] = replace(policy, info=None)
    with pytest.raises(RatoonError) as caught:
        await api.service.update(requests.update())
    assert caught.value.code is ErrorCode.POLICY_NOT_READY
    api.engine.known_policies[requests.POLICY] = policy
    await api.service.update(requests.update())
    assert len(api.engine.log) == 1


async def test_a_deleted_policy_is_not_found_whatever_else_is_wrong(api: Api) -> None:
    await api.create_policy()
    await api.service.update(requests.update())
    del api.engine.known_policies[requests.POLICY]
    for request in (requests.update(seq=2), requests.update(seq=0)):
        with pytest.raises(RatoonError) as caught:
            await api.service.update(request)
        assert caught.value.code is ErrorCode.POLICY_NOT_FOUND


async def test_a_refusal_by_a_remembered_policy_is_confirmed(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.create_policy()
    await api.service.update(requests.update())
    reads = Reads(api, monkeypatch)
    with pytest.raises(RatoonError) as caught:
        await api.service.update(requests.update(seq=0))
    assert (caught.value.field, reads.count) == ("key.seq", 1)


async def test_what_a_new_policy_takes_is_not_refused_by_the_old_one(api: Api) -> None:
    await api.create_policy()
    await api.service.update(requests.update())
    _create_anew(api, sequencing=Sequencing.SERVER)
    request = requests.update()
    request.key.request_id = "a"
    await api.service.update(request)
    assert api.engine.log[-1].key == RequestKey(request_id="a")


async def test_what_the_old_policy_takes_is_validated_by_the_new_one(api: Api) -> None:
    await api.create_policy()
    await api.service.update(requests.update())
    _create_anew(api, sequencing=Sequencing.SERVER)
    with pytest.raises(RatoonError) as caught:
        await api.service.update(requests.update(seq=2))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "key.seq")
    assert len(api.engine.log) == 1
    _create_anew(api, sequencing=Sequencing.CLIENT)
    api.engine.known_policies[requests.POLICY] = replace(
        api.engine.known_policies[requests.POLICY], created_at=100.0
    )
    await api.service.update(requests.update(seq=2))
    submission = api.engine.log[-1]
    assert (submission.key, submission.policy_created_at) == (SeqKey(seq=2), 100.0)
