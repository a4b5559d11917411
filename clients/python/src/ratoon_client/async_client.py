"""The client of one service, for asyncio: one method per call of `ratoon.v1.PolicyService`.

A method that returns a handle has been durably accepted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from ratoon_client import rpcs
from ratoon_client.arguments import IntsLike, all_of, check_seconds, check_type, token_array
from ratoon_client.caller import Caller
from ratoon_client.config import ClientConfig, with_api_key, with_tls_files
from ratoon_client.errors import RatoonApiError
from ratoon_client.operation import POLL_S, AsyncOperationHandle, get_operation
from ratoon_client.rollouts import Group
from ratoon_client.sender import set_batch
from ratoon_client.session import AsyncPolicySession
from ratoon_client.transport.target import (
    TLS_SCHEMES,
    check_key_target,
    check_target,
    open_transport,
    reach,
)
from ratoon_client.values import Checkpoint, ForwardResult, Health, OperationResult, PolicyOptions
from ratoon_client.weights.calls import (
    HOLD_S,
    ack_weights,
    fetch_chunk,
    fetch_result_file,
    weight_manifest,
)
from ratoon_client.weights.export import export_weights
from ratoon_client.weights.pull import KEEP_VERSIONS, PulledWeights, pull_weights
from ratoon_client.weights.receiver import Adapter, AsyncWeightReceiver, ReceiverEvent, log_event
from ratoon_client.weights.send import create_from
from ratoon_client.wire import decode, group_messages, policy_spec_message, request_message
from ratoon_proto.types import (
    GradientManifest,
    KeptRollout,
    NamedVersion,
    Operation,
    OperationKind,
    OperationKindName,
    OperationState,
    OperationStateName,
    Policy,
    SampleResult,
    SamplingParams,
    ServerInfo,
    StepHistory,
    StepRollouts,
    VersionList,
    WeightFile,
    WeightManifest,
)


class AsyncRatoonClient:
    """A client of one service for asyncio, on one event loop; a context manager, or use `close`.

    Args:
        target: `grpc://host:port` (or just `host:port`), `http://host:port`, and with TLS
            `grpcs://...` or `https://...`.
        api_key: Goes with every call. Without TLS it goes to this machine only, unless `config`
            has `plain_text_key` or RATOON_PLAIN_TEXT_KEY is 1. Default: RATOON_API_KEY.
        ca_file: Authorities to verify the service with, in PEM. Default: RATOON_CA_FILE.
        cert_file: The client's own certificate, in PEM. Default: RATOON_CERT_FILE.
        key_file: The certificate's key, in PEM. Default: RATOON_KEY_FILE.
        timeout_s: Seconds that a call may take with its retries.
        attempt_timeout_s: Seconds that each try of a call may take.
        config: Further settings; arguments above take precedence over its values.

    Raises:
        InvalidArgumentError: An argument has no form on the wire. Methods raise it too, before
            anything is sent.
        RatoonApiError: The service refuses a call.
        TransportError: The service does not answer.
        UnusableClientError: The client is closed, or belongs to another process.
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
        times = {"timeout_s": timeout_s, "attempt_timeout_s": attempt_timeout_s}
        given = {name: value for name, value in times.items() if value is not None}
        keyed = with_api_key(replace(config or ClientConfig(), **given), api_key)
        check_key_target(target, keyed)
        self._config = with_tls_files(
            keyed, ca_file, cert_file, key_file, is_tls=scheme in TLS_SCHEMES
        )
        self._caller = Caller(
            partial(open_transport, target, self._config), partial(reach, target), self._config
        )

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
        """Close the connection for good; operations on the service go on."""
        await self._caller.close()

    async def create_policy(
        self, policy_id: str, **options: Unpack[PolicyOptions]
    ) -> AsyncOperationHandle[Policy]:
        """Build a policy.

        Args:
            policy_id: Its id: [a-z0-9][a-z0-9_-]{0,63}.
            **options: Fields of a PolicySpec; one of `preset`, `model_folder` and `send_folder`, a
                model folder of this machine whose files are sent, is required.

        Returns:
            The handle of the operation, which is done once the policy can be trained. The same
            call again is the same operation.

        Raises:
            RatoonApiError: POLICY_EXISTS, where the policy exists with other options.
        """
        spec = policy_spec_message(policy_id, options)
        folder = options.get("send_folder")
        if folder is None:
            answer = await self._caller.ask(rpcs.CREATE_POLICY, spec=spec)
        else:
            answer = await create_from(self._caller, spec, Path(folder))
        return AsyncOperationHandle(self._caller, answer)

    async def delete_policy(self, policy_id: str) -> AsyncOperationHandle[None]:
        """Remove a policy with its weights and checkpoints.

        The call is sent once: a second one could meet a policy of that id made in between.
        """
        return AsyncOperationHandle(
            self._caller, await self._caller.ask(rpcs.DELETE_POLICY, policy_id=policy_id)
        )

    async def release_policy(self, policy_id: str) -> Policy:
        """Put a policy away: save its state, and end its workers, whose GPUs are free then.

        Waits until nothing is left to run. What needs no worker is answered as before, and the next
        call that needs one brings the policy back.

        Raises:
            RatoonApiError: WINDOW_OPEN, where gradients wait for their step.
        """
        return decode(await self._caller.ask(rpcs.RELEASE_POLICY, policy_id=policy_id), Policy)

    async def get_policy(self, policy_id: str) -> Policy:
        """Read a policy as it is now."""
        return decode(await self._caller.ask(rpcs.GET_POLICY, policy_id=policy_id), Policy)

    async def list_policies(self) -> list[Policy]:
        """Read all policies that the caller may see."""
        answer = await self._caller.ask(rpcs.LIST_POLICIES)
        return [decode(policy, Policy) for policy in answer.policies]

    def policy(self, policy_id: str, *, consume: bool = False) -> AsyncPolicySession:
        """Begin a session of sequenced calls to a policy, which makes their keys; sends nothing.

        Args:
            policy_id: The policy.
            consume: Whether a call that the service refuses for what it says takes its seq all the
                same, as an operation that fails with the refusal: for callers that count on.
        """
        return AsyncPolicySession(self._caller, policy_id, consume=consume)

    async def forward(
        self,
        policy_id: str,
        groups: Sequence[Group],
        *,
        with_entropy: bool = False,
        use_reference: bool = False,
        expected_version: int | None = None,
        num_teacher_tokens: int = 0,
        with_teacher_logprobs: bool = False,
    ) -> AsyncOperationHandle[ForwardResult]:
        """Compute log-probs by the policy's newest version; no gradient, and no place in its order.

        Args:
            policy_id: The policy.
            groups: The batch; large ones are uploaded in parts.
            with_entropy: Whether to compute entropies too.
            use_reference: Whether to run the frozen reference in place of the policy.
            expected_version: The operation fails with VERSION_MISMATCH at another version.
            num_teacher_tokens: How many of the likeliest tokens to answer at each trained token,
                for a student's `teacher_tokens` and `teacher_logprobs`.
            with_teacher_logprobs: Whether to answer log-probs of the rollouts' `teacher_tokens`.
        """
        request = request_message(
            rpcs.FORWARD.request,
            policy_id=policy_id,
            with_entropy=with_entropy,
            use_reference=use_reference,
            expected_version=expected_version,
            num_teacher_tokens=num_teacher_tokens,
            with_teacher_logprobs=with_teacher_logprobs,
        )
        await set_batch(self._caller, request, groups)
        return AsyncOperationHandle(self._caller, await self._caller.call(rpcs.FORWARD, request))

    async def sample(
        self,
        policy_id: str,
        prompt: IntsLike,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - it is frozen
        *,
        version: int | None = None,
        base: bool = False,
        name: str = "",
        timeout_s: float = 600.0,
    ) -> SampleResult:
        """Sample continuations of a prompt.

        Args:
            policy_id: The policy.
            prompt: Token ids.
            sampling: How many, how long, and how they are drawn.
            version: A published version. Default: the newest.
            base: Whether to sample from the weights that the policy began with.
            name: Sample from the version of this name instead.
            timeout_s: Seconds that the samples may take; the first ones start the sampler.

        Raises:
            RatoonApiError: WEIGHTS_NOT_FOUND, where the version is not published, or no more.
        """
        check_seconds("timeout_s", timeout_s)
        check_type("sampling", sampling, SamplingParams)
        request = request_message(
            rpcs.SAMPLE.request,
            policy_id=policy_id,
            version=version,
            base=base,
            name=name,
            prompt=token_array("prompt", prompt).tolist(),
            sampling=sampling,
        )
        message = await self._caller.call_in_turn(rpcs.SAMPLE, request, wait_s=timeout_s)
        return decode(message, SampleResult)

    async def upload_part(
        self, policy_id: str, upload_id: str, part_index: int, groups: Sequence[Group]
    ) -> int:
        """Upload one part of a batch; calls with large batches do so by themselves.

        Args:
            policy_id: The policy that the batch is for.
            upload_id: A name of the caller's choice: [a-zA-Z0-9_-]{1,64}.
            part_index: The part's place, from 0.
            groups: Whole groups.

        Returns:
            The part's serialized size in bytes.
        """
        answer = await self._caller.ask(
            rpcs.UPLOAD_PART,
            policy_id=policy_id,
            upload_id=upload_id,
            part_index=part_index,
            groups=group_messages(groups),
        )
        return answer.num_bytes

    async def operation(self, operation_id: str) -> AsyncOperationHandle[OperationResult]:
        """Get the handle of any operation by its id, whoever started it."""
        return AsyncOperationHandle(
            self._caller, await self._caller.ask(rpcs.GET_OPERATION, operation_id=operation_id)
        )

    async def get_operation(self, operation_id: str, *, wait_s: float = 0.0) -> Operation:
        """Read an operation once it has ended, or as it stands after `wait_s` seconds."""
        check_seconds("wait_s", wait_s)
        message = await get_operation(
            self._caller, operation_id, wait_s, timeout_s=wait_s + self._caller.config.timeout_s
        )
        return decode(message, Operation)

    async def operations(
        self,
        policy_id: str | None = None,
        *,
        kinds: Sequence[OperationKind | OperationKindName] = (),
        states: Sequence[OperationState | OperationStateName] = (),
        seq: int | None = None,
    ) -> AsyncGenerator[Operation, None]:
        """List operations, newest first, a page at a time as they are iterated over.

        Args:
            policy_id: The policy. Default: all policies that the caller may see.
            kinds: Only operations of these kinds.
            states: Only operations in these states.
            seq: Only the policy's operation with this seq.
        """
        request = request_message(
            rpcs.LIST_OPERATIONS.request,
            policy_id=policy_id,
            kinds=all_of("kinds", kinds, str),
            states=all_of("states", states, str),
            seq=seq,
        )
        while True:
            page = await self._caller.call(rpcs.LIST_OPERATIONS, request)
            for operation in page.operations:
                yield decode(operation, Operation)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def steps(
        self,
        policy_id: str,
        figures: Sequence[str] = (),
        *,
        after_seq: int = 0,
        before_seq: int = 0,
        max_points: int = 1000,
    ) -> StepHistory:
        """Read the figures of a policy's optimizer steps, oldest first, as columns.

        Args:
            policy_id: The policy.
            figures: Names of a report's figures: `loss`, `seconds.forward`. Default: all.
            after_seq: Only steps after this seq: `history.seq[-1]` of an earlier answer.
            before_seq: Only steps before this seq; 0: up to the newest.
            max_points: Where there are more steps, neighbours are joined into one point, with their
                mean, least and greatest values.
        """
        message = await self._caller.ask(
            rpcs.LIST_STEPS,
            policy_id=policy_id,
            figures=all_of("figures", figures, str),
            after_seq=after_seq,
            before_seq=before_seq,
            max_points=max_points,
        )
        return decode(message, StepHistory)

    async def versions(self, policy_id: str) -> VersionList:
        """Read which versions of a policy are published, and what its receivers serve."""
        message = await self._caller.ask(rpcs.LIST_VERSIONS, policy_id=policy_id)
        return decode(message, VersionList)

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Stop an operation before its optimizer step; one that has ended stays as it is."""
        message = await self._caller.ask(rpcs.CANCEL_OPERATION, operation_id=operation_id)
        return decode(message, Operation)

    async def list_checkpoints(self, policy_id: str) -> list[Checkpoint]:
        """Read a policy's checkpoints."""
        answer = await self._caller.ask(rpcs.LIST_CHECKPOINTS, policy_id=policy_id)
        return [decode(checkpoint, Checkpoint) for checkpoint in answer.checkpoints]

    async def rollouts(self, policy_id: str, seq: int) -> StepRollouts:
        """Read what a ForwardBackward or Update has kept of its rollouts, by its seq, without
        tokens.

        Raises:
            RatoonApiError: ROLLOUTS_NOT_FOUND, where nothing is kept of it, or no more.
        """
        answer = await self._caller.ask(rpcs.LIST_ROLLOUTS, policy_id=policy_id, seq=seq)
        return decode(answer, StepRollouts)

    async def rollout(self, policy_id: str, seq: int, group: int, rollout: int) -> KeptRollout:
        """Read one kept rollout with its tokens, by the indexes of group and rollout.

        Raises:
            RatoonApiError: ROLLOUTS_NOT_FOUND, where it is not kept, or no more.
        """
        place = {"policy_id": policy_id, "seq": seq, "group": group, "rollout": rollout}
        return decode(await self._caller.ask(rpcs.GET_ROLLOUT, **place), KeptRollout)

    async def delete_checkpoint(self, policy_id: str, checkpoint_id: str) -> Checkpoint:
        """Delete a checkpoint, whatever the policy does meanwhile.

        Its name is free at once; its files go as soon as no recovery begins at it. The call is sent
        once: a second one could meet a checkpoint saved under that name in between.

        Returns:
            What was deleted.

        Raises:
            RatoonApiError: CHECKPOINT_NOT_FOUND, where there is none of this name.
        """
        answer = await self._caller.ask(
            rpcs.DELETE_CHECKPOINT, policy_id=policy_id, checkpoint_id=checkpoint_id
        )
        return decode(answer, Checkpoint)

    async def delete_version(self, policy_id: str, name: str) -> NamedVersion:
        """Take a version's name away, whatever the policy does meanwhile.

        Its files go unless something else keeps them. The call is sent once: a second one could
        meet a version published under that name in between.

        Returns:
            What had the name.

        Raises:
            RatoonApiError: WEIGHTS_NOT_FOUND, where no version has this name.
        """
        answer = await self._caller.ask(rpcs.DELETE_VERSION, policy_id=policy_id, name=name)
        return decode(answer, NamedVersion)

    async def weight_manifest(
        self,
        policy_id: str,
        version: int | None = None,
        *,
        name: str | None = None,
        known_version: int | None = None,
        wait_s: float = 0.0,
        delta_from: int | None = None,
    ) -> WeightManifest:
        """Read the manifest of a version: its files with their digests.

        While the service writes a version that an ended operation made, the call waits for it, ten
        minutes at most: the answer is never older than the newest version that the caller was told
        of.

        Args:
            policy_id: The policy.
            version: The version. Default: the newest published.
            name: In place of `version`: the name that PublishVersion has given it.
            known_version: Given without `version`: wait for a newest version other than this one,
                which is the answer where no other came.
            wait_s: Seconds to wait for a version that no operation has made yet.
            delta_from: A version that is here whole: a version that is being written is waited for
                no longer than until its delta from that one can be fetched.

        Raises:
            RatoonApiError: WEIGHTS_NOT_FOUND, where there is no such version.
        """
        return await weight_manifest(
            self._caller,
            policy_id,
            version,
            name=name,
            known_version=known_version,
            wait_s=wait_s,
            delta_from=delta_from,
        )

    async def watch_weights(
        self, policy_id: str, *, known_version: int | None = None
    ) -> AsyncGenerator[WeightManifest, None]:
        """Follow the newest version of a policy.

        Args:
            policy_id: The policy.
            known_version: A version that is not wanted as the first.

        Yields:
            The newest manifest, then another each time the newest version changes. A slow caller
            gets only the newest, whose number may be lower after a LoadCheckpoint.

        Raises:
            TransportError: The service has answered nothing for the client's `timeout_s`. Lost
                connections are made again until then.
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
        """Tell the service what a receiver serves and reads.

        Args:
            policy_id: The policy.
            receiver_id: The receiver's name, which stays the same over its restarts.
            version: The version that it serves; None: none.
            holds_version: A version that it reads, which the service keeps until the receiver's
                next call.
            hold_s: Seconds that `holds_version` is kept at most.

        Returns:
            The newest published version; None: there is none.
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
        """Have gradient sums of the open window written to a file.

        The service reads them between two operations; each try waits ten minutes for that.

        Args:
            policy_id: The policy.
            names: Names of tensors, as in published weights.
        """
        names = all_of("names", names, str)
        request = request_message(
            rpcs.GET_GRADIENT_MANIFEST.request, policy_id=policy_id, names=names
        )
        message = await self._caller.call_in_turn(rpcs.GET_GRADIENT_MANIFEST, request)
        return decode(message, GradientManifest)

    async def fetch_file(self, policy_id: str, file: WeightFile) -> bytes:
        """Fetch and verify a whole file of a manifest, into memory.

        `safetensors.numpy.load` reads a file of gradients.

        Raises:
            IntegrityError: The bytes are not what the file's digest says.
        """
        return await fetch_result_file(self._caller, policy_id, file.digest, file.size_bytes)

    async def fetch_weights(
        self, policy_id: str, digest: str, *, offset: int, length: int
    ) -> bytes:
        """Fetch and verify one chunk of a file of a manifest, or of a result file.

        Args:
            policy_id: The policy.
            digest: The file's digest.
            offset: First byte of the chunk.
            length: Bytes of the chunk.

        Raises:
            IntegrityError: The bytes are not what the chunk's digest says.
        """
        return await fetch_chunk(self._caller, policy_id, digest, offset=offset, length=length)

    async def pull_weights(
        self,
        policy_id: str,
        folder: Path | str,
        version: int | None = None,
        *,
        name: str | None = None,
        keep: int | None = KEEP_VERSIONS,
    ) -> PulledWeights:
        """Pull a version into `folder`/version-N; `folder`/latest then names the newest.

        Files that an earlier version or the service's folder on this host has are linked, an
        interrupted pull goes on where it stopped, and deltas are fetched in place of files where
        that is fewer bytes. On any failure the folder stays as it was.

        Args:
            policy_id: The policy.
            folder: A folder for versions of this policy.
            version: The version. Default: the newest published.
            name: In place of `version`: its name. `folder`/latest stays as it is.
            keep: How many of the last pulled versions stay; None: all.

        Raises:
            IntegrityError: Bytes are not what their digests say.
        """
        return await pull_weights(
            self._caller, policy_id, Path(folder), version=version, name=name, keep=keep
        )

    async def export_weights(
        self,
        policy_id: str,
        folder: Path | str,
        version: int | None = None,
        *,
        name: str | None = None,
        base: Path | str | None = None,
        merge: bool = False,
    ) -> PulledWeights:
        """Write a version as a Hugging Face folder of its own, with tokenizer and README.md.

        Args:
            policy_id: The policy.
            folder: A folder that is new or empty.
            version: The version. Default: the newest published.
            name: In place of `version`: its name.
            base: For an adapter: the folder of its base, or the base's id on a hub, which the
                adapter's config then names.
            merge: Whether to merge the adapter into the folder `base`, which makes a whole model.

        Raises:
            InvalidArgumentError: There is something in `folder`, or `base` is not of the version.
            IntegrityError: Bytes are not what their digests say.
        """
        return await export_weights(
            self._caller,
            policy_id,
            Path(folder),
            version=version,
            name=name,
            base=base,
            merge=merge,
        )

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
        """Make a receiver, which brings versions into an engine as they are published.

        Args:
            policy_id: The policy.
            root: A folder of this receiver's own.
            adapter: How a version comes into the engine. Default: versions only reach `root`.
            receiver_id: Its name in the service's metrics. Default: made from this host and `root`.
            keep: How many versions stay in `root`, 2 or more.
            on_event: Called on the event loop for each version that the engine took, and by
                `follow` for each failure.
        """
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
        """Read the service's versions, backends and limits."""
        return decode(await self._caller.ask(rpcs.GET_SERVER_INFO), ServerInfo)

    async def health(self) -> Health:
        """Ask once how the service is now.

        Raises:
            TransportError: The service does not answer.
        """
        try:
            message = await self._caller.ask(rpcs.HEALTH)
        except RatoonApiError as error:
            # HTTP says with its status what gRPC says with the message.
            if error.code != "UNAVAILABLE":
                raise
            return Health(status=error.message)
        return decode(message, Health)
