"""Messages as JSON responses, and a route's documentation of them.

Enters a message, leaves a response. Invariant: the body is `wire.to_json` of the message and
nothing else.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from fastapi.responses import JSONResponse
from google.protobuf.message import Message

from ratoon.api.http.wire import to_json

ACCEPTED = 202

PolicyId = Annotated[str, Path(examples=["tiny-grpo"], description="[a-z0-9][a-z0-9_-]{0,63}")]
UploadId = Annotated[str, Path(examples=["batch-17"], description="[a-zA-Z0-9_-]{1,64}")]
CheckpointId = Annotated[str, Path(examples=["after-warmup"])]
OperationId = Annotated[str, Path(description="As CreatePolicy, Update, ... answered it.")]


def json_of(message: Message, *, status: int = 200) -> JSONResponse:
    return JSONResponse(to_json(message), status_code=status)
