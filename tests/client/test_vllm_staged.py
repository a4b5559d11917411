"""Versions staged in vLLM's workers: before the pause whole and verified, or no pause at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save

from ratoon_client import AsyncRatoonClient, EngineError, StagedVllmAdapter
from ratoon_client.weights.vllm import register
from ratoon_proto.types import WeightFile, WeightManifest
from tests.client import fake_vllm
from tests.client.fake_engine import FILE, serving_engine
from tests.client.fake_service import FakeService
from tests.client.fake_vllm import NAMES, NUM_WORKERS, StagingEngine, model, tensors
from tests.client.receiver.conftest import follow
from tests.client.samples import manifest, weight_file
from tests.client.test_pull_deltas import delta_between

WAIT_S = 20.0
PYPROJECT = Path(__file__).parents[2] / "clients/python/pyproject.toml"


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    entry = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    EntryPoint("ratoon", entry["ratoon"], "vllm.general_plugins").load()()


@pytest.fixture
def wire() -> str:
    return "http"


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncRatoonClient]:
    async with AsyncRatoonClient(url, timeout_s=5.0) as client:
        yield client


@pytest.fixture
def engine() -> StagingEngine:
    return StagingEngine()


@pytest.fixture
def engine_url(engine: StagingEngine) -> Iterator[str]:
    with serving_engine(engine) as url:
        yield url


@pytest.fixture
def vllm(engine_url: str) -> Iterator[StagedVllmAdapter]:
    with StagedVllmAdapter(engine_url, load_s=WAIT_S, call_s=WAIT_S) as adapter:
        yield adapter


class Held:
    """The first digest of every worker, which is not told before `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.has_begun = threading.Event()
        new = xxhash.xxh3_128
        nth = itertools.count()

        def held() -> Any:
            if next(nth) < NUM_WORKERS:
                self.has_begun.set()
                assert self.go.wait(WAIT_S)
            return new()

        module = sys.modules["ratoon_client.weights.vllm_engine"]
        monkeypatch.setattr(module, "xxhash", type("_", (), {"xxh3_128": staticmethod(held)}))


def version(root: Path, number: int, data: bytes | None = None) -> tuple[Path, WeightManifest]:
    """A folder and its manifest."""
    folder = root / f"version-{number}"
    folder.mkdir(exist_ok=True)
    data = model(number) if data is None else data
    (folder / FILE).write_bytes(data)
    # No engine looks at the bytes of `config.json`.
    files = [weight_file("config.json", b"{}"), weight_file(FILE, data)]
    return folder, manifest(number, files)


def stage_info(of: tuple[Path, WeightManifest], staging_id: str) -> dict[str, Any]:
    folder, listed = of
    return {
        "staging_id": staging_id,
        "folder": str(folder),
        "files": [asdict(file) for file in listed.files[1:]],
    }


@dataclass(frozen=True, kw_only=True)
class Rig:
    """An engine, its adapter, and a root for folders of versions."""

    root: Path
    engine: StagingEngine
    vllm: StagedVllmAdapter

    def version(self, number: int, data: bytes | None = None) -> tuple[Path, WeightManifest]:
        return version(self.root, number, data)

    async def commit(self, number: int, *, previous: int | None = None) -> float:
        folder, listed = self.version(number)
        old = None if previous is None else self.version(previous)[0]
        return await self.vllm.commit(folder, listed, previous=old)


@pytest.fixture
def rig(tmp_path: Path, engine: StagingEngine, vllm: StagedVllmAdapter) -> Rig:
    return Rig(root=tmp_path, engine=engine, vllm=vllm)


async def test_versions_are_received(rig: Rig, service: FakeService, client: AsyncRatoonClient):
    receiver = client.weight_receiver("p", rig.root / "mirror", rig.vllm)
    for number in (1, 2):
        service.publish(number, {FILE: model(number), "config.json": b"{}"})
        received = await receiver.sync_once()
        assert received is not None
        assert received.pause_s > 0
        assert rig.engine.sample() == model(number)
    assert await receiver.sync_once() is None
    rig.engine.start()
    assert rig.engine.sample() == model(0)
    assert await receiver.sync_once() is not None
    assert rig.engine.sample() == model(2)
    # Nothing was loaded from a folder.
    loads = [body for path, body in rig.engine.calls if path == "/collective_rpc"]
    assert {body["method"] for body in loads} == {"weight_transfer_engine"}


def test_ratoonctl_stages_versions(
    service: FakeService, url: str, tmp_path: Path, engine: StagingEngine, engine_url: str
):
    service.long_poll_s = WAIT_S
    service.publish(1, {FILE: model(1)})
    options = ("--root", str(tmp_path), "--vllm", engine_url, "--vllm-backend", "ratoon")
    with follow(url, "weights", "follow", "p", *options) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("version 1  ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert engine.sample() == model(1)
    assert "/update_weights" in engine.paths()


async def test_the_engine_samples_until_every_worker_has_staged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    held = Held(monkeypatch)
    was_asked = threading.Semaphore(0)
    rig.engine.on_call = lambda path: was_asked.release() if path == "/collective_rpc" else None
    committing = asyncio.create_task(rig.commit(1))
    for _ in range(3):
        assert await asyncio.to_thread(was_asked.acquire, timeout=WAIT_S)
    assert rig.engine.sample() == model(0)
    assert "/pause?mode=wait" not in rig.engine.paths()
    held.go.set()
    await committing
    assert rig.engine.sample() == model(1)
    assert rig.engine.paths()[rig.engine.paths().index("/pause?mode=wait") :] == [
        "/pause?mode=wait",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]


class LateWorker:
    """Beside one that is ready: it says so at its third answer, or tells an error."""

    def __init__(self, backend: Any, error: str | None) -> None:
        self._backend = backend
        self._error = error
        self.num_answers = 0

    def __call__(self) -> dict[str, Any]:
        self.num_answers += 1
        return self._backend() | {"is_running": self.num_answers < 3, "error": self._error}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("rank", range(NUM_WORKERS))
async def test_no_worker_is_passed_over(rig: Rig, rank: int):
    worker = rig.engine.workers[rank]
    late = worker.weight_transfer_engine = LateWorker(worker.weight_transfer_engine, None)
    await rig.commit(1)
    assert late.num_answers == 3
    worker.weight_transfer_engine = LateWorker(worker.weight_transfer_engine, "no memory")
    with pytest.raises(EngineError, match="not staged: no memory"):
        await rig.commit(2)
    assert rig.engine.sample() == model(1)
    assert rig.engine.paths().count("/pause?mode=wait") == 1


def test_an_update_of_what_is_not_staged_changes_nothing(tmp_path: Path, engine: StagingEngine):
    (worker, other) = engine.workers
    with pytest.raises(RuntimeError, match="nothing was staged as 1"):
        worker.weight_transfer_engine.update_weights({"staging_id": "1"})
    worker.init_weight_transfer_engine(stage_info(version(tmp_path, 1), "1"))
    with pytest.raises(RuntimeError, match="nothing was staged as 2"):
        worker.weight_transfer_engine.update_weights({"staging_id": "2"})
    # As of a second data-parallel engine, whose workers are not asked.
    folder, listed = version(tmp_path, 1)
    (folder / FILE).write_bytes(flipped(model(1), 9))
    other.init_weight_transfer_engine(stage_info((folder, listed), "3"))
    with pytest.raises(RuntimeError, match=r"version-1 is not staged: .* the digest"):
        other.weight_transfer_engine.update_weights({"staging_id": "3"})
    assert engine._loaded() == model(0)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


SPOILED = {
    "bit": (flipped(model(1), len(model(1)) - 1), "does not have the digest"),
    "header": (flipped(model(1), 9), "does not have the digest"),
    "cut": (model(1)[:-1], "has .* bytes, not"),
    "longer": (model(1) + b"\0", "has .* bytes, not"),
    "another version's": (model(2), "does not have the digest"),
    "gone": (None, "FileNotFoundError"),
}


@pytest.mark.parametrize("kind", SPOILED)
async def test_bytes_that_are_not_the_manifests_cause_no_pause(rig: Rig, kind: str):
    data, message = SPOILED[kind]
    folder, listed = rig.version(1)
    if data is None:
        (folder / FILE).unlink()
    else:
        (folder / FILE).write_bytes(data)
    with pytest.raises(EngineError, match=message):
        await rig.vllm.commit(folder, listed, previous=None)
    assert "/pause?mode=wait" not in rig.engine.paths()
    assert rig.engine.sample() == model(0)
    await rig.commit(1)
    assert rig.engine.sample() == model(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no safetensors file", "not staged"),
        (save({NAMES[0]: torch.zeros(2, dtype=torch.int8)}), "I8 is not among BF16"),
        (b"", "not staged"),
    ],
)
async def test_files_without_tensors_cause_no_pause(rig: Rig, data: bytes, message: str):
    folder, listed = rig.version(1, data)
    with pytest.raises(EngineError, match=message):
        await rig.vllm.commit(folder, listed, previous=None)
    assert "/pause?mode=wait" not in rig.engine.paths()


async def test_a_version_of_several_files_and_float32_is_loaded(rig: Rig):
    values = tensors(1)
    folder, _ = rig.version(1)
    files: list[WeightFile] = []
    for number, name in enumerate(NAMES):
        data = save({name: values[name].float() if number % 2 else values[name]})
        files.append(weight_file(f"model-{number}.safetensors", data))
        (folder / files[-1].name).write_bytes(data)
    await rig.vllm.commit(folder, manifest(1, files), previous=None)
    assert rig.engine.sample() == model(1)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/start_weight_update", ConnectionError()),
        ("/update_weights", ConnectionError()),
        ("/update_weights", 500),
        ("/finish_weight_update", ConnectionError()),
    ],
)
async def test_a_load_that_fails_is_undone_and_the_next_is_taken(
    rig: Rig, path: str, fault: int | Exception
):
    """500: in the middle of a layer of one worker, whose update is over; the other's is not."""
    await rig.commit(1)
    rig.engine.faults[path] = [fault] * (2 if path == "/start_weight_update" else 1)
    with pytest.raises(EngineError, match="version-1 is loaded again"):
        await rig.commit(2, previous=1)
    assert rig.engine.sample() == model(1)
    await rig.commit(3, previous=1)
    assert rig.engine.sample() == model(3)
    assert rig.engine.sampled == {model(1), model(3)}


async def test_an_engine_that_takes_neither_version_stays_paused(rig: Rig):
    await rig.commit(1)
    rig.engine.faults["/update_weights"] = [500]
    # What was staged is asked for by the same call.
    rig.engine.on_call = lambda path: (
        rig.engine.faults.update({"/collective_rpc": [500]}) if path == "/update_weights" else None
    )
    with pytest.raises(EngineError, match="the engine is left paused"):
        await rig.commit(2, previous=1)
    assert rig.engine.sample() is None


async def test_a_version_without_one_of_the_parameters_is_undone(rig: Rig):
    await rig.commit(1)
    values = tensors(2)
    del values[NAMES[1]]
    folder, listed = rig.version(2, save(values))
    with pytest.raises(EngineError, match=rf"{NAMES[1]}.*version-1 is loaded again"):
        await rig.vllm.commit(folder, listed, previous=rig.root / "version-1")
    assert rig.engine.sample() == model(1)


async def test_a_version_that_comes_during_another_waits_for_its_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    held = Held(monkeypatch)
    rig.vllm._load_s = 0.0
    with pytest.raises(EngineError, match=r"version-1 is not staged after 0\.0 s"):
        await rig.commit(1)
    rig.vllm._load_s = WAIT_S
    first = [worker.weight_transfer_engine._staging for worker in rig.engine.workers]
    committing = asyncio.create_task(rig.commit(2))
    begun = threading.Event()
    rig.engine.on_call = lambda path: begun.set() if path == "/collective_rpc" else None
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    for worker in rig.engine.workers:
        worker.weight_transfer_engine._staging._thread.join(0.2)
        assert worker.weight_transfer_engine._staging.is_running
    held.go.set()
    await committing
    assert rig.engine.sample() == model(2)
    assert all("another version came" in staging.error for staging in first)


async def test_an_engine_that_restarts_while_it_stages_is_not_paused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    held = Held(monkeypatch)
    rig.engine.on_call = lambda path: rig.engine.start() if path == "/collective_rpc" else None
    with pytest.raises(EngineError, match="staged no more"):
        await rig.commit(1)
    held.go.set()
    assert "/pause?mode=wait" not in rig.engine.paths()


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/collective_rpc"])
async def test_an_engine_that_does_not_know_the_backend_is_not_paused(rig: Rig, path: str):
    rig.engine.faults[path] = [500]
    with pytest.raises(EngineError, match=f"{path} answered 500"):
        await rig.commit(1)
    assert "/pause?mode=wait" not in rig.engine.paths()


async def test_host_memory_is_used_again(rig: Rig):
    def places() -> list[int]:
        staged = [worker.weight_transfer_engine._staging.wait() for worker in rig.engine.workers]
        return [tensor.data_ptr() for worker in staged for tensor in worker.values()]

    await rig.commit(1)
    first = places()
    await rig.commit(2)
    assert places() == first
    assert rig.engine.sample() == model(2)


class DeltaRig:
    """Versions of a service with deltas, a receiver of them, and what it has told."""

    def __init__(self, rig: Rig, service: FakeService, client: AsyncRatoonClient) -> None:
        self.rig, self._service = rig, service
        self.receiver = client.weight_receiver("p", rig.root / "mirror", rig.vllm)

    def publish(self, number: int, parent: int | None, delta: bytes | None = None) -> None:
        """Version `number`, with its delta from `parent`, or these bytes in its place."""
        deltas: list[tuple[int, bytes]] = []
        if parent is not None:
            scratch = self.rig.root / f"scratch-{number}"
            before, after = ({FILE: model(each)} for each in (parent, number))
            made = delta_between(scratch, before, after, parent)
            deltas.append((parent, made if delta is None else delta))
        files = {FILE: model(number), "config.json": b"{}"}
        self._service.publish(number, files, deltas=deltas)

    async def take(self, number: int) -> bool:
        """Whether the newest version came by its delta: staged before it was pulled."""
        engine = self.rig.engine
        engine.calls.clear()
        received = await self.receiver.sync_once()
        assert received is not None
        assert (received.version, engine.sample()) == (number, model(number))
        assert (received.folder / FILE).read_bytes() == model(number)
        staged = [b["init_info"] for path, b in engine.calls if path.startswith("/init")]
        assert engine.paths().count("/pause?mode=wait") == 1
        return "delta" in staged[-1]


@pytest.fixture
def deltas(
    rig: Rig, service: FakeService, client: AsyncRatoonClient, monkeypatch: pytest.MonkeyPatch
) -> DeltaRig:
    monkeypatch.setattr("ratoon.stream.deltas._MAX_SHARE", 1e9)
    return DeltaRig(rig, service, client)


async def test_a_version_is_made_of_its_delta_in_each_workers_memory(deltas: DeltaRig):
    """Once the version before was staged whole; its files are made of the delta after that."""
    for number in (1, 2, 3):
        deltas.publish(number, number - 1 if number > 1 else None)
        assert await deltas.take(number) == (number > 1)
        assert deltas.rig.engine.sampled <= {model(each) for each in range(number + 1)}
    mirror = deltas.rig.root / "mirror"
    assert json.loads((mirror / ".receiver.json").read_text())["version"] == 3
    assert not (mirror / ".partial").exists()


async def test_workers_that_have_not_the_parent_take_the_files(deltas: DeltaRig):
    """As after a restart, or with another version in their memory; no pause is lost for it."""
    deltas.publish(1, None)
    await deltas.take(1)
    deltas.rig.engine.start()
    deltas.publish(2, 1)
    assert not await deltas.take(2)
    deltas.publish(3, 2)
    assert await deltas.take(3)
    await deltas.rig.commit(7)
    deltas.publish(4, 3)
    assert not await deltas.take(4)
    deltas.publish(5, 4)
    assert await deltas.take(5)


@pytest.mark.parametrize("fault", ["no delta", "another version's"])
async def test_a_delta_that_makes_something_else_causes_no_pause(
    deltas: DeltaRig, tmp_path: Path, fault: str
):
    """Workers' memory is spoiled at most, and is read whole again."""
    deltas.publish(1, None)
    await deltas.take(1)
    other = delta_between(tmp_path / "other", {FILE: model(1)}, {FILE: model(9)}, 1)
    deltas.publish(2, 1, {"no delta": b"", "another version's": other}[fault])
    assert not await deltas.take(2)
    deltas.publish(3, 2)
    assert await deltas.take(3)


async def test_a_delta_whose_load_fails_is_undone_and_the_version_is_taken_again(
    deltas: DeltaRig,
):
    deltas.publish(1, None)
    await deltas.take(1)
    deltas.publish(2, 1)
    deltas.rig.engine.faults["/update_weights"] = [500]
    with pytest.raises(EngineError, match="version-1 is loaded again"):
        await deltas.receiver.sync_once()
    assert deltas.rig.engine.sample() == model(1)
    # Workers may have failed that nobody can ask, so its files are taken.
    assert not await deltas.take(2)
    deltas.publish(3, 2)
    assert await deltas.take(3)


async def test_a_receiver_that_ends_before_the_files_are_here_commits_again(
    deltas: DeltaRig, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    deltas.publish(1, None)
    await deltas.take(1)
    deltas.publish(2, 1)
    with monkeypatch.context() as patch:
        patch.setattr("ratoon_client.weights.folder.VersionsFolder.add", fail)
        with pytest.raises(OSError, match="the disk is full"):
            await deltas.receiver.sync_once()
    assert deltas.rig.engine.sample() == model(2)
    assert await deltas.take(2)


def test_host_memory_grows_and_goes_with_its_file():
    from ratoon_client.weights.vllm_engine import HostMemory

    def files(**sizes: int) -> list[WeightFile]:
        return [WeightFile(name=name, size_bytes=size, digest="") for name, size in sizes.items()]

    memory = HostMemory(torch.device("cpu"))
    a, b = memory.buffers(files(a=8192, b=4096))
    less, same = memory.buffers(files(a=100, b=4096))
    assert (less.numel(), less.data_ptr(), same.data_ptr()) == (100, a.data_ptr(), b.data_ptr())
    (more,) = memory.buffers(files(b=5000))
    assert more.numel() == 5000
    assert memory._buffers.keys() == {"b"}
    memory.close()
    assert memory._buffers == {}


def test_workers_that_end_let_go_of_what_they_stage(
    tmp_path: Path, engine: StagingEngine, monkeypatch: pytest.MonkeyPatch
):
    held = Held(monkeypatch)
    worker = engine.workers[0]
    worker.init_weight_transfer_engine(stage_info(version(tmp_path, 1), "1"))
    assert held.has_begun.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(worker.weight_transfer_engine.shutdown)
        held.go.set()
        ending.result(WAIT_S)
    assert worker.weight_transfer_engine()["is_running"] is False
    assert "another version came" in worker.weight_transfer_engine()["error"]


def test_the_plugin_is_registered_once_and_passes_over_another_vllm(
    monkeypatch: pytest.MonkeyPatch,
):
    register()
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    register()


def test_the_plugin_imports_no_torch():
    code = "import sys, ratoon_client.weights.vllm as v; v.register()"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
