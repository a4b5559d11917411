"""What an operation that has ended made is what every reader gets, however it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratoon.config import RatoonConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.policy.controller import Controller
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import LoraTuning, OperationState, PublishConfig, PublishKind, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import PATIENCE_S, Machine, import_weights, load, save
from tests.until import until

Read = Callable[[Controller], Awaitable[WeightManifest]]
EVERY_2 = PublishConfig(kind=PublishKind.EVERY_N, every_n=2)
ON_REQUEST = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
LORA = ModelSpec(
    base=PresetBase(name="tiny"), tuning=LoraTuning(rank=2, alpha=4.0), dtype=ModelDtype.FLOAT32,
    seed=1,
)  # fmt: skip


class Gate:
    """Holds the publications of a machine until it is opened; `begun` once there is one."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = asyncio.Event(), asyncio.Event()
        publish = machine.worker.publish

        async def wait(*args: Any) -> WeightManifest:
            self.begun.set()
            await self.opened.wait()
            return await publish(*args)

        monkeypatch.setattr(machine.worker, "publish", wait)

    async def check_waits(self, *reads: asyncio.Future[Any]) -> None:
        """Fails where a read ends before the gate is opened; opens it."""
        await asyncio.wait_for(self.begun.wait(), PATIENCE_S)
        await asyncio.sleep(0.02)
        early = [read.result() for read in reads if read.done()]
        assert not early, f"answered before the version was there: {early}"
        self.opened.set()

    async def check_all_wait(self, controller: Controller, version: int) -> None:
        """Every kind of reader waits for the gate, and gets this version then."""
        reads = {name: asyncio.ensure_future(read(controller)) for name, read in READS.items()}
        await self.check_waits(*reads.values())
        assert {name: (await read).version for name, read in reads.items()} == dict.fromkeys(
            READS, version
        )


def known(version: int | None, wait_s: float) -> Read:
    return lambda controller: controller.weight_manifest(None, version, wait_s)


def client_of(controller: Controller, folder: Path = Path("data")) -> EngineClient:
    """The engine as the wires see it, of one policy."""
    engine = SimpleNamespace(
        weight_manifest=lambda _policy_id, *args: controller.weight_manifest(*args),
        policy=lambda _policy_id: asyncio.sleep(0.0),
        note_call=lambda _policy_id: asyncio.sleep(0.0),
    )
    settings = EngineSettings.from_config(RatoonConfig(data_root=folder))
    return EngineClient(lambda call: call.on(engine), settings)


async def watched(controller: Controller, version: int | None) -> WeightManifest:
    """What a watch tells first."""
    return await anext(aiter(client_of(controller).watch_weights("p", version)))


# Versions 0, 1 and 2 are published when an operation makes another; a reader may have any of them.
READS: dict[str, Read] = {
    "pull": known(None, 0.0),
    "sync_once": known(2, 0.0),
    "sync_once, waits": known(2, PATIENCE_S),
    "sync_once, several versions behind": known(0, 0.0),
    "sync_once, several versions behind, waits": known(0, PATIENCE_S),
    "watch": lambda controller: watched(controller, None),
    "watch of what is served": lambda controller: watched(controller, 2),
    "watch, several versions behind": lambda controller: watched(controller, 0),
}


async def with_three_versions(machine: Machine) -> Machine:
    await machine.start()
    await machine.end(await machine.update(1, 1))
    await machine.end(await machine.submit(2, save("mine"), 0))
    await machine.end(await machine.update(3, 3))
    await machine.landed()
    assert machine.run.published == (0, 1, 2)
    return machine


