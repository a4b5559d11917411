"""A real Chromium, and pages of it that fail their test where the page itself complained."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

# Long: tests share few cores.
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, headless.

    Until it is closed an event loop runs in this thread: no module with async tests may use it.
    """
    binary = shutil.which("chromium")
    if binary is None:
        # `.ci/run` installs it, so there its absence is a failure.
        assert not os.environ.get("CI"), "chromium is not installed"
        pytest.skip("chromium is not installed: scripts/install-test-services.sh")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=binary, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages in contexts of their own: what they log as an error fails the test.

    Answers of 4xx and 5xx, which browsers log too, are the test's own business.
    """
    contexts, complaints = [], []

    def open_(url: str, *, init: str = "", **options: Any) -> Page:
        wanted: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}, **options}
        context = browser.new_context(**wanted)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        if init:
            context.add_init_script(init)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text)
                if message.type == "error" and "Failed to load resource" not in message.text
                else None
            ),
        )
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not complaints
