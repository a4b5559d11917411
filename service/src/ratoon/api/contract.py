"""The calls of `ratoon.v1.PolicyService`, from their descriptors."""

from __future__ import annotations

import re

from ratoon_proto.v1 import service_pb2

SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
# Calls that carry rollouts.
BATCHES = frozenset(
    method.name
    for method in SERVICE.methods
    if {"batch", "groups"} & set(method.input_type.fields_by_name)
)


def call_name(rpc: str) -> str:
    """The method of `PolicyService`, and the route's name: `get_policy` for `GetPolicy`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()
