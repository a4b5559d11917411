"""The calls of `ratoon.v1.PolicyService` that are built, with their types.

`is_idempotent` is true only where sending the same request twice has the effect of sending it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from ratoon_proto.v1 import (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
    service_pb2,
    weights_pb2,
)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Rpc(Generic[RequestT, ResponseT]):
    """One call; `name` is the method's."""

    name: str
    request: type[RequestT]
    response: type[ResponseT]
    is_idempotent: bool = True


_Operation = operation_pb2.Operation

# A repeated spec is answered with the first operation; another spec with POLICY_EXISTS.
CREATE_POLICY = Rpc("CreatePolicy", service_pb2.CreatePolicyRequest, _Operation)
# Pieces that are there already change nothing.
SEND_MODEL_FILE = Rpc(
    "SendModelFile", service_pb2.SendModelFileRequest, service_pb2.SendModelFileResponse
)
# A second delete could meet a policy that was made anew in between.
DELETE_POLICY = Rpc(
    "DeletePolicy", service_pb2.DeletePolicyRequest, _Operation, is_idempotent=False
)
RELEASE_POLICY = Rpc("ReleasePolicy", service_pb2.ReleasePolicyRequest, policy_pb2.Policy)
GET_POLICY = Rpc("GetPolicy", service_pb2.GetPolicyRequest, policy_pb2.Policy)
LIST_POLICIES = Rpc(
    "ListPolicies", service_pb2.ListPoliciesRequest, service_pb2.ListPoliciesResponse
)
# Sequenced calls carry their key: the same key and payload is the first operation again.
UPDATE = Rpc("Update", service_pb2.UpdateRequest, _Operation)
FORWARD_BACKWARD = Rpc("ForwardBackward", service_pb2.ForwardBackwardRequest, _Operation)
OPTIM_STEP = Rpc("OptimStep", service_pb2.OptimStepRequest, _Operation)
DISCARD_GRADIENTS = Rpc("DiscardGradients", service_pb2.DiscardGradientsRequest, _Operation)
IMPORT_WEIGHTS = Rpc("ImportWeights", service_pb2.ImportWeightsRequest, _Operation)
# Without a key it is a read.
FORWARD = Rpc("Forward", service_pb2.ForwardRequest, _Operation)
UPLOAD_PART = Rpc("UploadPart", service_pb2.UploadPartRequest, service_pb2.UploadPartResponse)
GET_OPERATION = Rpc("GetOperation", service_pb2.GetOperationRequest, _Operation)
WATCH_OPERATION = Rpc("WatchOperation", service_pb2.WatchOperationRequest, _Operation)
LIST_OPERATIONS = Rpc(
    "ListOperations", service_pb2.ListOperationsRequest, service_pb2.ListOperationsResponse
)
LIST_STEPS = Rpc("ListSteps", service_pb2.ListStepsRequest, service_pb2.StepHistory)
LIST_VERSIONS = Rpc("ListVersions", service_pb2.ListVersionsRequest, service_pb2.VersionList)
PUBLISH_VERSION = Rpc("PublishVersion", service_pb2.PublishVersionRequest, _Operation)
# A second delete could meet a version that was published under that name in between.
DELETE_VERSION = Rpc(
    "DeleteVersion",
    service_pb2.DeleteVersionRequest,
    operation_pb2.NamedVersion,
    is_idempotent=False,
)
CANCEL_OPERATION = Rpc("CancelOperation", service_pb2.CancelOperationRequest, _Operation)
SAVE_CHECKPOINT = Rpc("SaveCheckpoint", service_pb2.SaveCheckpointRequest, _Operation)
LOAD_CHECKPOINT = Rpc("LoadCheckpoint", service_pb2.LoadCheckpointRequest, _Operation)
LIST_CHECKPOINTS = Rpc(
    "ListCheckpoints", service_pb2.ListCheckpointsRequest, service_pb2.ListCheckpointsResponse
)
LIST_ROLLOUTS = Rpc("ListRollouts", service_pb2.ListRolloutsRequest, rollout_pb2.StepRollouts)
GET_ROLLOUT = Rpc("GetRollout", service_pb2.GetRolloutRequest, rollout_pb2.KeptRollout)
# A second delete could meet a checkpoint that was saved under that name in between.
DELETE_CHECKPOINT = Rpc(
    "DeleteCheckpoint",
    service_pb2.DeleteCheckpointRequest,
    operation_pb2.CheckpointInfo,
    is_idempotent=False,
)
GET_WEIGHT_MANIFEST = Rpc(
    "GetWeightManifest", service_pb2.GetWeightManifestRequest, weights_pb2.WeightManifest
)
ACK_WEIGHTS = Rpc("AckWeights", service_pb2.AckWeightsRequest, service_pb2.AckWeightsResponse)
GET_GRADIENT_MANIFEST = Rpc(
    "GetGradientManifest", service_pb2.GetGradientManifestRequest, weights_pb2.GradientManifest
)
# A second answer is another sample, of which the caller has seen none.
SAMPLE = Rpc("Sample", service_pb2.SampleRequest, sampling_pb2.SampleResult)
FETCH_WEIGHTS = Rpc(
    "FetchWeights", service_pb2.FetchWeightsRequest, service_pb2.FetchWeightsResponse
)
GET_SERVER_INFO = Rpc("GetServerInfo", service_pb2.GetServerInfoRequest, service_pb2.ServerInfo)
# A probe says how things are now.
HEALTH = Rpc("Health", service_pb2.HealthRequest, service_pb2.HealthResponse, is_idempotent=False)
