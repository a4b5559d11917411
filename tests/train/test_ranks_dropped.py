"""Ranks whose network drops all packets from some moment on: nothing says that others are gone.

They run in a network namespace of their own, whose only interface, the loopback, is taken down
while they exchange. Run as a module, with a shard's name, this file is what runs there.
"""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import subprocess
import sys
import time

import pytest

from harness.environment import ROOT
from ratoon.errors import CopyFailedError
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.shards import copies
from ratoon.train.spec import PassHooks
from ratoon_proto.types import Shard
from tests.train.rank_runs import alone_of, ranked, update_over
from tests.train.trainer_runs import make_batch, make_loss, make_step

# Timeout of one exchange, and time until the kernel gives a silent machine up.
TIMEOUT_S = 3.0
_NAMESPACE = ("unshare", "--net", "--")
# <linux/sockios.h>, <net/if.h>
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def _has_namespaces() -> bool:
    found = shutil.which("unshare") is not None
    return (
        found
        and not subprocess.run([*_NAMESPACE, "true"], check=False, capture_output=True).returncode
    )


@pytest.mark.more
@pytest.mark.skipif(not _has_namespaces(), reason="no network namespace may be made here")
@pytest.mark.parametrize(
    "shard", [Shard.STATES, pytest.param(Shard.GRADIENTS, marks=pytest.mark.slow)]
)
def test_ranks_that_hear_nothing_more_give_up(shard: Shard) -> None:
    command = [*_NAMESPACE, sys.executable, "-m", "tests.train.test_ranks_dropped", shard]
    run = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert float(run.stdout.split()[-1]) < 60.0


def _set_loopback(*, is_up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        flags = flags | _IFF_UP if is_up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


def _lose_the_network(shard: Shard) -> float:
    """Seconds from when nothing came through any more until the update failed."""
    _set_loopback(is_up=True)
    copies.IDLE_S, copies.EVERY_S, copies.TIMES = 1, 1, 2
    alone = alone_of(PresetBase(name="tiny"), dtype=ModelDtype.FLOAT64)
    with ranked(alone.spec, 2, 100, shard, TIMEOUT_S) as (two, _):
        update_over(two, 0, (0, 1))
        batch, lost_at = make_batch(1, num_groups=8), 0.0
        loss = make_loss(batch)

        def lose(done: int, _planned: int, _tokens: int) -> None:
            nonlocal lost_at
            if done == 1:
                _set_loopback(is_up=False)
                lost_at = time.monotonic()

        plan, step = two.prepare(batch, loss).plan, make_step(two, loss)
        with pytest.raises(CopyFailedError):
            two.update(two.prepare(batch, loss, plan), step, PassHooks(on_progress=lose))
        assert lost_at, "it failed before"
        assert two.version == 1
        return time.monotonic() - lost_at


if __name__ == "__main__":
    print(_lose_the_network(Shard(sys.argv[1])))
