"""Take the pictures of docs/view.md: ``python tools/screenshots.py FIRST SECOND EPISODES``, with folders of runs.

The first two are runs on the same prompts with held-out answers, the third one of an environment's episodes with at
least one event. Needs Playwright and the system's Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 820


@contextmanager
def served(runs: list[str]) -> Iterator[str]:
    """Start `rlpipe view`, and yield the address that it prints."""
    command = [sys.executable, "-m", "rlpipe", "view", *runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def take(page: Page, name: str, view: str, *, height: int = HEIGHT) -> None:
    """Save what a view shows."""
    show(page, view)
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.wait_for_timeout(1500)  # charts draw themselves
    page.screenshot(path=IMAGES / f"view_{name}.png")


def show(page: Page, view: str) -> None:
    page.evaluate("view => { delete document.querySelector('main').dataset.view; location.hash = `#/${view}`; }", view)
    page.wait_for_selector(f"main[data-view='{view.split('?')[0]}']")
    page.wait_for_timeout(1000)


def open_page(browser: Browser, address: str, scheme: str) -> Page:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(address)
    page.wait_for_selector("main[data-view]")
    return page


def varied_group(page: Page) -> str:
    """Return the id of the newest trained group of which some completions are right and some wrong."""
    show(page, "groups?run=0&state=TRAINED&sort=std&order=desc")
    found = page.locator("table.groups tbody tr[data-group]").first.get_attribute("data-group")
    assert found is not None
    return found


def main() -> None:
    first, second, episodes = sys.argv[1:]
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with served([first, second]) as address:
            page = open_page(browser, address, "light")
            take(page, "overview", "overview?run=0&shown=0.1")
            take(page, "groups", "groups?run=0")
            take(page, "group", f"group?run=0&id={varied_group(page)}", height=620)
            take(page, "events", "events?run=0")
            take(page, "parts", "parts?run=0")
            show(page, "compare?run=0")
            page.locator("table.prompts tbody tr").first.click()
            page.wait_for_timeout(1000)
            page.screenshot(path=IMAGES / "view_compare.png")
        with served([episodes]) as address:
            page = open_page(browser, address, "dark")
            take(page, "episode", f"group?run=0&id={varied_group(page)}")
        browser.close()


if __name__ == "__main__":
    main()
