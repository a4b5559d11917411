"""Fixtures of the whole suite: one Ray cluster a worker, and the recorded rollouts.

Imports neither ray nor the service at the top: tests/kernels runs where neither is installed. Nor
torch: the process that shares out the tests needs none.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.recorded import DATA, RecordedGroup, read_groups

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.running_service import Service
    from tests.torch_settings import TorchSettings
    from tests.work_units import WorkUnits


# As in a worker: libraries that are imported ask whether there is a GPU, and who has asked CUDA
# itself can fork no process that uses one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Folders of tests are in memory where that has so much room, so that no database waits for a disk:
# what a power cut leaves of one is told from recorded writes, in tests/durability.
_MEMORY, _LEAST_FREE_BYTES = Path("/dev/shm"), 4 * 2**30
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _LEAST_FREE_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "write what became of every GPU test to this result file (JSON)"
    parser.addoption("--gpu-report", type=Path, metavar="PATH", help=help_text)
    help_text = "keep what --gpu-report's file says of tests that this run leaves out"
    parser.addoption("--gpu-report-again", action="store_true", help=help_text)
    help_text = "record what tests/golden finds, in place of comparing it"
    parser.addoption("--write-golden", action="store_true", help=help_text)
    help_text = "take the pictures of docs/images anew"
    parser.addoption("--write-images", action="store_true", help=help_text)
    help_text = "record how long the test files take, in tests/durations.json"
    parser.addoption("--write-durations", action="store_true", help=help_text)
    help_text = "of tests marked more, run those of a part of the files: 2/3, the second of three"
    parser.addoption("--part", metavar="K/N", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and "multigpu" not in config.option.markexpr:
        _take_one_gpu(vars(config)["workerinput"]["workerid"])
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests.work_units import Durations

        config.pluginmanager.register(
            Durations(is_written=bool(config.getoption("--write-durations")))
        )
    path = config.getoption("--gpu-report")
    if path is not None:
        from tests.benchmarks.gpu_report import CollectedInWorker, GpuReport

        if hasattr(config, "workerinput"):
            config.pluginmanager.register(CollectedInWorker())
        else:
            is_again = bool(config.getoption("--gpu-report-again"))
            config.pluginmanager.register(GpuReport(path, is_again=is_again))


def _take_one_gpu(worker: str) -> None:
    """Workers of pytest-xdist, `gw0` and so on, take the GPUs in turn; before CUDA is there."""
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(worker[2:]) % num_gpus]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        from tests.work_units import keep_part

        keep_part(config, items, part)
    if hasattr(config, "workerinput"):
        from tests.work_units import longest_first

        longest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay: who collects garbage need not look at them, which takes 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """After the last test of a shared service or cluster everything of the session is torn down.

    An idle service takes a tenth of a core, and each policy that is left more than half a percent.
    """
    if nextitem is None or not hasattr(item.config, "workerinput"):
        return None
    from tests.work_units import is_last_of_shared

    if not is_last_of_shared(item.nodeid, nextitem.nodeid):
        return None
    return item.ihook.pytest_runtest_protocol(item=item, nextitem=None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WorkUnits:
    from tests.work_units import WorkUnits

    return WorkUnits(config, log)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The session's cluster; this process is connected to it."""

    namespace: str
    address: str


@pytest.fixture(scope="session", autouse=True)
def first_torch_settings() -> TorchSettings:
    """As this process starts with them."""
    from tests.torch_settings import TorchSettings

    return TorchSettings.of_this_process()


@pytest.fixture(scope="module", autouse=True)
def torch_settings(first_torch_settings: TorchSettings) -> Iterator[None]:
    """A trainer configures its whole process; the next module finds torch as it was."""
    yield
    first_torch_settings.restore()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """One small local cluster for all tests of a worker that need Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray._private.authentication.authentication_token_setup import (
        enable_token_auth_by_default,
        ensure_token_if_auth_enabled,
    )

    from ratoon.cluster.ray_private import LocalRay

    # Its token is this user's, as of what `ray.init` would start.
    enable_token_auth_by_default()
    ensure_token_if_auth_enabled()
    # Short: Ray puts sockets below it, and the path of a socket has at most 107 bytes.
    temp_dir = tempfile.mkdtemp(prefix="rt-", dir="/tmp")
    local = LocalRay(num_cpus=2, object_store_bytes=100 * 2**20, temp_folder=temp_dir)
    ray.init(address=local.address, namespace="ratoon", log_to_driver=False)
    local.open_forks()
    yield RayCluster(namespace="ratoon", address=local.address)
    ray.shutdown()
    local.end(is_orderly=True)
    shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def service(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The whole service, started once for the tests of every folder."""
    from tests.running_service import running_service

    with running_service(ray_cluster.namespace, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="session")
def gsm8k_groups() -> tuple[RecordedGroup, ...]:
    """300 grade-school problems of 4 solutions each, reward = correct or not."""
    return _recorded("gsm8k_rollouts.jsonl")


@pytest.fixture(scope="session")
def airline_groups() -> tuple[RecordedGroup, ...]:
    """25 airline-support tasks of 4 conversations with tools each, reward = task solved."""
    return _recorded("tau_airline_rollouts.jsonl")


def _recorded(name: str) -> tuple[RecordedGroup, ...]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"recorded rollouts are not on this machine: {path}")
    return read_groups(path)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised allocation is NaN, also those inside torch's own operators."""
    import torch

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(was_deterministic)
