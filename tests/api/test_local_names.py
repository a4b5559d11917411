"""Web pages and a service without keys: rebound names, posts of other origins, CORS."""

from __future__ import annotations

from itertools import product

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


async def test_names_of_this_machine_are_answered(client: httpx.AsyncClient) -> None:
    for host in LOCAL:
        assert (await client.get("/v1/policies", headers={"Host": host})).status_code == 200, host
    # The API document's page tries calls out.
    own = {"Origin": "http://localhost:8000"}
    assert (await client.get("/v1/policies", headers=own)).status_code == 200


async def test_other_names_are_refused(client: httpx.AsyncClient) -> None:
    """A page whose name was made an address of this machine still has its own name in `Host`."""
    for host, path in product(STRANGE, ("/v1/policies", "/metrics", "/openapi.json", "/nothing")):
        answer = await client.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["field"]) == (403, "host"), host
    for host in STRANGE:
        answer = await client.get("/v1/health", headers={"Host": host})
        assert answer.status_code != 403, host


async def test_posts_of_other_pages_change_nothing(api: Api, client: httpx.AsyncClient) -> None:
    """A post of plain text, or with no body, is one for which a browser asks nobody first."""
    body = '{"spec": {"policy_id": "theirs", "preset": "tiny"}}'
    for origin, content_type in product(PAGES, ("text/plain", "application/json", "")):
        headers = {"Origin": origin, "Content-Type": content_type}
        for path, content in (
            ("/v1/policies", body),
            (f"/v1/operations/{requests.POLICY}.1:cancel", ""),
        ):
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code == 403, headers
    listed = await api.service.list_policies(service_pb2.ListPoliciesRequest())
    assert [policy.spec.policy_id for policy in listed.policies] == []


async def test_no_page_is_told_that_it_may_read(client: httpx.AsyncClient) -> None:
    """CORS is closed: no answer has a header that lets a page of another origin read it."""
    for origin in ("http://evil.example", "http://localhost:8000"):
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


async def test_allowed_names_are_answered(api: Api) -> None:
    app = create_app(api.service, api.limits, gate=OPEN_GATE)
    app.add_middleware(LocalNames, allowed=["Ratoon"])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for host in ("ratoon:8000", "RATOON"):
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
