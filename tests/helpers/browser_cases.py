"""A headless browser on pages of `rlpipe view`, which notes whatever a page should not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
NEEDED = "RLPIPE_NEED_BROWSER"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 15_000
"""Milliseconds that a page has to show what is expected: an index gives way to pages, and machines are busy."""
expect.set_options(timeout=TIMEOUT_MS)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Open the system's Chromium; without one, skip the test, or fail if ``RLPIPE_NEED_BROWSER`` is set."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        report = pytest.fail if os.environ.get(NEEDED) else pytest.skip
        report(f"no browser: none of {', '.join(BROWSERS)} is installed; `make browser` installs one, as root")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@contextmanager
def served(runs: Sequence[Path], *, cache: Path, code: Path = ROOT, python: str = sys.executable) -> Iterator[str]:
    """Start `rlpipe view` from the package in a folder; yield the address that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(code), "XDG_CACHE_HOME": str(cache)}
    command = [python, "-m", "rlpipe", "view", *map(str, runs)]
    process = subprocess.Popen(command, env=environment, cwd=cache.parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), address
        yield address
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """Open a page; afterwards, check that it raised and logged no error, opened no dialog, and asked nobody else."""
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("console", lambda message: faults.append(message.text) if _is_fault(message) else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
    own = address.split("#")[0]
    page.on("request", lambda request: None if request.url.startswith((own, "data:")) else faults.append(request.url))
    page.goto(address)
    page.wait_for_selector("main[data-view]")
    yield page
    assert page.evaluate("window.hacked") is None
    assert not faults, faults
    context.close()


def _is_fault(message: ConsoleMessage) -> bool:
    """Return whether a message is an error, other than an answer that says what is wrong with a question."""
    return message.type in ("error", "warning") and "status of 400" not in message.text


def show(page: Page, view: str) -> None:
    """Go to a view by its address, and wait until it is drawn."""
    name = view.split("?")[0]
    page.evaluate("view => { delete document.querySelector('main').dataset.view; location.hash = `#/${view}`; }", view)
    page.wait_for_selector(f"main[data-view='{name}']")


CONTRASTS = (Path(__file__).with_name("contrasts.js")).read_text().partition("\n")[2]
"""Program that returns the texts of a page whose contrast is below 4.5:1."""
CONTROLS = "button, a, input, select, summary, [tabindex='0']"
UNNAMED = f"""() => [...document.querySelectorAll("{CONTROLS}")].filter((element) => {{
  const legend = element.closest("fieldset")?.querySelector("legend")?.textContent;
  const label = element.labels?.[0]?.textContent.trim() || legend;
  const named = element.getAttribute("aria-label") || element.textContent.trim() || label;
  return !named && element.getBoundingClientRect().width > 0;
}}).map((element) => element.outerHTML.slice(0, 120))"""
"""Program that returns the controls of a page without a name for a screen reader."""


def click_through_group(page: Page, *, following: int = 2) -> None:
    """Open group 1 of a run with episodes and images from the table of groups, and use every control that it has.

    The group ``following`` it is the one of the next number, or in a table that is filtered its next row.
    """
    page.locator("tr[data-group='1']").click()
    expect(page.locator("h2")).to_have_text("Group 1")
    expect(page.locator(".rollout")).to_have_count(2)
    assert page.locator(".images img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
    first = page.locator(".rollout").first
    expect(first.locator("details.turn")).to_have_count(2)
    call = first.locator("details.call")
    expect(call).to_contain_text("search")
    expect(call.locator(".result")).to_contain_text("found it")
    call.locator("summary").click()
    expect(call.locator(".result")).to_be_hidden()
    first.locator("summary", has_text="tokens").click()
    tokens = first.locator(".tokens")
    expect(tokens).to_have_text("It is 2 ☃, says group 1.")
    tints = {
        "log-prob": "unlikely",
        "advantage": "negative",
        "the learner's log-prob difference": "positive",  # of this sequence; those of the next one are negative
        "loss mask": "trained",
        "policy version": "series-0",
    }
    for how, kind in tints.items():
        page.get_by_label("Colour tokens by").select_option(label=how)
        first.locator("summary", has_text="tokens").click()
        expect(tokens.locator(f".tint.{kind}").first).to_be_visible()
    tokens.locator(".token").nth(2).hover()
    expect(page.locator("#tooltip")).to_contain_text("the learner's log-prob")
    expect(page.locator("#tooltip")).to_contain_text("(difference 0.01)")
    tooltip = page.locator("#tooltip")
    tokens.focus()
    page.keyboard.press("End")
    expect(tokens.locator(".token.chosen")).to_have_text(tokens.locator(".token").last.inner_text())
    page.keyboard.press("Home")
    expect(tooltip).to_contain_text(tokens.locator(".token").first.inner_text())
    page.keyboard.press("ArrowRight")
    expect(tokens.locator(".token.chosen")).to_have_attribute("data-at", "1")
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()
    page.get_by_role("link", name="Next group").click()
    expect(page.locator("h2")).to_have_text(f"Group {following}")
