"""One worker runs all tests that share a cluster."""

from __future__ import annotations

import pytest

from tests.two_workers import unit_of


def test_all_that_share_a_cluster_are_of_one_worker(request: pytest.FixtureRequest) -> None:
    """Checks the tests that were collected with this one."""
    fixtures = {item.nodeid: getattr(item, "fixturenames", ()) for item in request.session.items}
    sharing = [nodeid for nodeid, names in fixtures.items() if "ray_cluster" in names]
    if not sharing:
        pytest.skip("collected without them")
    assert {unit_of(nodeid) for nodeid in sharing} == {"shared service"}
