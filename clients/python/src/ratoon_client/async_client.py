"""The client of one service, for asyncio: one method per call of `ratoon.v1.PolicyService`.

A method that returns a handle has been durably accepted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from ratoon_client.arguments import all_of, check_seconds
from ratoon_client.caller import Caller
from ratoon_client.config import ClientConfig, with_api_key, with_timeouts, with_tls_files
from ratoon_client.errors import RatoonApiError
from ratoon_client.operation import POLL_S, AsyncOperationHandle
from ratoon_client.rollouts import Group
from ratoon_client.session import AsyncPolicySession
from ratoon_client.transport.target import (
    TLS_SCHEMES,
    check_key_target,
    check_target,
    open_transport,
)
from ratoon_client.upload import set_batch
from ratoon_client.values import (
    Checkpoint,
    ForwardResult,
    GradientManifest,
    Health,
    Operation,
    OperationResult,
    Policy,
    PolicyOptions,
    ServerInfo,
    WeightFile,
    WeightManifest,
)
from ratoon_client.weights.adapter import Adapter
from ratoon_client.weights.calls import HOLD_S, ack_weights, weight_manifest
from ratoon_client.weights.fetch import fetch_chunk, fetch_result_file
from ratoon_client.weights.pull import KEEP_VERSIONS, PulledWeights, pull_weights
from ratoon_client.weights.receiver import AsyncWeightReceiver, ReceiverEvent, log_event
from ratoon_client.wire import rpcs
from ratoon_client.wire.decode import decode
from ratoon_client.wire.encode import group_messages, policy_spec_message, request_message
from ratoon_proto.v1 import service_pb2


class AsyncRatoonClient:
    """Use it on one event loop, and as a context manager or with `close`.

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
        scheme, _ = check_target(target)
        timed = with_timeouts(config or ClientConfig(), timeout_s, attempt_timeout_s)
        keyed = with_api_key(timed, api_key)
        check_key_target(target, keyed)
        self._config = with_tls_files(
            keyed, ca_file, cert_file, key_file, is_tls=scheme in TLS_SCHEMES
        )
        self._caller = Caller(partial(open_transport, target, self._config), self._config)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connection, for good; operations on the service go on."""
        await self._caller.close()

    async def create_policy(
        self, policy_id: str, **options: Unpack[PolicyOptions]
    ) -> AsyncOperationHandle[Policy]:
        """Build a policy. The same options again are the same operation, others POLICY_EXISTS."""
        spec = policy_spec_message(policy_id, options)
        request = request_message(service_pb2.CreatePolicyRequest, spec=spec)
        return AsyncOperationHandle(
            self._caller, await self._caller.call(rpcs.CREATE_POLICY, request)
        )

    async def delete_policy(self, policy_id: str) -> AsyncOperationHandle[None]:
        """Never retried: a second one could meet a policy of that id made in between."""
        request = request_message(service_pb2.DeletePolicyRequest, policy_id=policy_id)
        return AsyncOperationHandle(
            self._caller, await self._caller.call(rpcs.DELETE_POLICY, request)
        )

    async def get_policy(self, policy_id: str) -> Policy:
        request = request_message(service_pb2.GetPolicyRequest, policy_id=policy_id)
        return decode(await self._caller.call(rpcs.GET_POLICY, request), Policy)

    async def list_policies(self) -> list[Policy]:
        answer = await self._caller.call(rpcs.LIST_POLICIES, service_pb2.ListPoliciesRequest())
        return [decode(policy, Policy) for policy in answer.policies]

    def policy(self, policy_id: str) -> AsyncPolicySession:
        """Sequenced calls with their keys made for you. Nothing is sent yet."""
        return AsyncPolicySession(self._caller, policy_id)

    async def forward(
        self,
        policy_id: str,
        groups: Sequence[Group],
        *,
        with_entropy: bool = False,
        use_reference: bool = False,
        expected_version: int | None = None,
    ) -> AsyncOperationHandle[ForwardResult]:
        """Compute log-probs by the policy's newest version; no gradient, and no place in its order.

        Args:
            policy_id: The policy.
            groups: The batch; large ones are uploaded in parts.
            with_entropy: Whether to compute entropies too.
            use_reference: Whether to run the frozen reference in place of the policy.
            expected_version: The operation fails with VERSION_MISMATCH at another version.
        """
        request = request_message(
            service_pb2.ForwardRequest,
            policy_id=policy_id,
            with_entropy=with_entropy,
            use_reference=use_reference,
            expected_version=expected_version,
        )
        await set_batch(self._caller, request, groups)
        return AsyncOperationHandle(self._caller, await self._caller.call(rpcs.FORWARD, request))

    async def upload_part(
        self, policy_id: str, upload_id: str, part_index: int, groups: Sequence[Group]
    ) -> int:
        """One part of a batch; gives its serialized bytes. Large calls do this by themselves."""
        request = request_message(
            service_pb2.UploadPartRequest,
            policy_id=policy_id,
            upload_id=upload_id,
            part_index=part_index,
            groups=group_messages(groups),
        )
        return (await self._caller.call(rpcs.UPLOAD_PART, request)).num_bytes

    async def operation(self, operation_id: str) -> AsyncOperationHandle[OperationResult]:
        """The handle of an operation that somebody else started."""
        request = request_message(service_pb2.GetOperationRequest, operation_id=operation_id)
        return AsyncOperationHandle(
            self._caller, await self._caller.call(rpcs.GET_OPERATION, request)
        )

    async def get_operation(self, operation_id: str, *, wait_s: float = 0.0) -> Operation:
        """The operation once it has ended, or as it stands after `wait_s` seconds."""
        check_seconds("wait_s", wait_s)
        request = request_message(
            service_pb2.GetOperationRequest, operation_id=operation_id, wait_s=wait_s
        )
        message = await self._caller.call(
            rpcs.GET_OPERATION,
            request,
            timeout_s=wait_s + self._config.timeout_s,
            attempt_timeout_s=wait_s + self._config.attempt_timeout_s,
        )
        return decode(message, Operation)

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Stop it before its optimizer step; one that has ended stays as it is."""
        request = request_message(service_pb2.CancelOperationRequest, operation_id=operation_id)
        return decode(await self._caller.call(rpcs.CANCEL_OPERATION, request), Operation)

    async def list_checkpoints(self, policy_id: str) -> list[Checkpoint]:
        request = request_message(service_pb2.ListCheckpointsRequest, policy_id=policy_id)
        answer = await self._caller.call(rpcs.LIST_CHECKPOINTS, request)
        return [decode(checkpoint, Checkpoint) for checkpoint in answer.checkpoints]

    async def weight_manifest(
        self,
        policy_id: str,
        version: int | None = None,
        *,
        known_version: int | None = None,
        wait_s: float = 0.0,
    ) -> WeightManifest:
        """The files of a version; None is the newest.

        A version that an ended operation made is waited for while the service writes it, ten
        minutes at most, whatever `known_version` and `wait_s` are: what is answered is never older
        than the newest that the caller was told of. Beyond that the call waits up to `wait_s`
        seconds for a version that is not there yet, or for a newest other than `known_version`,
        which is answered again where none came.
        """
        return await weight_manifest(
            self._caller, policy_id, version, known_version=known_version, wait_s=wait_s
        )

    async def watch_weights(
        self, policy_id: str, *, known_version: int | None = None
    ) -> AsyncGenerator[WeightManifest, None]:
        """The newest version, unless it is `known_version`, then each time it is another.

        A version that an ended operation made is waited for while the service writes it. A slow
        caller gets only the newest, which after a LoadCheckpoint may have a lower number. Lost
        connections are made again; raises TransportError where the service has answered nothing for
        the client's `timeout_s`.
        """
        while True:
            try:
                newest = await self.weight_manifest(
                    policy_id, known_version=known_version, wait_s=POLL_S
                )
            except RatoonApiError as error:
                if error.code != "WEIGHTS_NOT_FOUND":
                    raise
                continue  # Nothing is published yet.
            if newest.version != known_version:
                known_version = newest.version
                yield newest

    async def ack_weights(
        self,
        policy_id: str,
        receiver_id: str,
        *,
        version: int | None = None,
        holds_version: int | None = None,
        hold_s: float = HOLD_S,
    ) -> int | None:
        """Say what a receiver serves and reads; gives the newest published version, if any.

        `receiver_id` is the same over the receiver's restarts. `holds_version` is kept until its
        next call, at most `hold_s` seconds.
        """
        return await ack_weights(
            self._caller,
            policy_id,
            receiver_id,
            version=version,
            holds_version=holds_version,
            hold_s=hold_s,
        )

    async def gradient_manifest(self, policy_id: str, names: Sequence[str]) -> GradientManifest:
        """Gradient sums of the open window as a file, of tensors named as in published weights.

        The service reads them between two operations, which is waited for, ten minutes a try.
        """
        names = all_of("names", names, str)
        request = request_message(
            service_pb2.GetGradientManifestRequest, policy_id=policy_id, names=names
        )
        message = await self._caller.call_in_turn(rpcs.GET_GRADIENT_MANIFEST, request)
        return decode(message, GradientManifest)

    async def fetch_file(self, policy_id: str, file: WeightFile) -> bytes:
        """A whole file of a manifest in memory, verified; of gradients, `safetensors.numpy.load`
        reads it.
        """
        return await fetch_result_file(self._caller, policy_id, file.digest, file.size_bytes)

    async def fetch_weights(
        self, policy_id: str, digest: str, *, offset: int, length: int
    ) -> bytes:
        """One chunk of a file of a manifest, or of a result file, verified."""
        return await fetch_chunk(self._caller, policy_id, digest, offset=offset, length=length)

    async def pull_weights(
        self,
        policy_id: str,
        folder: Path | str,
        version: int | None = None,
        *,
        keep: int | None = KEEP_VERSIONS,
    ) -> PulledWeights:
        """Bring `folder`/version-N up to date; see `weights.pull.pull_weights`."""
        return await pull_weights(self._caller, policy_id, Path(folder), version=version, keep=keep)

    def weight_receiver(
        self,
        policy_id: str,
        root: Path | str,
        adapter: Adapter | None = None,
        *,
        receiver_id: str | None = None,
        keep: int = KEEP_VERSIONS,
        on_event: Callable[[ReceiverEvent], None] = log_event,
    ) -> AsyncWeightReceiver:
        """Versions into an engine as they are published; without `adapter` into `root` alone."""
        return AsyncWeightReceiver(
            self._caller,
            policy_id,
            root,
            adapter,
            receiver_id=receiver_id,
            keep=keep,
            on_event=on_event,
        )

    async def server_info(self) -> ServerInfo:
        request = service_pb2.GetServerInfoRequest()
        return decode(await self._caller.call(rpcs.GET_SERVER_INFO, request), ServerInfo)

    async def health(self) -> Health:
        """How the service is now; asked once. Raises TransportError where it does not answer."""
        try:
            message = await self._caller.call(rpcs.HEALTH, service_pb2.HealthRequest())
        except RatoonApiError as error:
            # HTTP says with its status what gRPC says with the message.
            if error.code != "UNAVAILABLE":
                raise
            return Health(status=error.message)
        return decode(message, Health)
