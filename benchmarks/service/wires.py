"""`make bench-wires`: scripts for the Tinker API against this service, unmodified.

Recipes of the cookbook, with URL and key alone, on a random model and made-up data sets in the
folder they run in; what prompts they share; eight scripts at once on one base; and the cookbook's
loop on a reward that a random model can learn, with its rewards and with shuffled ones. Each part
is written as it ends, so that a run that is cut keeps what it has.

    python -m benchmarks.service.wires --out benchmarks/results/cpu/wires.json
    python -m benchmarks.service.wires --report FILE --markdown docs/performance.md
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.common.command import make_parser, names, run_figures
from benchmarks.common.document import figure_lines, write_json, write_section
from harness.environment import ROOT, describe
from harness.service import Service
from harness.tinker_site import NEWEST, SITES, STEPS, are_installed, environment
from ratoon_client import RatoonClient
from ratoon_proto.types import LoraTuning

BEGIN = "<!-- wires: written by benchmarks/service/wires.py -->"
END = "<!-- end of wires -->"
COOKBOOK = SITES / "cookbook"
OTHERS = [COOKBOOK, NEWEST, ROOT / ".venv-trl"]
SCRIPT = Path(__file__).with_name("wires_script.py")
MODEL = "Qwen/Qwen3-8B-Base"
HEAD_SCALE = 5.0
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`site`: another version of the cookbook than `COOKBOOK`, or that."""

    module: str
    options: str
    steps: int
    site: Path = COOKBOOK


_ARITHMETIC = "env=arithmetic renderer_name=role_colon group_size=4 groups_per_batch=4 max_steps=3"
RECIPES = {
    "arithmetic": Recipe(module="math_rl.train", options=_ARITHMETIC, steps=3),
    "arithmetic_0_6": Recipe(
        module="math_rl.train",
        options=f"{_ARITHMETIC} loss_fn=importance_sampling",
        steps=3,
        site=SITES / "cookbook-0.6.1",
    ),
    "rl_loop": Recipe(
        module="rl_loop", options="batch_size=4 group_size=8 max_tokens=8 max_steps=3", steps=3
    ),
    "sl_loop": Recipe(
        module="sl_loop", options="batch_size=16 max_steps=4 learning_rate=1e-2", steps=4
    ),
    "chat_sl": Recipe(
        module="chat_sl.train",
        options="dataset=chat.jsonl renderer_name=role_colon batch_size=16 max_length=256 "
        "max_steps=4",
        steps=4,
    ),
    # Its loss is computed in the client, from log-probs.
    "dpo": Recipe(
        module="preference.dpo.train",
        options="renderer_name=role_colon batch_size=16 max_length=256 max_steps=4 "
        "learning_rate=1e-3",
        steps=4,
    ),
}
STEPS_LEARNED = 60
NUM_TENANTS, TENANT_STEPS = 8, 4
TURN_TENSORS, TURNS = 504, 200
WHAT = {
    **{f"{name}_s": (f"recipe {name}, s", "<=", 30.0) for name in RECIPES},
    "rho_in_order": ("rho of 4 prompts with 8 samples, in order", ">=", 4.5),
    "rho_shuffled": ("the same datums shuffled", ">=", 4.5),
    "tenants_equal": (
        f"scripts of {NUM_TENANTS} at once that compute the bits they compute alone",
        ">=",
        8.0,
    ),
    "tenants_memory": (
        f"memory of {NUM_TENANTS} models over one model's, 16 bytes a parameter of adapters aside",
        "<=",
        1.2,
    ),
    "tenants_switch_ms": (
        f"switch to another model's adapter ({TURN_TENSORS} tensors, 36 layers), ms",
        "<=",
        1.0,
    ),
    "learned": (f"held-out reward after {STEPS_LEARNED} steps", ">=", 0.8),
    "learned_shuffled": ("the same with shuffled rewards", "<=", 0.2),
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=names, default=(), help="these alone; default: all")
    args = parser.parse_args(arguments)
    run_figures(args, lambda: measure(args.seed, args.parts, args.out), _cells, write_markdown)


