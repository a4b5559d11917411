"""Sequenced calls to one policy: one method per call, which the session's sender keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ratoon_client import rpcs
from ratoon_client.caller import Caller
from ratoon_client.custom_loss import WEIGHTED, CustomLoss, weighted
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.rollouts import Group
from ratoon_client.sender import OperationKey, Sender, SequencedRpc, operation_key, set_batch
from ratoon_client.values import (
    Checkpoint,
    ForwardBackwardResult,
    ForwardResult,
    Loss,
    Optim,
)
from ratoon_client.wire import loss_message, optim_message, request_message
from ratoon_proto.types import (
    BadRolloutAction,
    BadRolloutActionName,
    ImportMode,
    ImportModeName,
    ImportResult,
    LogprobsOf,
    LogprobsOfName,
    NamedVersion,
    StepResult,
)


class AsyncPolicySession:
    """Sequenced calls to one policy, with keys that the session makes.

    Under client sequencing the session counts seqs; under server sequencing it makes a request_id
    for each call. A call with a `seq` or `request_id` of the caller's uses that one instead.

    After a TransportError it is unknown whether a call was accepted, so the session keeps its key:
    the same call again is the same operation. Another call is refused with KEY_REUSED under client
    sequencing, until `resync` forgets the keys. Under server sequencing keys of calls with a batch
    are kept until `resync`, and keys of calls without one, which look alike each time, until the
    session's next call is accepted.

    Methods that return a handle raise RatoonApiError where the service refuses the call,
    TransportError where it does not answer, and InvalidArgumentError, before anything is sent,
    where an argument has no form on the wire.
    """

    def __init__(self, caller: Caller, policy_id: str, *, consume: bool = False) -> None:
        self._caller = caller
        self._policy_id = policy_id
        self._sender = Sender(caller, policy_id, consume=consume)

    @property
    def policy_id(self) -> str:
        """The id of the policy."""
        return self._policy_id

    async def next_seq(self) -> int:
        """The seq of the next call; 0 under server sequencing."""
        return await self._sender.next_seq()

    async def resync(self) -> int:
        """Forget what was counted, and ask the service.

        Returns:
            The seq of the next call; 0 under server sequencing.
        """
        return await self._sender.resync()

    async def update(
        self,
        groups: Sequence[Group],
        *,
        loss: Loss,
        optim: Optim,
        on_bad_rollout: BadRolloutAction | BadRolloutActionName = "refuse",
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[StepResult]:
        """Run forward and backward over all groups, then take one optimizer step.

        Args:
            groups: The batch; large ones are uploaded in parts.
            loss: What is minimised.
            optim: The optimizer step.
            on_bad_rollout: Whether rollouts that cannot be trained, with a NaN or a token that the
                model has not, `refuse` the call, or are dropped, named in the report.
            expected_version: The operation fails with VERSION_MISMATCH at another version.
            seq: The operation's place, under client sequencing. Default: the session's next.
            request_id: The operation's key, under server sequencing. Default: a new one.

        Returns:
            The handle of the operation, which is durably accepted.
        """
        key = operation_key(seq, request_id)
        return await self._send(
            rpcs.UPDATE,
            key,
            groups,
            loss=loss_message(loss),
            optim=optim_message(optim),
            on_bad_rollout=on_bad_rollout,
            expected_version=expected_version,
        )

    async def forward_backward(
        self,
        groups: Sequence[Group],
        *,
        loss: Loss,
        with_logprobs: LogprobsOf | LogprobsOfName | None = None,
        with_entropy: bool = False,
        on_bad_rollout: BadRolloutAction | BadRolloutActionName = "refuse",
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[ForwardBackwardResult]:
        """Add the gradients of a batch to the window.

        Args:
            groups: As for `update`.
            loss: As for `update`.
            with_logprobs: Which response tokens' log-probs to return: those that are `trained`,
                or `all`. Default: none.
            with_entropy: Whether to return their entropies too.
            on_bad_rollout: As for `update`.
            expected_version: As for `update`.
            seq: As for `update`.
            request_id: As for `update`.

        Returns:
            The handle of the operation, which is durably accepted.
        """
        key = operation_key(seq, request_id)
        return await self._send(
            rpcs.FORWARD_BACKWARD,
            key,
            groups,
            loss=loss_message(loss),
            with_logprobs=with_logprobs,
            with_entropy=with_entropy,
            on_bad_rollout=on_bad_rollout,
            expected_version=expected_version,
        )

    async def forward_backward_custom(
        self, groups: Sequence[Group], *, loss_of: CustomLoss
    ) -> tuple[float, AsyncOperationHandle[ForwardBackwardResult]]:
        """Add the gradient of a loss of the caller's own to the window.

        The session makes two calls, with two keys: a Forward, whose result it waits for, and a
        ForwardBackward with `reinforce` and the advantages that have the gradient of
        `loss_of`. That gradient is a sum: an OptimStep divides it by nothing unless told otherwise.
        Where another producer has stepped in between, the operation fails with VERSION_MISMATCH.

        Args:
            groups: The batch.
            loss_of: From log-probs to a loss and its gradients; it runs in a thread.

        Returns:
            The loss, and the handle of the ForwardBackward.

        Raises:
            InvalidArgumentError: `loss_of` gives no loss and gradients.
        """
        forward = await (await self.forward(groups)).result()
        loss, batch = await asyncio.to_thread(weighted, groups, forward.logprobs, loss_of)
        handle = await self.forward_backward(batch, loss=WEIGHTED, expected_version=forward.version)
        return loss, handle

    async def optim_step(
        self,
        *,
        optim: Optim,
        include_seqs: Sequence[int] = (),
        allow_empty: bool = False,
        discard_on_poison: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[StepResult]:
        """Divide, clip and apply the window's gradients, and end the window.

        Args:
            optim: The optimizer step.
            include_seqs: Seqs of the ForwardBackwards to include. Default: the whole window, none
                of which may have failed.
            allow_empty: Whether to step without any gradient too, by moments and weight decay.
            discard_on_poison: Whether a step that a failed ForwardBackward keeps from being taken
                also discards the window.
            expected_version: As for `update`.
            seq: As for `update`.
            request_id: As for `update`.

        Returns:
            The handle of the operation, which is durably accepted.
        """
        key = operation_key(seq, request_id)
        return await self._send(
            rpcs.OPTIM_STEP,
            key,
            optim=optim_message(optim),
            expected_version=expected_version,
            include_seqs=include_seqs,
            allow_empty=allow_empty,
            discard_on_poison=discard_on_poison,
        )

    async def discard_gradients(
        self, *, seq: int | None = None, request_id: str | None = None
    ) -> AsyncOperationHandle[None]:
        """End the window without a step. Keys as for `update`."""
        return await self._send(rpcs.DISCARD_GRADIENTS, operation_key(seq, request_id))

    async def forward(
        self,
        groups: Sequence[Group],
        *,
        with_entropy: bool = False,
        use_reference: bool = False,
        expected_version: int | None = None,
        num_teacher_tokens: int = 0,
        with_teacher_logprobs: bool = False,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[ForwardResult]:
        """Compute log-probs at this point of the sequence; no gradient.

        `client.forward` reads the newest version instead, without a place in the sequence.

        Args:
            groups: The batch; large ones are uploaded in parts.
            with_entropy: Whether to compute entropies too.
            use_reference: Whether to run the frozen reference in place of the policy.
            expected_version: As for `update`.
            num_teacher_tokens: How many of the likeliest tokens to answer at each trained token,
                for a student's `teacher_tokens` and `teacher_logprobs`.
            with_teacher_logprobs: Whether to answer log-probs of the rollouts' `teacher_tokens`.
            seq: As for `update`.
            request_id: As for `update`.

        Returns:
            The handle of the operation, which is durably accepted.
        """
        key = operation_key(seq, request_id)
        return await self._send(
            rpcs.FORWARD,
            key,
            groups,
            with_entropy=with_entropy,
            use_reference=use_reference,
            expected_version=expected_version,
            num_teacher_tokens=num_teacher_tokens,
            with_teacher_logprobs=with_teacher_logprobs,
        )

    async def save_checkpoint(
        self,
        checkpoint_id: str = "",
        *,
        overwrite: bool = False,
        pinned: bool = False,
        ttl_s: float | None = None,
        keep_last: int = 0,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[Checkpoint]:
        """Save model, optimizer, version and seq. Keys as for `update`.

        Args:
            checkpoint_id: Its name. Default: one that the service makes from seq and version.
            overwrite: Whether it takes the place of a checkpoint of this name.
            pinned: Whether `keep_last` of later calls neither counts nor deletes it.
            ttl_s: Seconds after which the service deletes it. Default: never.
            keep_last: How many of the policy's checkpoints that are not pinned stay, this one
                among them. Default: all.
            seq: As for `update`.
            request_id: As for `update`.
        """
        return await self._send(
            rpcs.SAVE_CHECKPOINT,
            operation_key(seq, request_id),
            checkpoint_id=checkpoint_id,
            overwrite=overwrite,
            pinned=pinned,
            ttl_s=ttl_s,
            keep_last=keep_last,
        )

    async def publish_version(
        self,
        *,
        name: str,
        overwrite: bool = False,
        ttl_s: float | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[NamedVersion]:
        """Publish the weights as they are at this point of the sequence, under a name.

        They are kept until `client.delete_version`, or until `ttl_s` is over.

        Args:
            name: The version's name: [a-zA-Z0-9._-]{1,64}.
            overwrite: Whether it takes a name over that is another version's.
            ttl_s: Seconds after which the service takes the name away. Default: never.
            seq: As for `update`.
            request_id: As for `update`.

        Returns:
            The handle of the operation, which is durably accepted.
        """
        key = operation_key(seq, request_id)
        return await self._send(
            rpcs.PUBLISH_VERSION, key, name=name, overwrite=overwrite, ttl_s=ttl_s
        )

    async def load_checkpoint(
        self, checkpoint_id: str, *, seq: int | None = None, request_id: str | None = None
    ) -> AsyncOperationHandle[Checkpoint]:
        """Go back to the state of a checkpoint of this policy. Keys as for `update`."""
        key = operation_key(seq, request_id)
        return await self._send(rpcs.LOAD_CHECKPOINT, key, checkpoint_id=checkpoint_id)

    async def import_weights(
        self,
        folder: str,
        *,
        mode: ImportMode | ImportModeName = "full",
        reset_optimizer: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
        request_id: str | None = None,
    ) -> AsyncOperationHandle[ImportResult]:
        """Replace the weights by those of a folder, or add the folder's values to them.

        Args:
            folder: A folder below the server's models root.
            mode: `full` replaces the weights, `delta` adds to them.
            reset_optimizer: Whether moments and step count begin anew.
            expected_version: As for `update`.
            seq: As for `update`.
            request_id: As for `update`.

        Returns:
            The handle of the operation, which is durably accepted.
        """
        key = operation_key(seq, request_id)
        return await self._send(
            rpcs.IMPORT_WEIGHTS,
            key,
            model_folder=folder,
            mode=mode,
            reset_optimizer=reset_optimizer,
            expected_version=expected_version,
        )

    async def _send(
        self,
        rpc: SequencedRpc,
        key: OperationKey | None,
        groups: Sequence[Group] | None = None,
        **fields: Any,
    ) -> AsyncOperationHandle[Any]:
        """Send a request of these fields, and of `groups` where the call has a batch.

        Encoding and uploading take time, so they come before the call takes a seq.
        """
        request = request_message(rpc.request, policy_id=self._policy_id, **fields)
        if groups is not None:
            await set_batch(self._caller, request, groups)
        return await self._sender.send(rpc, request, key)
