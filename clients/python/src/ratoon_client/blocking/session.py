"""The synchronous session, for any number of threads: one loop runs all, seqs stay contiguous."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ratoon_client.blocking.loop import LoopThread
from ratoon_client.blocking.operation import OperationHandle
from ratoon_client.custom_loss import CustomLoss
from ratoon_client.loss import Loss, Optim
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.results import (
    Checkpoint,
    ForwardResult,
    ImportMode,
    ImportResult,
    StepResult,
)
from ratoon_client.rollouts import Group
from ratoon_client.session import AsyncPolicySession

ResultT = TypeVar("ResultT")


class PolicySession:
    """See `AsyncPolicySession`."""

    def __init__(self, loop: LoopThread, session: AsyncPolicySession) -> None:
        self._loop = loop
        self._session = session

    @property
    def policy_id(self) -> str:
        return self._session.policy_id

    def next_seq(self) -> int:
        return self._loop.run(self._session.next_seq())

    def resync(self) -> int:
        return self._loop.run(self._session.resync())

    def update(
        self,
        groups: Sequence[Group],
        *,
        loss: Loss,
        optim: Optim,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> OperationHandle[StepResult]:
        return self._handle(
            self._session.update(
                groups, loss=loss, optim=optim, expected_version=expected_version, seq=seq
            )
        )

    def forward_backward(
        self,
        groups: Sequence[Group],
        *,
        loss: Loss,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> OperationHandle[StepResult]:
        return self._handle(
            self._session.forward_backward(
                groups, loss=loss, expected_version=expected_version, seq=seq
            )
        )

    def forward_backward_custom(
        self, groups: Sequence[Group], *, loss_of: CustomLoss
    ) -> tuple[float, OperationHandle[StepResult]]:
        call = self._session.forward_backward_custom(groups, loss_of=loss_of)
        loss, handle = self._loop.run(call)
        return loss, OperationHandle(self._loop, handle)

    def optim_step(
        self,
        *,
        optim: Optim,
        include_seqs: Sequence[int] = (),
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> OperationHandle[StepResult]:
        return self._handle(
            self._session.optim_step(
                optim=optim,
                include_seqs=include_seqs,
                expected_version=expected_version,
                seq=seq,
            )
        )

    def discard_gradients(self, *, seq: int | None = None) -> OperationHandle[None]:
        return self._handle(self._session.discard_gradients(seq=seq))

    def forward(
        self,
        groups: Sequence[Group],
        *,
        with_entropy: bool = False,
        use_reference: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> OperationHandle[ForwardResult]:
        return self._handle(
            self._session.forward(
                groups,
                with_entropy=with_entropy,
                use_reference=use_reference,
                expected_version=expected_version,
                seq=seq,
            )
        )

    def save_checkpoint(
        self, checkpoint_id: str = "", *, seq: int | None = None
    ) -> OperationHandle[Checkpoint]:
        return self._handle(self._session.save_checkpoint(checkpoint_id, seq=seq))

    def load_checkpoint(
        self, checkpoint_id: str, *, seq: int | None = None
    ) -> OperationHandle[Checkpoint]:
        return self._handle(self._session.load_checkpoint(checkpoint_id, seq=seq))

    def import_weights(
        self,
        folder: str,
        *,
        mode: ImportMode = "full",
        reset_optimizer: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> OperationHandle[ImportResult]:
        return self._handle(
            self._session.import_weights(
                folder,
                mode=mode,
                reset_optimizer=reset_optimizer,
                expected_version=expected_version,
                seq=seq,
            )
        )

    def _handle(
        self, call: Coroutine[Any, Any, AsyncOperationHandle[ResultT]]
    ) -> OperationHandle[ResultT]:
        return OperationHandle(self._loop, self._loop.run(call))
