#!/usr/bin/env python3
"""Writes the tables of docs/models.md from the descriptions of the families.

    python scripts/models_page.py            # prints them
    python scripts/models_page.py --write    # into the page

Sizes are those of the configuration that transformers has for a class where a folder says nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ratoon.model.families import FAMILIES, WRAPPERS
from ratoon.model.families.family import Family
from ratoon.model.support import FIELDS_OFF, config_class
from ratoon.planner.layer_kinds import Attention, GatedDelta, Layer

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- {}: written by scripts/models_page.py -->", "<!-- end of {} -->"


def families() -> list[str]:
    """Table of the families that are served."""
    rows = ["| released models | `architectures` | layers | adapters reach |", "|---|---|---|---|"]
    for family in FAMILIES.values():
        kinds = dict.fromkeys(map(_kind, family.layers(config_class(family)())))
        adapted = ", ".join(f"`{name}`" for name in family.adapted)
        cells = family.models, f"`{family.architecture}`", "; ".join(kinds), adapted + _mlps(family)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def wrappers() -> list[str]:
    """Table of the models with a tower whose decoder is trained."""
    rows = [
        "| released models | `architectures` | the decoder is that of | refused in rollouts |",
        "|---|---|---|---|",
    ]
    for wrapper in WRAPPERS.values():
        tokens = ", ".join(f"`{name}`" for name, _ in wrapper.media_tokens)
        names = wrapper.architecture, wrapper.family.architecture
        cells = wrapper.models, *(f"`{name}`" for name in names), tokens
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def fields_off() -> list[str]:
    """Fields that must be absent, null, false or 0, as lines of the page's width."""
    lines, line = list[str](), ""
    for name in FIELDS_OFF:
        if len(line) + len(name) > 130:
            lines.append(line.rstrip())
            line = ""
        line += f"`{name}`, "
    return [*lines, line.removesuffix(", ") + "."]


def page(text: str) -> str:
    """The page with today's tables in it."""
    for name, rows in (
        ("families", families()),
        ("towers", wrappers()),
        ("fields", fields_off()),
    ):
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n" + "\n".join(rows) + f"\n\n{end}{after}"
    return text


def _kind(layer: Layer) -> str:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, Attention):
        words = [f"{'latent ' if mixer.latent else ''}attention {mixer.head_dim}"]
        words += [f"/{mixer.value_size}"] * (mixer.value_size != mixer.head_dim)
        words += [", gated"] * mixer.is_gated
        words += [f", window {mixer.window or 0:,}"] * (mixer.window is not None)
    else:
        assert isinstance(mixer, GatedDelta)
        words = [f"gated DeltaNet {mixer.key_dim}, {mixer.taps} taps"]
    if mlp.is_routed:
        words.append(f", {mlp.experts_per_token} of {mlp.num_experts} experts")
        words += [" and a shared one"] * (mlp.shared_size > 0)
    return "".join(words)


def _mlps(family: Family) -> str:
    if family.experts is None:
        return ", the MLP"
    return ", experts" if family.adapts_experts else ""


def main() -> None:
    """Print the tables, or write them."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join([*families(), "", *wrappers(), "", *fields_off()]))


if __name__ == "__main__":
    main()
