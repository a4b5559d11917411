"""The fake service over real HTTP, its JSON read and written by the service's own conversion.

A `LostAnswerError` closes the connection without a word, as a dying replica does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.http.bodies import fill_request
from ratoon.api.http.schema import body_of
from ratoon_proto.json_form import to_json
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api.wires import OTHER_ROUTES, ROUTES
from tests.client.fake_service import FakeService, LostAnswerError, RefusalError
from tests.client.http_server import Answer, Request, serving

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
BODIES = {method.name: body for method in _SERVICE.methods if (body := body_of(method)) is not None}
_STATUS = {
    "INVALID_ARGUMENT": 422,
    "KEY_REUSED": 409,
    "POLICY_EXISTS": 409,
    "SEQ_GAP": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
}


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


_PATTERNS = [
    ("GetWeightManifest", "GET", re.compile(r"/v1/policies/(?P<policy_id>[^/]+)/weights/latest")),
    *((name, method, _pattern(path)) for name, (method, path) in (ROUTES | OTHER_ROUTES).items()),
]
_FILE = re.compile(
    r"/v1/policies/(?P<policy_id>[^/]+)/weights/(?P<version>[^/]+)/files/(?P<name>.+)"
)


@contextmanager
def serving_http(service: FakeService, port: int = 0) -> Iterator[str]:
    """Gives `http://host:port`."""

    def answer(request: Request) -> Answer | None:
        try:
            return _answer(service, request)
        except RefusalError as refusal:
            return _json({"error": to_json(refusal.detail)}, _STATUS.get(refusal.detail.code, 404))
        except LostAnswerError:
            return None

    with serving(answer, port=port) as url:
        yield url


def _answer(service: FakeService, asked: Request) -> Answer:
    url = urlsplit(asked.path)
    file = _FILE.fullmatch(url.path)
    if file is not None:
        return _range(service, file["policy_id"], int(file["version"]), file["name"], asked.headers)
    name, places = _route(asked.method, url.path)
    request = _request(name, places, dict(parse_qsl(url.query)), asked.body)
    answer: Any = service.handle(name, request)
    if name == "WatchOperation":
        events = _events(service, request, answer)
        return Answer(body=events, headers={"Content-Type": "text/event-stream"})
    if isinstance(answer, service_pb2.FetchWeightsResponse):
        return Answer(body=answer.data, headers={"Ratoon-Chunk-Digest": answer.digest})
    return _json(to_json(answer))


def _events(service: FakeService, request: Message, operation: Any) -> Iterator[bytes]:
    while True:
        data = json.dumps(to_json(operation))
        yield f": keep-alive\n\nevent: operation\ndata: {data}\n\n".encode()
        if operation.state >= operation_pb2.OPERATION_STATE_DONE:
            return
        try:
            operation = service.handle("WatchOperation", request)
        except LostAnswerError:
            return


def _range(
    service: FakeService, policy_id: str, version: int, name: str, headers: Mapping[str, str]
) -> Answer:
    file = service.named_file(policy_id, version, name)
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", headers["Range"])
    assert match is not None
    assert "If-Range" not in headers, "a service with another file would answer all of it"
    offset, length = int(match[1]), int(match[2]) - int(match[1]) + 1
    request = service_pb2.FetchWeightsRequest(
        policy_id=policy_id, digest=file.digest, offset=offset, length=length
    )
    service.slow_chunk()
    chunk: Any = service.handle("FetchWeights", request)
    return Answer(status=206, body=chunk.data, headers={"ETag": service.tag(file.digest)})


def _json(data: object, status: int = 200) -> Answer:
    body = json.dumps(data).encode()
    return Answer(status=status, body=body, headers={"Content-Type": "application/json"})


def _route(method: str, path: str) -> tuple[str, dict[str, str]]:
    for name, route_method, pattern in _PATTERNS:
        match = pattern.fullmatch(path)
        if match is not None and method == route_method:
            return name, match.groupdict()
    raise RefusalError("ROUTE_NOT_FOUND", field=f"{method} {path}")


def _request(name: str, places: dict[str, str], query: dict[str, str], body: bytes) -> Message:
    request = GetMessageClass(_SERVICE.methods_by_name[name].input_type)()
    if name in BODIES:
        fill_request(request, BODIES[name].model_validate_json(body))
    for field, text in (places | query).items():
        kind = type(getattr(request, field))
        setattr(request, field, kind(text))
    return request
