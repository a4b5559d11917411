"""Versions broadcast into an engine: whole, or the one before them, or nothing is sampled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ratoon_client import EngineError, VllmNcclAdapter
from ratoon_client.weights import vllm_nccl
from tests.client.nccl_engine import FILE, WAIT_S, digest
from tests.client.samples import manifest

# A broadcast of several waits for its reader: more than sockets hold.
BIG = 2 * 2**20
# As one of them: two are together in a chunk.
CHUNK_BYTES = 4 * BIG
MANIFEST = manifest()
PUSH = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
COMMIT = ["/is_paused", "/pause?mode=wait", *PUSH, "/reset_prefix_cache", "/resume"]
JOIN = "/init_weight_transfer_engine"


def model(version: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(version)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        bits = torch.randint(0, 2**15, shape, generator=rng)
        return bits.to(torch.int16).view(torch.bfloat16).to(dtype)

    return {
        "a": tensor(3),
        "b": tensor(5, 7, dtype=torch.float32),
        **{f"c{index}": tensor(2, BIG) for index in range(4)},
        "d": tensor(1, dtype=torch.float32),
    }


def save(folder: Path, values: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(values, folder / FILE)
    return folder


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The first is what the engine is started with."""
    root = tmp_path_factory.mktemp("versions")
    return [save(root / f"version-{number}", model(number)) for number in range(3)]


@pytest.fixture(scope="module")
def digests() -> list[str]:
    return [digest(model(number)) for number in range(3)]


class Engine:
    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, name: str, body: Any = None) -> Any:
        return httpx.post(f"{self.url}/test/{name}", json=body, timeout=WAIT_S).json()

    def taken(self, name: str) -> Any:
        return self("state")[name]


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "cpu")


@pytest.fixture(scope="module")
def engine_url(versions: list[Path], device: str) -> Iterator[str]:
    file = Path(__file__).with_name("nccl_engine.py")
    command = [sys.executable, str(file), str(versions[0]), device]
    # NCCL takes two ranks on one GPU for those of two hosts.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_HOSTID": "engine"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@pytest.fixture
def engine(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    engine = Engine(engine_url)
    engine("restart")
    return engine


@dataclass(frozen=True, kw_only=True)
class Rig:
    """An engine, adapters of it, and folders of versions with their digests."""

    engine: Engine
    device: str
    versions: list[Path]
    digests: list[str]
    stack: ExitStack

    def adapter(self, load_s: float = WAIT_S) -> VllmNcclAdapter:
        options: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "load_s": load_s, "call_s": WAIT_S}
        made = VllmNcclAdapter(self.engine.url, device=self.device, **options)
        return self.stack.enter_context(made)


@pytest.fixture
def rig(engine: Engine, device: str, versions: list[Path], digests: list[str]) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(engine=engine, device=device, versions=versions, digests=digests, stack=stack)
        engine("release")


def child_ids() -> list[int]:
    """Ids of this process's children that push."""
    return [
        process.pid
        for process in psutil.process_iter(["ppid", "cmdline"])
        if process.info["ppid"] == os.getpid()
        and any("nccl_push" in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)], indirect=True
)
async def test_versions_are_pushed_by_one_group(rig: Rig):
    vllm = rig.adapter()
    pause_s = await vllm.commit(rig.versions[1], MANIFEST, previous=None)
    assert pause_s > 0
    (first,) = child_ids()
    # The group is made, and all is staged, before the pause.
    assert rig.engine.taken("calls") == [COMMIT[0], JOIN, *COMMIT]
    await vllm.commit(rig.versions[2], MANIFEST, previous=rig.versions[1])
    assert rig.engine.taken("calls")[len(COMMIT) + 2 :] == [COMMIT[0], *COMMIT]
    assert rig.engine.taken("sampled") == rig.digests[1:]
    assert child_ids() == [first]
    rig.engine("restart")
    await vllm.commit(rig.versions[1], MANIFEST, previous=rig.versions[2])
    assert rig.engine.taken("sampled") == [rig.digests[1]]
    assert child_ids() not in ([], [first])


@pytest.mark.more
@pytest.mark.parametrize("path", PUSH)
async def test_an_engine_that_answers_500_gets_the_old_version(rig: Rig, path: str):
    vllm = rig.adapter()
    rig.engine("fault", {path: 500})
    with pytest.raises(EngineError, match=r"answered 500: .*version-0 is loaded again"):
        await vllm.commit(rig.versions[1], MANIFEST, previous=None)
    await vllm.commit(rig.versions[2], MANIFEST, previous=None)
    assert rig.engine.taken("sampled") == [rig.digests[0], rig.digests[2]]
    assert rig.engine.taken("calls").count(JOIN) == 2


async def test_a_child_killed_in_mid_broadcast_is_half_a_version_that_is_not_sampled(rig: Rig):
    vllm = rig.adapter()
    rig.engine("fault", {"/update_weights": "hold"})
    with ThreadPoolExecutor(1) as pool:

        def kill() -> None:
            rig.engine("wait")
            (child,) = child_ids()
            os.kill(child, signal.SIGKILL)
            rig.engine("release")

        killing = pool.submit(kill)
        with pytest.raises(EngineError, match=r"answered 500: .*version-0 is loaded again"):
            await vllm.commit(rig.versions[1], MANIFEST, previous=None)
        killing.result()
    await vllm.commit(rig.versions[2], MANIFEST, previous=None)
    assert rig.engine.taken("sampled") == [rig.digests[0], rig.digests[2]]


