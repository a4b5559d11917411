"""A gate that lets everybody do everything, unrecorded: for tests of what is behind it."""

from __future__ import annotations

from pathlib import Path

from ratoon.api.gate import Gate
from ratoon.auth.access import OpenAccess
from ratoon.auth.audit import AuditEntry
from ratoon.auth.rates import InFlight, Rates


class NoAudit:
    """For a service in a test: keeps nothing."""

    def write(self, entry: AuditEntry) -> None:
        """Nothing."""


def open_gate(most: int = 1000) -> Gate:
    in_flight = InFlight(most=most, most_of_caller=most)
    rates = Rates(Path("unused: no caller has a key"))
    return Gate(OpenAccess(), NoAudit(), in_flight, rates, lambda _reason, _key_id: None)


OPEN_GATE = open_gate()
