"""`ratoon doctor`: reports what this machine and a cluster's nodes can do, and why they cannot.

Nothing is changed, and nothing is started except a short task on each node of `ray.address`. A
check that cannot be made is itself a failed check. What does not apply to this machine, such as GPU
kernels where there is no GPU, is no warning.
"""

from __future__ import annotations

import errno
import http.client
import logging
import os
import platform
import shutil
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil

from ratoon.config import RatoonConfig
from ratoon.errors import RatoonError
from ratoon.sole_service import is_free, ports_of

if TYPE_CHECKING:
    from ratoon.cluster.placement import Node
    from ratoon_kernels.registry import BackendStatus

MIN_PYTHON = (3, 11)
TORCH_VERSIONS = ((2, 11), (2, 13))
MIN_FREE_DISK_BYTES = 2 * 2**30
MIN_FREE_MEMORY_BYTES = 2 * 2**30
_PROBE_S = 10.0
# Model folders that are named.
_NAMED = 8
_HEALTH = "/v1/health"
# The end of what is said of a port, where the service runs already.
_SERVED = " is the service's, which answers"
# How a server bound to all addresses is reached from its own machine; nothing is bound here.
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nosec B104


class Status(StrEnum):
    """Result of a check; FAIL keeps the service from starting."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `detail` says what was found and, if it is not ok, what to do."""

    name: str
    status: Status
    detail: str


def run_checks(config: RatoonConfig) -> tuple[Check, ...]:
    """Run all checks, in start-up order. Never raises for what it examines."""
    groups: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("settings", lambda: _check_settings(config)),
        ("models root", lambda: _check_models(config)),
        ("python", _check_python),
        ("torch", _check_torch),
        ("gpu", _check_gpu),
        ("ranks", _check_ranks),
        ("kernels", _check_kernels),
        ("compiler", _check_compiler),
        ("ports", lambda: _check_ports(config)),
        ("tls", lambda: _check_tls(config)),
        ("disk", lambda: _check_disk(config)),
        ("policies", lambda: _check_policies(config)),
        ("memory", _check_memory),
        ("ray", _check_ray),
        ("cluster", lambda: _check_cluster(config)),
    )
    checks: list[Check] = []
    for name, group in groups:
        try:
            checks.extend(group())
        except (ImportError, OSError, RuntimeError) as err:
            checks.append(
                Check(name=name, status=Status.FAIL, detail=f"{type(err).__name__}: {err}")
            )
    return tuple(checks)


def next_step(checks: Sequence[Check]) -> str:
    """What to type next."""
    if failed := [check.name for check in checks if check.status is Status.FAIL]:
        return f"mend what fails ({', '.join(failed)}), then `ratoon doctor` again"
    if any(check.detail.endswith(_SERVED) for check in checks):
        return "`ratoonctl runs`: the service answers"
    return "`ratoon demo`; or `ratoon serve` and, in another shell, `ratoon example first`"


def _check_settings(config: RatoonConfig) -> Iterator[Check]:
    """Name what is set, as some values are secrets."""
    given = sorted(_names(config.model_dump(exclude_unset=True)))
    detail = f"set: {', '.join(given)}" if given else "none set: the defaults"
    yield Check(name="settings", status=Status.OK, detail=detail)


