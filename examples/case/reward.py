"""Reward of examples/grpo.py: the share of four characters that are of the case asked for."""

from __future__ import annotations

from typing import Any


def reward(response: str, example: dict[str, Any]) -> float:
    return sum(letter in example["letters"] for letter in response) / 4
