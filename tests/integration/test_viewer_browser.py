"""Every view of `rlpipe view`, clicked in a real browser: on runs that go on or have died, and in an exported page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser_cases import CONTRASTS, NEEDED, ROOT, UNNAMED, click_through_group, open_browser, opened, served, show
from playwright.sync_api import Browser, Page, Route, expect
from viewer_cases import ATTACK, ViewerRun, finished_run

from rlpipe.viewer.exported_page import write_page
from rlpipe.viewer.viewed_run import ViewedRun

VIEWS = ("overview", "groups", "group?id=1", "events", "parts", "compare")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("viewed")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Serve two runs: of 40 steps with episodes and images, and of 8 steps without."""
    finished_run(folder / "first", num_steps=40, episodes=True, images=True)
    finished_run(folder / "second", num_steps=8, reward_of={1: 7.0})
    with served([folder / "first", folder / "second"], cache=folder / "cache") as found:
        yield found


def test_a_browser_that_is_needed_and_missing_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for value, outcome in (("", pytest.skip.Exception), ("1", pytest.fail.Exception)):
        monkeypatch.setenv(NEEDED, value)
        with pytest.raises(outcome, match="make browser"), open_browser():
            pass


def wait_for_index(page: Page) -> None:
    show(page, "groups")
    page.wait_for_selector(".indexing", state="hidden")


