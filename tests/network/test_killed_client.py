"""A client killed in the middle of a large upload, and another process that does its work."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.network.conftest import Bench
from tests.network.proxy import Fault

pytestmark = [pytest.mark.e2e, pytest.mark.more]
ROOT = Path(__file__).parents[2]
# What a trainer runs; its seq is given, for two processes do the same step.
TRAINER = """
import asyncio, sys
from ratoon_client import AsyncRatoonClient, ClientConfig
from tests.network.samples import LOSS, OPTIM, batch

async def main(target, policy_id, seq):
    config = ClientConfig(upload_above_bytes=0, part_bytes=8192)
    async with AsyncRatoonClient(target, config=config) as client:
        handle = await client.policy(policy_id).update(
            batch(24, 256), loss=LOSS, optim=OPTIM, seq=int(seq)
        )
        print((await handle.result()).version)

asyncio.run(main(*sys.argv[1:]))
"""
# Bytes of 24 groups of 2 * 256 tokens and as many log-probs; HTTP has them in base64.
LEAST_BYTES = 24 * 2 * 256 * 8


async def trainer(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("sent", [0.4, 0.97])
async def test_another_process_completes_what_a_killed_one_began(
    bench: Bench, policy: str, sent: float
):
    """After it is killed the network is silent, as where its machine lost power."""
    async with bench.direct_client() as direct:
        before = await direct.get_policy(policy)
        at_byte = int(sent * LEAST_BYTES)
        bench.proxy.arm(Fault(kind="silence", direction="up", at_byte=at_byte))
        first = await trainer(bench.target, policy, str(before.next_seq))
        await asyncio.wait_for(bench.proxy.hit(), 60)
        first.kill()
        await first.wait()
        assert (await direct.get_policy(policy)).next_seq == before.next_seq
        second = await trainer(bench.target, policy, str(before.next_seq))
        out, _ = await second.communicate()
        assert (second.returncode, out.split()) == (0, [str(before.version + 1).encode()])
        after = await direct.get_policy(policy)
        assert (after.version, after.next_seq) == (before.version + 1, before.next_seq + 1)
