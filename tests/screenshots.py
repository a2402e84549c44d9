"""The pictures in docs/, from a real browser before the demo's swarm:

    python -m tests.screenshots
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from backends.demo_model import ensure_demo_model
from swarmnode.local_swarm import LocalNode, LocalSwarm
from swarmnode.paths import shared_cache_folder
from tests.swarm_tools import wait_until

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUESTION = "Why is sleep important?"
ANSWER_MS = 120_000
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def main() -> None:
    chromium = shutil.which("chromium") or sys.exit("no chromium is installed: `sudo apt install chromium` (Debian)")
    root = Path(tempfile.mkdtemp(prefix="swarmnode-screenshots-"))
    model = ensure_demo_model(shared_cache_folder())
    try:
        with (
            LocalSwarm(root, 3, backbone=3, each={"api": {"listen": "127.0.0.1:0"}}) as swarm,
            sync_playwright() as started,
        ):
            swarm.add_model(model, name="demo")
            swarm.wait_ready()
            wait_until(lambda: all(same_class(node) for node in swarm.workers), 60)  # adverts come a little later
            url = swarm.workers[0].status()["http"]["url"]
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"] * (os.geteuid() == 0))
            take(browser, url, "dashboard.png", viewport=WIDE)
            take(browser, url, "dashboard-phone.png", viewport=PHONE, color_scheme="dark")
            browser.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def same_class(node: LocalNode) -> bool:
    """All peers have measured, as far as this one has heard, the same."""
    return len({peer["numeric_class"] for peer in node.status()["peers"]}) == 1


def take(browser: Any, url: str, name: str, **look: Any) -> None:
    """A whole page, with an answer on it."""
    page = browser.new_context(**look).new_page()
    page.goto(url)
    page.locator("#peers tbody tr").nth(3).wait_for()
    page.fill("#message", QUESTION)
    page.click("#send")
    page.locator("#send:not([disabled])").wait_for(timeout=ANSWER_MS)
    page.locator("#matrix tbody tr").nth(3).wait_for()
    page.screenshot(path=DOCS / name, full_page=True)


if __name__ == "__main__":
    main()
