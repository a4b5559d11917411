"""docs/api.md against the code that it describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ratoon.api.contract import SERVICE
from ratoon.api.convert.checks import CHECKPOINT_ID, POLICY_ID, RECEIVER_ID, UPLOAD_ID
from ratoon.api.http.files import CHUNK_DIGEST
from ratoon.api.http.schema import body_of
from ratoon.config import LimitsConfig
from ratoon.engine.commands import REQUEST_ID
from ratoon.errors import ERROR_TABLE
from ratoon.train.loss.kinds import LOSSES
from ratoon_proto.fields import default_text, fields_of
from ratoon_proto.v1 import policy_pb2, service_pb2, training_pb2
from tests.api.wires import HTTP_ALONE, OTHER_ROUTES, ROUTES

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def _rows(header: str) -> list[list[str]]:
    table = TEXT[TEXT.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def test_the_table_of_errors_is_that_of_the_code() -> None:
    documented = [row[:4] for row in _rows("| code | HTTP | gRPC |")]
    assert documented == [
        [str(code), str(row.http), row.grpc, "yes" if row.retryable else "no"]
        for code, row in ERROR_TABLE.items()
    ]


def test_the_table_of_calls_is_that_of_the_routes() -> None:
    documented = {row[0]: tuple(row[1].split(" ")) for row in _rows("| RPC | HTTP |")}
    assert documented == {**ROUTES, **OTHER_ROUTES}
    prose = " ".join(TEXT.split())
    for method, path in HTTP_ALONE:
        assert f"`{method} {path}`" in prose


def test_defaults_and_ids_are_those_of_the_code() -> None:
    stated = dict(
        re.findall(r"(\w+) `(\w+)`", TEXT.split("`UNSPECIFIED`) is: ")[1].split(". Loss")[0])
    )
    files = (policy_pb2, service_pb2, training_pb2)
    messages = [m for file in files for m in file.DESCRIPTOR.message_types_by_name.values()]
    own = {
        "publish" if message.name == "PublishConfig" else field.name: default_text(field)
        for message in messages
        for field in fields_of(message)
        if field.enum_type is not None and default_text(field)
    }
    assert stated == own
    for pattern in (POLICY_ID, UPLOAD_ID, CHECKPOINT_ID, RECEIVER_ID, REQUEST_ID):
        # A pattern's exceptions are told in words.
        allowed = re.sub(r"^\(\?!.*?\)", "", pattern.pattern)
        assert f"`{allowed}`" in " ".join(TEXT.split())


def test_defaults_of_losses_are_those_of_the_code() -> None:
    def clip(bounds: tuple[float, float] | None) -> str:
        return "none" if bounds is None else ", ".join(f"{bound:g}" for bound in bounds)

    documented = [[cell.strip("`") for cell in row] for row in _rows("| loss | `clip_low`")]
    assert documented == [
        [
            str(kind),
            clip(row.clip),
            str(row.token_weight),
            str(row.divide_by),
            "none" if row.advantage is None else str(row.advantage),
        ]
        for kind, row in LOSSES.items()
    ]
    duals = [str(kind) for kind, row in LOSSES.items() if "dual_clip" in row.objective.options]
    assert f"`dual_clip` ({', '.join(f'`{kind}`' for kind in duals)};" in " ".join(TEXT.split())
    ratios = [kind for kind, row in LOSSES.items() if row.has_ratio]
    assert ratios == list(LOSSES)[:-4]
    assert [str(k) for k, row in LOSSES.items() if row.drop_zero_variance_groups] == ["dapo"]


def test_bodies_of_the_shell_example_are_taken() -> None:
    (example,) = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    create, update = re.findall(r"-d '(.*?)'\n", example, re.DOTALL)
    assert _body("CreatePolicy", create).spec.policy_id == "copy"
    assert _body("Update", update).seq == 1
    assert f"`{CHUNK_DIGEST}`" in TEXT
    assert f"length={LimitsConfig().max_fetch_bytes}" in example


def _body(rpc: str, text: str) -> Any:
    model = body_of(SERVICE.methods_by_name[rpc])
    assert model is not None
    return model.model_validate_json(text)
