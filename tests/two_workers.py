"""How tests are shared out between the two workers of `make test`.

One worker runs all that starts services: they share one Ray cluster, and no two clusters are to
compete for the machine's cores. The other runs the rest meanwhile, a file at a time, and so does
the first when it is done. Within a file tests keep their order.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

WITH_SERVICES = (
    *("tests/e2e/", "tests/network/", "tests/deploy/test_install.py"),
    *("tests/engine/test_engine_ray.py", "tests/engine/test_placement.py"),
)


class TwoWorkers(LoadScopeScheduling):
    """Work units are files, but for one unit of all that starts services."""

    def _split_scope(self, nodeid: str) -> str:
        return "services" if nodeid.startswith(WITH_SERVICES) else nodeid.split("::", 1)[0]


def services_first(items: list[pytest.Item]) -> None:
    """In place: the longest unit begins at once."""
    items.sort(key=lambda item: not item.nodeid.startswith(WITH_SERVICES))
