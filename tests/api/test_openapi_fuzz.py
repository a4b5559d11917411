"""Schemathesis over the OpenAPI document, against the application in this process.

What it sends follows the document, or breaks it on purpose; what comes back must be documented, of
the documented form, and never a 5xx.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks

from ratoon.api.http.app import create_app
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.errors import RatoonError
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.fake_engine import FakeEngine, service_of
from tests.api.open_gate import OPEN_GATE
from tests.api.wires import HTTP_ALONE, OTHER_ROUTES, ROUTES

# FastAPI's 405 names one method of a path in Allow; well-formed JSON may still be no batch, and a
# name that no policy has is no failure.
MAX_EXAMPLES = 10
LIMITS = LimitsConfig(max_fetch_bytes=1024, max_wait_s=0.01)
POLICY_ID = "tiny-grpo"
EXCLUDED = [
    checks.allow_header_conformance,
    checks.unsupported_method,
    checks.positive_data_acceptance,
]


class _EndingEngine(FakeEngine):
    """What it sends of versions ends: a caller in this process cannot leave before."""

    async def watch_weights(
        self, policy_id: str, known_version: int | None
    ) -> AsyncIterator[WeightManifest]:
        yield await self.weight_manifest(policy_id, None, known_version, LIMITS.max_wait_s)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> PolicyService:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    (folder / "model.safetensors").write_bytes(b"0123456789")
    return service_of(_EndingEngine(folder=folder, gap_wait_s=0.001), LIMITS, folder)


@pytest.fixture(scope="module")
def document(service: PolicyService) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi(
        "/openapi.json", create_app(service, LIMITS, gate=OPEN_GATE)
    )


@pytest.fixture(autouse=True)
def _policy(service: PolicyService) -> None:
    """A policy to send to, though another case has deleted it."""
    request = service_pb2.CreatePolicyRequest(spec=requests.spec(POLICY_ID))
    with suppress(RatoonError):
        asyncio.run(service.create_policy(request))


OPERATIONS = sorted({*ROUTES.values(), *OTHER_ROUTES.values(), *HTTP_ALONE})
# They take nothing that could be wrong.
BARE = {("GET", path) for path in ("/metrics", "/v1/health", "/v1/info", "/v1/policies")}
CASES = [(mode, *operation) for operation in OPERATIONS for mode in GenerationMode]


@pytest.mark.more
@pytest.mark.parametrize(
    ("mode", "method", "path"),
    [case for case in CASES if case[0] is GenerationMode.POSITIVE or case[1:] not in BARE],
)
def test_answers_are_as_documented(
    document: schemathesis.BaseSchema, mode: GenerationMode, method: str, path: str
) -> None:
    operation = document[path][method.lower()]
    has_more_than_the_path = mode is GenerationMode.POSITIVE or bool(operation.body)
    is_known = "{policy_id}" in path and has_more_than_the_path
    known = {"policy_id": POLICY_ID} if is_known else {}

    @settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )
    @given(case=operation.as_strategy(mode, path_parameters=known))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(excluded_checks=EXCLUDED)

    check()
