"""Builds JSON responses of messages, and describes parameters of routes.

A response's body is `to_json` of the message and nothing else.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from fastapi.responses import JSONResponse
from google.protobuf.message import Message

from ratoon.api.convert.checks import DIGEST, OPERATION_ID, POLICY_ID, UPLOAD_ID
from ratoon_proto.json_form import to_json

ACCEPTED = 202

PolicyId = Annotated[str, Path(examples=["tiny-grpo"], pattern=f"^{POLICY_ID.pattern}$")]
UploadId = Annotated[str, Path(examples=["batch-17"], pattern=f"^{UPLOAD_ID.pattern}$")]
Digest = Annotated[str, Path(pattern=f"^{DIGEST.pattern}$")]
CheckpointId = Annotated[str, Path(examples=["after-warmup"])]
KnownVersion = Annotated[int | None, Query(ge=0, lt=2**63)]
OperationId = Annotated[str, Path(pattern=f"^{OPERATION_ID.pattern}$")]


def json_of(message: Message, *, status: int = 200) -> JSONResponse:
    """Build the JSON response of a message."""
    return JSONResponse(to_json(message), status_code=status)
