"""The fake service over real HTTP, its JSON read and written by the service's own conversion.

A `LostAnswerError` closes the connection without a word, as a dying replica does.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import xxhash
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.http.bodies import fill_request
from ratoon.api.http.schema import body_of
from ratoon_proto.json_form import to_json
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api.wires import OTHER_ROUTES, ROUTES
from tests.client.fake_service import FakeService, LostAnswerError, RefusalError

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
_FILE = _pattern("/v1/policies/{policy_id}/weights/{version}/files/{name}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving_http(service: FakeService) -> Iterator[str]:
    """Gives `http://host:port`."""

    class Handler(_Handler):
        fake = service

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeService
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            file = _FILE.fullmatch(url.path)
            if file is not None:
                self._send_range(file["policy_id"], int(file["version"]), file["name"])
                return
            name, places = _route(self.command, url.path)
            self._send_answer(name, _request(name, places, dict(parse_qsl(url.query)), body))
        except RefusalError as refusal:
            status = _STATUS.get(refusal.detail.code, 404)
            self._send(status, {"error": to_json(refusal.detail)})
        except LostAnswerError:
            self.close_connection = True

    def _send_answer(self, name: str, request: Message) -> None:
        if name == "WatchOperation":
            self._send_events(request)
            return
        answer = self.fake.handle(name, request)
        if isinstance(answer, service_pb2.FetchWeightsResponse):
            self._send_bytes(200, answer.data, {"Ratoon-Chunk-Digest": answer.digest})
        else:
            self._send(200, to_json(answer))

    def _send_events(self, request: Message) -> None:
        """A stream without a length, ended by the end of the connection."""
        operation: Any = self.fake.handle("WatchOperation", request)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        while True:
            data = json.dumps(to_json(operation))
            self.wfile.write(f": keep-alive\n\nevent: operation\ndata: {data}\n\n".encode())
            if operation.state >= operation_pb2.OPERATION_STATE_DONE:
                return
            operation = self.fake.handle("WatchOperation", request)

    def _send_range(self, policy_id: str, version: int, name: str) -> None:
        manifest: Any = self.fake.handle(
            "GetWeightManifest",
            service_pb2.GetWeightManifestRequest(policy_id=policy_id, version=version),
        )
        self.fake.calls["GetWeightManifest"] -= 1
        files = [*manifest.files, *(delta.file for delta in manifest.deltas)]
        file = next(file for file in files if file.name == name)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match is not None
        assert "If-Range" not in self.headers, "a service with another file would answer all of it"
        offset, length = int(match[1]), int(match[2]) - int(match[1]) + 1
        request = service_pb2.FetchWeightsRequest(
            policy_id=policy_id, digest=file.digest, offset=offset, length=length
        )
        self.fake.slow_chunk()
        chunk: Any = self.fake.handle("FetchWeights", request)
        assert xxhash.xxh3_128_hexdigest(self.fake.file(file.digest)) == file.digest
        self._send_bytes(206, chunk.data, {"ETag": self.fake.tag(file.digest)})

    def _send(self, status: int, data: object) -> None:
        self._send_bytes(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _send_bytes(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


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