def _names(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _names(cast("dict[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_models(config: RatoonConfig) -> Iterator[Check]:
    root = config.models_folder
    found = sorted(
        str(path.parent.relative_to(root))
        for depth in ("*", "*/*")
        for path in root.glob(f"{depth}/config.json")
    )
    named = ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    detail = f"{root}: {named or 'no model folder yet; a preset needs none'}"
    yield Check(name="models root", status=Status.OK, detail=detail)


def _check_python() -> Iterator[Check]:
    found = platform.python_version()
    ok = sys.version_info[:2] >= MIN_PYTHON
    expected = ".".join(map(str, MIN_PYTHON))
    detail = found if ok else f"{found}; needs {expected} or newer"
    yield Check(name="python", status=Status.OK if ok else Status.FAIL, detail=detail)


def _check_torch() -> Iterator[Check]:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = TORCH_VERSIONS
    ok = low <= version <= high
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if not ok:
        detail += f"; tested with {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    yield Check(name="torch", status=Status.OK if ok else Status.WARN, detail=detail)


def _check_gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        # The driver's, which a machine without such a device has not.
        is_there = Path("/dev/nvidiactl").exists()
        why = "torch is a CPU build" if torch.version.cuda is None else "torch finds none"
        detail = f"one is here, but {why}; the CPU is used" if is_there else "none: the CPU is used"
        yield Check(name="gpu", status=Status.WARN if is_there else Status.OK, detail=detail)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory_gib = properties.total_memory / 2**30
        detail = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory_gib:.0f} GiB"
        yield Check(name=f"gpu {index}", status=Status.OK, detail=detail)


def _check_ranks() -> Iterator[Check]:
    """Report how many ranks a policy may have here, and what they copy through."""
    import torch

    from ratoon.cluster.placement import gpu_links

    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        detail = "one GPU: policies of one rank"
    elif num_gpus:
        links = gpu_links() or "how they are linked nvidia-smi does not say"
        detail = f"policies of up to {num_gpus} ranks, a GPU each; {links}"
    else:
        detail = f"policies of up to {psutil.cpu_count()} ranks on the CPU, as many as cores"
    yield Check(name="ranks", status=Status.OK, detail=detail)


def _check_kernels() -> Iterator[Check]:
    import torch

    from ratoon_kernels.registry import list_backends

    yield from judge_backends(list_backends(), has_gpu=torch.cuda.is_available())


def judge_backends(backends: Iterable[BackendStatus], *, has_gpu: bool) -> Iterator[Check]:
    """Name the backends of each op that can be used, best first, and on a GPU why others cannot.

    A GPU that only the plain reference serves is a warning.
    """
    for op, of_op in groupby(backends, key=lambda backend: backend.op):
        each = list(of_op)
        usable = [backend.name for backend in each if backend.is_available]
        others = [f"not {one.name}: {one.reason}" for one in each if has_gpu and one.reason]
        is_slow = has_gpu and usable == [each[-1].name]
        yield Check(
            name=op,
            status=Status.WARN if is_slow else Status.OK,
            detail="; ".join([", ".join(usable), *others]),
        )


def _check_compiler() -> Iterator[Check]:
    import torch

    found = shutil.which("gcc") or shutil.which("clang")
    if torch.cuda.is_available():
        status = Status.OK if found else Status.WARN
        detail = found or "none: Triton needs gcc or clang, with libc's headers"
    else:
        status, detail = Status.OK, f"{found or 'none'}; the CPU needs none"
    yield Check(name="compiler", status=status, detail=detail)


def _check_ports(config: RatoonConfig) -> Iterator[Check]:
    for setting, host, port in ports_of(config):
        name = setting.removesuffix("_port").removesuffix(".port").replace(".", " ")
        status, detail = Status.OK, f"{host}:{port} is free"
        try:
            if port == 0:
                detail = "any free port"
            elif not is_free(host, port):
                if own_health(config) is not None:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
                detail = f"{host}:{port}{_SERVED}"
        except OSError as err:
            status, detail = Status.FAIL, f"{host}:{port} cannot be bound: {err.strerror}"
        yield Check(name=f"port {name}", status=status, detail=detail)


def _check_tls(config: RatoonConfig) -> Iterator[Check]:
    from ratoon.edge.tls import ENDS_SOON, files_of, load_certificates

    files = files_of(config)
    if files is None:
        yield Check(name="tls", status=Status.OK, detail="off: plain text")
        return
    try:
        ends_at = load_certificates(files).ends_at
    except RatoonError as err:
        yield Check(name="tls", status=Status.FAIL, detail=err.message)
        return
    ends_soon = ends_at - datetime.now(UTC) < ENDS_SOON
    detail = f"certificates until {ends_at:%Y-%m-%d %H:%M} UTC"
    yield Check(name="tls", status=Status.WARN if ends_soon else Status.OK, detail=detail)


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _check_disk(config: RatoonConfig) -> Iterator[Check]:
    root = _existing_parent(config.data_root)
    free_bytes = shutil.disk_usage(root).free
    ok = free_bytes >= MIN_FREE_DISK_BYTES
    detail = f"{free_bytes / 2**30:.1f} GiB free for {config.data_root.absolute()}"
    if not ok:
        detail += f"; wants {MIN_FREE_DISK_BYTES / 2**30:.0f} GiB"
    if config.weights_root is not None:
        free_bytes = shutil.disk_usage(_existing_parent(config.weights_root)).free
        detail += f", {free_bytes / 2**30:.1f} GiB for {config.weights_root.absolute()}"
    yield Check(name="disk", status=Status.OK if ok else Status.FAIL, detail=detail)


def _check_policies(config: RatoonConfig) -> Iterator[Check]:
    """Report policies whose journal has lost its end, and what was set aside for that."""
    from ratoon.engine.files.losses import read_loss
    from ratoon.engine.files.paths import POLICIES
    from ratoon.engine.settings import EngineSettings
    from ratoon.stream.files import DamagedFileError

    settings = EngineSettings.from_config(config)
    root = settings.data_root / POLICIES
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.name.startswith("."):
            continue
        paths = settings.paths(folder.name)
        try:
            loss = read_loss(paths)
            detail = "" if loss is None else loss.text
        except DamagedFileError as err:
            detail = f"{paths.loss}: {err}"
        if detail:
            yield Check(name=f"policy {folder.name}", status=Status.WARN, detail=detail)
        for aside in (paths.set_aside, paths.weights_set_aside):
            if aside.is_dir():
                size_bytes = sum(p.stat().st_size for p in aside.rglob("*") if p.is_file())
                detail = f"{aside} has {size_bytes / 2**30:.1f} GiB that starts have set aside"
                yield Check(name=f"policy {folder.name}", status=Status.WARN, detail=detail)


def _check_memory() -> Iterator[Check]:
    free_bytes = psutil.virtual_memory().available
    ok = free_bytes >= MIN_FREE_MEMORY_BYTES
    detail = f"{free_bytes / 2**30:.1f} GiB available, {psutil.cpu_count()} cores"
    if not ok:
        detail += f"; wants {MIN_FREE_MEMORY_BYTES / 2**30:.0f} GiB"
    yield Check(name="memory", status=Status.OK if ok else Status.WARN, detail=detail)


def _check_ray() -> Iterator[Check]:
    version = metadata.version("ray")
    # Only its size is read.
    shm = Path("/dev/shm")  # nosec B108
    if shm.is_dir():
        free_bytes = shutil.disk_usage(shm).free
        detail = f"{version}, {free_bytes / 2**20:.0f} MiB of shared memory free"
    else:
        detail = f"{version}, no /dev/shm: the object store uses plain files"
    yield Check(name="ray", status=Status.OK, detail=detail)


def _check_cluster(config: RatoonConfig) -> Iterator[Check]:
    if not config.ray.address:
        return
    import ray
    from ray.exceptions import RayError

    from ratoon.cluster.placement import look_at_nodes

    try:
        ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
        nodes = look_at_nodes(config.data_root.absolute())
    except RayError as err:
        raise RuntimeError(str(err)) from err
    finally:
        ray.shutdown()
    yield from judge_nodes(nodes, config.data_root.absolute())


def judge_nodes(nodes: Sequence[Node], data_root: Path) -> Iterator[Check]:
    """Check that all nodes have the first one's versions and data root.

    A policy's ranks may be on any node.
    """
    first = nodes[0].seen
    for node in nodes:
        seen, faults = node.seen, list[str]()
        for name, version in seen.versions.items():
            if version != first.versions[name]:
                faults.append(f"{name} {version}, the head has {first.versions[name]}")
        if seen.folder != first.folder:
            there = "is not there" if seen.folder is None else "is another folder than the head's"
            faults.append(f"{data_root} {there}")
        if seen.interface is None:
            faults.append("no network interface has this address")
        found = [f"{node.num_gpus} {node.gpu or 'GPU'}, {node.num_free_gpus} free"]
        found += [seen.links] if seen.links else []
        found += [f"ranks copy through {seen.interface}"] if seen.interface else []
        yield Check(
            name=f"node {node.address}",
            status=Status.FAIL if faults else Status.OK,
            detail="; ".join([*faults, *found]),
        )
    if first.folder is None and all(node.seen.folder is None for node in nodes):
        detail = f"{data_root} is on no node yet; all have to see the same"
        yield Check(name="data root", status=Status.WARN, detail=detail)


def own_health(config: RatoonConfig) -> str | None:
    """Return why the service of `config`, on this machine, is not healthy; None if it is.

    Its certificate is not verified, as the probe sends no secret. A service that refuses the probe
    because it requires another client certificate counts as healthy.
    """
    from ratoon.edge.tls import files_of

    host = _OWN.get(config.http.host, config.http.host)
    files = files_of(config)
    if files is None:
        connection = http.client.HTTPConnection(host, config.http.port, timeout=_PROBE_S)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(files.cert, files.key)
        connection = http.client.HTTPSConnection(
            host, config.http.port, timeout=_PROBE_S, context=context
        )
    asks_clients = files is not None and files.client_ca is not None
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        connection.request("GET", _HEALTH)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as err:
        # In TLS 1.3 a server refuses a client only after its own part of the handshake.
        is_refused = is_connected or (isinstance(err, ssl.SSLError) and "ALERT" in str(err))
        if asks_clients and is_refused and not isinstance(err, TimeoutError):
            return None
        return str(err) or type(err).__name__
    finally:
        connection.close()
    return None if status == http.client.OK else f"HTTP {status}"
