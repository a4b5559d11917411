"""Web pages and a service without keys: rebound names, posts of other origins, CORS."""

from __future__ import annotations

import httpx
import pytest

from ratoon.api.http.access import LocalNames
from ratoon.api.http.app import create_app
from ratoon.auth.access import checked_hosts
from ratoon.config import AuthConfig, GrpcConfig, HttpConfig, RatoonConfig
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.open_gate import OPEN_GATE

LOCAL = ["localhost:8000", "127.0.0.1:8000", "127.9.8.7", "[::1]:8000", "LOCALHOST"]
STRANGE = [
    "evil.example:8000",
    "localhost.evil.example",
    "10.1.2.3",
    "[fd00::1]:80",
    "",
    "[",
    "a@b",
]
PAGES = [
    "http://evil.example",
    "https://localhost:8000.evil.example",
    "null",
    "http://localhost:3000",
    "http://[",
]


@pytest.fixture
def client(api: Api) -> httpx.AsyncClient:
    app = create_app(api.service, api.limits, gate=OPEN_GATE)
    app.add_middleware(LocalNames)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000")


@pytest.mark.parametrize("host", LOCAL)
async def test_names_of_this_machine_are_answered(client: httpx.AsyncClient, host: str) -> None:
    answer = await client.get("/v1/policies", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", STRANGE)
async def test_other_names_are_refused(client: httpx.AsyncClient, host: str) -> None:
    """A page whose name was made an address of this machine still has its own name in `Host`."""
    for path in ("/v1/policies", "/metrics", "/openapi.json", "/nothing"):
        answer = await client.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["field"] == "host"
    answer = await client.get("/v1/health", headers={"Host": host})
    assert answer.status_code != 403


@pytest.mark.parametrize("origin", PAGES)
@pytest.mark.parametrize("content_type", ["text/plain", "application/json", ""])
async def test_posts_of_other_pages_change_nothing(
    api: Api, client: httpx.AsyncClient, origin: str, content_type: str
) -> None:
    """A post of plain text, or with no body, is one for which a browser asks nobody first."""
    headers = {"Origin": origin, "Content-Type": content_type}
    body = '{"spec": {"policy_id": "theirs", "preset": "tiny"}}'
    answer = await client.post("/v1/policies", content=body, headers=headers)
    assert answer.status_code == 403
    answer = await client.post(f"/v1/operations/{requests.POLICY}.1:cancel", headers=headers)
    assert answer.status_code == 403
    listed = await api.service.list_policies(service_pb2.ListPoliciesRequest())
    assert [policy.spec.policy_id for policy in listed.policies] == []


async def test_its_own_pages_may(client: httpx.AsyncClient) -> None:
    """The API document's page tries calls out."""
    answer = await client.get("/v1/policies", headers={"Origin": "http://localhost:8000"})
    assert answer.status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:8000"])
async def test_no_page_is_told_that_it_may_read(client: httpx.AsyncClient, origin: str) -> None:
    """CORS is closed: no answer has a header that lets a page of another origin read it."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for answer in (
        await client.options("/v1/policies", headers=asked),
        await client.get("/v1/policies", headers={"Origin": origin}),
        await client.get("/v1/health", headers={"Origin": origin}),
    ):
        assert [name for name in answer.headers if name.startswith("access-control-")] == []


@pytest.mark.parametrize("host", ["ratoon:8000", "RATOON"])
async def test_allowed_names_are_answered(api: Api, host: str) -> None:
    app = create_app(api.service, api.limits, gate=OPEN_GATE)
    app.add_middleware(LocalNames, allowed=["Ratoon"])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/v1/policies", headers={"Host": host})).status_code == 200
        rebound = await client.get("/v1/policies", headers={"Host": "ratoon.evil.example"})
        assert rebound.status_code == 403


_PUBLIC = GrpcConfig(host="10.1.2.3")
_ANY = HttpConfig(allowed_hosts=("*",))


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (RatoonConfig(), ()),
        (RatoonConfig(auth=AuthConfig(required=True)), None),
        # Published on loopback by a container, it was an admin's to any page of a rebound name.
        (RatoonConfig(auth=AuthConfig(required=False)), ()),
        (RatoonConfig(auth=AuthConfig(required=False), grpc=_PUBLIC), ()),
        (RatoonConfig(auth=AuthConfig(required=False), http=_ANY), None),
        (RatoonConfig(http=HttpConfig(allowed_hosts=("a",))), ("a",)),
        (RatoonConfig(grpc=_PUBLIC), None),
    ],
)
def test_names_are_looked_at_where_no_key_is(
    config: RatoonConfig, allowed: tuple[str, ...] | None
) -> None:
    assert checked_hosts(config) == allowed