def test_the_overview_is_zoomed_smoothed_searched_and_themed(browser: Browser, address: str) -> None:
    with opened(browser, address, color_scheme="light") as page:
        reward = page.locator(".chart[data-title='Reward']")
        expect(reward.locator(".legend")).to_contain_text("first")
        expect(reward.locator(".legend")).to_contain_text("second")
        for title in ("Entropy", "Completion length", "Staleness", "Tokens per second", "Time by phase (s)"):
            expect(page.locator(f".chart[data-title='{title}']")).to_be_visible()
        for title, value in (("KL", "0.039"), ("Held-out accuracy", "0.5")):
            expect(page.locator(f".chart[data-title='{title}'] canvas")).to_be_visible()
            expect(page.locator(f".chart[data-title='{title}'] .legend")).to_contain_text(value)
        box = reward.locator(".u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 90)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 90, steps=5)
        page.mouse.up()
        expect(reward).to_have_attribute("data-zoomed", "")
        expect(page.locator(".chart[data-title='Entropy']")).to_have_attribute("data-zoomed", "")
        page.get_by_role("button", name="Reset zoom").click()
        expect(page.locator(".chart[data-zoomed]")).to_have_count(0)
        before = reward.screenshot()
        page.get_by_label("Smoothing").fill("0.9")
        assert reward.screenshot() != before
        page.get_by_role("combobox", name="Add a chart of a metric").fill("sampling/logp_difference/mean")
        page.keyboard.press("Enter")
        expect(page.locator(".chart[data-title='sampling/logp_difference/mean']")).to_be_visible()
        expect(page.locator(".doctor")).to_contain_text("the run has finished after 40 steps")
        colours = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(colours)
        page.get_by_role("button", name="Use dark colours").click()
        assert page.evaluate(colours) != light
        page.reload()
        page.wait_for_selector("main[data-view]")
        assert page.evaluate(colours) != light


def test_charts_are_read_and_zoomed_by_keys(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        reward, entropy = (page.locator(f".chart[data-title='{title}']") for title in ("Reward", "Entropy"))
        plot = reward.get_by_role("group", name="Reward over steps")
        plot.focus()
        page.keyboard.press("ArrowLeft")
        expect(reward.locator(".at")).to_have_text("step 39")
        expect(entropy.locator(".at")).to_have_text("step 39")
        page.keyboard.press("ArrowLeft")
        expect(reward.locator(".at")).to_have_text("step 38")
        for _ in range(9):
            page.keyboard.press("ArrowLeft")
        for _ in range(2):
            page.keyboard.press("+")
            expect(entropy).to_have_attribute("data-zoomed", "")
            expect(reward.locator(".at")).to_have_text("step 29")
        for _ in range(15):  # not past what is shown, a quarter of the steps
            page.keyboard.press("ArrowRight")
        expect(reward.locator(".at")).to_have_text("step 31")
        for _ in range(3):
            page.keyboard.press("-")
        expect(page.locator(".chart[data-zoomed]")).to_have_count(0)
        page.keyboard.press("+")
        expect(entropy).to_have_attribute("data-zoomed", "")
        page.keyboard.press("0")
        expect(page.locator(".chart[data-zoomed]")).to_have_count(0)


def test_events_above_a_curve_are_reached_by_keys(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        reward = page.locator(".chart[data-title='Reward']")
        reward.get_by_role("group", name="Reward over steps").focus()
        for _ in range(5):
            if "engine rollout-0 died: killed" not in reward.locator(".legend").inner_text():
                page.keyboard.press("E")
        step = reward.locator(".at").inner_text()
        page.keyboard.press("ArrowLeft")
        expect(reward.locator(".at")).not_to_have_text(step)
        page.keyboard.press("e")
        expect(reward.locator(".at")).to_have_text(step)
        page.keyboard.press("Enter")  # the most important event of the step
        expect(page.locator("tr.chosen")).to_contain_text("engine rollout-0 died: killed")


def test_an_event_above_a_curve_leads_to_its_description(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        mark = page.locator(".chart[data-title='Reward'] .mark.death")
        mark.hover()
        expect(page.locator("#tooltip")).to_contain_text("engine rollout-0 died: killed")
        mark.click()
        expect(page.locator("tr.chosen")).to_contain_text("engine rollout-0 died: killed")
        page.get_by_role("button", name="health 1").click()
        expect(page.locator("table.events tbody tr[data-event]")).to_have_count(1)
        expect(page.locator("table.events")).to_contain_text("the policy becomes random")
        discards = page.get_by_role("region", name="Discarded groups")
        expect(discards).to_contain_text("no reward variance")
        discards.get_by_role("link").click()
        expect(page.locator("p[role=status]").first).to_have_text("40 of 160 groups")


def test_discards_and_commands_are_events_too(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        expect(page.locator(".mark.end").first).to_be_visible()
        expect(page.locator(".mark.discard")).to_have_count(0)
        page.locator(".chart[data-title='Reward'] .mark.end").dispatch_event("click")
        expect(page.locator("tr.chosen")).to_contain_text("finished")
        page.locator(".mark.discard").first.dispatch_event("click")
        expect(page.locator("p[role=status]").first).to_have_text("40 of 160 groups")


def test_groups_are_filtered_sorted_and_paged(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        rows = page.locator("table.groups tbody tr")
        status = page.locator("p[role=status]").first
        expect(rows).to_have_count(50)
        expect(rows.first).to_have_attribute("data-group", "159")
        page.get_by_role("button", name="Next page").click()
        expect(rows.first).to_have_attribute("data-group", "109")
        page.get_by_role("button", name="Previous page").click()
        expect(rows.first).to_have_attribute("data-group", "159")
        page.get_by_role("button", name="Reward", exact=True).click()
        expect(page.locator("th[aria-sort=descending]")).to_contain_text("Reward")
        page.locator("input[name=step_max]").fill("2")
        expect(status).to_have_text("9 of 160 groups")
        page.locator("select[name=function]").select_option("right")
        page.locator("input[name=function_min]").fill("0.4")
        expect(status).to_have_text("3 of 160 groups")
        page.locator("select[name=status]").select_option("truncated")
        expect(status).to_have_text("1 of 160 groups")
        page.reload()  # the address holds the filters
        expect(status).to_have_text("1 of 160 groups")
        page.get_by_role("button", name="Clear").click()
        expect(status).to_have_text("160 of 160 groups")
        for first in ("159", "0"):  # discarded ones first, then trained ones
            page.get_by_role("button", name="State", exact=True).click()
            expect(rows.first).to_have_attribute("data-group", first)
        for _ in range(2):
            page.get_by_role("button", name="Reason", exact=True).click()
            expect(rows.first.locator(".reason")).to_have_text("no reward variance")  # those without one come last
        page.locator("select[name=reason]").select_option("no reward variance")
        expect(status).to_have_text("40 of 160 groups")
        page.locator("input[name=reward_min]").fill("many")
        expect(page.locator("table.groups")).to_contain_text("reward_min='many' is not a number")


def test_groups_are_reached_by_keys_alone(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        page.keyboard.press("/")
        page.keyboard.type("is 2 +")
        expect(page.locator("p[role=status]").first).to_have_text("14 of 160 groups")
        page.keyboard.press("Escape")
        page.locator("table.groups tbody tr").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        second = page.locator("table.groups tbody tr").nth(1)
        expect(second).to_be_focused()
        number = second.get_attribute("data-group")
        page.keyboard.press("Enter")
        expect(page.locator("h2")).to_have_text(f"Group {number}")
        page.reload()
        page.wait_for_selector("main[data-view=group]")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator(".brand")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Overview")).to_be_focused()


def test_pages_of_groups_are_turned_by_keys(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        rows = page.locator("table.groups tbody tr")
        rows.nth(2).focus()
        for key, first in (("ArrowRight", "109"), ("ArrowRight", "59"), ("ArrowLeft", "109")):
            page.keyboard.press(key)
            expect(rows.first).to_have_attribute("data-group", first)
            expect(rows.first).to_be_focused()
        held = """row => ["ArrowLeft", "ArrowRight", "ArrowRight"].forEach((key) =>
            row.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })))"""
        rows.first.evaluate(held)  # before the first of the pages has come
        expect(rows.first).to_have_attribute("data-group", "159")
        page.keyboard.press("ArrowDown")
        expect(rows.nth(1)).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Shift+Tab")
        expect(rows.nth(1)).to_be_focused()


def test_the_way_back_from_a_group_leads_to_its_page_and_filters(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        rows = page.locator("table.groups tbody tr")
        page.locator("select[name=state]").select_option("TRAINED")
        expect(page.locator("p[role=status]").first).to_have_text("120 of 160 groups")
        page.get_by_role("button", name="Next page").click()
        expect(page.locator("p[role=status]").first).to_contain_text("page 2")
        first = rows.first.get_attribute("data-group") or ""
        for leads_back in (lambda: page.go_back(), lambda: page.get_by_role("link", name="← Groups").click()):
            rows.first.click()
            expect(page.locator("h2")).to_have_text(f"Group {first}")
            leads_back()
            expect(page.locator("p[role=status]").first).to_contain_text("page 2")
            expect(rows.first).to_have_attribute("data-group", first)
            expect(page.locator("select[name=state]")).to_have_value("TRAINED")


def test_one_group_shows_tokens_episodes_and_images(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        page.locator("input[name=step_max]").fill("0")
        click_through_group(page, following=0)


def test_version_changes_and_tokens_that_are_not_trained_are_marked(browser: Browser, tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=2, two_versions=True)
    with served([tmp_path / "run"], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        show(page, "group?id=1")
        first = page.locator(".rollout").first
        expect(first).to_contain_text("11 of version 0, 13 of version 1")
        page.get_by_label("Colour tokens by").select_option(label="policy version")
        legend = page.locator(".toolbar .key")
        expect(legend).to_have_text(["a version 0", "a version 1"])
        tints = [first.locator(f".token.tint.series-{place}") for place in (0, 1)]
        assert "".join(tints[0].all_inner_texts()).endswith("☃, ")
        assert "".join(tints[1].all_inner_texts()) == "says group 1."
        page.get_by_label("Colour tokens by").select_option(label="loss mask")
        expect(first.locator(".token.unmasked")).to_have_text(["i", "s"])
        expect(first.locator(".token.tint.trained").first).to_be_visible()
        first.locator(".token.unmasked").first.hover()
        expect(page.locator("#tooltip")).to_contain_text("not drawn by the policy, not trained")
        assert page.evaluate(CONTRASTS) == []


@pytest.mark.parametrize(
    "path", ["../config.yaml", "../../../../etc/passwd", "..%2fconfig.yaml", "static/../config.yaml", "//etc/passwd"]
)
def test_paths_outside_of_the_page_lead_nowhere(address: str, path: str) -> None:
    place = urlsplit(address)
    connection = HTTPConnection(place.netloc)  # which sends a path as it is, unlike a browser
    connection.request("GET", place.path.rstrip("/") + "/" + path)
    assert connection.getresponse().status in (401, 404)


def test_the_first_and_the_last_group_lead_only_to_groups_that_are_there(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        before, after = (page.get_by_role("link", name=f"{name} group") for name in ("Previous", "Next"))
        show(page, "group?id=0")
        expect(before).to_have_attribute("aria-disabled", "true")
        after.click()
        expect(page.locator("h2")).to_have_text("Group 1")
        before.click()
        expect(page.locator("h2")).to_have_text("Group 0")
        show(page, "group?id=159")
        expect(after).to_have_attribute("aria-disabled", "true")
        before.click()
        expect(page.locator("h2")).to_have_text("Group 158")


def test_a_prompt_is_shown_with_its_tool_calls(browser: Browser, tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=1, history=True)
    with served([tmp_path / "run"], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        show(page, "group?id=1")
        prompt = page.get_by_role("region", name="Prompt")
        expect(prompt).to_contain_text("a table may help")
        expect(prompt).to_contain_text("user Ada")
        call = prompt.locator("details.call")
        expect(call).to_have_count(1)
        expect(call).to_contain_text("lookup")
        expect(call.locator(".result")).to_contain_text("a table of sums")
        call.locator("summary").click()
        expect(call.locator(".result")).to_be_hidden()
        expect(prompt.locator(".message")).to_have_count(3)
        assert page.evaluate(CONTRASTS) == []


def test_a_browser_that_keeps_nothing_shows_the_page(browser: Browser, address: str) -> None:
    refuse = (
        "Object.defineProperty(window, '{}', {{ get() {{ throw new DOMException('refused', 'SecurityError'); }} }});"
    )
    with opened(browser, address) as page:
        page.add_init_script("".join(refuse.format(name) for name in ("sessionStorage", "localStorage")))
        page.reload()
        page.wait_for_selector("main[data-view=overview]")
        page.get_by_label("Smoothing").fill("0.9")
        wait_for_index(page)
        page.locator("select[name=state]").select_option("TRAINED")
        expect(page.locator("p[role=status]").first).to_have_text("120 of 160 groups")
        page.locator("table.groups tbody tr").first.click()
        page.get_by_label("Colour tokens by").select_option(label="loss mask")
        page.locator(".rollout summary", has_text="tokens").first.click()
        expect(page.locator(".tint.trained").first).to_be_visible()
        page.get_by_role("link", name="← Groups").click()
        expect(page.locator("p[role=status]").first).to_have_text("120 of 160 groups")
        show(page, "overview")
        expect(page.get_by_label("Smoothing")).to_have_value("0.9")


def test_parts_show_what_the_controller_saw(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        page.get_by_role("link", name="Parts").click()
        engines = page.get_by_role("region", name="Engines", exact=True)
        expect(engines.locator("tbody tr")).to_contain_text("rollout-0healthy40–31 s before")
        expect(page.get_by_role("region", name="Scorers")).to_contain_text("scorer-0")
        expect(page.get_by_role("region", name="Learner ranks")).to_contain_text("in a step")
        page.get_by_role("link", name="40 discarded").click()
        expect(page.locator("p[role=status]").first).to_have_text("40 of 160 groups")


def test_two_runs_and_two_versions_are_compared(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        page.get_by_role("link", name="Compare").click()
        first = page.locator("table.prompts tbody tr").first
        expect(first).to_contain_text("What is 1 + 1?")
        expect(page.locator(".side[data-side=left] .rollout")).to_have_count(2)
        expect(page.locator(".side[data-side=right] .rollout")).to_have_count(2)
        page.locator("table.prompts tbody tr").nth(1).click()
        expect(page.locator("table.prompts tr.chosen")).to_have_count(1)
        page.locator("select[name=right]").select_option("first")
        page.locator("input[name=left_max]").fill("3")
        page.locator("input[name=right_min]").fill("30")
        page.get_by_role("button", name="Compare").click()
        left, right = (page.locator(f".side[data-side={side}] select") for side in ("left", "right"))
        expect(left).to_contain_text("version 0")
        expect(right).to_contain_text("version 3")
        number = right.locator("option").first.get_attribute("value")
        right.select_option(number)
        expect(page.locator(".side[data-side=right]")).to_contain_text(f"says group {number}")


def test_an_older_comparison_never_replaces_a_newer_one(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        show(page, "compare")
        rows = page.locator("table.prompts tbody tr")
        expect(rows.nth(1)).to_be_visible()
        held: list[Route] = []
        page.route("**/api/prompts*", lambda route: route.continue_() if held else held.append(route))
        search = page.get_by_label("Search prompts")
        search.fill("5 + 5")
        page.keyboard.press("Tab")  # asks for them
        search.fill("2 + 2")
        page.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("What is 2 + 2?")
        with page.expect_response(lambda answer: "text=5" in answer.url):
            held[0].continue_()
        page.wait_for_timeout(200)
        expect(rows).to_contain_text("What is 2 + 2?")


def test_a_comparison_of_groups_that_are_being_read_says_so_and_follows(browser: Browser, address: str) -> None:
    def unread(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=[{**run, "num_indexed": 1} for run in answer.json()])

    with opened(browser, address) as page:
        wait_for_index(page)
        page.route("**/api/runs*", unread)
        page.route("**/api/prompts*", lambda route: route.fulfill(json=[]))
        page.reload()
        show(page, "compare")
        expect(page.locator("main")).to_contain_text("the prompts of first are being read: 1 of ")
        page.unroute_all()
        expect(page.locator("table.prompts tbody tr").first).to_be_visible()
        expect(page.locator(".side[data-side=left] .rollout").first).to_be_visible()


def test_answers_that_can_not_be_read_are_reported(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        wait_for_index(page)
        show(page, "compare")
        rows = page.locator("table.prompts tbody tr")
        expect(page.locator(".side[data-side=right] .rollout").first).to_be_visible()
        page.route("**/api/answers*", lambda route: route.fulfill(status=400, body="a planted problem"))
        rows.nth(1).click()
        expect(page.locator(".pair")).to_have_text("a planted problem")
        page.unroute("**/api/answers*")
        page.route("**/api/group?*", lambda route: route.fulfill(status=400, body="another problem"))
        rows.nth(0).click()
        expect(page.locator(".side[data-side=left]")).to_contain_text("another problem")
        page.unroute("**/api/group?*")
        rows.nth(1).click()
        expect(page.locator(".side[data-side=right] .rollout").first).to_be_visible()


def test_answers_to_held_out_prompts_are_compared_before_those_of_training(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own_cache"))
    ViewerRun(tmp_path / "one").evaluate().train(2).evaluate().end()
    ViewerRun(tmp_path / "two").evaluate().train(1).end()

    def look(page: Page) -> None:
        page.get_by_role("link", name="Compare").click()
        rows = page.locator("table.prompts tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.first).to_contain_text("Held out:")
        page.locator("select[name=right]").select_option("one")
        page.locator("select[name=left]").select_option("one")
        rows.filter(has_text="Held out: 1").click()
        for side, text in (("left", "3 says version 0"), ("right", "3 says version 2")):
            expect(page.locator(f".side[data-side={side}] .rollout")).to_contain_text(text)
        page.locator("select[name=prompts]").select_option("training")
        expect(page.locator("main")).to_contain_text("no training prompt that both sides have answered")

    with (
        served([tmp_path / "one", tmp_path / "two"], cache=tmp_path / "cache") as address,
        opened(browser, address) as page,
    ):
        wait_for_index(page)
        look(page)
    write_page([ViewedRun(tmp_path / name, name) for name in ("one", "two")], tmp_path / "run.html")
    with opened(browser, (tmp_path / "run.html").as_uri(), offline=True) as page:
        look(page)


def test_a_run_is_followed_until_it_is_killed(browser: Browser, tmp_path: Path) -> None:
    case = ROOT / "tests" / "helpers" / "viewer_cases.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{case.parent}"}
    command = [sys.executable, str(case), str(tmp_path / "live"), "0.3"]
    writer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        writer.stdout.readline()
        with served([tmp_path / "live"], cache=tmp_path / "cache") as address, opened(browser, address) as page:
            step = page.locator(".run .facts b").first
            expect(page.locator(".run .pill")).to_have_text("running")
            seen = step.inner_text()
            expect(step).not_to_have_text(seen)
            points = page.locator(".charts").get_attribute("data-points")
            expect(page.locator(".charts")).not_to_have_attribute("data-points", points or "")
            show(page, "groups")
            newest = page.locator("table.groups tbody tr").first
            number = newest.get_attribute("data-group")
            expect(newest).not_to_have_attribute("data-group", number or "")
            show(page, "compare")
            versions = page.locator("table.prompts tbody tr td:last-child").first
            expect(page.locator(".side[data-side=left] .rollout").first).to_be_visible()
            answers = page.locator(".pair").inner_text()
            seen = versions.inner_text()
            expect(versions).not_to_have_text(seen)
            assert page.locator(".pair").inner_text() == answers
            show(page, "events")
            expect(page.locator("table.events")).to_contain_text("engine rollout-0 died after step")
            show(page, "parts")
            expect(page.locator("main")).to_contain_text("ago)")
            writer.send_signal(signal.SIGKILL)
            writer.wait(10)
            log = tmp_path / "live" / "ledger.sqlite-wal"
            size = log.stat().st_size
            expect(page.locator("#top .pill")).to_have_text("killed")
            show(page, "groups")
            page.locator("table.groups tbody tr").nth(5).click()  # the newest may not be generated yet
            expect(page.locator(".rollout").first).to_contain_text("says group")
            show(page, "parts")
            expect(page.locator("main")).to_contain_text("before the run ended")
            show(page, "overview")
            expect(page.locator(".run .pill")).to_have_text("killed")
            expect(page.locator(".chart[data-title='Reward'] .mark.end").first).to_be_visible()
            show(page, "events")
            expect(page.locator("table.events")).to_contain_text("killed")
            show(page, "compare")
            expect(page.locator(".side[data-side=right] .rollout").first).to_contain_text("says group")
            assert log.stat().st_size == size
    finally:
        writer.kill()
        writer.wait(10)


@pytest.mark.slow
def test_a_run_that_begins_in_a_viewed_folder_appears(browser: Browser, tmp_path: Path) -> None:
    finished_run(tmp_path / "runs" / "old", num_steps=4)
    with served([tmp_path / "runs"], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        expect(page.locator(".card.run")).to_have_count(1)
        finished_run(tmp_path / "runs" / "new", num_steps=6)
        expect(page.locator(".card.run")).to_have_count(2, timeout=20_000)  # looked for every five seconds
        expect(page.locator(".chart[data-title='Reward'] .legend")).to_contain_text("new")
        page.locator("select[name=run]").select_option("new")
        expect(page.locator("#top")).to_contain_text("step 6 of 6")
        show(page, "compare")
        expect(page.locator("select[name=left] option")).to_have_text(["old", "new"])
        finished_run(tmp_path / "runs" / "newest", num_steps=2)
        expect(page.locator("select[name=left] option")).to_have_text(["old", "new", "newest"], timeout=20_000)
        page.locator("select[name=right]").select_option("newest")
        expect(page.locator("table.prompts tbody tr").first).to_be_visible()


def test_a_group_is_followed_while_it_is_shown(browser: Browser, tmp_path: Path) -> None:
    run = ViewerRun(tmp_path / "live").train(1)
    group = run.admit()[0].group_id
    with served([tmp_path / "live"], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        show(page, f"group?id={group}")
        state = page.locator("#main .toolbar .pill").first
        expect(state).to_have_text("admitted")
        expect(page.locator(".rollout")).to_have_count(0)
        run.train(1)
        expect(state).to_have_text("assigned", timeout=20_000)
        expect(page.locator(".rollout").first).to_contain_text(f"says group {group}")
        expect(page.get_by_label("Colour tokens by")).to_be_visible()
        run.end()
        expect(state).to_have_text("trained", timeout=20_000)


def test_a_page_whose_server_has_ended_says_so(browser: Browser, folder: Path) -> None:
    finished_run(folder / "short", num_steps=1)
    context = browser.new_context()
    page = context.new_page()
    with served([folder / "short"], cache=folder / "cache") as address:
        page.goto(address)
        page.wait_for_selector("main[data-view]")
    expect(page.locator("#gone")).to_contain_text("rlpipe view has ended")
    context.close()


def test_no_text_of_a_model_becomes_a_program(browser: Browser, tmp_path: Path) -> None:
    planted = tmp_path / "<img src=x onerror=window.hacked=1>"
    finished_run(planted, planted=ATTACK, episodes=True, history=True)
    exported = tmp_path / "run.html"
    with served([planted], cache=tmp_path / "cache") as address, opened(browser, address) as page:
        look_for_attacks(page)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "rlpipe", "view", str(planted), "--export", str(exported)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    with opened(browser, exported.as_uri()) as page:
        look_for_attacks(page)


def look_for_attacks(page: Page) -> None:
    for view in VIEWS:
        show(page, view)
        page.wait_for_timeout(200)
        if view != "overview":
            expect(page.locator("main"), view).to_contain_text("</script><script>window.hacked=1")
    show(page, "group?id=1")
    page.locator(".rollout summary", has_text="tokens").first.click()
    page.locator(".token").nth(20).hover()
    assert page.locator("main img, main svg, main script, main a[href^=javascript]").count() == 0


def test_the_policy_stops_a_program_that_gets_into_the_page(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("main[data-view]")
    for kind, text in (("text/javascript", "window.hacked = 1"), ("module", "window.hacked = 1")):
        page.evaluate(
            "([kind, text]) => { const made = document.createElement('script'); made.type = kind;"
            " made.textContent = text; document.body.append(made); }",
            [kind, text],
        )
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>')")
    assert page.evaluate("fetch('http://127.0.0.1:9/').catch(error => 'refused')") == "refused"
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    page.close()


def test_an_exported_page_works_alone(browser: Browser, tmp_path: Path) -> None:
    finished_run(tmp_path / "one", num_steps=120, images=True, episodes=True)
    two = ViewerRun(tmp_path / "two", reward_of={1: 7.0}).train(8)
    for number in range(250):  # more than are shown at once
        two.ledger.note("recovery", "rollout-0", f"the engine came back, {number}")
    two.end()
    file = tmp_path / "run.html"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "rlpipe",
        "view",
        str(tmp_path / "one"),
        str(tmp_path / "two"),
        "--export",
        str(file),
    ]
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "of 480 groups" in told
    assert file.stat().st_size < 8 * 2**20
    with opened(browser, file.as_uri(), offline=True) as page:
        page.locator("#left-out summary").click()
        expect(page.locator("#left-out")).to_contain_text("it does not follow a run that goes on")
        expect(page.locator("#left-out")).to_contain_text("of 480 groups")
        expect(page.locator(".chart[data-title='Reward'] canvas")).to_be_visible()
        page.get_by_role("link", name="Groups").click()
        page.locator("input[name=reward_min]").fill("0.5")
        page.get_by_role("button", name="Reward", exact=True).click()
        page.locator("table.groups tbody tr").first.click()
        expect(page.locator(".rollout").first.locator(".episode")).to_contain_text("found it")
        assert page.locator(".images img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
        for view in ("events", "events?run=1", "parts", "compare"):
            show(page, view)
            if view.startswith("events"):
                expect(page.get_by_role("button", name="Older events")).to_be_hidden()
        expect(page.locator(".side[data-side=right] .rollout").first).to_be_visible()
        show(page, "groups?run=0")
        for is_discarded in (1, 0):
            page.get_by_role("button", name="State", exact=True).click()
            discarded = page.locator("table.groups tbody tr").first.get_by_text("discarded")
            expect(discarded).to_have_count(is_discarded)
        page.get_by_role("button", name="Reason", exact=True).click()
        expect(page.locator("table.groups tbody tr").first.locator(".reason")).to_have_text("no reward variance")
        show(page, "group?id=200")
        expect(page.locator("main")).to_contain_text("group 200 was left out of this file")
        page.get_by_role("link", name="Next group").click()  # the next one that is in the file
        expect(page.get_by_role("region", name="Prompt")).to_be_visible()
        show(page, "group?id=479")
        expect(page.get_by_role("link", name="Next group")).to_have_attribute("aria-disabled", "true")
        page.get_by_role("link", name="← Groups").click()
        expect(page.locator("table.groups tbody tr").first).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_texts_have_contrast_and_controls_have_names(browser: Browser, address: str, scheme: str) -> None:
    with opened(browser, address, color_scheme=scheme) as page:
        wait_for_index(page)
        for view in VIEWS:
            show(page, view)
            page.wait_for_timeout(300)
            for summary in page.locator(".rollout summary", has_text="tokens").all():
                summary.click()
            for how in page.locator("select[name=colouring] option").all_inner_texts():
                page.get_by_label("Colour tokens by").select_option(label=how)
                for summary in page.locator(".rollout summary", has_text="tokens").all():
                    summary.click()
                assert page.evaluate(CONTRASTS) == [], (view, how)
            assert page.evaluate(CONTRASTS) == [], view
            assert page.evaluate(UNNAMED) == [], view


@pytest.mark.slow
def test_the_installed_wheel_serves_the_page(browser: Browser, address: str, folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--quiet"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("rlpipe", "actors", "kernels", "configs", "examples", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    command[4] = str(source)
    subprocess.run([*command, "--wheel-dir", str(tmp_path)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("rlpipe-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    started = time.monotonic()
    exported = tmp_path / "run.html"
    with served([folder / "second"], cache=folder / "cache", code=tmp_path / "installed") as found:
        assert time.monotonic() - started < 60
        with opened(browser, found, offline=False) as page:
            expect(page.locator(".chart[data-title='Reward']")).to_be_visible()
            look_at_all_views(page)
            files = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
            assert any(name.endswith("vendor/uPlot.iife.min.js") for name in files)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "rlpipe", "view", str(folder / "second"), "--export", str(exported)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    with opened(browser, exported.as_uri(), offline=True) as page:
        look_at_all_views(page)


def look_at_all_views(page: Page) -> None:
    """Open every view of the run ``second``, and check that it has what it is for."""
    shown = {
        "overview": ".chart[data-title='Reward'] canvas",
        "groups": "table.groups tbody tr[data-group]",
        "group?id=1": ".rollout .token",
        "events": "table.events tbody tr",
        "parts": "main table tbody tr",
        "compare": ".side[data-side=right] .rollout",
    }
    assert shown.keys() == {*VIEWS}
    for view, element in shown.items():
        show(page, view)
        expect(page.locator(element).first).to_be_visible()
