"""How tests are shared out between the two workers of `make test` and `make test-more`.

Tests that share the session's Ray cluster are one unit, so that there is one cluster; tests that
start services of their own are a second unit. These two are the longest and begin at once, one in
each worker. The rest goes by file to whichever worker is free. Within a file tests keep their
order.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

OWN_SERVICES = (
    *("tests/deploy/test_install.py", "tests/e2e/test_demo.py"),
    *("tests/e2e/test_outages.py", "tests/e2e/test_tls.py"),
)
SHARED_SERVICE = (
    *("tests/e2e/", "tests/network/"),
    *("tests/engine/test_creation_faults.py", "tests/engine/test_engine_ray.py"),
    "tests/engine/test_placement.py",
    *("tests/engine/test_ranks_ray.py", "tests/engine/test_ray_calls.py", "tests/test_doctor.py"),
)


def unit_of(nodeid: str) -> str:
    """The name of the unit that a test is run in: all of a unit are run by one worker."""
    if nodeid.startswith(OWN_SERVICES):
        return "own services"
    if nodeid.startswith(SHARED_SERVICE):
        return "shared service"
    return nodeid.split("::", 1)[0]


class TwoWorkers(LoadScopeScheduling):
    """Work units are files, but for the two units of services."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def services_first(items: list[pytest.Item]) -> None:
    """In place: the longest units begin at once."""
    first = ("shared service", "own services")
    ranks = {unit: rank for rank, unit in enumerate(first)}
    items.sort(key=lambda item: ranks.get(unit_of(item.nodeid), len(first)))
