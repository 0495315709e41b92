"""The way through the page of `rlpipe view`: each view is found again as it was left, and says what it can't know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_cases import opened, served, show
from playwright.sync_api import Browser, Page, expect
from viewer_cases import ViewerRun, finished_run


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve two runs, one of them without the metrics of its last steps."""
    folder = tmp_path_factory.mktemp("viewed")
    finished_run(folder / "first", num_steps=40)
    finished_run(folder / "second", num_steps=8)
    with (folder / "second" / "metrics.jsonl").open("a") as file:
        for step in (9, 10):
            file.write(json.dumps({"step": step, "time": 1.0, "loss": 0.1, "entropy": None, "reward": 0.5}) + "\n")
    with served([folder / "first", folder / "second"], cache=folder / "cache") as found:
        yield found


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, address) as found:
        yield found


def test_tabs_lead_to_views_as_they_were_left(page: Page) -> None:
    show(page, "groups")
    page.locator("select[name=state]").select_option("DISCARDED")
    status = page.locator("p[role=status]").first
    expect(status).to_have_text("40 of 160 groups")
    page.get_by_role("link", name="Events", exact=True).click()
    page.wait_for_selector("main[data-view=events]")
    page.get_by_role("link", name="Groups", exact=True).click()
    expect(status).to_have_text("40 of 160 groups")
    page.get_by_role("link", name="Groups", exact=True).click()  # once more: all of them
    expect(status).to_have_text("160 of 160 groups")
    page.locator("select[name=run]").select_option("1")
    expect(status).to_have_text("32 of 32 groups")


def test_a_view_begins_at_its_top_and_is_left_where_it_was(page: Page) -> None:
    show(page, "groups")
    row = page.locator("table.groups tbody tr").nth(45)
    row.scroll_into_view_if_needed()
    page.wait_for_function("scrollY > 100")
    before = page.evaluate("scrollY")
    row.click()
    page.wait_for_selector("main[data-view=group]")
    page.wait_for_function("scrollY === 0")
    expect(page.locator("#main")).to_be_focused()
    page.go_back()
    page.wait_for_selector("main[data-view=groups]")
    page.wait_for_function(f"Math.abs(scrollY - {before}) < 3")


def test_the_next_group_is_that_of_the_table_it_was_opened_from(page: Page) -> None:
    show(page, "groups")
    page.locator("select[name=state]").select_option("DISCARDED")
    rows = page.locator("table.groups tbody tr")
    expect(rows.first).to_have_attribute("data-group", "159")
    expect(rows.nth(1)).to_have_attribute("data-group", "155")
    rows.first.click()
    expect(page.get_by_role("link", name="Previous group")).to_have_attribute("aria-disabled", "true")
    page.get_by_role("link", name="Next group").click()
    expect(page.locator("h2")).to_have_text("Group 155")
    show(page, "groups?run=0")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("p[role=status]").first).to_have_text("160 of 160 groups")
    page.locator("tr[data-group='158']").click()
    page.get_by_role("link", name="Next group").click()
    expect(page.locator("h2")).to_have_text("Group 159")


def test_a_mark_says_of_which_of_several_runs_it_is(page: Page) -> None:
    show(page, "overview?shown=0,1")
    page.locator(".chart[data-title='Reward'] .mark.end").first.dispatch_event("mouseenter")
    expect(page.locator("#tooltip")).to_contain_text("first · step 40 · end")


def test_what_a_filter_can_not_know_is_said(page: Page) -> None:
    show(page, "groups")
    page.wait_for_selector(".indexing", state="hidden")
    said = page.locator("main > .groups > .notice")
    expect(said).to_be_hidden()
    page.locator("input[type=search]").fill("is")
    expect(said).to_contain_text("are known of 120 of 160 groups")


def test_a_metric_that_is_no_number_any_more_has_none_in_the_legend(page: Page) -> None:
    show(page, "overview?run=1&shown=1")
    legend = page.locator(".chart[data-title='Entropy'] .legend")
    expect(legend).to_have_text("second –")
    expect(page.locator(".chart[data-title='Reward'] .legend")).to_have_text("second 0.5")


def test_a_run_has_no_values_after_its_end(page: Page) -> None:
    show(page, "overview?shown=0,1")
    chart = page.locator(".chart[data-title='Reward']")
    expect(chart.locator(".legend")).to_contain_text("second 0.5")
    chart.get_by_role("group", name="Reward over steps").focus()
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".legend")).to_contain_text("second –")


def test_an_address_of_another_run_or_view_leads_to_one_that_is_there(page: Page) -> None:
    show(page, "groups?run=99")
    expect(page.locator("p[role=status]").first).to_have_text("32 of 32 groups")
    page.evaluate("location.hash = '#/constructor'")
    page.wait_for_selector("main[data-view=overview]")


def test_text_that_is_selected_stays_while_the_run_goes_on(browser: Browser, tmp_path: Path) -> None:
    run = ViewerRun(tmp_path / "live", num_steps=100).train(1)
    with served([run.folder], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        show(page, "groups")
        page.wait_for_selector("table.groups tbody tr")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('table.groups tbody .prompt'))")
        chosen = page.evaluate("String(getSelection())")
        run.train(1)
        expect(page.locator("#top")).to_contain_text("step 2 of 100")
        page.wait_for_timeout(5000)
        assert page.evaluate("String(getSelection())") == chosen != ""
        page.evaluate("getSelection().removeAllRanges()")
        expect(page.locator("p[role=status]").first).to_have_text("8 of 8 groups")


def test_more_tokens_of_long_completions_are_shown_in_parts(browser: Browser, tmp_path: Path) -> None:
    run = ViewerRun(tmp_path / "run", num_steps=1, ending="." * 9000).train(1)
    run.end()
    with served([run.folder], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        show(page, "group?id=1")
        more = page.get_by_role("button", name="more tokens").first
        expect(more).to_have_text(re.compile(r"^7,\d{3} more tokens$"))
        more.click()
        expect(more).to_have_text(re.compile(r"^1,\d{3} more tokens$"))
