"""Times publication of a large policy beside its training, through the service on one GPU.

The model has random weights, made here. Versions, and the model's folder, are below `--root`.

    python -m benchmarks.stream.gpu --out benchmarks/results/h200/streams.json --root /dev/shm
    python -m benchmarks.stream.gpu --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import aligned, link, markdown_table, write_section
from benchmarks.service import start
from benchmarks.service.run import MODEL, SMALL, Plan, rollouts, write_model
from benchmarks.service.start import PATIENCE_S
from harness.gpu_results import write_result
from harness.service import Service
from ratoon_client import ClientConfig, Loss, Optim, Publish, RatoonClient
from ratoon_proto.types import PublishKindName

BEGIN = "<!-- streams of a GPU: written by benchmarks/stream/gpu.py -->"
END = "<!-- end of streams of a GPU -->"
# Pairs of each policy; the first ones compile, and write to memory that is new.
NUM_PAIRS, NUM_LEFT_OUT = 5, 2
GB = 10**9
WANTED = {
    "trainer_stall_s": "<= 0.15",
    "visible_s": "<= 1.0",
    "update_over_trained": "<= 1.08",
    "pull_s": "",
    "pull_host_s": "",
    "delta_visible_s": "<= 0.5",
    "trained_beside_delta": "<= 1.02",
    "changed_share": "",
    "delta_percent": "",
}
WHAT = {
    "trainer_stall_s": "publishing holds the trainer, seconds",
    "visible_s": "from a step's end until its version can be fetched, seconds",
    "update_over_trained": "an update as its caller waits for it, over what is trained in it",
    "pull_s": "the version pulled over HTTP on the same machine, seconds",
    "pull_host_s": "the same by its `weights_root`: linked and verified, seconds",
    "delta_visible_s": "until its delta can be fetched by who has the version before, seconds",
    "trained_beside_delta": "what is trained in an update beside a delta, over that without",
    "changed_share": "weights that a step changes, of 1",
    "delta_percent": "its delta, % of the version; absent where it is no gain",
}
# Seconds for which publishing held the trainer, at commit 5da8ddf on one H100 with this model.
BEFORE = "8.3-11.4"


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    parser.add_argument("--host-gib", type=int, default=0, help="memory lent to activations")
    parser.add_argument("--start", type=Path, help="measure benchmarks.service.start into it, too")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(aligned([["", "measured", "wanted"], *_cells(result)])))
    if args.report is not None and args.markdown is not None:
        write_markdown(result, args.markdown, link(args.report, args.markdown))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    plan = start.FULL if is_for_gpu(args) else replace(SMALL, dtype="bfloat16")
    plan = replace(plan, host_gib=args.host_gib)
    with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
        root = Path(folder)
        write_model(plan, args.device, root / "models" / MODEL, args.seed)
        if args.start is not None:
            write_result(args.start, start.measure(plan, args.device, root, args.seed), seed=0)
        result: dict[str, Any] = {}
        for result in measure(plan, args.device, root, args.seed):
            if args.out is not None:
                write_result(args.out, result, seed=args.seed)
    return result


def measure(plan: Plan, device: str, root: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Medians and their samples: of a policy without deltas, then with those of one that has them,
    which are absent before.
    """
    weights_root = root / "weights"
    settings: dict[str, Any] = {
        **start.settings_of(plan, device, root),
        "weights_root": str(weights_root),
    }
    with (
        Service(root, **settings) as service,
        RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client,
    ):
        plain = _updates(client, plan, seed, with_deltas=False)
        pull_s, size_bytes = _pull(service, root, None)
        pull_host_s, _ = _pull(service, root, weights_root)
        steady = plain[NUM_LEFT_OUT:]
        result = {
            "trainer_stall_s": _median(steady, "publish_s"),
            "visible_s": _median(steady, "visible_s"),
            "update_over_trained": statistics.median(r["seconds"] / r["trained_s"] for r in steady),
            "pull_s": pull_s,
            "pull_host_s": pull_host_s,
            "delta_visible_s": None,
            "changed_share": None,
            "delta_percent": None,
            "version_gb": size_bytes / GB,
            "plan": asdict(plan),
            "updates": plain,
        }
        yield result
        client.delete_policy(start.POLICY).result(PATIENCE_S)
        deltas = _updates(client, plan, seed, with_deltas=True)
    with_delta = deltas[NUM_LEFT_OUT:]
    sizes = [row["delta_bytes"] for row in with_delta if row["delta_bytes"] is not None]
    yield result | {
        "delta_visible_s": _median(with_delta, "visible_s"),
        "changed_share": _median(with_delta, "changed_share"),
        "delta_percent": 100 * statistics.median(sizes) / size_bytes if sizes else None,
        "updates_with_deltas": deltas,
    }