def measure(seed: int, parts: tuple[str, ...], out: Path | None) -> dict[str, Any]:
    """The figures of `WHAT`, and what they were made of; `out` has those that there are so far.

    `parts`: names of some, as `_parts` has them; (): all. Raises `RuntimeError` for a script that
    fails, `SystemExit` without the SDK.
    """
    if not are_installed([*OTHERS, *(recipe.site for recipe in RECIPES.values())]):
        raise SystemExit("the SDK and its cookbook are not installed: make env-cookbook")
    result = describe(seed)
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        root = Path(folder)
        write_folder(root / "work", root / "models", seed)
        settings = {"device": "cpu", "num_threads": 1, "max_tenants": NUM_TENANTS}
        service = Service(
            root,
            crash_points=False,
            worker=settings,
            tinker={"enabled": True},
            # Scripts ask the gateway: nothing of Serve starts beside them.
            serve={"num_replicas": 0},
        )
        with service:
            for name, part in _parts(service, root / "work", seed).items():
                if name in parts or not parts:
                    result |= part()
                    if out is not None:
                        write_json(out, result)
    return result


def _parts(service: Service, work: Path, seed: int) -> dict[str, Callable[[], dict[str, Any]]]:
    recipes = {name: partial(_recipe, name, service, work) for name in RECIPES}
    learns = {
        name: partial(_learned, name, service, work, seed, is_shuffled)
        for name, is_shuffled in (("learned", "false"), ("learned_shuffled", "true"))
    }
    return {
        **recipes,
        "shares": partial(_shares, service, work),
        "tenants": partial(_tenants, service, work),
        **learns,
    }


