"""`ratoon.v1.PolicyService` over gRPC.

Enters a request and the call's context, leaves a response or a typed status. Invariant: every RPC
of the contract has a method; those not built yet answer UNIMPLEMENTED.

A method is called by the gateway with `grpc.aio`'s context and by a Serve replica with Serve's own.
The latter reaches the caller only along with a message, so on Serve a stream that fails ends with
one empty message before its status.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from ratoon.api.chunk import FileChunk, Serialized
from ratoon.api.gate import ANSWERED, NO_ANSWER, Gate, Visit
from ratoon.api.grpc.access import presented_of
from ratoon.api.grpc.intake import Request
from ratoon.api.grpc.status import CallContext, as_ratoon_error, set_status
from ratoon.api.grpc.wiring import Refused, sized
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import operation_pb2, policy_pb2, service_pb2, weights_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message | FileChunk)
EmptyT = TypeVar("EmptyT", bound=Message)


class _Outcome:
    """How a request ended, so far."""

    code = grpc.StatusCode.CANCELLED


class PolicyServicer:
    """Holds nothing but the service and its gate (default: open).

    `max_body_bytes` bounds a request's serialized size.
    """

    def __init__(
        self,
        service: PolicyService,
        *,
        max_body_bytes: int,
        status_needs_message: bool,
        gate: Gate,
    ) -> None:
        self._service = service
        self._gate = gate
        self._max_body_bytes = max_body_bytes
        self._status_needs_message = status_needs_message

    async def CreatePolicy(
        self, request: service_pb2.CreatePolicyRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.create_policy
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def DeletePolicy(
        self, request: service_pb2.DeletePolicyRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.delete_policy
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def GetPolicy(
        self, request: service_pb2.GetPolicyRequest, grpc_context: CallContext
    ) -> policy_pb2.Policy:
        call = self._service.get_policy
        return await self._answer(call, request, grpc_context, policy_pb2.Policy)

    async def ListPolicies(
        self, request: service_pb2.ListPoliciesRequest, grpc_context: CallContext
    ) -> service_pb2.ListPoliciesResponse:
        call = self._service.list_policies
        return await self._answer(call, request, grpc_context, service_pb2.ListPoliciesResponse)

    async def Update(
        self, request: service_pb2.UpdateRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.update
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def ForwardBackward(
        self, request: service_pb2.ForwardBackwardRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.forward_backward
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def OptimStep(
        self, request: service_pb2.OptimStepRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.optim_step
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def DiscardGradients(
        self, request: service_pb2.DiscardGradientsRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.discard_gradients
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def Forward(
        self, request: service_pb2.ForwardRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.forward
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def UploadPart(
        self, request: service_pb2.UploadPartRequest, grpc_context: CallContext
    ) -> service_pb2.UploadPartResponse:
        call = self._service.upload_part
        return await self._answer(call, request, grpc_context, service_pb2.UploadPartResponse)

    async def GetOperation(
        self, request: service_pb2.GetOperationRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.get_operation
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def WatchOperation(
        self, request: service_pb2.WatchOperationRequest, grpc_context: CallContext
    ) -> AsyncGenerator[operation_pb2.Operation, None]:
        call = self._service.watch_operation
        messages = self._stream(call, request, grpc_context, operation_pb2.Operation)
        async with aclosing(messages):
            async for message in messages:
                yield message

    async def CancelOperation(
        self, request: service_pb2.CancelOperationRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.cancel_operation
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def SaveCheckpoint(
        self, request: service_pb2.SaveCheckpointRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.save_checkpoint
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def LoadCheckpoint(
        self, request: service_pb2.LoadCheckpointRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        call = self._service.load_checkpoint
        return await self._answer(call, request, grpc_context, operation_pb2.Operation)

    async def ListCheckpoints(
        self, request: service_pb2.ListCheckpointsRequest, grpc_context: CallContext
    ) -> service_pb2.ListCheckpointsResponse:
        call = self._service.list_checkpoints
        response = service_pb2.ListCheckpointsResponse
        return await self._answer(call, request, grpc_context, response)

    async def GetWeightManifest(
        self, request: service_pb2.GetWeightManifestRequest, grpc_context: CallContext
    ) -> weights_pb2.WeightManifest:
        call = self._service.get_weight_manifest
        return await self._answer(call, request, grpc_context, weights_pb2.WeightManifest)

    async def FetchWeights(
        self, request: service_pb2.FetchWeightsRequest, grpc_context: CallContext
    ) -> Serialized:
        call = self._service.fetch_weights
        response = service_pb2.FetchWeightsResponse
        return await Serialized.of(await self._answer(call, request, grpc_context, response))

    async def GetServerInfo(
        self, request: service_pb2.GetServerInfoRequest, grpc_context: CallContext
    ) -> service_pb2.ServerInfo:
        call = self._service.get_server_info
        return await self._answer(call, request, grpc_context, service_pb2.ServerInfo)

    async def Health(
        self, request: service_pb2.HealthRequest, grpc_context: CallContext
    ) -> service_pb2.HealthResponse:
        call = self._service.health
        return await self._answer(call, request, grpc_context, service_pb2.HealthResponse)

    async def WatchWeights(
        self, request: service_pb2.WatchWeightsRequest, grpc_context: CallContext
    ) -> AsyncGenerator[weights_pb2.WeightManifest, None]:
        self._refuse_unbuilt("WatchWeights", "watch_weights", grpc_context)
        if self._status_needs_message:
            yield weights_pb2.WeightManifest()

    async def AckWeights(
        self, request: service_pb2.AckWeightsRequest, grpc_context: CallContext
    ) -> service_pb2.AckWeightsResponse:
        self._refuse_unbuilt("AckWeights", "ack_weights", grpc_context)
        return service_pb2.AckWeightsResponse()

    async def ImportWeights(
        self, request: service_pb2.ImportWeightsRequest, grpc_context: CallContext
    ) -> operation_pb2.Operation:
        self._refuse_unbuilt("ImportWeights", "import_weights", grpc_context)
        return operation_pb2.Operation()

    async def GetGradientManifest(
        self, request: service_pb2.GetGradientManifestRequest, grpc_context: CallContext
    ) -> weights_pb2.GradientManifest:
        self._refuse_unbuilt("GetGradientManifest", "get_gradient_manifest", grpc_context)
        return weights_pb2.GradientManifest()

    async def FetchGradients(
        self, request: service_pb2.FetchGradientsRequest, grpc_context: CallContext
    ) -> service_pb2.FetchGradientsResponse:
        self._refuse_unbuilt("FetchGradients", "fetch_gradients", grpc_context)
        return service_pb2.FetchGradientsResponse()

    async def _answer(
        self,
        call: Callable[[RequestT], Awaitable[ResponseT]],
        request: RequestT | Refused | Request,
        context: CallContext,
        response: type[EmptyT],
    ) -> ResponseT | EmptyT:
        """The response, or an empty one that gRPC drops for the status of `context`."""
        with self._measured(call.__name__) as outcome:
            try:
                with self._visit(call.__name__, context) as visit:
                    message = await self._message(request, visit)
                    answer = await self._gate.run(visit, call, message)
            except Exception as error:  # noqa: BLE001 - the border of the process
                outcome.code = set_status(context, as_ratoon_error(error, call.__name__))
                return response()
            outcome.code = grpc.StatusCode.OK
            return answer

    async def _stream(
        self,
        call: Callable[[RequestT], AsyncGenerator[EmptyT, None]],
        request: RequestT | Refused | Request,
        context: CallContext,
        response: type[EmptyT],
    ) -> AsyncGenerator[EmptyT, None]:
        with self._measured(call.__name__) as outcome:
            try:
                with self._visit(call.__name__, context) as visit:
                    message = await self._message(request, visit)
                    async with aclosing(self._gate.stream(visit, call, message)) as answers:
                        async for answer in answers:
                            yield answer
                outcome.code = grpc.StatusCode.OK
            except Exception as error:  # noqa: BLE001 - the border of the process
                outcome.code = set_status(context, as_ratoon_error(error, call.__name__))
                if self._status_needs_message:
                    yield response()

    def _refuse_unbuilt(self, rpc: str, call: str, context: CallContext) -> None:
        try:
            with self._visit(call, context):
                pass
        except RatoonError as error:
            set_status(context, error)
            return
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details(f"{rpc} is not built yet")

    async def _message(self, request: RequestT | Refused | Request, visit: Visit) -> RequestT:
        """The request itself, which is read here where it has not come yet."""
        if isinstance(request, Request):
            request = cast("RequestT | Refused", await request.read(visit.caller.name))
        return sized(request, self._max_body_bytes)

    @contextmanager
    def _measured(self, method: str) -> Generator[_Outcome, None, None]:
        """Counts one request; a caller that left has no other outcome than CANCELLED."""
        outcome, start = _Outcome(), time.perf_counter()
        try:
            yield outcome
        finally:
            self._service.record_request(
                transport="grpc",
                method=method,
                code=outcome.code.name,
                seconds=time.perf_counter() - start,
            )

    @contextmanager
    def _visit(self, call: str, context: CallContext) -> Generator[Visit, None, None]:
        """Enter the gate and leave it. Raises what `Gate.enter` raises."""
        visit = self._gate.enter(call, presented_of(context))
        outcome = NO_ANSWER
        try:
            yield visit
            outcome = ANSWERED
        except RatoonError as error:
            outcome = str(error.code)
            raise
        except Exception:
            outcome = str(ErrorCode.INTERNAL)
            raise
        finally:
            self._gate.leave(visit, "", outcome)
