"""The two calls of a receiver of weights: which version is the newest, and what it serves."""

from __future__ import annotations

from ratoon_client.arguments import check_seconds
from ratoon_client.caller import Caller
from ratoon_client.values import WeightManifest
from ratoon_client.wire.decode import decode
from ratoon_client.wire.encode import request_message
from ratoon_client.wire.rpcs import ACK_WEIGHTS
from ratoon_proto.v1 import service_pb2

# How long a version is held for a receiver that says nothing more.
HOLD_S = 600.0


async def weight_manifest(
    caller: Caller,
    policy_id: str,
    version: int | None = None,
    *,
    known_version: int | None = None,
    wait_s: float = 0.0,
) -> WeightManifest:
    """Read a manifest; `AsyncRatoonClient.weight_manifest` documents the arguments."""
    check_seconds("wait_s", wait_s)
    request = request_message(
        service_pb2.GetWeightManifestRequest,
        policy_id=policy_id,
        version=version,
        known_version=known_version,
        wait_s=wait_s,
    )
    return decode(await caller.weight_manifest(request), WeightManifest)


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
    request = request_message(
        service_pb2.AckWeightsRequest,
        policy_id=policy_id,
        receiver_id=receiver_id,
        version=version,
        holds_version=holds_version,
        hold_s=0.0 if holds_version is None else hold_s,
    )
    answer = await caller.call(ACK_WEIGHTS, request)
    return answer.published_version if answer.HasField("published_version") else None
