"""Routes of sequenced calls and uploads. Each is one call of the service, named after it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse
from google.protobuf.message import Message

from ratoon.api.gate import Gate
from ratoon.api.http.access import VisitOf
from ratoon.api.http.bodies import BodyRoute
from ratoon.api.http.errors import error_responses
from ratoon.api.http.responses import ACCEPTED, PolicyId, UploadId, json_of
from ratoon.api.http.schema.base import WireModel
from ratoon.api.http.schema.operation import Operation
from ratoon.api.http.schema.requests import (
    DiscardGradientsRequest,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    UpdateRequest,
)
from ratoon.api.http.schema.rollout import UploadPartRequest, UploadPartResponse
from ratoon.api.http.wire import fill
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode
from ratoon_proto.v1 import service_pb2 as wire

MessageT = TypeVar("MessageT", bound=Message)
PartIndex = Annotated[int, Path(ge=0, lt=2**31)]

_KEYED = (
    ErrorCode.POLICY_NOT_FOUND,
    ErrorCode.POLICY_NOT_READY,
    ErrorCode.POLICY_FAILED,
    ErrorCode.KEY_REUSED,
    ErrorCode.SEQ_GAP,
    ErrorCode.RESOURCE_EXHAUSTED,
)
_BATCH = (*_KEYED, ErrorCode.UPLOAD_NOT_FOUND, ErrorCode.OPERATION_NOT_FOUND)


def router(service: PolicyService, gate: Gate) -> APIRouter:
    routes = APIRouter(prefix="/v1/policies/{policy_id}", tags=["training"], route_class=BodyRoute)

    def accepted(path: str, *codes: ErrorCode) -> dict[str, Any]:
        return {
            "path": path,
            "status_code": ACCEPTED,
            "response_model": Operation,
            "responses": error_responses(*codes),
        }

    @routes.post(**accepted("/update", *_BATCH))
    async def update(visit: VisitOf, policy_id: PolicyId, body: UpdateRequest) -> JSONResponse:
        """Forward and backward over all groups, then one optimizer step."""
        request = await asyncio.to_thread(_filled, wire.UpdateRequest(policy_id=policy_id), body)
        return json_of(await gate.run(visit, service.update, request), status=ACCEPTED)

    @routes.post(**accepted("/forward_backward", *_BATCH))
    async def forward_backward(
        visit: VisitOf, policy_id: PolicyId, body: ForwardBackwardRequest
    ) -> JSONResponse:
        """Add the gradients of a batch to the window."""
        request = await asyncio.to_thread(
            _filled, wire.ForwardBackwardRequest(policy_id=policy_id), body
        )
        return json_of(await gate.run(visit, service.forward_backward, request), status=ACCEPTED)

    @routes.post(**accepted("/optim_step", *_KEYED))
    async def optim_step(
        visit: VisitOf, policy_id: PolicyId, body: OptimStepRequest
    ) -> JSONResponse:
        """Divide, clip and apply the window's gradients, and end the window."""
        request = _filled(wire.OptimStepRequest(policy_id=policy_id), body)
        return json_of(await gate.run(visit, service.optim_step, request), status=ACCEPTED)

    @routes.post(**accepted("/discard_gradients", *_KEYED))
    async def discard_gradients(
        visit: VisitOf, policy_id: PolicyId, body: DiscardGradientsRequest
    ) -> JSONResponse:
        """End the window without a step."""
        request = _filled(wire.DiscardGradientsRequest(policy_id=policy_id), body)
        return json_of(await gate.run(visit, service.discard_gradients, request), status=ACCEPTED)

    @routes.post(**accepted("/forward", *_BATCH))
    async def forward(visit: VisitOf, policy_id: PolicyId, body: ForwardRequest) -> JSONResponse:
        """Log-probs, and entropy, of given rollouts; no gradient."""
        request = await asyncio.to_thread(_filled, wire.ForwardRequest(policy_id=policy_id), body)
        return json_of(await gate.run(visit, service.forward, request), status=ACCEPTED)

    @routes.put(
        "/uploads/{upload_id}/parts/{part_index}",
        response_model=UploadPartResponse,
        responses=error_responses(ErrorCode.POLICY_NOT_FOUND, ErrorCode.RESOURCE_EXHAUSTED),
    )
    async def upload_part(
        visit: VisitOf,
        policy_id: PolicyId,
        upload_id: UploadId,
        part_index: PartIndex,
        body: UploadPartRequest,
    ) -> JSONResponse:
        """One part of a large batch, kept until an operation names its upload or it expires."""
        empty = wire.UploadPartRequest(
            policy_id=policy_id, upload_id=upload_id, part_index=part_index
        )
        return json_of(
            await gate.run(
                visit, service.upload_part, await asyncio.to_thread(_filled, empty, body)
            )
        )

    return routes


def _filled(request: MessageT, body: WireModel) -> MessageT:
    fill(request, body)
    return request
