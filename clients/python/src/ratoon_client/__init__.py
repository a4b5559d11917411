"""Client of the Ratoon policy-update service."""

from ratoon_client.async_client import AsyncRatoonClient
from ratoon_client.blocking.client import (
    OperationHandle,
    PolicySession,
    RatoonClient,
    WeightReceiver,
)
from ratoon_client.config import ClientConfig
from ratoon_client.custom_loss import CustomLoss, by_autograd
from ratoon_client.errors import (
    EngineError,
    IntegrityError,
    InvalidArgumentError,
    RatoonApiError,
    RatoonClientError,
    ResultTimeoutError,
    TlsError,
    TransportError,
    UnusableClientError,
)
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.rollouts import Group, Rollout, Segment, group, rollout
from ratoon_client.session import AsyncPolicySession
from ratoon_client.values import (
    AdamW,
    Checkpoint,
    Correction,
    ForwardResult,
    FromForward,
    Health,
    Kl,
    Lora,
    Loss,
    Optim,
    Parallel,
    PolicyOptions,
    Publish,
    Staleness,
)
from ratoon_client.weights.adapter import Adapter, FolderAdapter
from ratoon_client.weights.pull import PulledWeights
from ratoon_client.weights.receiver import (
    AsyncWeightReceiver,
    Received,
    ReceiveFailure,
    ReceiverEvent,
)
from ratoon_client.weights.sglang import SglangAdapter
from ratoon_client.weights.vllm import VllmAdapter
from ratoon_client.weights.vllm_nccl import VllmNcclAdapter
from ratoon_client.weights.vllm_staged import StagedVllmAdapter
from ratoon_proto.types import (
    CorrectionMask,
    GradientManifest,
    ImportResult,
    NumericsGuard,
    OldLogprobs,
    Operation,
    OverlongFilter,
    OverlongPenalty,
    Policy,
    Progress,
    ServerInfo,
    StepReport,
    StepResult,
    VersionSpan,
    WeightDelta,
    WeightFile,
    WeightManifest,
)

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "Adapter",
    "AsyncOperationHandle",
    "AsyncPolicySession",
    "AsyncRatoonClient",
    "AsyncWeightReceiver",
    "Checkpoint",
    "ClientConfig",
    "Correction",
    "CorrectionMask",
    "CustomLoss",
    "EngineError",
    "FolderAdapter",
    "ForwardResult",
    "FromForward",
    "GradientManifest",
    "Group",
    "Health",
    "ImportResult",
    "IntegrityError",
    "InvalidArgumentError",
    "Kl",
    "Lora",
    "Loss",
    "NumericsGuard",
    "OldLogprobs",
    "Operation",
    "OperationHandle",
    "Optim",
    "OverlongFilter",
    "OverlongPenalty",
    "Parallel",
    "Policy",
    "PolicyOptions",
    "PolicySession",
    "Progress",
    "Publish",
    "PulledWeights",
    "RatoonApiError",
    "RatoonClient",
    "RatoonClientError",
    "ReceiveFailure",
    "Received",
    "ReceiverEvent",
    "ResultTimeoutError",
    "Rollout",
    "Segment",
    "ServerInfo",
    "SglangAdapter",
    "StagedVllmAdapter",
    "Staleness",
    "StepReport",
    "StepResult",
    "TlsError",
    "TransportError",
    "UnusableClientError",
    "VersionSpan",
    "VllmAdapter",
    "VllmNcclAdapter",
    "WeightDelta",
    "WeightFile",
    "WeightManifest",
    "WeightReceiver",
    "by_autograd",
    "group",
    "rollout",
]
