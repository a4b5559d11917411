"""Routes of weights and result files: whole files and ranges of them, and chunks by digest.

Range requests follow RFC 9110, section 14.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any, BinaryIO, cast

import xxhash
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ratoon.api.gate import Gate
from ratoon.api.http.access import AuthorizedCallOf
from ratoon.api.http.errors import error_response, error_responses
from ratoon.api.http.routes import Digest, PolicyId, Version
from ratoon.api.service import PolicyService
from ratoon.edge.budget import CHUNK_BYTES
from ratoon.edge.zero_copy import ZERO_COPY
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import WeightFile
from ratoon_proto.v1 import service_pb2 as wire

BINARY = "application/octet-stream"
WHOLE, PART, NOT_MODIFIED = 200, 206, 304
# xxh3-128 of the body, 32 hexadecimal digits.
CHUNK_DIGEST = "Ratoon-Chunk-Digest"
# Bytes that are read and digested at a time; they fit a core's cache.
_PIECE_BYTES = 256 * 1024
Offset = Annotated[int, Query(ge=0, lt=2**63)]
Length = Annotated[int, Query(ge=1, lt=2**63)]
_NOT_FOUND = (ErrorCode.POLICY_NOT_FOUND, ErrorCode.WEIGHTS_NOT_FOUND)
_WEIGHT_FILE = "/v1/policies/{policy_id}/weights/{version}/files/{name:path}"
_NOT_MODIFIED = {"description": "If-None-Match names the file's digest."}
_BYTES = {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


def add_files(
    routes: APIRouter, service: PolicyService, gate: Gate, *, max_fetch_bytes: int
) -> None:
    """Add the routes of files. Answers that are held in memory have at most `max_fetch_bytes`."""

    @routes.get(
        _WEIGHT_FILE,
        tags=["weights"],
        response_class=Response,
        responses={
            200: {**_BYTES, "description": "The whole file."},
            206: {**_BYTES, "description": "The range, or its beginning from Ray Serve."},
            304: _NOT_MODIFIED,
            **error_responses(*_NOT_FOUND, ErrorCode.RANGE_NOT_SATISFIABLE),
        },
    )
    async def get_weight_file(
        request: Request,
        authorized: AuthorizedCallOf,
        policy_id: PolicyId,
        version: Version,
        name: str,
        range_header: Annotated[str | None, Header(alias="Range")] = None,
        if_range: Annotated[str | None, Header()] = None,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        """A file of a version, or a range of it; its ETag is the file's digest.

        Ray Serve's port answers at most `limits.max_fetch_bytes`: a range's beginning, or 416.
        """
        asked = wire.GetWeightManifestRequest(policy_id=policy_id)
        gate.check(authorized, asked)
        path, file = await service.weight_file(policy_id, version, name)
        headers = _headers(file)
        try:
            choice = choose_range(
                range_header=range_header,
                if_range=if_range,
                if_none_match=if_none_match,
                size_bytes=file.size_bytes,
                digest=file.digest,
                # Serve's proxy would hold whatever a stalled reader has not read.
                max_bytes=file.size_bytes if _is_zero_copy(request.scope) else max_fetch_bytes,
            )
        except RatoonError as error:
            headers["Content-Range"] = f"bytes */{file.size_bytes}"
            return error_response(error, headers)
        check_again = partial(gate.check_again, authorized, asked)
        return await _file_response(choice, path, file, headers, check_again)

    @routes.head(
        _WEIGHT_FILE,
        tags=["weights"],
        responses={
            200: {"description": "The file's size and digest."},
            304: _NOT_MODIFIED,
            **error_responses(*_NOT_FOUND),
        },
    )
    async def head_weight_file(
        authorized: AuthorizedCallOf,
        policy_id: PolicyId,
        version: Version,
        name: str,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Size and digest of a file of a version, as its Content-Length and ETag."""
        gate.check(authorized, wire.GetWeightManifestRequest(policy_id=policy_id))
        _, file = await service.weight_file(policy_id, version, name)
        headers = _headers(file)
        if is_known(file.digest, if_none_match):
            return Response(status_code=304, headers=headers)
        headers["Content-Length"] = str(file.size_bytes)
        return Response(headers=headers, media_type=BINARY)

    @routes.get(
        "/v1/policies/{policy_id}/files/{digest}",
        tags=["weights"],
        response_class=Response,
        responses={
            200: {**_BYTES, "description": "The bytes, with their xxh3-128 in a header."},
            **error_responses(*_NOT_FOUND, ErrorCode.RANGE_NOT_SATISFIABLE),
        },
    )
    async def fetch_weights(
        authorized: AuthorizedCallOf,
        policy_id: PolicyId,
        digest: Digest,
        offset: Offset,
        length: Length,
    ) -> Response:
        """One chunk of a file of a manifest, or of a result file."""
        request = wire.FetchWeightsRequest(
            policy_id=policy_id, digest=digest, offset=offset, length=length
        )
        chunk = await gate.run(authorized, service.fetch_weights, request)
        return Response(chunk.data, media_type=BINARY, headers={CHUNK_DIGEST: chunk.digest})


def _headers(file: WeightFile) -> dict[str, str]:
    return {"ETag": etag_of(file.digest), "Accept-Ranges": "bytes"}


def _is_zero_copy(scope: Scope) -> bool:
    return ZERO_COPY in scope.get("extensions", {})


