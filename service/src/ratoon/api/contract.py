"""The calls of `ratoon.v1.PolicyService`, the bounds of their requests, and whom they act for.

The principal of the call being served is a context variable, so it follows a call into its tasks
and threads but never into another call. Methods of the service need no second argument for it.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from ratoon.edge.bodies import WITHOUT_BODY
from ratoon.engine.commands import NOBODY, Holder
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
# Bytes of any other request; GetGradientManifest names tensors, and a model with experts
# has tens of thousands; Sample has a prompt.
SMALL_BYTES = 64 * 1024
LISTS_BYTES = 2**20
# Calls of the Tinker wire whose requests are as large as batches, or larger than a small one.
_TINKER_BATCHES = frozenset({"tinker_forward_backward"})
_TINKER = "tinker"
_LISTS = {
    "GetGradientManifest": ": ask for fewer names at a time",
    "Sample": ": the prompt is too long",
}
_PIECES = "SendModelFile"
_FILE = re.compile(r"/v1/policies/[^/]+/(weights/[^/]+/)?files/[^/]+")
_ADVICE = {
    **_LISTS,
    _PIECES: ": send smaller pieces",
    **dict.fromkeys(BATCHES, ": send the batch in parts (UploadPart)"),
}
_HOLDER: ContextVar[Holder] = ContextVar("ratoon_holder", default=NOBODY)


def body_bound(rpc: str, most: int) -> int:
    """Maximum request size of an RPC; `most` applies to those with a batch, or with a piece of a
    file. "": an unknown RPC."""
    if rpc in BATCHES or rpc in _TINKER_BATCHES or rpc == _PIECES:
        return most
    return min(most, LISTS_BYTES if rpc in _LISTS or rpc == _TINKER else SMALL_BYTES)


def check_size(rpc: str, num_bytes: int, bound: int) -> None:
    """Check a request that has at least `num_bytes`. Raises BODY_TOO_LARGE if that is over it."""
    if num_bytes > bound:
        raise RatoonError(
            ErrorCode.BODY_TOO_LARGE,
            f"the request has at least {num_bytes} bytes, the limit of this call is {bound}"
            + _ADVICE.get(rpc, ""),
            got=f"{num_bytes} bytes",
            expected=f"at most {bound} bytes",
        )


def rpc_at(path: str) -> str:
    """The RPC at an HTTP path, if its request may be large; "": any other path."""
    return next((rpc for rpc, place in _PLACES.items() if place.fullmatch(path)), "")


def body_bound_at(method: str, path: str, most: int) -> int:
    """Maximum body size of an HTTP request; unknown paths count as calls without a batch."""
    return 0 if method in WITHOUT_BODY else body_bound(rpc_at(path), most)


def is_fetch(method: str, path: str) -> bool:
    """Whether an HTTP request is answered with bytes of a file."""
    return method == "GET" and _FILE.fullmatch(path) is not None


def call_name(rpc: str) -> str:
    """Name of an RPC's method of `PolicyService`, and of its route (`get_policy`)."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()


def _place(rpc: str) -> re.Pattern[str]:
    route = http_route(SERVICE.methods_by_name[rpc])
    assert route is not None, f"{rpc} has no route"
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", route[1]))


_PLACES = {
    **{rpc: _place(rpc) for rpc in _ADVICE},
    **{rpc: re.compile(f"/api/v1/{rpc.removeprefix('tinker_')}") for rpc in _TINKER_BATCHES},
    _TINKER: re.compile("/api/v1/.+"),
}


@contextmanager
def acting_for(holder: Holder) -> Generator[None, None, None]:
    """Make operations that are submitted in the block belong to `holder`."""
    token = _HOLDER.set(holder)
    try:
        yield
    finally:
        _HOLDER.reset(token)


def current_holder() -> Holder:
    """Return the holder that the current call acts for."""
    return _HOLDER.get()
