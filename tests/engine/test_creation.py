"""What a creation of several ranks fails with, by what the ranks say of themselves."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

from ratoon.cluster import ray_peer
from ratoon.cluster.ray_peer import Step, Watch
from ratoon.engine.refusals import unexpected
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import CopyFailedError, ErrorCode
from tests.engine.refusals import raises

_LOADED = Step(number=1, is_over=True, is_awaited=False)
_LOADS = Step(number=1, is_over=False, is_awaited=False)
_MEETS = Step(number=2, is_over=False, is_awaited=False)
_IS_AWAITED = Step(number=2, is_over=False, is_awaited=True)


@dataclass
class Peer:
    now: Step = _LOADS
    failed: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def step(self) -> Step:
        return self.now

    def failure(self) -> Exception | None:
        return self.failed

    def end(self) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_peer, "_LOOK_S", 0.01)
    monkeypatch.setattr(ray_peer, "_REASON_S", 0.3)


def _creation(*peers: Peer) -> Watch:
    made = Watch("rank 0 on GPU 0 of 10.0.0.1", lambda: peers)
    made.has_joined = True
    return made


def _fail_once_ended(made: Watch, peer: Peer, failure: Exception) -> None:
    """Rank 0's own part: it waits for a peer, and is told of its end by their connection."""
    with made.watched():
        assert peer.ended.wait(10.0)
        assert made.failure() is not None, "it is known before rank 0 returns"
        raise failure


def test_a_rank_that_fails_is_told_while_rank_0_waits_for_it() -> None:
    failing, other = Peer(failed=MemoryError("no room"), now=_MEETS), Peer(now=_MEETS)
    made = _creation(failing, other)
    with raises(ErrorCode.RESOURCE_EXHAUSTED, match="no room"):
        _fail_once_ended(made, other, CopyFailedError("a connection was closed"))
    assert failing.ended.is_set()


def test_what_a_failure_follows_from_is_told() -> None:
    """A rank that has waited for one that died is told of it before the death is known."""
    first, died = Peer(failed=CopyFailedError("a connection was closed")), Peer()
    late = threading.Timer(0.1, lambda: setattr(died, "failed", WorkerLostError("rank 2 died")))
    late.start()
    with pytest.raises(WorkerLostError, match="rank 2 died"), _creation(first, died).watched():
        assert died.ended.wait(10.0)


def test_rank_0_without_memory_is_what_the_others_ran_into() -> None:
    peer = Peer(failed=CopyFailedError("rank 1 could not join: remote process exited"))
    own = CopyFailedError("rank 0 could not join the others: Cuda failure 2 'out of memory'")
    with raises(ErrorCode.RESOURCE_EXHAUSTED) as caught:
        _fail_once_ended(_creation(peer), peer, own)
    assert caught.value.message.startswith("rank 0 on GPU 0 of 10.0.0.1 has not enough memory")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ((_LOADED, _LOADED), "of ranks [0] one"),
        ((_LOADED, _LOADS), "of ranks [0, 2] one"),
        ((_MEETS, _MEETS), "of ranks [0, 1, 2] one"),
        ((_IS_AWAITED, _MEETS), "of ranks [1] one"),
    ],
)
def test_a_rank_that_does_not_go_on_is_told(
    steps: tuple[Step, Step], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_peer, "BEHIND_S", 0.1)
    peers = [Peer(now=step) for step in steps]
    made = _creation(*peers)
    with pytest.raises(WorkerLostError) as caught, made.watched():
        assert peers[0].ended.wait(10.0)
    assert str(caught.value) == f"{told} has not gone on for 0.1 s"


def test_ranks_that_all_read_the_model_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_peer, "BEHIND_S", 0.1)
    peers = Peer(), Peer()
    made = _creation(*peers)
    with made.watched():
        time.sleep(0.5)
        for peer in peers:
            peer.now = _LOADED
    assert made.failure() is None
    assert not any(peer.ended.is_set() for peer in peers)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), ErrorCode.RESOURCE_EXHAUSTED),
        (RuntimeError("CUDA error: out of memory"), ErrorCode.RESOURCE_EXHAUSTED),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ErrorCode.RESOURCE_EXHAUSTED),
        (RuntimeError("CUDA error: an illegal memory access"), ErrorCode.INTERNAL),
    ],
)
def test_an_error_names_the_rank_that_has_it(error: Exception, code: ErrorCode) -> None:
    assert "rank" not in unexpected(error).message
    error.add_note("a note of a library")
    error.add_note("rank 3 on GPU 5 of 10.0.0.2")
    told = unexpected(error)
    assert told.code is code
    assert told.message.startswith("rank 3 on GPU 5 of 10.0.0.2")
