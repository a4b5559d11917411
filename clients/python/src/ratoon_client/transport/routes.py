"""Method and path of each call under HTTP; fields in path or query are not in the body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

from google.protobuf.message import Message

_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """`path` has `{field}` where a field of the request goes; `query` names those that follow."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    query: tuple[str, ...] = ()

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT")

    @property
    def fields(self) -> frozenset[str]:
        """Those that are not in the body."""
        return frozenset((*_PLACE.findall(self.path), *self.query))

    def url(self, request: Message) -> str:
        return _PLACE.sub(lambda place: quote(str(getattr(request, place[1])), safe=""), self.path)

    def params(self, request: Message) -> dict[str, Any]:
        return {name: getattr(request, name) for name in self.query}


def _route(method: Literal["GET", "POST", "PUT", "DELETE"], path: str, *query: str) -> Route:
    return Route(method=method, path=f"/v1{path}", query=query)


_POLICY = "/policies/{policy_id}"
_OPERATION = "/operations/{operation_id}"
ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        "CreatePolicy": _route("POST", "/policies"),
        "DeletePolicy": _route("DELETE", _POLICY),
        "GetPolicy": _route("GET", _POLICY),
        "ListPolicies": _route("GET", "/policies"),
        "Update": _route("POST", f"{_POLICY}/update"),
        "ForwardBackward": _route("POST", f"{_POLICY}/forward_backward"),
        "OptimStep": _route("POST", f"{_POLICY}/optim_step"),
        "DiscardGradients": _route("POST", f"{_POLICY}/discard_gradients"),
        "Forward": _route("POST", f"{_POLICY}/forward"),
        "UploadPart": _route("PUT", f"{_POLICY}/uploads/{{upload_id}}/parts/{{part_index}}"),
        "GetOperation": _route("GET", _OPERATION, "wait_s"),
        "WatchOperation": _route("GET", f"{_OPERATION}/events"),
        "CancelOperation": _route("POST", f"{_OPERATION}/cancel"),
        "SaveCheckpoint": _route("POST", f"{_POLICY}/checkpoints"),
        "LoadCheckpoint": _route("POST", f"{_POLICY}/checkpoints/{{checkpoint_id}}/load"),
        "ListCheckpoints": _route("GET", f"{_POLICY}/checkpoints"),
        "GetWeightManifest": _route("GET", f"{_POLICY}/weights/{{version}}"),
        "FetchWeights": _route("GET", f"{_POLICY}/files/{{digest}}", "offset", "length"),
        "GetServerInfo": _route("GET", "/info"),
        "Health": _route("GET", "/health"),
    }
)
LATEST_MANIFEST = _route("GET", f"{_POLICY}/weights/latest")
