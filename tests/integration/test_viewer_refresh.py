"""The page of `rlpipe view` on runs that go on: a refresh takes nothing from its reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_cases import opened, served, show
from playwright.sync_api import Browser, Page, expect
from viewer_cases import ViewerRun, config_of, finished_run


@pytest.fixture
def run(tmp_path: Path) -> ViewerRun:
    return ViewerRun(tmp_path / "live", num_steps=100)


@pytest.fixture
def page(browser: Browser, run: ViewerRun, tmp_path: Path) -> Iterator[Page]:
    with served([run.folder], cache=tmp_path / "cache") as address, opened(browser, address) as found:
        yield found


def train(run: ViewerRun, page: Page) -> None:
    """Train a step, and wait until the page has been drawn with it."""
    run.train(1)
    expect(page.locator("#top")).to_contain_text(f"step {run.step} of 100")


def test_the_focus_stays_where_it_is(run: ViewerRun, page: Page) -> None:
    train(run, page)
    for control in (page.get_by_role("link", name="Parts"), page.locator("#theme")):
        control.focus()
        train(run, page)
        expect(control).to_be_focused()
    show(page, "events")
    run.ledger.note("death", "rollout-0", "engine rollout-0 died")
    page.get_by_role("button", name="death 1").focus()
    run.ledger.note("death", "rollout-0", "engine rollout-0 died again")
    expect(page.get_by_role("button", name="death 2")).to_be_focused()
    show(page, "groups")
    page.get_by_role("button", name="Reward", exact=True).click()
    expect(page.get_by_role("button", name="Reward", exact=True)).to_be_focused()
    train(run, page)
    expect(page.locator("p[role=status]").first).to_have_text(f"{4 * run.step} of {4 * run.step} groups")
    expect(page.get_by_role("button", name="Reward", exact=True)).to_be_focused()


def test_events_that_are_read_stay(run: ViewerRun, page: Page) -> None:
    train(run, page)
    run.ledger.note("death", "rollout-0", "engine rollout-0 died")
    for number in range(520):  # more than are asked for the marks
        run.ledger.note("recovery", "rollout-0", f"the engine came back, {number}")
    train(run, page)
    expect(page.locator(".chart[data-title='Reward'] .mark.recovery").first).to_be_visible()
    assert page.locator(".chart[data-title='Reward'] .mark").count() == 40
    page.locator(".chart[data-title='Reward'] .mark.death").dispatch_event("click")
    expect(page.locator("tr.chosen")).to_contain_text("rollout-0 died")
    expect(page.locator("tr.chosen")).to_be_in_viewport()
    rows = page.locator("table.events tbody tr[data-event]")
    expect(rows).to_have_count(521)
    page.evaluate("scrollTo(0, 0)")
    run.ledger.note("recovery", "rollout-1", "another came back")
    expect(rows).to_have_count(522)
    expect(page.locator("tr.chosen")).to_contain_text("rollout-0 died")
    expect(page.locator("tr.chosen")).not_to_be_in_viewport()
    page.locator(".mark.recovery").first.dispatch_event("click")
    expect(page.locator("tr.chosen")).to_contain_text("came back")
    run.ledger.note("recovery", "rollout-1", "and another")
    expect(rows).to_have_count(523)
    expect(page.locator("tr.chosen")).to_contain_text("came back")


def test_parts_of_a_run_that_goes_on_lead_to_its_groups(run: ViewerRun, page: Page) -> None:
    run.train(4)
    run.record_parts()
    train(run, page)
    page.get_by_role("link", name="Parts").click()
    engine = page.get_by_role("region", name="Engines", exact=True).locator("tbody tr")
    expect(engine).to_contain_text("rollout-0healthy4")
    run.record_parts()
    train(run, page)
    expect(engine).to_contain_text("rollout-0healthy5")
    page.get_by_role("link", name="6 discarded").click()
    expect(page.locator("p[role=status]").first).to_have_text("6 of 24 groups")
    train(run, page)
    expect(page.locator("p[role=status]").first).to_have_text("7 of 28 groups")


def test_answers_that_are_compared_stay_while_the_run_goes_on(run: ViewerRun, page: Page) -> None:
    run.train(4)
    train(run, page)
    page.get_by_role("link", name="Compare").click()
    page.locator("table.prompts tbody tr").filter(has_text="What is 1 + 1?").click()
    chosen = page.locator("table.prompts tr.chosen")
    expect(chosen).to_contain_text("0–3 (2 groups)")
    left, right = (page.locator(f".side[data-side={side}]") for side in ("left", "right"))
    expect(left.locator(".rollout").first).to_contain_text("says group 1.")
    expect(right.locator(".rollout").first).to_contain_text("says group 13.")
    left.locator("select").select_option("13")
    expect(left.locator(".rollout").first).to_contain_text("says group 13.")
    train(run, page)
    train(run, page)
    expect(chosen).to_contain_text("0–6 (3 groups)")
    expect(left.locator(".rollout").first).to_contain_text("says group 13.")


def test_views_of_a_run_that_starts_appear_with_its_ledger(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "starting"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(config_of(folder, 100)))
    with served([folder], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        page.get_by_role("link", name="Groups").click()
        expect(page.locator("main[data-view='groups failed']")).to_contain_text("has no ledger.sqlite")
        run = ViewerRun(folder, num_steps=100).train(1)
        expect(page.locator("table.groups tbody tr")).to_have_count(4, timeout=20_000)
        page.locator("table.groups tbody tr").first.click()
        after = page.get_by_role("link", name="Next group")
        expect(after).to_have_attribute("aria-disabled", "true")
        run.train(1)
        expect(after).not_to_have_attribute("aria-disabled", "true", timeout=20_000)


def test_a_refresh_that_fails_is_reported_and_tried_again(run: ViewerRun, page: Page) -> None:
    train(run, page)
    show(page, "events")
    page.route("**/api/marks*", lambda route: route.fulfill(status=400, body="a planted problem"))
    train(run, page)
    expect(page.locator("#old")).to_have_text("what is shown may be old: a planted problem")
    for _ in range(3):
        with page.expect_response("**/api/marks*"):
            pass
    expect(page.locator("#gone")).to_have_count(0)
    page.unroute("**/api/marks*")
    expect(page.locator("#old")).to_have_count(0)


@pytest.mark.slow
def test_a_range_that_is_dragged_and_the_pointer_stay(run: ViewerRun, page: Page) -> None:
    grid = page.locator(".charts")
    expect(grid).to_have_text("no metrics yet: the first step is under way")
    for _ in range(5):
        train(run, page)
    reward = page.locator(".chart[data-title='Reward']")
    box = reward.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 90)
    expect(reward.locator(".at")).to_have_text("step 5")
    train(run, page)
    expect(grid).to_have_attribute("data-points", "6")
    expect(reward.locator(".at")).to_have_text("step 6")
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 90, steps=5)
    train(run, page)
    expect(grid).to_have_attribute("data-points", "7")
    page.mouse.up()
    expect(reward).to_have_attribute("data-zoomed", "")
    train(run, page)
    expect(grid).to_have_attribute("data-points", "8")
    expect(page.locator(".chart[data-title='Entropy'][data-zoomed]")).to_be_visible()
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.locator(".chart[data-zoomed]")).to_have_count(0)


@pytest.mark.slow
def test_new_reasons_and_reward_functions_can_be_chosen(run: ViewerRun, page: Page) -> None:
    train(run, page)
    show(page, "groups")
    reasons = page.locator("select[name=reason] option")
    expect(reasons).to_have_text(["any", "no reward variance"])
    page.locator("select[name=state]").select_option("DISCARDED")
    expect(page.locator("p[role=status]").first).to_have_text("1 of 4 groups")
    page.keyboard.press("Escape")
    run.planted = ", again"  # in the reason, and in the names of the functions
    train(run, page)
    expect(reasons).to_have_text(["any", "no reward variance", "no reward variance, again"])
    expect(page.locator("select[name=state]")).to_have_value("DISCARDED")
    expect(page.locator("p[role=status]").first).to_have_text("2 of 8 groups")
    expect(page.get_by_role("button", name="right, again", exact=True)).to_be_visible()


def test_any_of_several_runs_are_shown(browser: Browser, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        finished_run(folder, num_steps=3)
    with served(folders, cache=tmp_path / "cache") as address, opened(browser, address) as page:
        legend = page.locator(".chart[data-title='Reward'] .legend")
        cards = page.locator(".card.run")
        expect(cards).to_have_count(3)
        page.get_by_label("Show second", exact=True).uncheck()
        expect(cards).to_have_count(2)
        expect(legend).not_to_contain_text("second")
        expect(page.get_by_label("Show second", exact=True)).to_be_focused()
        page.get_by_label("Show first", exact=True).click()  # the run that the other views are about
        expect(cards).to_have_count(1)
        expect(page.locator("select[name=run]")).to_have_value("2")
        expect(page.get_by_label("Show third", exact=True)).to_be_disabled()
        page.get_by_label("Show second", exact=True).click()
        expect(cards).to_have_count(2)
        expect(legend).to_contain_text("second")
        expect(legend).not_to_contain_text("first")
        page.reload()
        expect(cards).to_have_count(2)
        page.get_by_role("button", name="Show only second").click()
        expect(cards).to_have_count(1)
        page.get_by_role("button", name="Show all runs").click()
        expect(cards).to_have_count(3)
