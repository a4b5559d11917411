"""Routes of policies and checkpoints. Each is one call of the service, named after it."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ratoon.api.gate import Gate
from ratoon.api.http.access import VisitOf
from ratoon.api.http.errors import error_responses
from ratoon.api.http.responses import ACCEPTED, CheckpointId, PolicyId, json_of
from ratoon.api.http.schema.operation import Operation
from ratoon.api.http.schema.policy import CreatePolicyRequest, ListPoliciesResponse, Policy
from ratoon.api.http.schema.requests import LoadCheckpointRequest, SaveCheckpointRequest
from ratoon.api.http.schema.server import ListCheckpointsResponse
from ratoon.api.http.wire import fill
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode
from ratoon_proto.v1 import service_pb2 as wire

_SEQUENCED = (
    ErrorCode.POLICY_NOT_FOUND,
    ErrorCode.POLICY_NOT_READY,
    ErrorCode.POLICY_FAILED,
    ErrorCode.KEY_REUSED,
    ErrorCode.SEQ_GAP,
    ErrorCode.RESOURCE_EXHAUSTED,
)


def router(service: PolicyService, gate: Gate) -> APIRouter:
    routes = APIRouter(prefix="/v1/policies", tags=["policies"])

    @routes.post(
        "",
        status_code=ACCEPTED,
        response_model=Operation,
        responses=error_responses(
            ErrorCode.POLICY_EXISTS, ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNSUPPORTED
        ),
    )
    async def create_policy(visit: VisitOf, body: CreatePolicyRequest) -> JSONResponse:
        """Build a policy; done once its model is loaded and version 0 can be trained."""
        request = wire.CreatePolicyRequest()
        fill(request, body)
        return json_of(await gate.run(visit, service.create_policy, request), status=ACCEPTED)

    @routes.get("", response_model=ListPoliciesResponse, responses=error_responses())
    async def list_policies(visit: VisitOf) -> JSONResponse:
        return json_of(await gate.run(visit, service.list_policies, wire.ListPoliciesRequest()))

    @routes.get(
        "/{policy_id}",
        response_model=Policy,
        responses=error_responses(ErrorCode.POLICY_NOT_FOUND),
    )
    async def get_policy(visit: VisitOf, policy_id: PolicyId) -> JSONResponse:
        return json_of(
            await gate.run(visit, service.get_policy, wire.GetPolicyRequest(policy_id=policy_id))
        )

    @routes.delete(
        "/{policy_id}",
        status_code=ACCEPTED,
        response_model=Operation,
        responses=error_responses(ErrorCode.POLICY_NOT_FOUND, ErrorCode.POLICY_NOT_READY),
    )
    async def delete_policy(visit: VisitOf, policy_id: PolicyId) -> JSONResponse:
        """Stop its workers and remove its files; its operations can still be read."""
        request = wire.DeletePolicyRequest(policy_id=policy_id)
        return json_of(await gate.run(visit, service.delete_policy, request), status=ACCEPTED)

    @routes.post(
        "/{policy_id}/checkpoints",
        status_code=ACCEPTED,
        response_model=Operation,
        responses=error_responses(*_SEQUENCED),
    )
    async def save_checkpoint(
        visit: VisitOf, policy_id: PolicyId, body: SaveCheckpointRequest
    ) -> JSONResponse:
        """Model, optimizer, version and seq at the last step boundary."""
        request = wire.SaveCheckpointRequest(policy_id=policy_id)
        fill(request, body)
        return json_of(await gate.run(visit, service.save_checkpoint, request), status=ACCEPTED)

    @routes.get(
        "/{policy_id}/checkpoints",
        response_model=ListCheckpointsResponse,
        responses=error_responses(ErrorCode.POLICY_NOT_FOUND),
    )
    async def list_checkpoints(visit: VisitOf, policy_id: PolicyId) -> JSONResponse:
        request = wire.ListCheckpointsRequest(policy_id=policy_id)
        return json_of(await gate.run(visit, service.list_checkpoints, request))

    @routes.post(
        "/{policy_id}/checkpoints/{checkpoint_id}/load",
        status_code=ACCEPTED,
        response_model=Operation,
        responses=error_responses(*_SEQUENCED, ErrorCode.CHECKPOINT_NOT_FOUND),
    )
    async def load_checkpoint(
        visit: VisitOf,
        policy_id: PolicyId,
        checkpoint_id: CheckpointId,
        body: LoadCheckpointRequest,
    ) -> JSONResponse:
        request = wire.LoadCheckpointRequest(policy_id=policy_id, checkpoint_id=checkpoint_id)
        fill(request, body)
        return json_of(await gate.run(visit, service.load_checkpoint, request), status=ACCEPTED)

    return routes
