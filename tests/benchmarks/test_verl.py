"""Updates of verl's own actor and of the service's: what is made of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.service import verl
from harness.environment import describe


def test_figures_compare_updates_of_the_same_batches(tmp_path: Path) -> None:
    def update(seconds: float, loss: float, tokens: float) -> dict[str, float]:
        return {"seconds": seconds, "loss": loss, "grad_norm": 1 + loss, "tokens": tokens}

    taken = {
        "verl": [update(4, 1, 100), update(2, 0, 100), update(8, 0, 100)],
        "ratoon": [update(1, 1, 30), update(9, 0.5, 20), update(2, 0, 25)],
    }
    found = verl.figures(taken)
    wanted = {"update_ratio": 0.5, "token_ratio": 0.25, "loss_off": 0.5, "norm_off": 0.5}
    assert {name: found[name] for name in verl.WHAT} == wanted
    path = tmp_path / "page.md"
    path.write_text(f"before\n{verl.BEGIN}\n{verl.END}\nafter\n", encoding="utf-8")
    verl.write_markdown({**found, **describe(0), "updates": taken}, path, "verl.json")
    text = path.read_text(encoding="utf-8")
    assert f"| {verl.WHAT['token_ratio']} | 0.25 | <= 1 |" in text
    assert text.endswith("after\n")
