"""That `WITH_SERVICES` names what shares a cluster."""

from __future__ import annotations

import pytest

from tests.two_workers import WITH_SERVICES


def test_all_that_share_a_cluster_are_of_one_worker(request: pytest.FixtureRequest) -> None:
    """Of the tests that were collected with this one."""
    fixtures = {item.nodeid: getattr(item, "fixturenames", ()) for item in request.session.items}
    sharing = [nodeid for nodeid, names in fixtures.items() if "ray_cluster" in names]
    if not sharing:
        pytest.skip("collected without them")
    assert [nodeid for nodeid in sharing if not nodeid.startswith(WITH_SERVICES)] == []
