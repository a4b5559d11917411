"""`make bench-wires`: scripts for the Tinker API against this service, unmodified.

Recipes of the cookbook, with URL and key alone, on a random model and made-up data sets in the
folder they run in; what prompts they share; and the cookbook's loop on a reward that a random model
can learn, with its rewards and with shuffled ones.

    python -m benchmarks.service.wires --out benchmarks/results/cpu/wires.json
    python -m benchmarks.service.wires --report FILE --markdown docs/performance.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.common.command import make_parser, run_figures
from benchmarks.common.document import figure_lines, write_section
from harness.environment import ROOT, describe
from harness.service import Service

BEGIN = "<!-- wires: written by benchmarks/service/wires.py -->"
END = "<!-- end of wires -->"
SITES = [ROOT / ".compat" / "cookbook", ROOT / ".compat" / "tinker-0.38.0", ROOT / ".venv-trl"]
SCRIPT = Path(__file__).with_name("wires_script.py")
MODEL = "Qwen/Qwen3-8B-Base"
PATIENCE_S = 600.0
# A recipe's module, its arguments beside model and folder, and its steps.
RECIPES = {
    "arithmetic": (
        "math_rl.train",
        "env=arithmetic renderer_name=role_colon group_size=4 groups_per_batch=4 max_steps=3",
        3,
    ),
    "rl_loop": ("rl_loop", "batch_size=4 group_size=8 max_tokens=8 max_steps=3", 3),
    "sl_loop": ("sl_loop", "batch_size=16 max_steps=4 learning_rate=1e-2", 4),
    "chat_sl": (
        "chat_sl.train",
        "dataset=chat.jsonl renderer_name=role_colon batch_size=16 max_length=256 max_steps=4",
        4,
    ),
}
STEPS = 60
WHAT = {
    **{f"{name}_s": (f"recipe {name}, s", "<=", 30.0) for name in RECIPES},
    "rho_in_order": ("rho of 4 prompts with 8 samples, in order", ">=", 4.5),
    "rho_shuffled": ("the same datums shuffled", ">=", 4.5),
    "learned": (f"held-out reward after {STEPS} steps", ">=", 0.8),
    "learned_shuffled": ("the same with shuffled rewards", "<=", 0.2),
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    run_figures(args, lambda: measure(args.seed), _cells, write_markdown)


def measure(seed: int) -> dict[str, Any]:
    """Every figure of `WHAT`. Raises `RuntimeError` for a script that fails, `SystemExit` without
    the SDK."""
    if not all((site / ".stamp").exists() for site in SITES):
        raise SystemExit("the SDK and its cookbook are not installed: make env-cookbook")
    environment = describe(seed)
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        root = Path(folder)
        write_folder(root / "work", root / "models", seed)
        settings = {"device": "cpu", "num_threads": 1, "max_tenants": 8}
        service = Service(root, crash_points=False, worker=settings, tinker={"enabled": True})
        with service:
            recipes = {name: _recipe(name, service, root / "work") for name in RECIPES}
            shares = _script(service, root / "work", "shares", MODEL)
            learned = {
                name: _script(service, root / "work", "learns", MODEL, name, STEPS, seed, is_so)
                for name, is_so in (("learned", "false"), ("learned_shuffled", "true"))
            }
    return {
        **{f"{name}_s": found["seconds"] for name, found in recipes.items()},
        "rho_in_order": shares["in order"],
        "rho_shuffled": shares["shuffled"],
        **{name: found["after"] for name, found in learned.items()},
        **environment,
        "recipes": recipes,
        "learning": learned,
    }


def write_folder(work: Path, models: Path, seed: int) -> None:
    """Make the folder that recipes run in: a model and data sets under the names they ask for."""
    import torch
    from transformers import Qwen3ForCausalLM

    from ratoon.model.presets import byte_tokenizer, preset_config

    torch.manual_seed(seed)
    Qwen3ForCausalLM(cast("Any", preset_config("tiny"))).save_pretrained(models / MODEL)
    byte_tokenizer().save_pretrained(models / MODEL)
    work.mkdir()
    (work / "Qwen").symlink_to(models / "Qwen")
    sums = [(number, number * 7 % 100) for number in range(64)]
    questions = [
        {"question": f"What is {a} + {b}?", "answer": f"They add up.\n#### {a + b}"}
        for a, b in sums
    ]
    chats = [
        {
            "prompt": f"{a} + {b}",
            "messages": [
                {"role": "user", "content": f"{a} + {b}"},
                {"role": "assistant", "content": str(a + b)},
            ],
        }
        for a, b in sums
    ]
    _write_data_set(work / "openai" / "gsm8k", "main", questions)
    _write_data_set(work / "HuggingFaceH4" / "no_robots", "default", chats)
    _write_lines(work / "chat.jsonl", [{"messages": each["messages"]} for each in chats])


def _write_data_set(folder: Path, name: str, rows: list[Any]) -> None:
    folder.mkdir(parents=True)
    _write_lines(folder / "rows.jsonl", rows)
    splits = [{"split": split, "path": "rows.jsonl"} for split in ("train", "test")]
    card = json.dumps({"configs": [{"config_name": name, "data_files": splits}]})
    (folder / "README.md").write_text(f"---\n{card}\n---\n", encoding="utf-8")


def _write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _recipe(name: str, service: Service, work: Path) -> dict[str, Any]:
    """Run a recipe to its end: its seconds, and the metrics of its steps."""
    module, options, steps = RECIPES[name]
    start = time.perf_counter()
    given = [*options.split(), f"model_name={MODEL}", f"log_path={name}"]
    _run(service, work, ["-m", f"tinker_cookbook.recipes.{module}", *given])
    seconds = time.perf_counter() - start
    lines = (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    if len(metrics) < steps:
        raise RuntimeError(f"{name} ended after {len(metrics)} of {steps} steps")
    return {"seconds": seconds, "steps": metrics}


def _script(service: Service, work: Path, *arguments: object) -> dict[str, float]:
    start = time.perf_counter()
    told = _run(service, work, [str(SCRIPT), *map(str, arguments)])
    return {**json.loads(told.splitlines()[-1]), "seconds": time.perf_counter() - start}


def _run(service: Service, work: Path, command: list[str]) -> str:
    """Run Python with the SDK and the cookbook. Raises `RuntimeError` with what it said last."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=work,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, SITES)),
            "TINKER_BASE_URL": service.http,
            "TINKER_API_KEY": "tml-none-is-asked-for",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(work / "cache"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    of_what = "one run of each"
    write_section(path, BEGIN, END, figure_lines(result, _cells(result), of_what, result_link))


def _cells(result: dict[str, Any]) -> list[list[str]]:
    return [
        [what, f"{result[name]:.3g}", f"{sign} {target:g}"]
        for name, (what, sign, target) in WHAT.items()
    ]


if __name__ == "__main__":
    main()