def write_folder(work: Path, models: Path, seed: int) -> None:
    """Make the folder that recipes run in: a model and data sets under the names they ask for."""
    import torch
    from transformers import Qwen3ForCausalLM

    from ratoon.model.presets import byte_tokenizer, preset_config

    torch.manual_seed(seed)
    config = cast("Any", preset_config("tiny"))
    config.tie_word_embeddings = False
    model = Qwen3ForCausalLM(config)
    # Adapters leave the head as it is: as small as it is drawn, it hardly lets logits move.
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD_SCALE)
    model.save_pretrained(models / MODEL)
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
    pairs = [
        {
            "chosen": f"\n\nHuman: {a} + {b}\n\nAssistant: {a + b}",
            "rejected": f"\n\nHuman: {a} + {b}\n\nAssistant: {a - b}",
        }
        for a, b in sums
    ]
    _write_data_set(work / "openai" / "gsm8k", "main", questions)
    _write_data_set(work / "Anthropic" / "hh-rlhf", "default", pairs)
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
    recipe = RECIPES[name]
    module = f"tinker_cookbook.recipes.{recipe.module}"
    given = [*recipe.options.split(), f"model_name={MODEL}", f"log_path={name}"]
    _, seconds = _run(service, work, ["-m", module, *given], recipe.site)
    lines = (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    if len(metrics) < recipe.steps:
        raise RuntimeError(f"{name} ended after {len(metrics)} of {recipe.steps} steps")
    return {f"{name}_s": seconds["wall_s"], name: {**seconds, "steps": metrics}}


def _shares(service: Service, work: Path) -> dict[str, Any]:
    told, seconds = _run(service, work, [str(SCRIPT), "shares", MODEL])
    found = json.loads(told.splitlines()[-1])
    return {
        "rho_in_order": found["in order"],
        "rho_shuffled": found["shuffled"],
        "shares": seconds,
    }


def _learned(
    name: str, service: Service, work: Path, seed: int, is_shuffled: str
) -> dict[str, Any]:
    command = [str(SCRIPT), "learns", MODEL, name, str(STEPS_LEARNED), str(seed), is_shuffled]
    told, seconds = _run(service, work, command)
    found = json.loads(told.splitlines()[-1])
    return {name: found["after"], f"{name}_run": {**found, **seconds}}


def _tenants(service: Service, work: Path) -> dict[str, Any]:
    """Scripts one by one, each without others' models, and then all of them at once."""
    seeds = [*range(1, NUM_TENANTS + 1)]
    alone, first = dict[int, list[Any]](), 0
    with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
        for seed in seeds:
            _delete_policies(client)
            alone |= _steps(service, work, [seed])
            first = first or _worker_bytes(service)
        (policy,) = client.list_policies()
        _delete_policies(client)
        begin = time.perf_counter()
        together = _steps(service, work, seeds)
        seconds = time.perf_counter() - begin
    last = _worker_bytes(service)
    adapters = 16 * policy.num_trainable_parameters * (NUM_TENANTS - 1)
    return {
        "tenants_equal": sum(together[seed] == alone[seed] for seed in seeds),
        "tenants_memory": (last - adapters) / first,
        "tenants_switch_ms": _switch_ms(service.root / "models"),
        "tenants": {
            "seconds": seconds,
            "bytes_of_one": first,
            "bytes_of_all": last,
            "adapter_parameters": policy.num_trainable_parameters,
        },
    }


def _switch_ms(models: Path) -> float:
    """Time in which the adapter of another model takes its place in the base."""
    import torch

    from ratoon.model.loader import read_model
    from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec

    spec = ModelSpec(
        base=FolderBase(folder=str(models / MODEL)),
        tuning=LoraTuning(rank=16, alpha=32.0),
        dtype=ModelDtype.FLOAT32,
        seed=0,
    )
    model = read_model(spec, models_root=models).place(torch.device("cpu"))
    adapters = [model.new_adapter(seed) for seed in range(2)]
    begin = time.perf_counter()
    for turn in range(TURNS):
        model.bind(adapters[turn % 2])
    seconds = (time.perf_counter() - begin) / TURNS
    return 1000 * seconds / len(adapters[0]) * TURN_TENSORS


def _delete_policies(client: RatoonClient) -> None:
    for policy in client.list_policies():
        client.delete_policy(policy.spec.policy_id)


def _steps(service: Service, work: Path, seeds: list[int]) -> dict[int, list[Any]]:
    """What each seed's script printed of its steps, without its model."""
    told, _ = _run(service, work, [str(STEPS), MODEL, str(TENANT_STEPS), *map(str, seeds)])
    found: dict[int, list[Any]] = {seed: [] for seed in seeds}
    for line in map(json.loads, told.splitlines()):
        found[line["seed"]].append((line["step"], line["loss"], line["digest"]))
    return found


def _worker_bytes(service: Service) -> int:
    """Private memory of the process that has the models: the service has one beside it, bare."""
    held = [psutil.Process(pid).memory_full_info().uss for pid in service.pids("worker")]
    if len(held) > 2:
        raise RuntimeError(f"{len(held)} workers, expected one with all models and a bare one")
    return max(held)


def _run(
    service: Service, work: Path, command: list[str], cookbook: Path = COOKBOOK
) -> tuple[str, dict[str, float]]:
    """Run Python with the SDK and a cookbook: what it printed, and seconds on the wall and of CPUs.

    Raises `RuntimeError` with what it said last.
    """
    sites = [cookbook, *OTHERS]
    start, script_s, service_s = time.perf_counter(), _children_cpu_s(), _cpu_s(service)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=work,
        env={
            **environment(service.http, sites),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(work / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, {
        "wall_s": time.perf_counter() - start,
        "script_cpu_s": _children_cpu_s() - script_s,
        "service_cpu_s": _cpu_s(service) - service_s,
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(service: Service) -> float:
    """CPU seconds of the service's processes that run; those that have ended are left out."""
    return sum(sum(process.cpu_times()[:2]) for process in service.processes())


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    of_what = "one run of each"
    write_section(path, BEGIN, END, figure_lines(result, _cells(result), of_what, result_link))


def _cells(result: dict[str, Any]) -> list[list[str]]:
    """A row of each figure that was measured."""
    return [
        [what, f"{result[name]:.3g}", f"{sign} {target:g}"]
        for name, (what, sign, target) in WHAT.items()
        if name in result
    ]


if __name__ == "__main__":
    main()
