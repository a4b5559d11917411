"""Sends a model folder of this machine with the CreatePolicy that names it.

CreatePolicy itself says what is missing: first all, later what an interrupted sender has left. So a
retry, by whatever process, sends no byte twice, and of a policy that exists none at all.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import xxhash

from ratoon_client import rpcs
from ratoon_client.caller import Caller
from ratoon_client.errors import InvalidArgumentError, RatoonApiError
from ratoon_proto.v1 import operation_pb2, policy_pb2, weights_pb2

_READ_BYTES = 2**20
# Files of folders within the model's.
_WITHIN = ("additional_chat_templates/*.jinja", "value_head/*.safetensors")
# A file may expire between two calls, if the sender sleeps for that long.
_MAX_ROUNDS = 3


async def create_from(
    caller: Caller, spec: policy_pb2.PolicySpec, folder: Path
) -> operation_pb2.Operation:
    """Create a policy of a folder's files and chat templates, other subfolders and hidden files
    aside.

    Raises InvalidArgumentError for a folder that cannot be read, and RatoonApiError.
    """
    try:
        files = await asyncio.to_thread(_described, folder)
    except OSError as err:
        raise InvalidArgumentError("send_folder", str(folder), f"readable files: {err}") from err
    if not files:
        raise InvalidArgumentError("send_folder", str(folder), "a folder with files")
    spec.sent_model.files.extend(files)
    by_digest = {file.digest: file for file in files}
    for _ in range(_MAX_ROUNDS * len(files)):
        try:
            return await caller.ask(rpcs.CREATE_POLICY, spec=spec)
        except RatoonApiError as error:
            file = by_digest.get(error.details.get("digest", ""))
            if error.code != "UPLOAD_NOT_FOUND" or file is None:
                raise
            arrived = int(error.details.get("arrived", "0"))
            await _send(caller, spec.policy_id, file, folder / file.name, arrived)
    return await caller.ask(rpcs.CREATE_POLICY, spec=spec)


async def _send(
    caller: Caller, policy_id: str, file: weights_pb2.WeightFile, path: Path, arrived: int
) -> None:
    """Send a file from byte `arrived` on."""
    # A body in base64 is a third larger than its bytes.
    most_bytes = min(caller.config.part_bytes, (await caller.limits()).max_body_bytes // 2)
    while True:
        data = await asyncio.to_thread(_read, path, arrived, most_bytes)
        answer = await caller.ask(
            rpcs.SEND_MODEL_FILE,
            policy_id=policy_id,
            digest=file.digest,
            size_bytes=file.size_bytes,
            offset=arrived,
            data=data,
        )
        arrived = answer.num_bytes
        # A file that has become shorter since is refused when the policy is created.
        if arrived >= file.size_bytes or not data:
            return


def _described(folder: Path) -> list[weights_pb2.WeightFile]:
    files: list[weights_pb2.WeightFile] = []
    within = (path for pattern in _WITHIN for path in folder.glob(pattern))
    for path in sorted([*folder.iterdir(), *within]):
        if path.is_file() and not path.name.startswith("."):
            digest, size_bytes = _digested(path)
            name = str(path.relative_to(folder))
            file = weights_pb2.WeightFile(name=name, size_bytes=size_bytes, digest=digest)
            files.append(file)
    return files


def _digested(path: Path) -> tuple[str, int]:
    state, size_bytes = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            state.update(block)
            size_bytes += len(block)
    return state.hexdigest(), size_bytes


def _read(path: Path, offset: int, most_bytes: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(most_bytes)
