"""Connections cut at random bytes: what was acknowledged is done, once, and no client knows."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from ratoon_client import AsyncRatoonClient, ClientConfig, Publish
from tests.network.conftest import Bench, opened, tiny_policy
from tests.network.proxy import Direction, Fault, FaultKind
from tests.network.samples import LOSS, OPTIM, batch
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.more]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
CUTS: tuple[FaultKind, ...] = ("reset", "close")
# In parts of one group, so that cuts hit uploads too.
PARTS = ClientConfig(upload_above_bytes=0, part_bytes=1)
# Updates that are not cut, of each form.
NUM_WHOLE = 2


async def one_update(client: AsyncRatoonClient, policy_id: str) -> int:
    """What a trainer does: look, send, wait. Gives the version."""
    handle = await client.policy(policy_id).update(batch(), loss=LOSS, optim=OPTIM)
    return (await handle.result()).version


async def cut_updates(bench: Bench, policy_id: str, num_seeds: int) -> None:
    """Whole updates, to see how many bytes one takes, then one a seed with a cut somewhere.

    A slow one asks more often how it goes, so the least bytes count.
    """
    totals: list[dict[Direction, int]] = []
    for config in (ClientConfig(), PARTS) * NUM_WHOLE:
        bench.proxy.arm(None)
        async with bench.client(config) as client:
            assert await one_update(client, policy_id) == len(totals) + 1
        totals.append(bench.proxy.num_bytes)
    least = [
        {way: min(total[way] for total in totals[in_parts::2]) for way in DIRECTIONS}
        for in_parts in (0, 1)
    ]
    for seed in range(num_seeds):
        dice = random.Random(seed)
        in_parts = seed % 3 == 0
        direction = dice.choice(DIRECTIONS)
        at_byte = dice.randrange(int(0.95 * least[in_parts][direction]))
        bench.proxy.arm(Fault(kind=dice.choice(CUTS), direction=direction, at_byte=at_byte))
        async with bench.client(PARTS if in_parts else None) as client:
            version = await one_update(client, policy_id)
        assert version == len(totals) + seed + 1, (direction, at_byte)
        assert bench.proxy.num_hits == seed + 1


@pytest.mark.parametrize("num_seeds", [12, pytest.param(100, marks=pytest.mark.slow)])
async def test_cuts_lose_no_update_and_double_none(service: Service, num_seeds: int):
    """Both wires at once, and the same updates over a good network: the weights are the same."""
    num_updates = num_seeds + 2 * NUM_WHOLE
    digests: dict[str, set[str]] = {}

    async def train(name: str, transport: str | None) -> None:
        async with (
            AsyncRatoonClient(service.addresses.grpc) as direct,
            tiny_policy(direct, name, publish=Publish("every_n", every_n=num_updates)) as policy_id,
        ):
            if transport is None:
                for version in range(num_updates):
                    assert await one_update(direct, policy_id) == version + 1
            else:
                async with opened(service, transport) as bench:
                    await cut_updates(bench, policy_id, num_seeds)
            policy = await direct.get_policy(policy_id)
            assert (policy.version, policy.next_seq) == (num_updates, num_updates + 1)
            manifest = await direct.weight_manifest(policy_id, num_updates)
            digests[name] = {file.digest for file in manifest.files}

    await asyncio.gather(
        train("cut-http", "http"), train("cut-grpc", "grpc"), train("undisturbed", None)
    )
    assert digests["cut-http"] == digests["cut-grpc"] == digests["undisturbed"]


async def test_a_cut_pull_of_weights_is_whole(bench: Bench, policy: str, tmp_path: Path):
    async with bench.client() as client:
        whole = await client.pull_weights(policy, tmp_path / "whole")
    total = bench.proxy.num_bytes["down"]
    config = ClientConfig(chunk_bytes=65_536)
    for seed in range(4):
        at_byte = random.Random(seed).randrange(int(0.95 * total))
        bench.proxy.arm(Fault(kind="reset", direction="down", at_byte=at_byte))
        async with bench.client(config) as client:
            pulled = await client.pull_weights(policy, tmp_path / str(seed), whole.version)
        assert bench.proxy.num_hits == seed + 1
        for file in pulled.manifest.files:
            theirs = (whole.folder / file.name).read_bytes()
            assert (pulled.folder / file.name).read_bytes() == theirs
