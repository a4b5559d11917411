"""Requests that become operations: validated by their policy, then submitted to the engine.

A request that is refused becomes one too where it asks to take its seq. Batches may come in parts
before their request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from ratoon.api import submissions
from ratoon.api.contract import current_holder
from ratoon.api.convert.checks import POLICY_ID, UPLOAD_ID, matched, required
from ratoon.api.convert.groups import raw_groups
from ratoon.api.submissions import BatchRequest, PlainRequest
from ratoon.config import LimitsConfig
from ratoon.engine.client import Engine, EngineClient
from ratoon.engine.commands import Submission
from ratoon.engine.refusals import is_policy_replaced
from ratoon.engine.types import Operation, Policy
from ratoon.errors import RatoonError, invalid
from ratoon_proto.v1 import rollout_pb2, service_pb2

MAX_UPLOAD_PARTS = 65_536
# Policies that are remembered; the one that was read the longest ago is forgotten first.
_MAX_KNOWN = 1024


class Acceptance:
    """Its methods raise `RatoonError`; a call that has begun runs to its end if its caller leaves.

    It keeps no state of a policy but what never changes while the policy exists.
    """

    def __init__(self, engine: EngineClient, limits: LimitsConfig) -> None:
        self._engine = engine
        self._limits = limits
        # Loaded policies by id; all but their spec and their model's info may be outdated.
        self._known: dict[str, Policy] = {}

    async def policy(self, policy_id: str) -> Policy:
        """The policy as it is now, which is remembered to validate later calls."""
        policy_id = matched("policy_id", policy_id, POLICY_ID)
        policy = await self._engine.call(Engine.policy, policy_id)
        if policy.info is not None:
            self._known.pop(policy_id, None)
            self._known[policy_id] = policy
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return policy

    async def batch(self, request: BatchRequest) -> Operation:
        """Submit a request with a batch."""

        async def built(policy: Policy) -> Submission:
            groups = await self._groups(request)
            return await asyncio.to_thread(
                submissions.with_batch, request, policy, groups, self._limits
            )

        return await self._submit(request, built)

    async def plain(self, request: PlainRequest) -> Operation:
        """Submit a request without one."""

        async def built(policy: Policy) -> Submission:
            return submissions.without_batch(request, policy)

        return await self._submit(request, built)

    async def part(self, request: service_pb2.UploadPartRequest) -> int:
        """Store a part, decoded here only to find errors; its batch is validated whole.

        Returns its size in bytes.
        """
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        upload_id = matched("upload_id", request.upload_id, UPLOAD_ID)
        if not 0 <= request.part_index < MAX_UPLOAD_PARTS:
            expected = f"at least 0 and below {MAX_UPLOAD_PARTS}"
            raise invalid("part_index", request.part_index, expected)
        if not request.groups:
            raise required("groups", "at least one group")
        max_tokens = self._limits.max_tokens
        await asyncio.to_thread(raw_groups, request.groups, max_tokens=max_tokens)
        body = await asyncio.to_thread(_part_body, request.groups)
        await self._engine.finish(
            self._engine.call(
                Engine.put_upload_part,
                policy_id,
                upload_id,
                request.part_index,
                body,
                current_holder(),
            )
        )
        return len(body)

    async def _submit(
        self,
        request: BatchRequest | PlainRequest,
        build: Callable[[Policy], Awaitable[Submission]],
    ) -> Operation:
        """Submit a call; or its refusal, where that takes the call's seq."""
        try:
            return await self._validated(request.policy_id, build)
        except RatoonError as error:
            if not submissions.is_consumed(request, error):
                raise
            refusal = error
        return await self.refuse(request, refusal)

    async def refuse(self, request: BatchRequest | PlainRequest, refusal: RatoonError) -> Operation:
        """Submit the operation that takes a refused call's seq, and fails with the refusal."""

        async def refused(policy: Policy) -> Submission:
            return await asyncio.to_thread(submissions.refused, request, policy, refusal)

        return await self._validated(request.policy_id, refused)

    async def _validated(
        self, policy_id: str, build: Callable[[Policy], Awaitable[Submission]]
    ) -> Operation:
        """Validate a call by its policy, then submit it.

        A remembered policy saves one call of the engine. What it decides never changes while the
        policy exists, but the policy may have been deleted and created anew: so a refusal by a
        remembered policy stands only if the policy is still the same, and the engine refuses what
        was validated by an earlier policy of the same id.
        """
        known = self._known.get(matched("policy_id", policy_id, POLICY_ID))
        policy = known or await self.policy(policy_id)
        try:
            submission = await build(policy)
        except RatoonError:
            if known is None:
                raise
            policy = await self.policy(policy_id)
            if policy.created_at == known.created_at:
                raise
            submission = await build(policy)
        try:
            return await self._accepted(submission, policy)
        except RatoonError as error:
            if not is_policy_replaced(error):
                raise
        policy = await self.policy(policy_id)
        return await self._accepted(await build(policy), policy)

    async def _accepted(self, submission: Submission, policy: Policy) -> Operation:
        holder, created_at = current_holder(), policy.created_at
        submission = replace(submission, holder=holder, policy_created_at=created_at)
        return await self._engine.finish(self._engine.submit(submission))

    async def _groups(self, request: BatchRequest) -> Sequence[rollout_pb2.RolloutGroup]:
        match request.WhichOneof("source"):
            case "batch":
                return request.batch.groups
            case "upload":
                upload_id = matched("upload.upload_id", request.upload.upload_id, UPLOAD_ID)
                num_parts = request.upload.num_parts
                if not 1 <= num_parts <= MAX_UPLOAD_PARTS:
                    expected = f"at least 1 and at most {MAX_UPLOAD_PARTS}"
                    raise invalid("upload.num_parts", num_parts, expected)
                parts = await self._engine.call(
                    Engine.get_upload_parts, request.policy_id, upload_id, num_parts
                )
                return await asyncio.to_thread(_joined, parts)
            case None:
                raise required("source", "batch or upload")


def _part_body(groups: Sequence[rollout_pb2.RolloutGroup]) -> bytes:
    return rollout_pb2.RolloutBatch(groups=groups).SerializeToString()


def _joined(parts: Sequence[bytes]) -> list[rollout_pb2.RolloutGroup]:
    """The groups of all parts, in order."""
    try:
        batches = [rollout_pb2.RolloutBatch.FromString(part) for part in parts]
    except DecodeError as err:
        raise AssertionError("a stored upload part is not a RolloutBatch") from err
    return [group for batch in batches for group in batch.groups]
