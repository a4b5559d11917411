"""The calls of `ratoon.v1.PolicyService`, from their descriptors."""

from __future__ import annotations

import re

from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.fields import http_route
from ratoon_proto.v1 import service_pb2

SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
# Calls that carry rollouts.
BATCHES = frozenset(
    method.name
    for method in SERVICE.methods
    if {"batch", "groups"} & set(method.input_type.fields_by_name)
)

# Bytes of a request without a batch; GetGradientManifest names tensors, and a model with experts
# has tens of thousands.
SMALL_BYTES = 64 * 1024
NAMES_BYTES = 2**20
_NAMES = "GetGradientManifest"
_ADVICE = {
    _NAMES: ": ask for fewer names at a time",
    **dict.fromkeys(BATCHES, ": send the batch in parts (UploadPart)"),
}


def body_bound(rpc: str, most: int) -> int:
    """Bytes of a call's request, where one with a batch may have `most`; "": no call at all."""
    if rpc in BATCHES:
        return most
    return min(most, NAMES_BYTES if rpc == _NAMES else SMALL_BYTES)


def check_size(rpc: str, num_bytes: int, bound: int) -> None:
    """Raises BODY_TOO_LARGE where a request, which has at least so many bytes, is over it."""
    if num_bytes > bound:
        raise RatoonError(
            ErrorCode.BODY_TOO_LARGE,
            f"the request has at least {num_bytes} bytes, the limit of this call is {bound}"
            + _ADVICE.get(rpc, ""),
            got=f"{num_bytes} bytes",
            expected=f"at most {bound} bytes",
        )


def rpc_at(path: str) -> str:
    """The call at an HTTP path whose request may be large; "": any other."""
    return next((rpc for rpc, place in _PLACES.items() if place.fullmatch(path)), "")


def call_name(rpc: str) -> str:
    """The method of `PolicyService`, and the route's name: `get_policy` for `GetPolicy`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()


def _place(rpc: str) -> re.Pattern[str]:
    route = http_route(SERVICE.methods_by_name[rpc])
    assert route is not None, f"{rpc} has no route"
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", route[1]))


_PLACES = {rpc: _place(rpc) for rpc in _ADVICE}
