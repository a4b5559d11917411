"""Calls to actors that die, hang or take their time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, cast

import pytest
import ray

from ratoon.cluster.ray_calls import ActorLostError, ask_living
from tests.conftest import RayCluster

# More than a busy machine makes a process wait.
_SILENCE_S = 3.0


class Busy:
    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer."""

    @ray.method
    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    @ray.method
    def end_by(self, number: int) -> None:
        os.kill(os.getpid(), number)
        # Another thread may be the first that it reaches.
        time.sleep(100 * _SILENCE_S)


@pytest.fixture
def busy(ray_cluster: RayCluster) -> Any:
    """It is up."""
    assert ray_cluster.address
    remote = cast("Any", ray.remote)
    actor = remote(num_cpus=0, concurrency_groups={"control": 1})(Busy).remote()
    ray.get(actor.ping.remote())
    return actor


@pytest.mark.more
async def test_an_actor_that_computes_for_longer_than_it_may_be_silent_is_waited_for(
    busy: Any,
) -> None:
    took = busy.work.remote(1.5 * _SILENCE_S)
    assert await ask_living(took, busy.ping.remote, _SILENCE_S) == "done"


@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.more)]
)
async def test_an_actor_that_hangs_or_dies_is_lost(busy: Any, number: int) -> None:
    with pytest.raises(ActorLostError) as caught:
        await ask_living(busy.end_by.remote(number), busy.ping.remote, _SILENCE_S)
    is_hung = str(caught.value) == f"it did not answer for {_SILENCE_S:g} s"
    assert is_hung is (number == signal.SIGSTOP)
