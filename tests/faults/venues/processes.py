"""The engine of one policy and its worker, an edge and a receiver, as processes without Ray.

All decisions are the service's and the client's own code. This only carries calls, with Ray's
guarantee that a call of a lost process fails at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.gate import build_gate
from ratoon.api.http.app import create_app, start_http
from ratoon.api.service import PolicyService
from ratoon.auth.access import checked_hosts
from ratoon.config import CheckpointConfig, HttpConfig, LimitsConfig, RatoonConfig
from ratoon.edge.budget import EdgeBounds
from ratoon.engine.client import EngineClient
from ratoon.engine.crash_points import make_reach
from ratoon.engine.files.archive import Archive, ArchivedBodyFiles, BlobArchive
from ratoon.engine.files.paths import BodyFiles, policy_paths
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.tables import open_database
from ratoon.engine.policy.controller import Controller
from ratoon.engine.policy.limits import Claims
from ratoon.engine.policy.run import Policies, PolicyRun
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import Acknowledgement, Policy, PolicySpec
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import configure_logging
from ratoon.stream.manifest import WeightManifest
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_client import ClientConfig, RatoonClient, VllmAdapter
from ratoon_proto.types import BackendInfo
from tests.api.fake_engine import FakeSampler
from tests.faults.builds import break_build
from tests.faults.venues.power import record_syncs
from tests.faults.venues.rpc import POOL, Peer, PeerLostError, Server
from tests.stream.local_store import LocalStore

P = ParamSpec("P")
T = TypeVar("T")
_ASIDE = ("fence", "progress", "cancel", "publish", "write_snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the two processes share. `build`: the fault that they are built with, "": none."""

    root: Path
    spec: PolicySpec
    trainer: TrainerSpec
    limits: LimitsConfig
    checkpoints: CheckpointConfig
    build: str
    # What is not synced is lost by `faults_power.cut_power`.
    has_power_cuts: bool
    # Whether bodies and checkpoints have copies.
    has_store: bool
    # URL of the engine that versions go to; "": there is none, and no edge.
    inference_url: str
    http_port: int

    @property
    def data_root(self) -> Path:
        return self.root / "data"

    @property
    def database(self) -> Path:
        return self.data_root / "ratoon.sqlite"

    @property
    def crash_points(self) -> Path:
        return self.data_root / "crash-points"

    @property
    def url(self) -> str:
        """URL of the edge."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def mirror(self) -> Path:
        """The receiver's folder."""
        return self.root / "mirror"

    @property
    def store_is_away(self) -> Path:
        """While there is such a file, the object store takes nothing."""
        return self.root / "store-is-away"

    def socket(self, name: str) -> Path:
        return self.root / f"{name}.sock"


def run_worker(settings: Settings) -> None:
    """Trainer calls on one thread; those of `_ASIDE` do not wait for them."""
    _begin(settings)
    core = WorkerCore(Trainer.create, make_reach(settings.crash_points))
    compute = ThreadPoolExecutor(1)

    def answer(name: str, args: tuple[Any, ...]) -> object:
        method = getattr(core, name)
        return method(*args) if name in _ASIDE else compute.submit(method, *args).result()

    Server(settings.socket("worker"), answer).run()


def run_engine(settings: Settings) -> None:
    """The only process that opens the database.

    Starts by itself, again after a failure, and answers callers meanwhile.
    """
    _begin(settings)
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete(_make_run(settings))
    controller = Controller(run)
    started: list[asyncio.Task[None]] = []

    async def start() -> None:
        if not started or (started[0].done() and started[0].exception() is not None):
            started[:] = [loop.create_task(controller.start())]
        await asyncio.shield(started[0])

    async def ask(name: str, args: tuple[Any, ...]) -> object:
        await start()
        if name == "policy":
            row = await run.journal.policy(run.policy_id)
            assert row is not None
            return row.to_policy()
        if name == "read_output":
            _, digest = args
            return (run.paths.results / digest).read_bytes()
        return await getattr(controller, name)(*args)

    def answer(name: str, args: tuple[Any, ...]) -> object:
        return asyncio.run_coroutine_threadsafe(ask(name, args), loop).result()

    server = Server(settings.socket("engine"), answer)
    threading.Thread(target=server.run, daemon=True).start()
    first = loop.create_task(start())
    first.add_done_callback(lambda done: done.exception())
    loop.run_forever()


def run_edge(settings: Settings) -> None:
    """HTTP as the gateway has it."""
    _begin(settings)
    config = RatoonConfig(
        data_root=settings.data_root,
        limits=settings.limits,
        http=HttpConfig(port=settings.http_port),
    )
    engine = RpcEngine(settings)
    service = PolicyService(
        engine=EngineClient(lambda call: call.on(engine), EngineSettings.from_config(config)),
        sampler=FakeSampler(),
        limits=config.limits,
        defaults=SpecDefaults(models_root=config.models_folder, micro_batch_tokens=1),
        device="cpu",
    )
    app = create_app(
        service, config.limits, gate=build_gate(config), allowed_hosts=checked_hosts(config)
    )
    bounds = EdgeBounds(max_body_bytes=config.limits.max_body_bytes)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(
        start_http(app, host=config.http.host, port=config.http.port, bounds=bounds, context=None)
    )
    loop.run_forever()


