"""The page's files as the gateway serves them: without a key, and nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from ratoon.api.http.page import HEADERS, INDEX, page_files
from tests.api.conftest import Api
from tests.api.guarded import Guarded

MOST_BYTES = 300_000
FILES = page_files()
TEXT = {name: data.decode() for name, data in FILES.items()}


async def test_the_page_is_served_whole_without_a_key(guarded: Guarded) -> None:
    """What one file names is served under that name; all of it weighs less than 300 kB."""
    seen, open_ = {}, {"/"}
    while open_:
        path = open_.pop()
        answer = await guarded.client.get(path)
        assert answer.status_code == 200, path
        seen[path] = len(answer.content)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, path
        found = re.findall(r'(?:href|src)="(page/[^"]+)"|from "\./([^"]+)"', answer.text)
        open_ |= {f"/{a or f'page/{b}'}" for a, b in found} - set(seen)
    assert {path.rpartition("/")[2] or INDEX for path in seen} == set(FILES)
    assert sum(seen.values()) < MOST_BYTES


async def test_the_page_lets_a_browser_do_little(guarded: Guarded) -> None:
    answer = await guarded.client.get("/")
    rules = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert not any("unsafe" in rule or "*" in rule for rule in rules.values())
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


async def test_a_browser_is_sent_a_file_once(api: Api) -> None:
    first = await api.http.client.get("/page/main.js")
    again = await api.http.client.get(
        "/page/main.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/", 200),
        ("POST", "/", 405),
        ("GET", "/page/", 404),
        ("GET", "/page/none.js", 404),
        ("GET", "/page/..%2Fconfig.py", 404),
        ("GET", "/page/%2e%2e/config.py", 404),
    ],
)
async def test_nothing_else_is_served(api: Api, method: str, path: str, status: int) -> None:
    assert (await api.http.client.request(method, path)).status_code == status


@pytest.mark.parametrize("name", sorted(TEXT))
def test_a_file_names_no_other_host_and_makes_no_markup(name: str) -> None:
    """Text from the service is only ever set as text, so that markup in it is shown."""
    text = TEXT[name].replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"(?i)\b(?:https?|wss?):|//[a-z0-9-]+\.[a-z]", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
        r"|\bimport\(|localStorage|document\.cookie",
        text,
    )
    assert not re.search(r"(?i)<[^>]+ (?:style|on[a-z]+)=", text)
