"""Examples and files for operators that `ratoon example` writes.

An installation has them within the package, where the source tree has links to `examples/` and
`deploy/`. No file that is there is written over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Files below `root`, a folder of the package, that keep their places; `then`: what to type."""

    about: str
    root: str
    patterns: tuple[str, ...]
    then: str


EXAMPLES = {
    "first": Example(
        about="the README's script: a policy learns to answer in digits",
        root="examples",
        patterns=("first.py",),
        then="python first.py",
    ),
    "grpo": Example(
        about="GRPO on your model, prompts and reward; a task to try it on, a reward for GSM8K",
        root="examples",
        patterns=("grpo.py", "case/*", "gsm8k/*"),
        then=(
            "python grpo.py tiny case/prompts.jsonl case/reward.py --policy case --dtype float32 "
            "--prompts 2 --responses 32 --max-tokens 4 --learning-rate 2e-3 --updates 40"
        ),
    ),
    "vllm": Example(
        about="the loop with vLLM as the sampler",
        root="examples",
        patterns=("vllm_loop.py",),
        then="python vllm_loop.py --help",
    ),
    "monitoring": Example(
        about="Prometheus: scrapes and alerts; a dashboard for Grafana",
        root="deploy",
        patterns=("alerts.yml", "prometheus*.yml", "grafana/*"),
        then="promtool check config prometheus.yml",
    ),
    "kubernetes": Example(
        about="a base for kustomize: KubeRay's service, network policy, claim and secret",
        root="deploy/kubernetes",
        patterns=("*.yaml",),
        then="kubectl kustomize .",
    ),
    "systemd": Example(
        about="a unit for systemd",
        root="deploy",
        patterns=("ratoon.service",),
        then="systemd-analyze verify ratoon.service",
    ),
}


def write_example(name: str, folder: Path) -> list[Path]:
    """Write an example's files into a folder, which is made if need be; their paths.

    Raises FileExistsError, before anything is written, where one of them is there; OSError.
    """
    example = EXAMPLES[name]
    root = _PACKAGE / example.root
    files = {
        folder / source.relative_to(root): source
        for pattern in example.patterns
        for source in sorted(root.glob(pattern))
        if source.is_file()
    }
    for path in files:
        if path.exists():
            raise FileExistsError(f"{path} is there already: nothing is written")
    for path, source in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
    return list(files)
