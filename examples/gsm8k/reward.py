"""GSM8K for examples/grpo.py: a problem as a chat turn, and whether a response solves it.

A line of the data has `question` and `answer`: a worked solution that ends with `#### ` and the
number.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_ASKED = "\nReason step by step. End with a line of #### and the number alone."
_NUMBER = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


def messages(example: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": example["question"] + _ASKED}]


def number(text: str) -> Decimal | None:
    """The number after the last ####; None: there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def reward(response: str, example: dict[str, Any]) -> float:
    """1 where both end with the same number, however it is written."""
    told = number(response)
    return float(told is not None and told == number(example["answer"]))
