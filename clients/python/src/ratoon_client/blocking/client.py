"""The synchronous client, for any number of threads; `AsyncRatoonClient` documents its methods."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from ratoon_client.async_client import HOLD_S, AsyncRatoonClient
from ratoon_client.blocking.loop import LoopThread
from ratoon_client.blocking.operation import OperationHandle
from ratoon_client.blocking.receiver import WeightReceiver
from ratoon_client.blocking.session import PolicySession
from ratoon_client.config import ClientConfig
from ratoon_client.loss import Loss, Optim
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.policy_options import PolicyOptions
from ratoon_client.results import (
    Checkpoint,
    ForwardResult,
    GradientManifest,
    Health,
    ImportMode,
    ImportResult,
    Operation,
    OperationResult,
    Policy,
    ServerInfo,
    StepResult,
    WeightFile,
    WeightManifest,
)
from ratoon_client.rollouts import Group
from ratoon_client.weights.adapter import Adapter
from ratoon_client.weights.pull import KEEP_VERSIONS, PulledWeights
from ratoon_client.weights.receiver import ReceiverEvent, log_event

ResultT = TypeVar("ResultT")


class RatoonClient:
    """A client of one service; use it as a context manager or with `close`.

    `target` is `grpc://host:port` (or just `host:port`), `http://host:port`, and with TLS
    `grpcs://...` or `https://...`. `api_key` goes with every call, and without TLS to this machine
    alone, unless `config` has `plain_text_key` or RATOON_PLAIN_TEXT_KEY is 1. Files in PEM:
    `ca_file` has the authorities to verify the service with, `cert_file` and `key_file` are the
    client's own. What is left out is taken from `config`, or else from the environment's
    RATOON_API_KEY, RATOON_CA_FILE, RATOON_CERT_FILE and RATOON_KEY_FILE. `timeout_s` bounds a call
    with its retries, `attempt_timeout_s` each try.

    Calls raise RatoonApiError for what the service refuses, TransportError where it does not
    answer.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        ca_file: Path | str | None = None,
        cert_file: Path | str | None = None,
        key_file: Path | str | None = None,
        timeout_s: float | None = None,
        attempt_timeout_s: float | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        self._client = AsyncRatoonClient(
            target,
            api_key=api_key,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            timeout_s=timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            config=config,
        )
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection, for good; operations on the service go on.

        Does nothing the second time, and in a process that was forked from the client's.
        """
        if self._loop.is_running:
            self._loop.run(self._client.close())
            self._loop.stop()

    def create_policy(
        self, policy_id: str, **options: Unpack[PolicyOptions]
    ) -> OperationHandle[Policy]:
        return self._handle(self._client.create_policy(policy_id, **options))

    def delete_policy(self, policy_id: str) -> OperationHandle[None]:
        return self._handle(self._client.delete_policy(policy_id))

    def get_policy(self, policy_id: str) -> Policy:
        return self._loop.run(self._client.get_policy(policy_id))

    def list_policies(self) -> list[Policy]:
        return self._loop.run(self._client.list_policies())

    def policy(self, policy_id: str) -> PolicySession:
        return PolicySession(self._loop, self._client.policy(policy_id))

    def update(
        self,
        policy_id: str,
        groups: Sequence[Group],
        *,
        loss: Loss,
        optim: Optim,
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[StepResult]:
        return self._handle(
            self._client.update(
                policy_id,
                groups,
                loss=loss,
                optim=optim,
                expected_version=expected_version,
                seq=seq,
                request_id=request_id,
            )
        )

    def forward_backward(
        self,
        policy_id: str,
        groups: Sequence[Group],
        *,
        loss: Loss,
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[StepResult]:
        return self._handle(
            self._client.forward_backward(
                policy_id,
                groups,
                loss=loss,
                expected_version=expected_version,
                seq=seq,
                request_id=request_id,
            )
        )

    def optim_step(
        self,
        policy_id: str,
        *,
        optim: Optim,
        include_seqs: Sequence[int] = (),
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[StepResult]:
        return self._handle(
            self._client.optim_step(
                policy_id,
                optim=optim,
                include_seqs=include_seqs,
                expected_version=expected_version,
                seq=seq,
                request_id=request_id,
            )
        )

    def discard_gradients(
        self, policy_id: str, *, seq: int | None = None, request_id: str | None = None
    ) -> OperationHandle[None]:
        return self._handle(
            self._client.discard_gradients(policy_id, seq=seq, request_id=request_id)
        )

    def forward(
        self,
        policy_id: str,
        groups: Sequence[Group],
        *,
        with_entropy: bool = False,
        use_reference: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[ForwardResult]:
        return self._handle(
            self._client.forward(
                policy_id,
                groups,
                with_entropy=with_entropy,
                use_reference=use_reference,
                expected_version=expected_version,
                seq=seq,
                request_id=request_id,
            )
        )

    def upload_part(
        self, policy_id: str, upload_id: str, part_index: int, groups: Sequence[Group]
    ) -> int:
        return self._loop.run(self._client.upload_part(policy_id, upload_id, part_index, groups))

    def operation(self, operation_id: str) -> OperationHandle[OperationResult]:
        return self._handle(self._client.operation(operation_id))

    def get_operation(self, operation_id: str, *, wait_s: float = 0.0) -> Operation:
        return self._loop.run(self._client.get_operation(operation_id, wait_s=wait_s))

    def cancel_operation(self, operation_id: str) -> Operation:
        return self._loop.run(self._client.cancel_operation(operation_id))

    def save_checkpoint(
        self,
        policy_id: str,
        checkpoint_id: str = "",
        *,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[Checkpoint]:
        return self._handle(
            self._client.save_checkpoint(policy_id, checkpoint_id, seq=seq, request_id=request_id)
        )

    def load_checkpoint(
        self,
        policy_id: str,
        checkpoint_id: str,
        *,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[Checkpoint]:
        return self._handle(
            self._client.load_checkpoint(policy_id, checkpoint_id, seq=seq, request_id=request_id)
        )

    def import_weights(
        self,
        policy_id: str,
        folder: str,
        *,
        mode: ImportMode = "full",
        reset_optimizer: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> OperationHandle[ImportResult]:
        return self._handle(
            self._client.import_weights(
                policy_id,
                folder,
                mode=mode,
                reset_optimizer=reset_optimizer,
                expected_version=expected_version,
                seq=seq,
                request_id=request_id,
            )
        )

    def list_checkpoints(self, policy_id: str) -> list[Checkpoint]:
        return self._loop.run(self._client.list_checkpoints(policy_id))

    def weight_manifest(
        self,
        policy_id: str,
        version: int | None = None,
        *,
        known_version: int | None = None,
        wait_s: float = 0.0,
    ) -> WeightManifest:
        return self._loop.run(
            self._client.weight_manifest(
                policy_id, version, known_version=known_version, wait_s=wait_s
            )
        )

    def watch_weights(
        self, policy_id: str, *, known_version: int | None = None
    ) -> Iterator[WeightManifest]:
        watch = self._client.watch_weights(policy_id, known_version=known_version)
        return self._loop.iterate(watch)

    def ack_weights(
        self,
        policy_id: str,
        receiver_id: str,
        *,
        version: int | None = None,
        holds_version: int | None = None,
        hold_s: float = HOLD_S,
    ) -> int | None:
        return self._loop.run(
            self._client.ack_weights(
                policy_id,
                receiver_id,
                version=version,
                holds_version=holds_version,
                hold_s=hold_s,
            )
        )

    def gradient_manifest(self, policy_id: str, names: Sequence[str]) -> GradientManifest:
        return self._loop.run(self._client.gradient_manifest(policy_id, names))

    def fetch_file(self, policy_id: str, file: WeightFile) -> bytes:
        return self._loop.run(self._client.fetch_file(policy_id, file))

    def fetch_weights(self, policy_id: str, digest: str, *, offset: int, length: int) -> bytes:
        return self._loop.run(
            self._client.fetch_weights(policy_id, digest, offset=offset, length=length)
        )

    def pull_weights(
        self,
        policy_id: str,
        folder: Path | str,
        version: int | None = None,
        *,
        keep: int | None = KEEP_VERSIONS,
    ) -> PulledWeights:
        return self._loop.run(self._client.pull_weights(policy_id, folder, version, keep=keep))

    def weight_receiver(
        self,
        policy_id: str,
        root: Path | str,
        adapter: Adapter | None = None,
        *,
        receiver_id: str | None = None,
        keep: int = KEEP_VERSIONS,
        on_event: Callable[[ReceiverEvent], None] = log_event,
    ) -> WeightReceiver:
        receiver = self._client.weight_receiver(
            policy_id, root, adapter, receiver_id=receiver_id, keep=keep, on_event=on_event
        )
        return WeightReceiver(self._loop, receiver)

    def server_info(self) -> ServerInfo:
        return self._loop.run(self._client.server_info())

    def health(self) -> Health:
        return self._loop.run(self._client.health())

    def _handle(
        self, call: Coroutine[Any, Any, AsyncOperationHandle[ResultT]]
    ) -> OperationHandle[ResultT]:
        return OperationHandle(self._loop, self._loop.run(call))
