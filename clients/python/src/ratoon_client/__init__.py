"""Client of the Ratoon policy-update service."""

from ratoon_client.async_client import AsyncRatoonClient
from ratoon_client.blocking.client import RatoonClient
from ratoon_client.blocking.operation import OperationHandle
from ratoon_client.blocking.session import PolicySession
from ratoon_client.config import ClientConfig
from ratoon_client.custom_loss import CustomLoss, by_autograd
from ratoon_client.errors import (
    IntegrityError,
    InvalidArgumentError,
    RatoonApiError,
    RatoonClientError,
    ResultTimeoutError,
    TlsError,
    TransportError,
    UnusableClientError,
)
from ratoon_client.loss import (
    Correction,
    CorrectionMask,
    FromForward,
    Kl,
    Loss,
    Optim,
    OverlongFilter,
    OverlongPenalty,
    Staleness,
)
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.policy_options import AdamW, Lora, NumericsGuard, PolicyOptions, Publish
from ratoon_client.results import (
    Checkpoint,
    ForwardResult,
    GradientManifest,
    Health,
    Operation,
    Policy,
    Progress,
    ServerInfo,
    StepReport,
    StepResult,
    WeightDelta,
    WeightFile,
    WeightManifest,
)
from ratoon_client.rollouts import Group, Rollout, Segment, VersionSpan, group, rollout
from ratoon_client.session import AsyncPolicySession
from ratoon_client.weights.pull import PulledWeights

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "AsyncOperationHandle",
    "AsyncPolicySession",
    "AsyncRatoonClient",
    "Checkpoint",
    "ClientConfig",
    "Correction",
    "CorrectionMask",
    "CustomLoss",
    "ForwardResult",
    "FromForward",
    "GradientManifest",
    "Group",
    "Health",
    "IntegrityError",
    "InvalidArgumentError",
    "Kl",
    "Lora",
    "Loss",
    "NumericsGuard",
    "Operation",
    "OperationHandle",
    "Optim",
    "OverlongFilter",
    "OverlongPenalty",
    "Policy",
    "PolicyOptions",
    "PolicySession",
    "Progress",
    "Publish",
    "PulledWeights",
    "RatoonApiError",
    "RatoonClient",
    "RatoonClientError",
    "ResultTimeoutError",
    "Rollout",
    "Segment",
    "ServerInfo",
    "Staleness",
    "StepReport",
    "StepResult",
    "TlsError",
    "TransportError",
    "UnusableClientError",
    "VersionSpan",
    "WeightDelta",
    "WeightFile",
    "WeightManifest",
    "by_autograd",
    "group",
    "rollout",
]
