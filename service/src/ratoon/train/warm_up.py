"""A pass over a few tokens, for which everything is compiled that a pass over many needs.

Compiled layers depend on the range that the number of tokens is in and on what each layer keeps,
both of which a few tokens are told to share with many (`PolicyModel.run_as`). So what is left of
the pass is nothing but compiled code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial

import numpy as np

from ratoon.log import get_logger
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.prepare import Prepared, prepare
from ratoon_proto.types import LossConfig, LossKind

_LOG = get_logger("warm_up")
# Tokens of the prompt and of each response.
_LENGTH = 8


def few_rollouts() -> Prepared:
    """Two rollouts of one prompt, packed as one micro-batch, for a loss of single tokens."""
    batch = RolloutBatch(
        group_ids=("",),
        group_offsets=np.array([0, 2]),
        prompt_tokens=np.ones(_LENGTH, np.int32),
        prompt_offsets=np.array([0, _LENGTH]),
        response_tokens=np.repeat(np.array([0, 1], np.int32), _LENGTH),
        response_offsets=np.array([0, _LENGTH, 2 * _LENGTH]),
        loss_mask=np.ones(2 * _LENGTH, np.bool_),
        sampler_logprobs=None,
        old_logprobs=None,
        reference_logprobs=None,
        rewards=np.array([0.0, 1.0]),
        advantages=None,
        token_weights=None,
        temperature=np.ones(2, np.float32),
        sampler_is_raw=np.zeros(2, np.bool_),
        truncated=np.zeros(2, np.bool_),
        policy_version=np.full(2, -1),
        top_p=np.ones(2, np.float32),
        top_k=np.zeros(2, np.int32),
    )
    loss = resolve_loss(LossConfig(kind=LossKind.REINFORCE), batch, has_frozen_reference=False)
    return prepare(batch, loss, version=0, plan=cpu_planner(None))


class Compiling:
    """Calls one function after the other in a thread, until somebody is in a hurry."""

    def __init__(self, calls: Iterable[Callable[[], None]]) -> None:
        self._is_awaited = False
        # Options of torch's compiler are the context's.
        run = partial(copy_context().run, self._run, calls)
        self._thread = threading.Thread(target=run, name="warm-up", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Wait for the function that runs; no other is called."""
        self._is_awaited = True
        self._thread.join()

    def _run(self, calls: Iterable[Callable[[], None]]) -> None:
        for call in calls:
            if self._is_awaited:
                return
            try:
                call()
            except Exception:  # noqa: BLE001 - an update that needs it says what is wrong
                _LOG.exception("nothing was compiled ahead")
                return
