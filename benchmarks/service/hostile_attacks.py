"""The attacks of `hostile_callers`, each a process of its own that ends by itself.

An attack prints what it achieved as a line of JSON. Attacks come from another loopback address than
the good caller, but for the floods of frames, which come from its own. They yield the cores to the
service, as real attackers have their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from harness.attacks import http
from harness.attacks.floods import FLOODS, flood
from harness.attacks.http2 import Sent, message_calls, withheld_messages

MIB = 2**20
SOURCE = "127.0.0.2"
GOOD_SOURCE = "127.0.0.1"
_POLICY_PATH = "/v1/policies/good"
_EMPTY_GROUPS = b"\x0a\x00" * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Target and duration of an attack. `key` may train, and is not the good caller's."""

    http_port: int
    grpc_port: int
    key: str
    seconds: float

    @property
    def target(self) -> http.Target:
        return http.Target(host="127.0.0.1", port=self.http_port, source=SOURCE)

    @property
    def grpc(self) -> tuple[str, int]:
        return "127.0.0.1", self.grpc_port

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


async def withheld_without_key(ground: Ground) -> Mapping[str, object]:
    """4,352 streams of 255 MiB, each short of a byte, of Health and of calls without a key."""
    sent = Sent()
    rpcs = ["Health", "Update", "GetOperation", "WatchOperation"]
    one = withheld_messages
    await asyncio.gather(
        *(
            one(ground.grpc, rpcs=rpcs, num_streams=128, message_bytes=255 * MIB,
                seconds=ground.seconds, source=SOURCE, sent=sent)
            for _ in range(34)
        )
    )  # fmt: skip
    return {"connections": sent.num_connections, "calls": sent.num_calls, "bytes": sent.num_bytes}


async def withheld_batches(ground: Ground) -> Mapping[str, object]:
    """256 batches of 60 MiB with a key, each short of a byte."""
    sent = Sent()
    rpcs = ["Update", "ForwardBackward", "Forward", "UploadPart"]
    await asyncio.gather(
        *(
            withheld_messages(
                ground.grpc, rpcs=rpcs, num_streams=64, message_bytes=60 * MIB,
                seconds=ground.seconds, headers=ground.headers, source=SOURCE, sent=sent,
            )
            for _ in range(4)
        )
    )  # fmt: skip
    return {"connections": sent.num_connections, "calls": sent.num_calls, "bytes": sent.num_bytes}


async def idle_connections(ground: Ground) -> Mapping[str, object]:
    """Connections left idle: silent, after an answer, after a refused body."""
    makers = (http.silent, http.newline_after_answer, http.byte_of_body_after_answer)
    return await _kept(ground, [lambda m=m: m(ground.target) for m in makers], most=9000)


async def stalled_readers(ground: Ground) -> Mapping[str, object]:
    """Answers that nobody reads, with and without a second request behind the first."""
    path = "/openapi.json"
    makers: list[Callable[[], Awaitable[http.Connection]]] = [
        lambda: http.stalled_reader(ground.target, path),
        lambda: http.stalled_reader_with_another(ground.target, path, 0.01),
        lambda: http.many_at_once(ground.target, path, 50),
    ]
    return await _kept(ground, makers, most=2000)


async def unread_bodies(ground: Ground) -> Mapping[str, object]:
    """Endless bodies where no handler reads one."""
    paths = [("GET", "/v1/health"), ("GET", "/v1/operations/x/events"), ("DELETE", _POLICY_PATH)]
    num_bytes = num_calls = 0
    ends_at = time.monotonic() + ground.seconds

    async def pour(number: int) -> None:
        nonlocal num_bytes, num_calls
        while time.monotonic() < ends_at:
            method, path = paths[number % len(paths)]
            with contextlib.suppress(OSError):
                num_bytes += await http.endless_body(ground.target, method, path, 256 * MIB)
            num_calls += 1
            await asyncio.sleep(0.01)

    await asyncio.gather(*(pour(number) for number in range(12)))
    return {"calls": num_calls, "bytes": num_bytes}


async def health_flood(ground: Ground) -> Mapping[str, object]:
    """Health without a key, over both wires, as fast as it is answered."""
    sent = Sent()
    ends_at = time.monotonic() + ground.seconds
    statuses: dict[str, int] = {}

    async def ask() -> None:
        while time.monotonic() < ends_at:
            with contextlib.suppress(OSError):
                connection = await ground.target.connect()
                while time.monotonic() < ends_at:
                    await connection.send(http.head("GET", "/v1/health"))
                    status = str(await connection.answer())
                    statuses[status] = statuses.get(status, 0) + 1
                    if status == "0":
                        break
                connection.close()
            await asyncio.sleep(0.01)

    calls = message_calls(
        ground.grpc, rpc="Health", message=b"", num_streams=16, seconds=ground.seconds,
        source=SOURCE, sent=sent,
    )  # fmt: skip
    await asyncio.gather(*(ask() for _ in range(4)), calls)
    return {"http": statuses, "grpc_calls": sent.num_calls}


