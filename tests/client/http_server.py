"""A small HTTP server on a thread, which a fake answers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Parts of a body are sent as they come, and the connection ends with the last one."""

    status: int = 200
    body: bytes | Iterator[bytes]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


# None: the connection is closed without a word.
Answering = Callable[[Request], Answer | None]


@contextmanager
def serving(answering: Answering, *, port: int = 0, keeps_alive: bool = True) -> Iterator[str]:
    """Gives `http://127.0.0.1:port`."""

    class Handler(_Handler):
        answers = staticmethod(answering)
        is_kept = keeps_alive

    server = _Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    answers: Answering
    is_kept: bool
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.answers(
            Request(
                method=self.command, path=self.path, headers=dict(self.headers.items()), body=body
            )
        )
        is_whole = answer is not None and isinstance(answer.body, bytes)
        self.close_connection |= not is_whole or not self.is_kept
        if answer is None:
            return
        self.send_response(answer.status)
        if isinstance(answer.body, bytes):
            self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        for part in [answer.body] if isinstance(answer.body, bytes) else answer.body:
            self.wfile.write(part)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
