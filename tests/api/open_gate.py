"""A gate that lets everybody do everything, unrecorded: for tests of what is behind it."""

from __future__ import annotations

from ratoon.api.gate import Gate
from ratoon.auth.access import OpenAccess
from ratoon.auth.audit import AuditEntry


class NoAudit:
    """For a service in a test: keeps nothing."""

    def write(self, entry: AuditEntry) -> None:
        """Nothing."""


OPEN_GATE = Gate(OpenAccess(), NoAudit())
