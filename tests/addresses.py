"""Where this machine is reached from others."""

from __future__ import annotations

import re

import psutil

from ratoon.config import is_loopback


def other_address() -> str | None:
    """An IPv4 address that is not loopback's; None: there is none."""
    addresses = (one.address for all_of in psutil.net_if_addrs().values() for one in all_of)
    return next(
        (text for text in addresses if re.fullmatch(r"[\d.]+", text) and not is_loopback(text)),
        None,
    )
