"""`make bench-streams`: versions on their way out, on the CPU and over loopback.

A service publishes versions of 2 GB in memory. Its edge is read by plain readers that keep nothing,
by ranges over HTTP beside a bare server that calls sendfile, over gRPC beside a bare `grpc.aio`
server of the same file, and by the client's whole pulls over both and on the same host; in turn,
each as often. Updates with and without a publication are compared in one run.

Then deltas, of files alone (`delta.py`).

    python -m benchmarks.stream.main --out benchmarks/results/cpu/streams.json
    python -m benchmarks.stream.main --report FILE --markdown docs/performance.md
"""

from __future__ import annotations

import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.command import make_parser, run_figures
from benchmarks.common.document import figure_lines, markdown_table, write_section
from benchmarks.service.run import SMALL, Plan, rollouts, write_model
from benchmarks.step.workload import Group, ModelSize
from benchmarks.stream import bare_servers, delta
from harness.environment import describe
from harness.service import Service
from ratoon_client import ClientConfig, Loss, Optim, Publish, RatoonClient
from ratoon_proto.types import WeightManifest

BEGIN = "<!-- streams: written by benchmarks/stream/main.py -->"
END = "<!-- end of streams -->"
POLICY = "streams"
PATIENCE_S = 600.0
GB = 1e9
READ_BYTES = 2**20
HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
# A caller that reads nothing more, and how long its memory is waited for.
STALL_S = 5.0
# 500 million float32: a version of 2 GB, beside which gradients and moments have room.
SIZE = ModelSize(
    name="500M", num_layers=12, hidden_size=1536, num_heads=12, num_kv_heads=4, head_dim=128,
    intermediate_size=6144, vocab_size=48_000, ties_embeddings=True,
)  # fmt: skip
FULL = Plan(
    model=SIZE,
    dtype="float32",
    group=Group(prompt=256, responses=(64, 64, 64, 64)),
    # Here in fours.
    num_updates=4,
    num_threads=2,
)
# Number of updates per published version.
CYCLE = 4
TARGETS = {
    "http_gb_s": ">= 1.5, or the next",
    "http_over_sendfile": ">= 0.8",
    "grpc_over_bare": ">= 0.7",
    "pull_http_gb_s": ">= 1.0",
    "pull_grpc_gb_s": "",
    "pull_host_gb_s": ">= 2",
    "publish_adds": "< 0.05",
    "stall_s": "",
    "visible_s": "",
    "stalled_mb": "< 64",
    "delta_percent": "<= 1.6",
    "rebuild_s": "< 3",
}
WHAT = {
    "http_gb_s": "a version read over HTTP, GB/s",
    "http_over_sendfile": "the same over a bare sendfile server",
    "grpc_over_bare": "over gRPC over a bare grpc.aio server",
    "pull_http_gb_s": "the client's pull over HTTP, written and verified, GB/s",
    "pull_grpc_gb_s": "the same over gRPC",
    "pull_host_gb_s": "the same on the service's host: linked and verified",
    "publish_adds": "what publishing each version adds to an update, of 1",
    "stall_s": "publishing holds the trainer, seconds",
    "visible_s": "from a step's end until its version can be fetched, seconds",
    "stalled_mb": "memory that a reader who stalls takes of the gateway, MB",
    "delta_percent": "a delta of 1% changed values, % of its version",
    "rebuild_s": "a version of 2 GB made of it, seconds",
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--repeats", type=int, default=5, help="reads of each kind")
    parser.add_argument("--weights-root", type=Path, default=Path("/dev/shm/rt-streams"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    plan = SMALL if args.small else FULL

    def measured() -> dict[str, Any]:
        return measure(plan, args.repeats, args.weights_root, args.seed)

    run_figures(args, measured, _cells, write_markdown)


def measure(plan: Plan, repeats: int, weights_root: Path, seed: int) -> dict[str, Any]:
    """All figures of one service, and the samples they are medians of."""
    environment = describe(seed)
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        root = Path(folder)
        write_model(plan, "cpu", root / "models" / POLICY, seed)
        worker = {"device": "cpu", "num_threads": plan.num_threads}
        try:
            with Service(root, worker=worker, weights_root=str(weights_root)) as service:
                updates = _updates(service, plan, seed)
                with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
                    manifest = client.weight_manifest(POLICY)
                reads = _reads(service, manifest, weights_root, repeats)
                stalled = _stalled_mb(service, manifest)
        finally:
            shutil.rmtree(weights_root, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="rt-", dir=weights_root.parent) as folder:
        size_mb = 2000 if plan is FULL else 20
        deltas = delta.measure(Path(folder), size_mb, (repeats + 1) // 2, seed)
    # The figure is that of the worse kind of change.
    of_one_percent = [row for row in deltas if row["share"] == 0.01]
    medians = {name: statistics.median(samples) for name, samples in reads.items()}
    seconds = {
        kind: statistics.median(row["seconds"] for row in rows) for kind, rows in updates.items()
    }
    return {
        "http_gb_s": medians["http"],
        "http_over_sendfile": medians["http"] / medians["sendfile"],
        "grpc_over_bare": medians["grpc"] / medians["bare grpc"],
        "pull_http_gb_s": medians["pull http"],
        "pull_grpc_gb_s": medians["pull grpc"],
        "pull_host_gb_s": medians["pull host"],
        # If each version is published, each update is held and overlaps a publication.
        "publish_adds": (seconds["held"] + seconds["beside"]) / seconds["alone"] - 2,
        "stall_s": statistics.median(row["stall_s"] for row in updates["held"]),
        "visible_s": statistics.median(row["visible_s"] for row in updates["held"]),
        "stalled_mb": stalled,
        "delta_percent": max(row["size_percent"] for row in of_one_percent),
        "rebuild_s": max(row["rebuild_s"] for row in of_one_percent),
        **environment,
        "version_gb": sum(file.size_bytes for file in manifest.files) / GB,
        "reads_gb_s": reads,
        "updates": updates,
        "deltas": deltas,
    }


def _updates(service: Service, plan: Plan, seed: int) -> dict[str, list[dict[str, float]]]:
    """Runs updates one after the other, and publishes every fourth one's version. `held`: that one.
    `beside`: the next, during which its version is written. `alone`: the two others. The first is
    left out."""
    rows: dict[str, list[dict[str, float]]] = {"held": [], "beside": [], "alone": []}
    with (
        RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client,
        RatoonClient(service.grpc, timeout_s=PATIENCE_S) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        publish = Publish("every_n", every_n=CYCLE)
        client.create_policy(
            POLICY, model_folder=POLICY, dtype=plan.dtype, publish=publish, recovery="fail"
        ).result(PATIENCE_S)
        client.weight_manifest(POLICY)
        session = client.policy(POLICY)

        def updated(version: int) -> tuple[dict[str, float], float]:
            batch = [rollouts(plan, version, seed + version)]
            started = time.perf_counter()
            update = session.update(batch, loss=Loss("grpo"), optim=Optim(learning_rate=1e-6))
            stall_s = update.result(PATIENCE_S).report.seconds.publish
            ended = time.perf_counter()
            return {"seconds": ended - started, "stall_s": stall_s}, ended

        def seen_at(version: int) -> float:
            reader.weight_manifest(POLICY, version=version, wait_s=PATIENCE_S)
            return time.perf_counter()

        updated(1)
        for version in range(2, CYCLE * plan.num_updates, CYCLE):
            rows["alone"] += [updated(version)[0], updated(version + 1)[0]]
            held, ended = updated(version + 2)
            seen = thread.submit(seen_at, version + 2)
            rows["beside"].append(updated(version + 3)[0])
            rows["held"].append(held | {"visible_s": held["stall_s"] + seen.result() - ended})
    return rows


@dataclass(frozen=True, slots=True)
class _File:
    """Largest file of a version: its name for readers, and its path on the disk."""

    name: str
    digest: str
    size_bytes: int
    url_path: str
    path: Path


def _reads(
    service: Service, manifest: WeightManifest, weights_root: Path, repeats: int
) -> dict[str, list[float]]:
    """GB/s of each reader, `repeats` times in turn, after one that warms up."""
    largest = max(manifest.files, key=lambda file: file.size_bytes)
    found = next(weights_root.rglob(f"{manifest.version:08d}/{largest.name}"))
    url_path = f"/v1/policies/{POLICY}/weights/{manifest.version}/files/{largest.name}"
    file = _File(largest.name, largest.digest, largest.size_bytes, url_path, found)
    samples: dict[str, list[float]] = {}
    with bare_servers.serving(file.path) as (sendfile_port, grpc_port):
        readers: dict[str, Callable[[], float]] = {
            "sendfile": lambda: _timed(file, lambda: _read_http(sendfile_port, file)),
            "http": lambda: _timed(file, lambda: _read_http(service.http_port, file)),
            "bare grpc": lambda: _timed(
                file, lambda: bare_servers.read_grpc(grpc_port, POLICY, file)
            ),
            "grpc": lambda: _timed(
                file, lambda: bare_servers.read_grpc(service.grpc_port, POLICY, file)
            ),
            "pull http": lambda: _pull(service.http, weights_root.parent),
            "pull grpc": lambda: _pull(service.grpc, weights_root.parent),
            "pull host": lambda: _pull(service.http, weights_root.parent, weights_root),
        }
        for number in range(repeats + 1):
            for name, read in readers.items():
                rate = read()
                if number:
                    samples.setdefault(name, []).append(round(rate, 4))
    return samples


def _timed(file: _File, read: Callable[[], None]) -> float:
    """GB/s."""
    started = time.perf_counter()
    read()
    return file.size_bytes / GB / (time.perf_counter() - started)


def _read_http(port: int, file: _File) -> None:
    """All ranges of the file, as many at a time and as long as `ratoon_client` asks for them.

    Raises `RuntimeError` where bytes are missing.
    """
    config = ClientConfig()
    starts = range(0, file.size_bytes, config.chunk_bytes)
    with ThreadPoolExecutor(config.fetches_in_flight) as threads:
        places = config.fetches_in_flight
        of_each = [starts[first::places] for first in range(places)]
        lengths = threads.map(lambda some: _read_ranges(port, file, some), of_each)
        if (length := sum(lengths)) != file.size_bytes:
            raise RuntimeError(f"{length} of {file.size_bytes} bytes")


def _read_ranges(port: int, file: _File, starts: range) -> int:
    """Bytes that came over one connection, range by range, into one buffer."""
    buffer, length = bytearray(READ_BYTES), 0
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as reader:
        for start in starts:
            stop = min(start + ClientConfig().chunk_bytes, file.size_bytes)
            head, rest = _asked(reader, file, f"Range: bytes={start}-{stop - 1}")
            missing = int(_LENGTH.search(head)[1])  # pyright: ignore[reportOptionalSubscript]
            if not head.startswith(b"HTTP/1.1 206"):
                raise RuntimeError(head.decode(errors="replace"))
            length += missing
            missing -= len(rest)
            while missing and (size := reader.recv_into(buffer, min(missing, READ_BYTES))):
                missing -= size
            if missing:
                return length - missing
    return length


def _asked(reader: socket.socket, file: _File, *headers: str) -> tuple[bytes, bytes]:
    """The head of the answer, and what of its body came with it."""
    lines = (f"GET {file.url_path} HTTP/1.1", "Host: localhost", *headers)
    reader.sendall("\r\n".join((*lines, "", "")).encode())
    answer = b""
    while HEAD_END not in answer:
        if not (data := reader.recv(4096)):
            raise RuntimeError(f"no answer but {answer!r}")
        answer += data
    head, _, rest = answer.partition(HEAD_END)
    return head, rest


def _pull(target: str, beside: Path, weights_root: Path | None = None) -> float:
    """GB/s of a client that has its connection: a version whole and verified, in memory.

    Raises `RuntimeError` where bytes were fetched beside a `weights_root`.
    """
    config = ClientConfig(timeout_s=PATIENCE_S, weights_root=weights_root)
    with (
        tempfile.TemporaryDirectory(dir=beside) as folder,
        RatoonClient(target, config=config) as client,
    ):
        client.server_info()
        started = time.perf_counter()
        pulled = client.pull_weights(POLICY, Path(folder) / "pulled")
        seconds = time.perf_counter() - started
    if weights_root is not None and pulled.fetched_bytes:
        raise RuntimeError(f"{pulled.fetched_bytes} bytes were fetched, not linked")
    return sum(file.size_bytes for file in pulled.manifest.files) / GB / seconds


def _stalled_mb(service: Service, manifest: WeightManifest) -> float:
    """Growth of the gateway's memory for one reader of a whole file that stalls."""
    largest = max(manifest.files, key=lambda file: file.size_bytes)
    url_path = f"/v1/policies/{POLICY}/weights/{manifest.version}/files/{largest.name}"
    file = _File(largest.name, largest.digest, largest.size_bytes, url_path, Path())
    gateway = psutil.Process(service.pids("gateway")[0])
    before = gateway.memory_info().rss
    with socket.create_connection(("127.0.0.1", service.http_port), timeout=PATIENCE_S) as reader:
        _asked(reader, file)
        time.sleep(STALL_S)
        return (gateway.memory_info().rss - before) / 1e6


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    num_reads = len(result["reads_gb_s"]["http"])
    of_what = f"versions of {result['version_gb']:.2g} GB, medians of {num_reads}"
    lines = [*figure_lines(result, _cells(result), of_what, result_link), ""]
    names = ("kind", "share", "size_percent", "bound_percent", "encode_s", "rebuild_s", "copy_s")
    cells = ([str(row.get(name, "")) for name in names] for row in result["deltas"])
    lines += markdown_table([name.replace("_", " ") for name in names], cells)
    write_section(path, BEGIN, END, lines)


def _cells(result: dict[str, Any]) -> list[list[str]]:
    return [[what, f"{result[name]:.3g}", TARGETS[name]] for name, what in WHAT.items()]


if __name__ == "__main__":
    main()
