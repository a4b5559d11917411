"""Scripts for the Tinker API: the parts of the benchmark that need no SDK and no service."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, Qwen3ForCausalLM

from benchmarks.service import wires
from harness.environment import describe


def test_figures_are_written_beside_what_is_wanted(tmp_path: Path) -> None:
    result = {**dict.fromkeys(wires.WHAT, 4.5), **describe(0)}
    path = tmp_path / "page.md"
    path.write_text(f"before\n{wires.BEGIN}\n{wires.END}\nafter\n", encoding="utf-8")
    wires.write_markdown(result, path, "wires.json")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| recipe arithmetic, s | 4.5 | <= 30 |" in text
    assert "| rho of 4 prompts with 8 samples, in order | 4.5 | >= 4.5 |" in text


def test_a_run_that_was_cut_has_the_figures_of_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"{wires.BEGIN}\n{wires.END}\n", encoding="utf-8")
    wires.write_markdown({"dpo_s": 12.0, **describe(0)}, path, "wires.json")
    text = path.read_text(encoding="utf-8")
    assert "| recipe dpo, s | 12 | <= 30 |" in text
    assert "rho" not in text


def test_recipes_find_a_model_and_data_sets_under_the_names_they_ask_for(tmp_path: Path) -> None:
    work, models = tmp_path / "work", tmp_path / "models"
    wires.write_folder(work, models, seed=3)
    model = Qwen3ForCausalLM.from_pretrained(work / wires.MODEL)
    text = "What is 1 + 1?"
    tokenizer = AutoTokenizer.from_pretrained(work / wires.MODEL)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) <= model.config.vocab_size
    for name, column in (
        ("openai/gsm8k", "question"),
        ("HuggingFaceH4/no_robots", "messages"),
        ("Anthropic/hh-rlhf", "rejected"),
    ):
        card = (work / name / "README.md").read_text(encoding="utf-8")
        (config,) = json.loads(card.split("---\n")[1])["configs"]
        assert {each["split"] for each in config["data_files"]} == {"train", "test"}
        for each in config["data_files"]:
            lines = (work / name / each["path"]).read_text(encoding="utf-8").splitlines()
            assert len(lines) == 64
            assert column in json.loads(lines[0])