async def _file_response(
    choice: Choice,
    path: FilePath,
    file: WeightFile,
    headers: dict[str, str],
    check_again: Callable[[], None],
) -> Response:
    if choice.status == NOT_MODIFIED:
        return Response(status_code=choice.status, headers=headers)
    start, stop = choice.start, choice.stop
    if choice.status == PART:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size_bytes}"
    first = min(stop, start + CHUNK_BYTES)
    opened, digest = await asyncio.to_thread(_opened, path, start, first)
    if first == stop:
        headers[CHUNK_DIGEST] = digest
    return FileResponse(
        opened, start, stop, check_again, headers=headers, status_code=choice.status
    )


class FileResponse(Response):
    """Sends a range of a file: by the kernel where the server supports it, else from memory.

    The kernel gets `CHUNK_BYTES` at a time, the first of which are in the page cache. Before each
    of the others `check_again` is called; a RatoonError that it raises ends the connection.
    """

    media_type = BINARY

    def __init__(
        self,
        file: BinaryIO,
        start: int,
        stop: int,
        check_again: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(None, **options)
        self.headers["Content-Length"] = str(stop - start)
        self._file = file
        self._start = start
        self._stop = stop
        self._check_again = check_again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file as file:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            length = self._stop - self._start
            if length and _is_zero_copy(scope):
                # The reader has left, or its key is no longer valid.
                with contextlib.suppress(ConnectionResetError, RatoonError):
                    await self._send_chunks(file.fileno(), send)
            else:
                data = await asyncio.to_thread(os.pread, file.fileno(), length, self._start)
                await send({"type": "http.response.body", "body": data})

    async def _send_chunks(self, file: int, send: Send) -> None:
        for start in range(self._start, self._stop, CHUNK_BYTES):
            stop = min(self._stop, start + CHUNK_BYTES)
            if start > self._start:
                self._check_again()
                await asyncio.to_thread(_digest, file, start, stop)
            message = {"file": file, "offset": start, "count": stop - start}
            await send({"type": ZERO_COPY, **message, "more_body": stop < self._stop})


def _opened(path: FilePath, start: int, stop: int) -> tuple[BinaryIO, str]:
    """Open a file and compute the digest of its bytes [start, stop).

    Raises WEIGHTS_NOT_FOUND where the version has just been dropped.
    """
    try:
        file = cast("BinaryIO", path.open("rb", buffering=0))
    except FileNotFoundError as err:
        raise RatoonError(
            ErrorCode.WEIGHTS_NOT_FOUND, f"{path.name}: this version is no longer kept"
        ) from err
    return file, _digest(file.fileno(), start, stop)


def _digest(file: int, start: int, stop: int) -> str:
    """Compute the xxh3-128 of a file's bytes [start, stop); it reads them into the page cache."""
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    while start < stop:
        num_bytes = os.preadv(file, [piece[: stop - start]], start)
        assert num_bytes, "a file has lost bytes"
        digest.update(piece[:num_bytes])
        start += num_bytes
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Bytes [start, stop) to send: `WHOLE` file, `PART` of it, or none that are `NOT_MODIFIED`."""

    status: int
    start: int
    stop: int


def etag_of(digest: str) -> str:
    """Return the ETag of a file with this digest."""
    return f'"{digest}"'


def is_known(digest: str, if_none_match: str | None) -> bool:
    """Return whether the caller has the file already, by its If-None-Match."""
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return "*" in tags or etag_of(digest) in tags


def choose_range(
    *,
    range_header: str | None,
    if_range: str | None,
    if_none_match: str | None,
    size_bytes: int,
    digest: str,
    max_bytes: int,
) -> Choice:
    """Return what to send of a file of `size_bytes`.

    A range over `max_bytes` is answered with its beginning, as the RFC allows. Multiple ranges are
    not served: the header is ignored then, as the RFC allows too. Raises RANGE_NOT_SATISFIABLE for
    a range outside the file, and for a whole file over `max_bytes`.
    """
    if is_known(digest, if_none_match):
        return Choice(status=NOT_MODIFIED, start=0, stop=0)
    match = None
    if range_header is not None and if_range in (None, etag_of(digest)):
        match = _RANGE.fullmatch(range_header.strip())
    if match is None or match.group(1) == match.group(2) == "":
        if size_bytes > max_bytes:
            raise _unsatisfiable(
                f"a whole file of {size_bytes} bytes", f"ranges of at most {max_bytes} bytes"
            )
        return Choice(status=WHOLE, start=0, stop=size_bytes)
    start, stop = _bounds(match.group(1), match.group(2), size_bytes)
    if start >= stop:
        raise _unsatisfiable(match.group(0), f"a range of the file's {size_bytes} bytes")
    return Choice(status=PART, start=start, stop=min(stop, start + max_bytes))


def _bounds(first: str, last: str, size_bytes: int) -> tuple[int, int]:
    """Return [start, stop) of the range `first-last`, `first-` or `-suffix length`."""
    if not first:
        return max(size_bytes - int(last), 0), size_bytes
    return int(first), min(int(last) + 1, size_bytes) if last else size_bytes


def _unsatisfiable(got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.RANGE_NOT_SATISFIABLE,
        f"Range: got {got}, expected {expected}",
        field="Range",
        got=got,
        expected=expected,
    )
