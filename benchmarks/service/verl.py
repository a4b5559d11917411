"""`make bench-verl`: updates of verl's own actor and of the service's, on the same batches.

Both are verl's worker in this process, called as its trainer calls it, in turns. verl's own is
FSDP2 with sdpa, which pads the rows of a micro-batch where there is no flash attention; the other
has the update done by a service on this machine, wire included. Both are float32 with two threads.

    python -m benchmarks.service.verl --out benchmarks/results/cpu/verl.json
    python -m benchmarks.service.verl --report FILE --markdown docs/performance.md
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.command import make_parser, run_figures
from benchmarks.common.document import figure_lines, write_section
from harness.environment import describe
from harness.service import Service
from harness.verl_site import (
    ACTOR,
    FSDP,
    RATOON,
    Run,
    make_batch,
    run_config,
    verl_on_path,
    worker_group,
)

BEGIN = "<!-- verl: written by benchmarks/service/verl.py -->"
END = "<!-- end of verl -->"
NUM_THREADS = 2
PROMPT_TOKENS = 256
RESPONSE_TOKENS = 64
PROMPTS, RESPONSES = 4, 8
WARM_UPDATES = 2
TARGETS = {"update_ratio": 1.0, "token_ratio": 1.0, "loss_off": 1e-5, "norm_off": 1e-5}
WHAT = {
    "update_ratio": "time of an update over that of verl's own actor",
    "token_ratio": "tokens run over those of the rows without padding",
    "loss_off": "largest difference of a loss",
    "norm_off": "largest difference of a gradient norm, relative",
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--updates", type=int, default=10, help="of each actor")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    run_figures(args, lambda: measure(args.updates, args.seed), _cells, write_markdown)


def measure(updates: int, seed: int) -> dict[str, Any]:
    """Every figure of `WHAT`, and what it was made of."""
    environment = describe(seed)
    with tempfile.TemporaryDirectory(prefix="rt-") as root:
        settings = {"device": "cpu", "num_threads": NUM_THREADS}
        with Service(Path(root), crash_points=False, worker=settings) as service:
            taken = _updates(Path(root) / "model", service.grpc, updates, seed)
    return {**figures(taken), **environment, "updates": taken}


def _updates(folder: Path, url: str, updates: int, seed: int) -> dict[str, list[dict[str, float]]]:
    """Seconds, loss, gradient norm and tokens of each update after the first, by actor."""
    import torch

    torch.set_num_threads(NUM_THREADS)
    _write_model(folder)
    common = (
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        f"{ACTOR}.optim.lr=1e-5",
    )
    taken: dict[str, list[dict[str, float]]] = {"verl": [], "ratoon": []}
    with verl_on_path(), worker_group():
        runs = {
            "verl": Run(run_config(folder, *FSDP, *common)),
            "ratoon": Run(run_config(folder, RATOON, f"+{ACTOR}.ratoon_url={url}", *common)),
        }
        for number in range(WARM_UPDATES + updates):
            prompts = [
                [12 + (number + place + token * (place + 1)) % 48 for token in range(PROMPT_TOKENS)]
                for place in range(PROMPTS)
            ]
            for name, run in runs.items():
                batch = make_batch(prompts, RESPONSES, RESPONSE_TOKENS, seed + number)
                tokens = float(batch.batch["attention_mask"].sum())
                start = time.perf_counter()
                found = run.update(batch)
                taken[name].append(
                    {
                        "seconds": time.perf_counter() - start,
                        "loss": float(found["actor/loss"][0]),
                        "grad_norm": float(found["actor/grad_norm"][0]),
                        "tokens": float(found.get("actor/ratoon/packed_tokens", [tokens])[0]),
                    }
                )
    return {name: rows[WARM_UPDATES:] for name, rows in taken.items()}


def _write_model(folder: Path) -> None:
    """A Qwen3 of random weights with a tokenizer: 4 layers of 256, 1.9 million parameters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from ratoon.model.presets import byte_tokenizer

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def figures(taken: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Every figure of `WHAT`, of the updates of both actors on the same batches."""

    def column(actor: str, name: str) -> list[float]:
        return [row[name] for row in taken[actor]]

    def off(name: str) -> list[tuple[float, float]]:
        return list(zip(column("ratoon", name), column("verl", name), strict=True))

    seconds = {actor: statistics.median(column(actor, "seconds")) for actor in taken}
    return {
        "update_ratio": seconds["ratoon"] / seconds["verl"],
        "token_ratio": sum(column("ratoon", "tokens")) / sum(column("verl", "tokens")),
        "loss_off": max(abs(ours - theirs) for ours, theirs in off("loss")),
        "norm_off": max(abs(ours / theirs - 1) for ours, theirs in off("grad_norm")),
        "verl_update_s": seconds["verl"],
        "ratoon_update_s": seconds["ratoon"],
    }


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    of_what = (
        f"medians of {len(result['updates']['verl'])} updates: {result['ratoon_update_s']:.3g} s, "
        f"and {result['verl_update_s']:.3g} s of verl's own"
    )
    write_section(path, BEGIN, END, figure_lines(result, _cells(result), of_what, result_link))


def _cells(result: dict[str, Any]) -> list[list[str]]:
    return [[what, f"{result[name]:.3g}", f"<= {TARGETS[name]:g}"] for name, what in WHAT.items()]


if __name__ == "__main__":
    main()
