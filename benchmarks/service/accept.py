"""How long a batch of 64 MiB takes until it is accepted, by one caller and by eight at once.

A caller's time begins with a request that is ready to be sent, and ends with the operation's id.
Requests have the largest size that a service takes by default: protobuf over gRPC, tensors in
base64 over HTTP. They name seqs behind a missing one, so none of them runs, and are cancelled then.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import grpc
import httpx
import numpy as np

from harness.service import Service
from ratoon_client import Loss, Optim, group, rollout
from ratoon_client.wire import group_messages, loss_message, optim_message
from ratoon_proto.json_form import to_request_json
from ratoon_proto.v1 import operation_pb2, service_pb2
from ratoon_proto.v1.rollout_pb2 import RolloutGroup

MIB = 2**20
BODY_BYTES = 64 * MIB
CALLERS = 8
ROUNDS = 5
_GROUP_ROLLOUTS, _PROMPT_TOKENS, _RESPONSE_TOKENS = 8, 512, 2048
# What is in a request beside its groups.
_REST_BYTES = 4096
_PATIENCE_S = 300.0
_UPDATE = "/ratoon.v1.PolicyService/Update"
# Sends the update of a seq; returns the id of its operation.
Send = Callable[[int], str]


def acceptance_s(service: Service, policy_id: str, next_seq: int, seed: int) -> dict[str, float]:
    """Medians of `ROUNDS` rounds, seconds from call to acceptance; `_8` of `CALLERS` at once."""
    seqs = itertools.count(next_seq + 1)
    rng = np.random.default_rng(seed)
    with (
        httpx.Client(base_url=service.http, trust_env=False, timeout=_PATIENCE_S) as client,
        ThreadPoolExecutor(CALLERS) as threads,
    ):

        def rounds(send: Send, callers: int) -> float:
            taken: list[float] = []
            for number in range(1 + ROUNDS):
                accepted = list(threads.map(_timed(send), itertools.islice(seqs, callers)))
                for _, operation_id in accepted:
                    client.post(f"/v1/operations/{operation_id}/cancel").raise_for_status()
                if number:  # The first round opens connections and fills caches.
                    taken += (seconds for seconds, _ in accepted)
            return statistics.median(taken)

        found: dict[str, float] = {}
        for wire, sender in (("http", _over_http), ("grpc", _over_grpc)):
            send = sender(service, policy_id, rng)
            found[f"accept_{wire}_s"] = rounds(send, 1)
            found[f"accept_8_{wire}_s"] = rounds(send, CALLERS)
        return found


def _timed(send: Send) -> Callable[[int], tuple[float, str]]:
    def timed(seq: int) -> tuple[float, str]:
        started = time.perf_counter()
        operation_id = send(seq)
        return time.perf_counter() - started, operation_id

    return timed


def _over_http(service: Service, policy_id: str, rng: np.random.Generator) -> Send:
    groups = _groups(rng, lambda one: len(json.dumps(to_request_json(one))))
    fields = to_request_json(_request(policy_id, groups), skip=frozenset({"policy_id"}))
    rest = json.dumps(fields).encode().removeprefix(b"{")
    client = httpx.Client(base_url=service.http, trust_env=False, timeout=_PATIENCE_S)

    def send(seq: int) -> str:
        body = b'{"seq": %d, ' % seq + rest
        while True:
            answer = client.post(
                f"/v1/policies/{policy_id}/update",
                content=body,
                headers={"Content-Type": "application/json"},
            )
            if answer.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                answer.raise_for_status()
                return str(answer.json()["operation_id"])
            # Bodies of other callers are in memory.
            time.sleep(float(answer.headers["retry-after"]))

    return send


def _over_grpc(service: Service, policy_id: str, rng: np.random.Generator) -> Send:
    groups = _groups(rng, RolloutGroup.ByteSize)
    rest = _request(policy_id, groups).SerializeToString()
    channels = [
        grpc.insecure_channel(
            service.grpc.removeprefix("grpc://"),
            options=[
                ("grpc.max_send_message_length", 2 * BODY_BYTES),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        for _ in range(CALLERS)
    ]

    def send(seq: int) -> str:
        key = service_pb2.UpdateRequest(key=service_pb2.OperationKey(seq=seq))
        call = channels[seq % CALLERS].unary_unary(
            _UPDATE, response_deserializer=operation_pb2.Operation.FromString
        )
        # Messages that follow one another are one message.
        return call(rest + key.SerializeToString(), timeout=_PATIENCE_S).operation_id

    return send


def _request(policy_id: str, groups: list[RolloutGroup]) -> service_pb2.UpdateRequest:
    request = service_pb2.UpdateRequest(
        policy_id=policy_id,
        loss=loss_message(Loss("grpo")),
        optim=optim_message(Optim(learning_rate=1e-5)),
    )
    request.batch.groups.extend(groups)
    return request


def _groups(rng: np.random.Generator, size_of: Callable[[RolloutGroup], int]) -> list[RolloutGroup]:
    """As many groups as a body has room for. `size_of`: bytes of one on the wire."""
    found: list[RolloutGroup] = []
    left = BODY_BYTES - _REST_BYTES
    for one in _made(rng):
        # A tag and a length go with each, or a comma.
        left -= size_of(one) + 8
        if left < 0:
            break
        found.append(one)
    return found


def _made(rng: np.random.Generator) -> Iterator[RolloutGroup]:
    for number in itertools.count():
        rollouts = [
            rollout(
                response=rng.integers(50, 60, _RESPONSE_TOKENS, np.int32),
                sampler_logprobs=-rng.random(_RESPONSE_TOKENS, np.float32),
                reward=float(index % 2),
            )
            for index in range(_GROUP_ROLLOUTS)
        ]
        prompt = rng.integers(50, 60, _PROMPT_TOKENS, np.int32)
        yield from group_messages([group(f"group-{number}", prompt, rollouts)])
