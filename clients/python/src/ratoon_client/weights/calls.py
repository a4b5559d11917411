"""Calls about weights: manifests, acknowledgements and verified bytes, into memory."""

from __future__ import annotations

import time

from ratoon_client.arguments import check_seconds
from ratoon_client.caller import TURN_S, Caller
from ratoon_client.errors import IntegrityError, RatoonClientError, TransportError
from ratoon_client.rpcs import ACK_WEIGHTS, FETCH_WEIGHTS, GET_WEIGHT_MANIFEST, HEALTH
from ratoon_client.weights.chunks import check_chunk, chunk_ranges, digest_of
from ratoon_client.wire import decode, request_message
from ratoon_proto.types import WeightManifest

# How long a version is held for a receiver that says nothing more.
HOLD_S = 600.0


async def weight_manifest(
    caller: Caller,
    policy_id: str,
    version: int | None = None,
    *,
    name: str | None = None,
    known_version: int | None = None,
    wait_s: float = 0.0,
    delta_from: int | None = None,
) -> WeightManifest:
    """Read a manifest; `AsyncRatoonClient.weight_manifest` documents the arguments.

    The service may take up to `TURN_S` to write the version, and says nothing meanwhile, like a
    connection that the network has forgotten. So the tries are short, and go on for as long as the
    service answers a probe.
    """
    check_seconds("wait_s", wait_s)
    request = request_message(
        GET_WEIGHT_MANIFEST.request,
        policy_id=policy_id,
        version=version,
        name=name,
        known_version=known_version,
        wait_s=wait_s,
        delta_from=delta_from,
    )
    end = time.monotonic() + wait_s + TURN_S
    while True:
        try:
            message = await caller.call_in_turn(
                GET_WEIGHT_MANIFEST,
                request,
                wait_s=wait_s,
                attempt_timeout_s=caller.config.attempt_timeout_s,
            )
            return decode(message, WeightManifest)
        except TransportError:
            is_there = caller.is_reached and time.monotonic() <= end
            if not is_there or not await _answers(caller):
                raise


async def _answers(caller: Caller) -> bool:
    try:
        await caller.ask(HEALTH)
    except RatoonClientError:
        return False
    return True


async def ack_weights(
    caller: Caller,
    policy_id: str,
    receiver_id: str,
    *,
    version: int | None = None,
    holds_version: int | None = None,
    hold_s: float = HOLD_S,
) -> int | None:
    """Acknowledge weights; `AsyncRatoonClient.ack_weights` documents the arguments."""
    check_seconds("hold_s", hold_s)
    answer = await caller.ask(
        ACK_WEIGHTS,
        policy_id=policy_id,
        receiver_id=receiver_id,
        version=version,
        holds_version=holds_version,
        hold_s=0.0 if holds_version is None else hold_s,
    )
    return answer.published_version if answer.HasField("published_version") else None


async def fetch_chunk(
    caller: Caller, policy_id: str, digest: str, *, offset: int, length: int
) -> bytes:
    """`length` bytes from `offset` on. Raises IntegrityError where they have another digest."""
    chunk = await caller.ask(
        FETCH_WEIGHTS, policy_id=policy_id, digest=digest, offset=offset, length=length
    )
    check_chunk(digest, offset, length, chunk.data, chunk.digest)
    return chunk.data


async def fetch_result_file(caller: Caller, policy_id: str, digest: str, size_bytes: int) -> bytes:
    """A whole result file, chunk by chunk."""
    parts = [
        await fetch_chunk(caller, policy_id, digest, offset=part.offset, length=part.length)
        for part in chunk_ranges(size_bytes, await caller.chunk_bytes())
    ]
    data = b"".join(parts)
    if digest_of(data) != digest:
        raise IntegrityError(f"result file {digest}: the bytes have another digest")
    return data
