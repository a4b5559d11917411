"""Client of the Ratoon policy-update service.

    with RatoonClient("grpc://127.0.0.1:8443") as client:
        client.create_policy("p", preset="tiny").result()
        session = client.policy("p")  # counts the seqs of its calls
        rollouts = [rollout(response=..., sampler_logprobs=..., reward=...), ...]
        groups = [group("a", prompt, rollouts)]
        step = session.update(groups, loss=Loss("grpo"), optim=Optim(learning_rate=1e-6)).result()
        folder = client.pull_weights("p", "weights").folder

- `RatoonClient`, `PolicySession`, `OperationHandle` and `WeightReceiver` block; each has a class
  beside it, with `Async` before its name, whose methods are coroutines.
- `group()` and `rollout()` make what is sent of lists and arrays; `Loss`, `Optim` and the classes
  that they take are the wire's messages, frozen dataclasses (docs/api.md).
- Every error is a `RatoonClientError`; `RatoonApiError` is what the service says.
"""

from importlib.metadata import version

from ratoon_client.async_client import AsyncRatoonClient
from ratoon_client.blocking import (
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
    WrongPortError,
)
from ratoon_client.gae import gae
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.rollouts import Group, Rollout, SamplingMask, Segment, group, rollout
from ratoon_client.session import AsyncPolicySession
from ratoon_client.values import (
    AdamW,
    Checkpoint,
    Correction,
    Distillation,
    ForwardBackwardResult,
    ForwardResult,
    FromForward,
    Health,
    Kl,
    Lora,
    Loss,
    Muon,
    Optim,
    Parallel,
    PolicyOptions,
    Publish,
    Schedule,
    Staleness,
    ValueLoss,
)
from ratoon_client.weights.pull import PulledWeights
from ratoon_client.weights.receiver import (
    Adapter,
    AsyncWeightReceiver,
    DeltaAdapter,
    FolderAdapter,
    Received,
    ReceiveFailure,
    ReceiverEvent,
)
from ratoon_client.weights.sglang import SglangAdapter
from ratoon_client.weights.vllm import StagedVllmAdapter, VllmAdapter
from ratoon_client.weights.vllm_nccl import VllmNcclAdapter
from ratoon_proto.types import (
    BadRollout,
    BadRolloutAction,
    BadRolloutReason,
    CheckpointSource,
    CorrectionMask,
    GradientManifest,
    ImportResult,
    KeptRollout,
    NamedVersion,
    NumericsGuard,
    Offender,
    OldLogprobs,
    Operation,
    OverlongFilter,
    OverlongPenalty,
    ParameterGroup,
    Policy,
    Progress,
    SampledSequence,
    SampleResult,
    SamplingParams,
    ServerInfo,
    StepReport,
    StepResult,
    StepRollouts,
    StepWarning,
    StopReason,
    Teacher,
    VersionSpan,
    WeightDelta,
    WeightFile,
    WeightManifest,
)

__version__ = version("ratoon-client")

__all__ = [
    "AdamW",
    "Adapter",
    "AsyncOperationHandle",
    "AsyncPolicySession",
    "AsyncRatoonClient",
    "AsyncWeightReceiver",
    "BadRollout",
    "BadRolloutAction",
    "BadRolloutReason",
    "Checkpoint",
    "CheckpointSource",
    "ClientConfig",
    "Correction",
    "CorrectionMask",
    "CustomLoss",
    "DeltaAdapter",
    "Distillation",
    "EngineError",
    "FolderAdapter",
    "ForwardBackwardResult",
    "ForwardResult",
    "FromForward",
    "GradientManifest",
    "Group",
    "Health",
    "ImportResult",
    "IntegrityError",
    "InvalidArgumentError",
    "KeptRollout",
    "Kl",
    "Lora",
    "Loss",
    "Muon",
    "NamedVersion",
    "NumericsGuard",
    "Offender",
    "OldLogprobs",
    "Operation",
    "OperationHandle",
    "Optim",
    "OverlongFilter",
    "OverlongPenalty",
    "Parallel",
    "ParameterGroup",
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
    "SampleResult",
    "SampledSequence",
    "SamplingMask",
    "SamplingParams",
    "Schedule",
    "Segment",
    "ServerInfo",
    "SglangAdapter",
    "StagedVllmAdapter",
    "Staleness",
    "StepReport",
    "StepResult",
    "StepRollouts",
    "StepWarning",
    "StopReason",
    "Teacher",
    "TlsError",
    "TransportError",
    "UnusableClientError",
    "ValueLoss",
    "VersionSpan",
    "VllmAdapter",
    "VllmNcclAdapter",
    "WeightDelta",
    "WeightFile",
    "WeightManifest",
    "WeightReceiver",
    "WrongPortError",
    "by_autograd",
    "gae",
    "group",
    "rollout",
]
