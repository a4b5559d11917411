"""Sampling calls of the Tinker wire.

A sample is a read: no operation, and nothing of it is journaled. The id of its future is the whole
request, so that every process answers it at any time: one that is not sampling it begins, after a
restart too. What nobody asks for any more ends.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ratoon.api.gate import AuthorizedCall, Gate
from ratoon.api.service import PolicyService
from ratoon.api.tinker import bodies
from ratoon.api.tinker.answers import error_answer, try_again
from ratoon.api.tinker.datums import future_id
from ratoon.api.tinker.errors import shown_error
from ratoon.api.tinker.names import (
    Sampler,
    checked_session,
    is_owned,
    not_found,
    sampler_at,
    sampler_of,
)
from ratoon.api.tinker.runs import Json, base_of, owner_of
from ratoon.api.tinker.sample_messages import sample_answer, sample_request
from ratoon.config import TinkerConfig
from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.model.spec import PRESET_NAMES
from ratoon.sampler.port import Weights
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.types import SamplingParams
from ratoon_proto.v1 import policy_pb2, sampling_pb2, service_pb2

# Seconds for which a sample that nobody waits for goes on: its client asks again at once.
GRACE_S = 3.0
# Seconds for which an engine that is away is waited for, and between two questions.
AWAY_S, _AGAIN_S = 20.0, 0.5
# As `PolicyService.to_sample` returns it.
_How = tuple[Weights, SamplingParams]
_FUTURE = re.compile(r"sample\.([0-9a-f]{12})\.[0-9a-f]{16}")


@dataclass(slots=True, eq=False)
class _Running:
    """A sample under way. `waiters`: requests that wait for it; `is_paused`: it waits for room."""

    task: asyncio.Task[sampling_pb2.SampleResult] | None = None
    waiters: int = 0
    is_paused: bool = False


class Samples:
    """A method per call, for one process; all raise `RatoonError`."""

    def __init__(self, service: PolicyService, gate: Gate, config: TinkerConfig) -> None:
        self._service, self._gate, self._config = service, gate, config
        self._running: dict[str, _Running] = {}
        # What was found out of a request, for its future, which mostly comes here and at once.
        self._found: dict[str, _How] = {}

    async def create_session(
        self, authorized: AuthorizedCall, body: bodies.CreateSamplingSession
    ) -> Json:
        session = checked_session(body.session_id, owner_of(authorized))
        sampler = self._named(body, session, owner_of(authorized))
        await self._base_model(sampler, body.base_model)
        return {
            "sampling_session_id": sampler.sampler_id,
            "type": "create_sampling_session",
        }

    async def sampler(self, authorized: AuthorizedCall, sampler_id: str) -> Json:
        sampler = sampler_of(sampler_id, owner_of(authorized))
        base_model = await self._base_model(sampler)
        return {"sampler_id": sampler_id, "base_model": base_model, "model_path": sampler.path}

    async def asample(self, authorized: AuthorizedCall, body: bodies.Asample) -> Json:
        owner = owner_of(authorized)
        if body.sampling_session_id is not None:
            sampler = sampler_of(body.sampling_session_id, owner)
        else:
            sampler = self._named(body, "", owner)
        request, targets = await asyncio.to_thread(sample_request, body, sampler)
        base, how = self._base(sampler.base_model), list[_How]()

        async def check(request: service_pb2.SampleRequest) -> service_pb2.SampleRequest:
            how.append(await self._service.to_sample(request, base))
            return request

        # What its future would be refused with is refused now.
        await self._gate.run(authorized, check, request)
        note = tinker_pb2.FutureNote(
            sample=request.SerializeToString(), base_model=sampler.base_model, targets=targets
        )
        name = secrets.token_hex(8)
        request_id = await asyncio.to_thread(future_id, f"sample.{owner}.{name}", note)
        (self._found[request_id],) = how
        asyncio.get_running_loop().call_later(GRACE_S, self._found.pop, request_id, None)
        ids = [f"{name}-{index}" for index in range(body.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def answer(
        self,
        authorized: AuthorizedCall,
        request_id: str,
        name: str,
        note: tinker_pb2.FutureNote,
        hold_s: float,
    ) -> Json | bytes:
        """Answer the future of a sample: a serialized `SampleResponse`, or an error.

        `name`, `note`: what `split_future` makes of `request_id`. Raises OPERATION_NOT_FOUND for an
        id that is none of this key's, and what the gate refuses.
        """
        request = _owned(name, note, owner_of(authorized))
        base, ended = self._base(note.base_model), dict[str, object]()

        async def held(request: service_pb2.SampleRequest) -> sampling_pb2.SampleResult:
            try:
                return await self._held(request_id, request, base, hold_s, ended)
            except RatoonError as error:
                ended.update(error_answer(shown_error(error)))
                return sampling_pb2.SampleResult()

        result = await self._gate.run(authorized, held, request)
        if ended:
            return ended
        return await asyncio.to_thread(sample_answer, result, request, note)

    async def _held(
        self,
        request_id: str,
        request: service_pb2.SampleRequest,
        base: policy_pb2.PolicySpec | None,
        hold_s: float,
        ended: Json,
    ) -> sampling_pb2.SampleResult:
        """Return the result, or after `hold_s` an empty one with the answer in `ended`."""
        loop = asyncio.get_running_loop()
        running = self._running.get(request_id)
        if running is None:
            running = self._running[request_id] = _Running()
            how = self._found.pop(request_id, None)
            running.task = loop.create_task(self._sampled(running, request, base, how))
        task = running.task
        assert task is not None, "set as it is made"
        running.waiters += 1
        try:
            await asyncio.wait({task}, timeout=hold_s)
            if task.done():
                self._running.pop(request_id, None)
                return task.result()
            ended.update(try_again(request_id))
            if running.is_paused:
                ended["queue_state"] = "paused_capacity"
            return sampling_pb2.SampleResult()
        finally:
            running.waiters -= 1
            if not running.waiters:
                loop.call_later(GRACE_S, self._leave, request_id, running)

    def _leave(self, request_id: str, running: _Running) -> None:
        if not running.waiters and self._running.get(request_id) is running:
            del self._running[request_id]
            assert running.task is not None, "set as it is made"
            running.task.cancel()

    async def _sampled(
        self,
        running: _Running,
        request: service_pb2.SampleRequest,
        base: policy_pb2.PolicySpec | None,
        how: _How | None,
    ) -> sampling_pb2.SampleResult:
        """Sample once there is room, and an engine. Raises UNAVAILABLE where it stays away.

        `how`: what was found out of the request a moment ago; weights may have gone since.
        """
        clock = asyncio.get_running_loop().time
        away_until = clock() + AWAY_S
        while True:
            try:
                how = how or await self._service.to_sample(request, base)
                return await self._service.sampled(request, how)
            except RatoonError as error:
                how = None
                # Without a resource it is the request that is too large.
                if "resource" in error.details:
                    running.is_paused = True
                    await asyncio.sleep(error.retry_after_s or _AGAIN_S)
                elif error.code is ErrorCode.UNAVAILABLE and clock() < away_until:
                    await asyncio.sleep(_AGAIN_S)
                else:
                    raise

    def _named(self, source: bodies.SamplingSource, session: str, owner: str) -> Sampler:
        """Return what a body names. Raises INVALID_ARGUMENT, CHECKPOINT_NOT_FOUND."""
        if source.model_path is not None:
            return sampler_at(source.model_path, owner)
        if source.base_model is None:
            raise invalid("model_path", "neither", "model_path or base_model")
        return Sampler(session=session, base_model=source.base_model)

    async def _base_model(self, sampler: Sampler, named: str | None = None) -> str:
        """Return the base of what there is to sample from.

        Raises WEIGHTS_NOT_FOUND, POLICY_NOT_FOUND, and INVALID_ARGUMENT for another base than
        `named`, and for a base that there is not.
        """
        if sampler.model is None:
            base = self._base(sampler.base_model)
            assert base is not None, "it is of no model"
            await self._service.base_of(base)
            return sampler.base_model
        if sampler.name:
            await self._service.get_weight_manifest(
                service_pb2.GetWeightManifestRequest(
                    policy_id=sampler.model.policy_id, name=sampler.name
                )
            )
        request = service_pb2.GetPolicyRequest(policy_id=sampler.model.policy_id)
        base_model = base_of((await self._service.get_policy(request)).spec)
        if named not in (None, base_model):
            raise invalid("base_model", shown(named), f"{base_model}, the weights' own")
        return base_model

    def _base(self, base_model: str) -> policy_pb2.PolicySpec | None:
        """Return a spec with the base; None for ""."""
        if not base_model:
            return None
        spec = policy_pb2.PolicySpec(
            policy_id="base",
            dtype=policy_pb2.ModelDtype.Value(f"MODEL_DTYPE_{self._config.dtype.upper()}"),
        )
        if base_model in PRESET_NAMES:
            spec.preset = base_model
        else:
            spec.model_folder = base_model
        return spec


def _owned(name: str, note: tinker_pb2.FutureNote, owner: str) -> service_pb2.SampleRequest:
    """Return the request of a future. Raises OPERATION_NOT_FOUND unless it is the owner's."""
    match = _FUTURE.fullmatch(name)
    if match is None or match[1] != owner:
        raise not_found(ErrorCode.OPERATION_NOT_FOUND)
    try:
        request = service_pb2.SampleRequest.FromString(note.sample)
    except DecodeError as err:
        raise not_found(ErrorCode.OPERATION_NOT_FOUND) from err
    # Whoever has made it may have written anything into it.
    if not note.base_model and not is_owned(request.policy_id, owner):
        raise not_found(ErrorCode.OPERATION_NOT_FOUND)
    if bool(note.base_model) == bool(request.policy_id):
        raise not_found(ErrorCode.OPERATION_NOT_FOUND)
    return request
