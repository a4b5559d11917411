"""`ratoonctl rollouts`: what a step has kept of its rollouts, the worst first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ratoon_client.cli.context import open_client, printable, settings_of, show, show_rows
from ratoon_client.errors import InvalidArgumentError
from ratoon_proto.types import KeptRollout

_COLUMNS = (
    *("group", "rollout", "id", "tokens", "reward", "advantage", "gap mean", "gap max", "at"),
    *("ratio max", "clipped", "weight", "version", "note"),
)
# Tokens of one rollout that are listed, and from which gap in nats on a token's text is marked.
_WORST_TOKENS = 10
_MARKED, _LARGE = 0.1, 1.0


class Order(StrEnum):
    """What the worst rollouts have most of."""

    GAP = "gap"
    RATIO = "ratio"
    WEIGHT = "weight"
    REWARD = "reward"
    LENGTH = "length"


_BY: Mapping[Order, Callable[[KeptRollout], float | None]] = {
    Order.GAP: lambda each: each.gap_max,
    Order.RATIO: lambda each: each.ratio_max,
    Order.WEIGHT: lambda each: each.weight_share,
    Order.REWARD: lambda each: None if each.reward is None else abs(each.reward),
    Order.LENGTH: lambda each: each.response_tokens,
}


def rollouts(
    context: typer.Context,
    policy_id: str,
    seq: Annotated[int, typer.Argument(help="Seq of an Update or ForwardBackward.", min=1)],
    group: Annotated[
        int | None, typer.Argument(help="Index of a group: with ROLLOUT, that one whole.", min=0)
    ] = None,
    rollout: Annotated[
        int | None, typer.Argument(help="Index of a rollout in its group.", min=0)
    ] = None,
    by: Annotated[Order, typer.Option(help="What the first have most of.")] = Order.GAP,
    limit: Annotated[int, typer.Option(help="How many at most.", min=1)] = 20,
) -> None:
    """List the rollouts that a step has kept, the worst first, or show one with its tokens.

    A policy keeps them with `--keep-rollouts worst` or `all`; a key needs the scope read:rollouts.
    """
    if (group is None) != (rollout is None):
        raise InvalidArgumentError("GROUP", "no ROLLOUT beside it", "both indexes, or none")
    with open_client(context) as client:
        if group is not None and rollout is not None:
            _show_one(context, client.rollout(policy_id, seq, group, rollout))
            return
        kept = client.rollouts(policy_id, seq).rollouts
    found = sorted(kept, key=lambda each: _rank(_BY[by](each)))[:limit]
    show_rows(context, found, _COLUMNS, map(_row, found))


def _rank(value: float | None) -> float:
    """Largest first; what has no value last."""
    return math.inf if value is None or math.isnan(value) else -value


def _row(each: KeptRollout) -> tuple[object, ...]:
    notes = [*["truncated"] * each.truncated, *["dropped"] * each.dropped]
    return (
        each.group,
        each.rollout,
        each.group_id,
        f"{each.prompt_tokens} + {each.response_tokens}",
        each.reward,
        each.advantage,
        each.gap_abs_mean,
        each.gap_max,
        each.gap_max_token,
        each.ratio_max,
        each.clip_fraction,
        each.weight_share,
        each.policy_version,
        ", ".join(notes) or None,
    )


def _show_one(context: typer.Context, each: KeptRollout) -> None:
    show(context, each, dict(zip(_COLUMNS, _row(each), strict=True)))
    if settings_of(context).as_json:
        return
    if each.texts:
        Console(soft_wrap=True).print(_coloured(each))
    gaps = sorted(enumerate(each.gaps), key=lambda place: _rank(abs(place[1])))
    worst = [place for place, gap in gaps if not math.isnan(gap)][:_WORST_TOKENS]
    rows = [_token_row(each, place) for place in worst]
    if rows:
        show_rows(context, (), ("token", "id", "text", "gap", "ratio", "advantage"), rows)


def _token_row(each: KeptRollout, place: int) -> tuple[object, ...]:
    at = each.prompt_tokens + place
    text = each.texts[at] if at < len(each.texts) else ""
    ratio = each.ratios[place] if place < len(each.ratios) else None
    advantage = each.advantages[place] if place < len(each.advantages) else None
    return (place, each.tokens[at], text, each.gaps[place], ratio, advantage)


def _coloured(each: KeptRollout) -> Text:
    """The text, prompt and untrained tokens dim, tokens with a large gap marked."""
    text = Text()
    for at, piece in enumerate(each.texts):
        place = at - each.prompt_tokens
        gap = abs(each.gaps[place]) if 0 <= place < len(each.gaps) else math.nan
        is_trained = 0 <= place < len(each.trained) and each.trained[place]
        style = "bold red" if gap >= _LARGE else "yellow" if gap >= _MARKED else ""
        lines = "\n".join(map(printable, piece.split("\n")))
        text.append(lines, style=style if is_trained else "dim")
    return text
