"""Where each call is under HTTP: what its `http` option in service.proto says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from google.protobuf.message import Message

from ratoon_proto.fields import fields_of, http_route
from ratoon_proto.v1 import service_pb2

_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Route:
    """`path` has `{field}` where a field of the request goes."""

    method: str
    path: str

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT")

    @property
    def fields(self) -> frozenset[str]:
        """Those in the path."""
        return frozenset(_PLACE.findall(self.path))

    def url(self, request: Message) -> str:
        return _PLACE.sub(lambda place: quote(_part(request, place[1]), safe=""), self.path)

    def params(self, request: Message) -> dict[str, Any]:
        """The query: all other fields of a call without a body."""
        if self.has_body:
            return {}
        return {
            field.name: getattr(request, field.name)
            for field in fields_of(request.DESCRIPTOR)
            if field.name not in self.fields
            and not (field.has_presence and not request.HasField(field.name))
        }


def _part(request: Message, name: str) -> str:
    is_absent = request.DESCRIPTOR.fields_by_name[name].has_presence and not request.HasField(name)
    return "latest" if is_absent else str(getattr(request, name))


ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        method.name: Route(*route)
        for method in service_pb2.DESCRIPTOR.services_by_name["PolicyService"].methods
        if (route := http_route(method)) is not None
    }
)