@pytest.mark.more
async def test_an_engine_that_never_joins_is_not_paused(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    # The child's own calls have the time that they need.
    make = vllm_nccl._Child  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(vllm_nccl, "_Child", lambda device, _: make(device, WAIT_S))
    rig.engine("fault", {JOIN: "hang"})
    with pytest.raises(EngineError, match=f"no answer to {JOIN}"):
        await rig.adapter(load_s=0.5).commit(rig.versions[1], MANIFEST, previous=None)
    assert child_ids() == []
    assert rig.engine.taken("calls") == ["/is_paused", JOIN]


@pytest.mark.more
async def test_an_engine_that_says_that_it_joined_is_waited_for_until_the_deadline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """As one does whose NCCL is switched off."""
    vllm = rig.adapter()
    join = vllm._join  # pyright: ignore[reportPrivateUsage]

    def join_soon(child: Any) -> None:
        monkeypatch.setattr(child, "_call_s", 0.5)
        join(child)

    monkeypatch.setattr(vllm, "_join", join_soon)
    rig.engine("fault", {JOIN: 200})
    with pytest.raises(EngineError, match=r"gave no answer in 0\.5 s"):
        await vllm.commit(rig.versions[1], MANIFEST, previous=None)
    assert child_ids() == []
    assert rig.engine.taken("calls") == ["/is_paused", JOIN]


@pytest.mark.more
async def test_an_engine_that_hangs_in_mid_update_stays_paused_until_its_restart(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    vllm = rig.adapter()
    await vllm.commit(rig.versions[1], MANIFEST, previous=None)
    monkeypatch.setattr(vllm, "_load_s", 2.0)
    monkeypatch.setattr(vllm, "_call_s", 2.0)
    rig.engine("fault", {"/update_weights": "hold"})
    with pytest.raises(EngineError, match="the engine is left paused: restart it"):
        await vllm.commit(rig.versions[2], MANIFEST, previous=rig.versions[1])
    with pytest.raises(EngineError, match="no answer to /is_paused"):
        await vllm.commit(rig.versions[2], MANIFEST, previous=rig.versions[1])
    assert rig.engine.taken("is_paused")
    assert rig.engine.taken("sampled") == [rig.digests[1]]
    rig.engine("restart")
    monkeypatch.setattr(vllm, "_load_s", WAIT_S)
    monkeypatch.setattr(vllm, "_call_s", WAIT_S)
    await vllm.commit(rig.versions[2], MANIFEST, previous=rig.versions[1])
    assert rig.engine.taken("sampled") == [rig.digests[2]]


@pytest.mark.more
async def test_what_an_update_left_in_a_paused_engine_is_no_part_of_the_next(rig: Rig):
    vllm = rig.adapter()
    rig.engine("fault", {"/update_weights": "half", "/finish_weight_update": 500})
    with pytest.raises(EngineError, match="left paused: restart it"):
        await vllm.commit(rig.versions[1], MANIFEST, previous=None)
    assert rig.engine.taken("is_paused")
    await vllm.commit(rig.versions[2], MANIFEST, previous=None)
    assert rig.engine.taken("sampled") == [rig.digests[2]]


@pytest.mark.more
async def test_several_workers_are_not_trusted_after_a_failure(rig: Rig):
    vllm = rig.adapter()
    await vllm.commit(rig.versions[1], MANIFEST, previous=None)
    rig.engine("workers", 2)
    rig.engine("fault", {"/update_weights": 500})
    with pytest.raises(EngineError, match=r"answered 500: .*the engine is left paused: restart it"):
        await vllm.commit(rig.versions[2], MANIFEST, previous=rig.versions[1])
    with pytest.raises(EngineError, match="was paused before: restart it"):
        await vllm.commit(rig.versions[2], MANIFEST, previous=rig.versions[1])
    assert rig.engine.taken("is_paused")


@pytest.mark.more
async def test_what_cannot_be_staged_is_refused_before_the_pause(rig: Rig, tmp_path: Path):
    scalar = save(tmp_path / "version-1", {"scale": torch.ones(())})
    with pytest.raises(EngineError, match="scale: vLLM unpacks no tensor without dimensions"):
        await rig.adapter().commit(scalar, MANIFEST, previous=None)
    assert rig.engine.taken("calls") == ["/is_paused"]


def test_a_child_ends_with_its_receiver(engine: Engine, versions: list[Path]):
    """While it waits for ranks that never come."""
    engine("fault", {JOIN: "hang"})
    code = (
        "import pathlib, ratoon_client as r\n"
        f"vllm = r.VllmNcclAdapter({engine.url!r}, device='cpu')\n"
        f"vllm._stage(pathlib.Path({str(versions[1])!r}), None)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as receiver:
        assert receiver.stderr is not None
        engine("wait")
        receiver.kill()
        # It ends once nobody has it: the child had it too.
        receiver.stderr.read()
    engine("release")
