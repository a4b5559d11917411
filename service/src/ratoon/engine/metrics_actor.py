"""The metrics hub: a detached actor that holds the totals of all processes.

Enters changes from everywhere, leaves the text of `/metrics`. Invariant: totals are in one process,
so that every replica shows the same. No torch is imported here.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import ray
from prometheus_client import disable_created_metrics

from ratoon.engine.ray_calls import find_actor
from ratoon.engine.settings import METRICS_NAME
from ratoon.metrics import Change, MetricsTotals

if TYPE_CHECKING:
    from ray.actor import ActorProxy


class MetricsActor:
    """Shell of `MetricsTotals`."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._totals = MetricsTotals()
        self._is_seeded = False

    @ray.method
    async def record(self, changes: Sequence[Change]) -> None:
        self._totals.apply(changes)

    @ray.method
    async def seed(self, changes: Sequence[Change]) -> None:
        """Start from what the journal counts; once in the life of this process."""
        if not self._is_seeded:
            self._is_seeded = True
            self._totals.apply(changes)

    @ray.method
    async def render(self) -> bytes:
        return self._totals.render()


class RayMetricsSink:
    """Sends without waiting; what cannot be sent is lost, as a metric may be."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._hub: ActorProxy[MetricsActor] | None = None

    def send(self, changes: Sequence[Change]) -> None:
        if self._hub is None:
            self._hub = find_metrics(self._namespace)
        if self._hub is not None and changes:
            self._hub.record.remote(tuple(changes))


def find_metrics(namespace: str) -> ActorProxy[MetricsActor] | None:
    return cast("ActorProxy[MetricsActor] | None", find_actor(METRICS_NAME, namespace))