def run_receiver(settings: Settings) -> None:
    """In pulls of many chunks."""
    config = ClientConfig(chunk_bytes=2048, attempt_timeout_s=10.0, connect_timeout_s=600.0)
    with (
        RatoonClient(settings.url, config=config) as client,
        VllmAdapter(settings.inference_url) as vllm,
    ):
        receiver = client.weight_receiver(
            settings.spec.policy_id, settings.mirror, vllm, on_event=lambda _: None
        )
        receiver.follow()


async def _make_run(settings: Settings) -> PolicyRun:
    paths = policy_paths(settings.data_root, settings.spec.policy_id)
    archive = BlobArchive(_Store(settings), paths) if settings.has_store else Archive()
    return PolicyRun(
        spec=settings.spec,
        trainer=settings.trainer,
        journal=Journal(open_database(f"sqlite:///{settings.database}")),
        worker=RpcWorker(settings),
        metrics=NoMetrics(),
        policies=cast("Policies", RpcEngine(settings)),
        now=time.time,
        limits=settings.limits,
        checkpoints=settings.checkpoints,
        paths=paths,
        bodies=ArchivedBodyFiles(paths, archive) if settings.has_store else BodyFiles(paths),
        archive=archive,
        claims=Claims(settings.data_root, max_total_bytes=settings.limits.max_total_queued_bytes),
        reach=make_reach(settings.crash_points),
    )


class _Store(LocalStore):
    """In the place of an object store."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.root / "store")
        self._is_away = settings.store_is_away

    def put(self, key: str, data: bytes) -> None:
        self._ask()
        super().put(key, data)

    def put_folder(self, key: str, source: Path) -> None:
        self._ask()
        super().put_folder(key, source)

    def delete_folder(self, key: str) -> None:
        self._ask()
        super().delete_folder(key)

    def _ask(self) -> None:
        if self._is_away.exists():
            raise RatoonError(ErrorCode.UNAVAILABLE, "the object store does not answer")


class NoMetrics:
    def send(self, changes: object) -> None:
        """Nobody looks."""


class RpcEngine:
    """What `EngineClient` asks of the engine, which has one policy here."""

    def __init__(self, settings: Settings) -> None:
        self._peer = Peer(settings.socket("engine"))

    async def policy(self, _policy_id: str) -> Policy:
        return await self._ask("policy")

    async def weight_manifest(self, _policy_id: str, *args: object) -> WeightManifest:
        return await self._ask("weight_manifest", *args)

    async def ack_weights(self, _policy_id: str, ack: Acknowledgement) -> int | None:
        return await self._ask("ack_weights", ack)

    async def backends(self) -> tuple[BackendInfo, ...]:
        return ()

    async def record_metrics(self, changes: object) -> None:
        """Nobody looks."""

    async def note_call(self, _policy_id: str) -> None:
        """The policy does not end."""

    def __getattr__(self, name: str) -> Any:
        async def ask(*args: object) -> object:
            return await self._ask(name, *args)

        return ask

    async def _ask(self, name: str, *args: object) -> Any:
        try:
            return await _in_pool(self._peer, name, *args)
        except PeerLostError as err:
            raise RatoonError(ErrorCode.UNAVAILABLE, "the engine does not answer") from err


class RpcWorker:
    """`RemoteWorker` at the worker's process.

    A file `held-<method>` in the root keeps the next call of that method on the way for ever, its
    arguments in the file: a message of an engine that is dead when it arrives.
    """

    def __init__(self, settings: Settings) -> None:
        self._root = settings.root
        self._peer = Peer(settings.socket("worker"))
        self._supervisor = Peer(settings.socket("supervisor"))

    async def replace(self) -> None:
        await _in_pool(self._supervisor, "replace_worker")

    async def release(self) -> None:
        """A bare one in its place holds as good as nothing."""
        await self.replace()

    async def fence(self, token: int, *, evenly: bool = False, num_nodes: int = 0) -> Any:
        del evenly, num_nodes
        await self._ask("fence", token)
        return await self._ask("status")

    async def call(
        self,
        method: Callable[Concatenate[WorkerCore, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        assert not options
        return await self._ask(method.__name__, *args)

    async def _ask(self, name: str, *args: object) -> Any:
        if (self._root / f"held-{name}").exists():
            await _in_pool(self._supervisor, "hold", name, args)
            await asyncio.Event().wait()
        try:
            return await _in_pool(self._peer, name, *args)
        except PeerLostError as err:
            raise WorkerLostError(str(err)) from err


async def _in_pool(peer: Peer, name: str, *args: object) -> Any:
    return await asyncio.get_running_loop().run_in_executor(POOL, peer.call, name, *args)


def _begin(settings: Settings) -> None:
    configure_logging("CRITICAL")
    if settings.has_power_cuts:
        record_syncs(settings.root)
    break_build(settings.build)
