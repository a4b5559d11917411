"""The page for people at `/`: static files of the wheel, served without a key.

The page itself calls the HTTP API, with a key that its reader types. Its policy lets it load and
call nothing but this service, run no inline script or style, and be framed by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

import xxhash
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ratoon.api.http.files import etag_of, is_known

INDEX = "index.html"
_MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        # An upgraded service has another page: browsers ask each time, and mostly get 304.
        "Cache-Control": "no-cache",
    }
)


def page_files() -> dict[str, bytes]:
    """Read the page's files, by name; about 100 kB in all."""
    folder = files("ratoon").joinpath("page")
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.partition(".")[2] in _MEDIA_TYPES
    }


def page_routes() -> list[Route]:
    """Build the routes of the page and of the files that it loads."""
    known = {name: (data, xxhash.xxh3_128(data).hexdigest()) for name, data in page_files().items()}

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        if name not in known:
            raise HTTPException(404, "no such file of the page")
        data, digest = known[name]
        headers = {**HEADERS, "ETag": etag_of(digest)}
        if is_known(digest, request.headers.get("If-None-Match")):
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=_MEDIA_TYPES[name.partition(".")[2]], headers=headers)

    return [
        Route("/", page, include_in_schema=False),
        Route("/page/{name}", page, include_in_schema=False),
    ]
