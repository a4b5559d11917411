"""Numbers of objects that operations of compiled code find, so that no graph depends on one."""

from __future__ import annotations

import itertools
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_LIVE: Final[WeakValueDictionary[int, object]] = WeakValueDictionary()
_NUMBERS: Final = itertools.count()


def numbered(owner: object) -> Tensor:
    """Returns a number for `owner`: int64 [1] on the CPU, so that compiled code does not depend on
    it."""
    number = next(_NUMBERS)
    _LIVE[number] = owner
    return torch.tensor([number])


def find(number_1: Tensor) -> object:
    """Returns the owner of a number, which must still live."""
    return _LIVE[int(number_1)]
