"""Routes of weights and result files: ranges of files, chunks by digest."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path as FilePath
from typing import Annotated, Any, BinaryIO, cast

import xxhash
from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ratoon.api.gate import Gate
from ratoon.api.http import ranges
from ratoon.api.http.access import AuthorizedCallOf
from ratoon.api.http.calls import Version
from ratoon.api.http.errors import error_response, error_responses
from ratoon.api.http.responses import Digest, PolicyId
from ratoon.api.http.zero_copy import ZERO_COPY
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.manifest import WeightFile
from ratoon_proto.v1 import service_pb2 as wire

BINARY = "application/octet-stream"
# xxh3-128 of the body, 32 hexadecimal digits.
CHUNK_DIGEST = "Ratoon-Chunk-Digest"
# Read and digested at a time: fits a core's cache.
_PIECE_BYTES = 256 * 1024
Offset = Annotated[int, Query(ge=0, lt=2**63)]
Length = Annotated[int, Query(ge=1, lt=2**63)]
_NOT_FOUND = (ErrorCode.POLICY_NOT_FOUND, ErrorCode.WEIGHTS_NOT_FOUND)
_BYTES = {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}


def router(service: PolicyService, gate: Gate, *, max_fetch_bytes: int) -> APIRouter:
    routes = APIRouter(prefix="/v1/policies/{policy_id}", tags=["weights"])

    @routes.get(
        "/weights/{version}/files/{name}",
        response_class=Response,
        responses={
            200: {**_BYTES, "description": "The whole file."},
            206: {
                **_BYTES,
                "description": "The range, or its beginning where it is over the limit.",
            },
            304: {"description": "If-None-Match names the file's digest."},
            **error_responses(*_NOT_FOUND, ErrorCode.RANGE_NOT_SATISFIABLE),
        },
    )
    async def get_weight_file(
        authorized: AuthorizedCallOf,
        policy_id: PolicyId,
        version: Version,
        name: str,
        range_header: Annotated[str | None, Header(alias="Range")] = None,
        if_range: Annotated[str | None, Header()] = None,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        """A file of a version; its ETag is its digest. At most `max_fetch_bytes` an answer."""
        asked = wire.GetWeightManifestRequest(policy_id=policy_id)
        gate.check(authorized, asked)
        path, file = await service.weight_file(policy_id, version, name)
        headers = {"ETag": ranges.etag_of(file.digest), "Accept-Ranges": "bytes"}
        try:
            choice = ranges.choose(
                range_header=range_header,
                if_range=if_range,
                if_none_match=if_none_match,
                size_bytes=file.size_bytes,
                digest=file.digest,
                max_bytes=max_fetch_bytes,
            )
        except RatoonError as error:
            headers["Content-Range"] = f"bytes */{file.size_bytes}"
            return error_response(error, headers)
        return await _file_response(choice, path, file, headers)

    @routes.get(
        "/files/{digest}",
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

    return routes


async def _file_response(
    choice: ranges.Whole | ranges.Part | ranges.NotModified,
    path: FilePath,
    file: WeightFile,
    headers: dict[str, str],
) -> Response:
    match choice:
        case ranges.NotModified():
            return Response(status_code=304, headers=headers)
        case ranges.Whole():
            return await FileResponse.of(path, 0, file.size_bytes, headers, status_code=200)
        case ranges.Part(start=start, stop=stop):
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size_bytes}"
            return await FileResponse.of(path, start, stop, headers, status_code=206)


class FileResponse(Response):
    """A file range with its digest, sent by the kernel where the server supports it."""

    media_type = BINARY

    def __init__(self, file: BinaryIO, start: int, stop: int, **options: Any) -> None:
        super().__init__(None, **options)
        self.headers["Content-Length"] = str(stop - start)
        self._file = file
        self._start = start
        self._stop = stop

    @classmethod
    async def of(
        cls, path: FilePath, start: int, stop: int, headers: dict[str, str], *, status_code: int
    ) -> FileResponse:
        """Raises WEIGHTS_NOT_FOUND where the version has just been dropped."""
        file, digest = await asyncio.to_thread(_opened, path, start, stop)
        return cls(
            file, start, stop, headers=headers | {CHUNK_DIGEST: digest}, status_code=status_code
        )

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
            if length and ZERO_COPY in scope.get("extensions", {}):
                message = {"file": file.fileno(), "offset": self._start, "count": length}
                await send({"type": ZERO_COPY, **message, "more_body": False})
            else:
                data = await asyncio.to_thread(os.pread, file.fileno(), length, self._start)
                await send({"type": "http.response.body", "body": data})


def _opened(path: FilePath, start: int, stop: int) -> tuple[BinaryIO, str]:
    """The file, and the xxh3-128 of its bytes [start, stop), which are then in the page cache."""
    try:
        file = cast("BinaryIO", path.open("rb", buffering=0))
    except FileNotFoundError as err:
        raise RatoonError(
            ErrorCode.WEIGHTS_NOT_FOUND, f"{path.name}: this version is no longer kept"
        ) from err
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    while start < stop:
        num_bytes = os.preadv(file.fileno(), [piece[: stop - start]], start)
        assert num_bytes, f"{path.name} has lost bytes"
        digest.update(piece[:num_bytes])
        start += num_bytes
    return file, digest.hexdigest()
