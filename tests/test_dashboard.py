"""The daemon's own page in a real browser: what it shows, a conversation, a worker that dies, small screens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from swarmnode.local_swarm import LocalSwarm
from tests.patience import LOADED, PATIENCE_S
from tests.tiny_architectures import write_tiny_model

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

DEAD_S = 5.0 * LOADED
SHOWN_MS = PATIENCE_S * 1000


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    root = tmp_path_factory.mktemp("page")
    model = write_tiny_model(root / "m.gguf", "olmoe")
    settings = {"leader": {"context_tokens": 8192}}  # room for answers that nobody would wait for
    with LocalSwarm(root / "swarm", 2, leader=settings, each={"api": {"listen": "127.0.0.1:0"}}) as swarm:
        swarm.add_model(model)
        swarm.wait_ready(timeout_s=PATIENCE_S)
        yield swarm


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield chromium
        chromium.close()


class Page:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.faults.append(said.text))
        self.hosts: set[str] = set()
        self.page.on("request", lambda asked: self.hosts.add(asked.url.split("/")[2]))
        self.page.route("**/v1/chat/completions", self._endless)
        self.page.goto(url)

    @staticmethod
    def _endless(route: Any) -> None:
        """No answer may be over before it is looked at, as one is that begins with the end token."""
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    def text(self, selector: str) -> str:
        words: str = self.page.locator(selector).inner_text()
        return words

    def wait(self, selector: str, milliseconds: float = SHOWN_MS) -> None:
        self.page.locator(selector).first.wait_for(timeout=milliseconds)

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def page(swarm: LocalSwarm, browser: Any) -> Iterator[Page]:
    opened = Page(browser, url_of(swarm))
    yield opened
    opened.close()


def url_of(swarm: LocalSwarm) -> str:
    return str(swarm.workers[0].status()["http"]["url"])


def test_the_page_shows_the_swarm_and_asks_nobody_else(swarm: LocalSwarm, page: Page) -> None:
    page.wait("#verdict.ready")
    page.wait("#peers tbody tr:nth-child(3)")
    assert {page.text(f"#peers tbody tr:nth-child({i}) th").split()[0] for i in (1, 2, 3)} == {
        node.name for node in swarm.nodes
    }
    page.wait("#matrix tbody tr:nth-child(3)")
    assert "every expert has at least 1 copy" in page.text("#coverage-words")
    page.page.focus("#heat")
    page.page.keyboard.press("ArrowRight")
    assert "expert 1: worker-" in page.text("#cell")
    assert page.hosts == {url_of(swarm).removeprefix("http://")}
    assert page.faults == []


def test_an_answer_streams_by_keyboard_and_can_be_stopped(page: Page) -> None:
    page.page.focus("#message")
    page.page.keyboard.type("Tell me more")
    page.page.keyboard.press("Enter")
    page.wait("#stop:not([disabled])")
    page.page.locator("#log article:nth-child(2) div:not(:empty)").wait_for(timeout=SHOWN_MS)
    page.page.click("#stop")
    page.wait("#send:not([disabled])")
    assert "Tell me more" in page.text("#log article:nth-child(1)")
    page.page.click("#forget")
    assert page.text("#log") == ""
    assert page.faults == []


def test_what_comes_from_peers_is_text_and_never_markup(browser: Any, swarm: LocalSwarm, page: Page) -> None:
    page.page.fill("#message", "<img src=x onerror=alert(1)>")
    page.page.keyboard.press("Enter")
    page.wait("#log article:nth-child(2)")
    assert page.page.locator("#log img").count() == 0
    assert "<img" in page.text("#log article:nth-child(1)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phones_width_is_enough(browser: Any, swarm: LocalSwarm, scheme: str) -> None:
    phone = Page(browser, url_of(swarm), viewport={"width": 360, "height": 740}, color_scheme=scheme)
    phone.wait("#peers tbody tr:nth-child(3)")
    assert phone.page.locator("html").evaluate("page => page.scrollWidth") == 360
    phone.close()


@pytest.mark.parametrize("width", [660, 1056, 1280])
def test_a_screen_shows_all_of_the_peers_without_scrolling_to_the_side(page: Page, width: int) -> None:
    page.page.set_viewport_size({"width": width, "height": 900})
    page.wait("#peers tbody tr:nth-child(3)")
    assert page.page.locator("#peers").evaluate("""table => {
        table.querySelector("td:nth-child(3)").textContent = "leader, backbone, worker";
        return table.scrollWidth <= table.parentElement.clientWidth;
    }""")


def test_everything_that_can_be_used_has_a_name(page: Page) -> None:
    page.wait("#verdict.ready")
    for role in ("button", "textbox", "region", "application", "log"):
        for each in page.page.get_by_role(role).all():
            name = each.get_attribute("aria-label") or each.get_attribute("aria-labelledby") or each.inner_text()
            assert name or page.page.locator(f"label[for={each.get_attribute('id')}]").count() == 1, role


def test_a_dead_worker_shows(browser: Any, swarm: LocalSwarm, page: Page) -> None:
    page.wait("#verdict.ready")
    swarm.workers[1].kill()
    page.wait('[data-peer="worker-2"] :is(.state-suspect, .state-gone)', DEAD_S * 1000)
    swarm.workers[1].start()
    # If that took over ten seconds, worker-1 has all experts by now, and there is nothing for it to hold.
    page.wait('[data-peer="worker-2"] :is(.state-joining, .state-loading, .state-ready)')