@pytest.mark.parametrize("made_by", ["update", "import", "load", "lora", "deltas"])
async def test_a_reader_gets_what_the_ended_operation_made(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    """Who had a version got the one before it, in 19 of 20 steps of a loop."""
    changes: dict[str, Any] = {
        "lora": {"model": LORA},
        "deltas": {"publish": PublishConfig(kind=PublishKind.EVERY, every_n=1, deltas=True)},
    }.get(made_by, {})
    machine = await with_three_versions(make_machine(keep_versions=4, **changes))
    gate = Gate(machine, monkeypatch)
    match made_by:
        case "import":
            operation = await machine.submit(4, import_weights(9), 9)
        case "load":
            operation = await machine.submit(4, load("mine"), 0)
        case _:
            operation = await machine.update(4, 4)
    assert (await machine.end(operation)).state is OperationState.DONE
    assert machine.run.version == (1 if made_by == "load" else 3)
    await gate.check_all_wait(machine.controller, machine.run.version)


async def test_a_reader_gets_the_last_of_several_updates(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mini-batches: the version between was the answer, whatever the caller would have waited."""
    machine = await with_three_versions(make_machine(keep_versions=4))
    assert (await machine.end(await machine.update(4, 4))).state is OperationState.DONE
    await machine.landed()
    gate = Gate(machine, monkeypatch)
    assert (await machine.end(await machine.update(5, 5))).state is OperationState.DONE
    await gate.check_all_wait(machine.controller, 4)


@pytest.mark.parametrize("name", READS)
async def test_a_reader_gets_the_newest_of_a_policy_that_publishes_on_request(
    make_machine: MakeMachine, name: str
) -> None:
    """Who had a version was told of no other until the next call."""
    machine = await make_machine(publish=ON_REQUEST, keep_versions=4).start()
    for seq in (1, 2, 3):
        await machine.controller.weight_manifest(None)
        assert (await machine.end(await machine.update(seq, seq))).state is OperationState.DONE
    assert machine.run.published == (0, 1, 2)
    assert (await READS[name](machine.controller)).version == 3


@pytest.mark.parametrize("kind", list(PublishKind))
@pytest.mark.parametrize("crashes", [False, True])
async def test_a_loaded_checkpoint_is_the_newest_though_its_version_is_still_published(
    make_machine: MakeMachine, *, kind: PublishKind, crashes: bool
) -> None:
    """The version that was given up stayed the newest: on request, and after a crash."""
    publish = PublishConfig(kind=kind, every_n=1)
    machine = await make_machine(publish=publish, keep_versions=4, recovery=Recovery.REPLAY).start()
    for seq, command in ((1, save("mine")), (3, load("mine"))):
        await machine.controller.weight_manifest(None)
        await machine.end(await machine.submit(seq, command, 0))
        if seq == 1:
            await machine.end(await machine.update(2, 2))
            assert (await machine.controller.weight_manifest(None)).version == 1
            if crashes and kind is not PublishKind.ON_REQUEST:
                machine.crashes.armed[CrashPoint.ENGINE_BEFORE_PUBLISH] = 1
    if crashes:
        await machine.restart_controller()
    assert machine.run.version == 0
    assert (await machine.controller.weight_manifest(None)).version == 0


async def test_what_is_not_published_is_not_waited_for(make_machine: MakeMachine) -> None:
    machine = await make_machine(publish=EVERY_2).start()
    await machine.updates(1, 2, 3)
    assert (await machine.controller.weight_manifest(None, 0, 0.0)).version == 2
    assert (await machine.controller.weight_manifest(None, 2, 0.0)).version == 2


@pytest.mark.parametrize("kind", [PublishKind.EVERY, PublishKind.ON_REQUEST])
@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_a_version_that_cannot_be_written_ends_the_wait(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, kind: PublishKind, wait_s: float
) -> None:
    machine = await make_machine(publish=PublishConfig(kind=kind, every_n=1)).start()
    await machine.controller.weight_manifest(None)
    publish, asked, opened = machine.worker.publish, list[int](), asyncio.Event()

    async def full(*args: Any) -> WeightManifest:
        asked.append(args[1])
        await opened.wait()
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "disk full")

    monkeypatch.setattr(machine.worker, "publish", full)
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    read = asyncio.ensure_future(machine.controller.weight_manifest(None, 0, wait_s))
    await until(lambda: asked)
    assert not read.done()
    opened.set()
    assert (await asyncio.wait_for(read, PATIENCE_S)).version == 0
    assert asked == [1]
    monkeypatch.setattr(machine.worker, "publish", publish)
    assert (await machine.controller.weight_manifest(1)).version == 1


@pytest.mark.parametrize(("recovery", "newest"), [(Recovery.REPLAY, 1), (Recovery.FAIL, 0)])
@pytest.mark.parametrize("version", [None, 0])
async def test_a_version_whose_worker_is_lost_is_waited_for(
    make_machine: MakeMachine,
    monkeypatch: pytest.MonkeyPatch,
    recovery: Recovery,
    newest: int,
    version: int | None,
) -> None:
    """Also where the start after that fails: a reader got the version before, meanwhile."""
    machine = await make_machine(recovery=recovery).start()
    fence, lost = machine.worker.fence, list[None]()

    async def fenced(token: int, *, evenly: bool = False, num_nodes: int = 0) -> Any:
        if machine.crashes.hits and len(lost) < 2:
            lost.append(None)
            raise WorkerLostError("it does not come up")
        return await fence(token, evenly=evenly, num_nodes=num_nodes)

    monkeypatch.setattr(machine.worker, "fence", fenced)
    machine.crashes.armed[CrashPoint.WORKER_BEFORE_PUBLISH] = 1
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    assert (await known(version, 0.0)(machine.controller)).version == newest
    assert len(lost) == 2


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda controller: controller.drain(0.0), ErrorCode.UNAVAILABLE),
        (lambda controller: controller.close(0.0), ErrorCode.POLICY_NOT_READY),
        (lambda controller: asyncio.to_thread(controller.abandon), ErrorCode.UNAVAILABLE),
        (lambda controller: controller._turns._give_up("its worker is gone"), None),
    ],
    ids=["drain", "close", "abandon", "failure"],
)
@pytest.mark.parametrize("version", [None, 0])
async def test_a_wait_ends_with_its_controller(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    ends: Callable[[Controller], Awaitable[None]],
    code: ErrorCode | None,
    version: int | None,
) -> None:
    """A service that drained answered the version before, which its next start would not."""
    gate = Gate(machine, monkeypatch)
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    read = asyncio.ensure_future(known(version, 0.0)(machine.controller))
    await asyncio.wait_for(gate.begun.wait(), PATIENCE_S)
    ending = asyncio.ensure_future(ends(machine.controller))
    if code is None:
        # What a failed policy has published stays readable.
        assert (await read).version == 0
    else:
        with pytest.raises(RatoonError) as caught:
            await read
        assert caught.value.code is code
    gate.opened.set()
    await ending


async def test_a_caller_that_leaves_does_not_stop_the_publication(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(machine, monkeypatch)
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(known(0, 0.0)(machine.controller), 0.05)
    gate.opened.set()
    assert (await known(0, 0.0)(machine.controller)).version == 1


@pytest.mark.parametrize("name", ["model.json", "nothing.json"])
async def test_a_file_of_a_version_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By version and name, as curl fetches it: WEIGHTS_NOT_FOUND, of a version that was made."""
    gate = Gate(machine, monkeypatch)
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    client = client_of(machine.controller, machine.root)
    read = asyncio.ensure_future(client.weight_file("p", 1, name))
    await gate.check_waits(read)
    if name == "model.json":
        path, file = await read
        assert path.stat().st_size == file.size_bytes
    else:
        with pytest.raises(RatoonError, match="no file of that name"):
            await read
