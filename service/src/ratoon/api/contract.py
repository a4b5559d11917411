"""The calls of `ratoon.v1.PolicyService`, as their descriptors have them."""

from __future__ import annotations

import re

from ratoon_proto.v1 import service_pb2

SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
# Calls that bring rollouts.
BATCHES = frozenset(
    method.name
    for method in SERVICE.methods
    if {"batch", "groups"} & set(method.input_type.fields_by_name)
)


def call_name(rpc: str) -> str:
    """The method of `PolicyService`, and the name of a route: `get_policy` of `GetPolicy`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()