def _pull(service: Service, root: Path, weights_root: Path | None) -> tuple[float, int]:
    """Seconds and bytes of the newest version.

    Raises `RuntimeError` where bytes were fetched beside a `weights_root`.
    """
    config = ClientConfig(timeout_s=PATIENCE_S, weights_root=weights_root)
    with (
        RatoonClient(service.http, config=config) as reader,
        tempfile.TemporaryDirectory(dir=root) as folder,
    ):
        begin = time.perf_counter()
        pulled = reader.pull_weights(start.POLICY, Path(folder) / "pulled")
        seconds = time.perf_counter() - begin
    if weights_root is not None and pulled.fetched_bytes:
        raise RuntimeError(f"{pulled.fetched_bytes} bytes were fetched, not linked")
    return seconds, sum(file.size_bytes for file in pulled.manifest.files)


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _updates(
    client: RatoonClient, plan: Plan, seed: int, *, with_deltas: bool
) -> list[dict[str, Any]]:
    """The second of each two updates, beside which the first one's version is published.

    `visible_s` begins at the end of the step: with what the trainer was held for. With deltas it
    ends when the delta from the version before is there, and `written_s` when the files are.
    """
    kind: PublishKindName = "every"
    client.create_policy(
        start.POLICY,
        model_folder=MODEL,
        dtype=plan.dtype,
        seed=seed,
        publish=Publish(kind, deltas=with_deltas),
        recovery="fail",
    ).result(PATIENCE_S)
    session, rows = client.policy(start.POLICY), []
    batch = [rollouts(plan, 1, seed)]
    optim = Optim(learning_rate=1e-6, changed_share=with_deltas)
    for _ in range(NUM_PAIRS):
        session.update(batch, loss=Loss("grpo"), optim=optim).result(PATIENCE_S)
        begin = time.perf_counter()
        result = session.update(batch, loss=Loss("grpo"), optim=optim).result(PATIENCE_S)
        ended = time.perf_counter()
        manifest = client.weight_manifest(
            start.POLICY,
            version=result.version,
            delta_from=result.version - 1 if with_deltas else None,
        )
        landed_s = time.perf_counter() - ended
        client.weight_manifest(start.POLICY, version=result.version)
        written_s = time.perf_counter() - ended
        phases = asdict(result.report.seconds)
        rows.append(
            {
                "seconds": ended - begin,
                "trained_s": phases["forward"] + phases["backward"] + phases["optimizer"],
                **{f"{name}_s": value for name, value in phases.items()},
                "visible_s": phases["publish"] + landed_s,
                "written_s": phases["publish"] + written_s,
                "num_micro_batches": result.report.num_micro_batches,
                "peak_memory_bytes": result.report.peak_memory_bytes,
                "changed_share": result.report.changed_share,
                "delta_bytes": sum(delta.file.size_bytes for delta in manifest.deltas) or None,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    where = (
        f"{result['gpu']}, torch {result['versions']['torch']}, commit {result['commit'][:12]}, "
        f"{result['plan']['model']['name']}, versions of {result['version_gb']:.3g} GB in memory, "
        f"medians of {NUM_PAIRS - NUM_LEFT_OUT}. [Raw samples]({result_link}). Before versions "
        f"were published beside training, on one H100: held for {BEFORE} seconds."
    )
    columns = ("", "measured", "wanted")
    write_section(path, BEGIN, END, [f"\n{where}\n", *markdown_table(columns, _cells(result))])


def _cells(result: dict[str, Any]) -> list[list[str]]:
    values = result | {"trained_beside_delta": _trained_beside_delta(result)}
    return [
        [what, "–" if values.get(name) is None else f"{values[name]:.3g}", WANTED[name]]
        for name, what in WHAT.items()
    ]


def _trained_beside_delta(result: dict[str, Any]) -> float | None:
    rows = result.get("updates_with_deltas")
    if rows is None:
        return None
    medians = [_median(of[NUM_LEFT_OUT:], "trained_s") for of in (rows, result["updates"])]
    return medians[0] / medians[1]


if __name__ == "__main__":
    main()