async def many_objects(ground: Ground) -> Mapping[str, object]:
    """Sends, with a key, 2 MiB of empty groups over gRPC, 3 MiB of them as JSON."""
    sent = Sent()
    num_posted = 0
    ends_at = time.monotonic() + ground.seconds
    body = b'{"batch": {"groups": [' + b"{}," * MIB + b"{}]}}"
    lines = [f"{name}: {value}" for name, value in ground.headers.items()]
    head = http.head(
        "POST", f"{_POLICY_PATH}/update", *lines,
        "Content-Type: application/json", f"Content-Length: {len(body)}",
    )  # fmt: skip

    async def post() -> None:
        nonlocal num_posted
        while time.monotonic() < ends_at:
            with contextlib.suppress(OSError):
                connection = await ground.target.connect()
                await connection.send(head + body)
                await connection.answer()
                connection.close()
                num_posted += 1
            await asyncio.sleep(0.01)

    # The field for groups of an uploaded part has number 4.
    message = _EMPTY_GROUPS.replace(b"\x0a", b"\x22")
    calls = message_calls(
        ground.grpc, rpc="UploadPart", message=message, num_streams=4, seconds=ground.seconds,
        headers=ground.headers, source=SOURCE, sent=sent,
    )  # fmt: skip
    await asyncio.gather(post(), post(), calls)
    return {"http_calls": num_posted, "grpc_calls": sent.num_calls, "grpc_bytes": sent.num_bytes}


async def reset_flood(ground: Ground) -> Mapping[str, object]:
    """Calls without a key, half of them reset at once: 16 connections of the good host."""
    return await _floods(ground, ["resets", "calls"] * 8)


async def frame_flood(ground: Ground) -> Mapping[str, object]:
    """Frames of all other kinds, on two connections each, from the good caller's address."""
    return await _floods(ground, sorted(set(FLOODS) - {"resets", "calls"}) * 2)


async def _floods(ground: Ground, names: list[str]) -> Mapping[str, object]:
    sent = Sent()
    await asyncio.gather(
        *(
            flood(ground.grpc, name, seconds=ground.seconds, source=GOOD_SOURCE, sent=sent)
            for name in names
        )
    )
    return {
        "connections": sent.num_connections,
        "closed": sent.num_closed,
        "frames": sent.num_calls,
        "bytes": sent.num_bytes,
    }


# Attack -> what of the service it aims at.
ATTACKS: Mapping[str, Callable[[Ground], Awaitable[Mapping[str, object]]]] = {
    attack.__name__: attack
    for attack in (
        withheld_without_key,
        withheld_batches,
        idle_connections,
        stalled_readers,
        unread_bodies,
        health_flood,
        many_objects,
        reset_flood,
        frame_flood,
    )
}


async def _kept(
    ground: Ground, makers: list[Callable[[], Awaitable[http.Connection]]], *, most: int
) -> Mapping[str, object]:
    """Opens as many connections as the service accepts, each reopened once it is closed."""
    kept: list[http.Connection] = []
    ends_at, num_made, num_refused = time.monotonic() + ground.seconds, 0, 0
    while time.monotonic() < ends_at:
        kept = [one for one in kept if not (one.writer.is_closing() or one.reader.at_eof())]
        batch = min(32, most - len(kept))
        waits = [
            asyncio.wait_for(makers[(num_made + n) % len(makers)](), 5.0) for n in range(batch)
        ]
        made = await asyncio.gather(*waits, return_exceptions=True)
        num_made += batch
        kept += [one for one in made if isinstance(one, http.Connection)]
        num_refused += sum(isinstance(one, BaseException) for one in made)
        await asyncio.sleep(0.1)
    return {"connections": num_made, "refused": num_refused, "open_at_end": len(kept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(ATTACKS))
    for name in ("--http-port", "--grpc-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    os.nice(10)
    ground = Ground(
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        key=os.environ["RATOON_API_KEY"],
        seconds=args.seconds,
    )
    print(json.dumps(asyncio.run(_attack(ATTACKS[args.name], ground))))


async def _attack(
    attack: Callable[[Ground], Awaitable[Mapping[str, object]]], ground: Ground
) -> Mapping[str, object]:
    return await attack(ground)


if __name__ == "__main__":
    main()
