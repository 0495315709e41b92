"""The page of `rlpipe view`, clicked through on runs that failed, were killed before a step, or have no ledger."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from browser_cases import click_through_group, opened, served, show
from playwright.sync_api import Browser, expect
from viewer_cases import ViewerRun, recorded_outcome_of

from rlpipe.common.run_files import EVENTS, OUTCOME
from rlpipe.errors import RunError
from rlpipe.replay.ledger.run_ledger import LedgerEvent
from rlpipe.tracking.jsonl import JsonlTracker, StepLog
from rlpipe.tracking.outcome import RunOutcome
from rlpipe.tracking.part_states import PartState, write_parts
from rlpipe.viewer.exported_page import write_page
from rlpipe.viewer.viewed_run import ViewedRun

NAMES = ("failed", "empty", "on_rows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ended")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    write_failed_run(folder / "failed")
    write_empty_run(folder / "empty")
    write_run_on_rows(folder / "on_rows")
    with served([folder / name for name in NAMES], cache=folder / "cache") as found:
        yield found


def write_failed_run(folder: Path) -> None:
    with suppress(RunError), recorded_outcome_of(folder):
        run = ViewerRun(folder, num_steps=10).train(6)
        run.ledger.note("death", "rank 0", "rank 0 died: killed")
        run.record_parts()
        run.end()
        raise RunError("the learner has died")


def write_empty_run(folder: Path) -> None:
    """Write what a run leaves whose driver is killed before the first step."""
    ViewerRun(folder).end()
    write_killed(folder)


def write_killed(folder: Path) -> None:
    """Write the outcome of a run whose driver is gone and has not said how it ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    outcome = RunOutcome(state="running", host=socket.gethostname(), pid=ended.pid, began_at=time.time() - 60)
    (folder / OUTCOME).write_text(json.dumps(asdict(outcome)))


def write_run_on_rows(folder: Path) -> None:
    with recorded_outcome_of(folder):
        (folder / "config.yaml").write_text("name: on_rows\nalgorithm: {kind: sft, num_steps: 4}\n")
        tracker = JsonlTracker(folder / "metrics.jsonl", 0)
        for step in range(1, 5):
            tracker.log(step, {"loss": 1 / step, "time/step": 2.0})
        event = LedgerEvent(number=0, time=time.time(), kind="death", subject="rank 1", message="rank 1 died: killed")
        StepLog(folder / EVENTS, 0).append(2, [asdict(event)])
        write_parts(folder, [PartState(kind="rank", name="rank 0", state="in a step", step=4, heard_s=2.0)])


def test_a_failed_run_is_clicked_through(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        show(page, "overview?run=0&shown=0")
        card = page.locator(".card.run")
        expect(card.locator(".pill")).to_have_text("failed")
        expect(card).to_contain_text("RunError: the learner has died")
        expect(page.locator(".doctor")).to_contain_text("after 6 steps, RunError: the learner has died")
        page.locator(".chart[data-title='Reward'] .mark.end").dispatch_event("click")
        expect(page.locator("tr.chosen")).to_contain_text("failed, RunError: the learner has died")
        page.get_by_role("button", name="death 1").click()
        expect(page.locator("table.events tbody tr")).to_have_count(1)
        expect(page.locator("table.events")).to_contain_text("rank 0 died: killed")
        page.get_by_role("link", name="Parts").click()
        expect(page.locator("main")).to_contain_text("before the run ended")
        page.get_by_role("link", name="6 discarded").click()
        expect(page.locator("p[role=status]").first).to_have_text("6 of 24 groups")
        page.get_by_role("link", name="Compare").click()
        expect(page.locator("main")).to_contain_text("no training prompt that both sides have answered")
        page.locator("select[name=right]").select_option("failed")
        page.locator("table.prompts tbody tr").filter(has_text="What is 2 + 2?").click()
        for side, group in (("left", 2), ("right", 14)):
            expect(page.locator(f".side[data-side={side}] .rollout").first).to_contain_text(f"says group {group}.")


def test_a_run_that_was_killed_before_a_step_is_clicked_through(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        show(page, "overview?run=1&shown=1")
        expect(page.locator(".card.run .pill")).to_have_text("killed")
        expect(page.locator(".charts")).to_have_text("no metrics: no step was done before the end (killed)")
        expect(page.locator(".doctor")).to_contain_text("was killed or lost its machine")
        page.get_by_role("link", name="Events").click()
        page.get_by_role("button", name="end 1").click()
        expect(page.locator("table.events tbody tr")).to_have_count(1)
        expect(page.locator("table.events")).to_contain_text("killed")
        page.get_by_role("link", name="Parts").click()
        expect(page.locator("main")).to_contain_text("this run has recorded no states of its parts")
        page.get_by_role("link", name="0 trained").click()
        expect(page.locator("table.groups")).to_contain_text("no group matches")
        page.get_by_role("link", name="Compare").click()
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("main")).to_contain_text("no training prompt that both sides have answered")


@pytest.mark.parametrize("state", ["running", "killed"])
def test_a_group_of_a_run_that_has_not_finished_is_clicked_through(
    browser: Browser, tmp_path: Path, state: str
) -> None:
    folder = tmp_path / state
    folder.mkdir()
    with recorded_outcome_of(folder) if state == "running" else nullcontext():
        run = ViewerRun(folder, num_steps=10, episodes=True, images=True).train(3)
        if state == "killed":
            run.end()
            write_killed(folder)
        with served([folder], cache=tmp_path / "cache") as address, opened(browser, address) as page:
            expect(page.locator(".card.run .pill")).to_have_text(state)
            page.get_by_role("link", name="Groups").click()
            click_through_group(page)


def test_a_run_without_a_ledger_is_clicked_through(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        show(page, "overview?run=2&shown=2")
        expect(page.locator(".card.run .pill")).to_have_text("finished")
        expect(page.locator(".doctor")).to_contain_text("rank 1, 1 x: rank 1 died: killed")
        page.locator(".chart[data-title='Loss'] .mark.death").dispatch_event("click")
        expect(page.locator("tr.chosen")).to_contain_text("rank 1 died: killed")
        page.get_by_role("button", name="end 1").click()
        expect(page.locator("table.events tbody tr")).to_have_count(1)
        page.get_by_role("link", name="Parts").click()
        expect(page.get_by_role("region", name="Learner ranks")).to_contain_text("rank 0")
        for view in ("Groups", "Compare"):
            page.get_by_role("link", name=view).click()
            expect(page.locator("main")).to_contain_text("algorithm.kind=sft, which keeps no ledger")


def test_an_exported_run_without_a_ledger_says_so(
    browser: Browser, address: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_page([ViewedRun(folder / "on_rows", "on_rows")], tmp_path / "run.html")
    with opened(browser, (tmp_path / "run.html").as_uri(), offline=True) as page:
        expect(page.locator(".chart[data-title='Loss']")).to_be_visible()
        for view in ("Groups", "Compare"):
            page.get_by_role("link", name=view).click()
            expect(page.locator("main .notice.bad")).to_contain_text("algorithm.kind=sft, which keeps no ledger")
