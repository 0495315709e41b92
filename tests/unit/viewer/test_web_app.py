"""Tests of the viewer's application: who is let in, what is answered, and that texts stay data."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from viewer_cases import ATTACK, ViewerRun, finished_run, picture, recorded_outcome_of

from rlpipe.cli import main
from rlpipe.common.atomic_io import held
from rlpipe.common.run_files import EVENTS, LEDGER, OUTCOME
from rlpipe.errors import Interrupted, RunError
from rlpipe.replay.ledger.run_ledger import Ledger, LedgerEvent
from rlpipe.tracking.jsonl import StepLog
from rlpipe.tracking.outcome import read_outcome
from rlpipe.viewer import web_app
from rlpipe.viewer.exported_page import write_page
from rlpipe.viewer.group_detail import messages_of
from rlpipe.viewer.group_index import GroupIndex
from rlpipe.viewer.group_query import GroupQuery
from rlpipe.viewer.metric_series import MetricSeries
from rlpipe.viewer.static_files import served_files, static_files
from rlpipe.viewer.viewed_run import ViewedRun, ViewedRuns
from rlpipe.viewer.web_app import Guard, Refresher, make_app, to_json

pytestmark = pytest.mark.usefixtures("empty_cache")

TOKEN = "secret-token"


def client_of(*folders: Path) -> TestClient:
    runs = [ViewedRun(folder, folder.name) for folder in folders]
    for run in runs:
        run.refresh()
    return TestClient(make_app(runs, TOKEN), base_url="http://127.0.0.1:1234")


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    finished_run(tmp_path / "run")
    return client_of(tmp_path / "run")


def ask(client: TestClient, name: str, /, **query: Any) -> Any:
    answer = client.get(f"/{TOKEN}/api/{name}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/wrong/api/runs", "/secret-toke/", "/secret-token2/", "//", "/\u00e9/"]
)
def test_a_wrong_token_gets_401(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 401
    assert "run" not in answer.json() if "json" in answer.headers["content-type"] else "wrong token" in answer.text


def test_a_request_for_no_path_gets_401() -> None:
    async def never(*_: Any) -> None:
        raise AssertionError

    async def keep(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    scope = {"type": "http", "method": "OPTIONS", "path": "*", "headers": [(b"host", b"localhost")]}
    asyncio.run(Guard(never, TOKEN)(scope, never, keep))
    assert sent[0]["status"] == 401


def test_an_address_without_its_last_slash_leads_to_the_page(client: TestClient) -> None:
    answer = client.get(f"/{TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, f"/{TOKEN}/")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:1234", "127.0.0.1.evil.example", "localhost.evil:80", "10.0.0.1", "", "[::2]:80"],
)
def test_another_host_gets_403(client: TestClient, host: str) -> None:
    """Check that a name which an attacker points to this machine reads nothing, even with the token."""
    assert client.get(f"/{TOKEN}/api/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80", "[::1]"])
def test_local_hosts_are_let_in_by_any_port(client: TestClient, host: str) -> None:
    assert client.get(f"/{TOKEN}/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["../web_app.py", "..%2fweb_app.py", "%2e%2e/%2e%2e/errors.py", "/etc/passwd", "vendor/../../web_app.py",
     "config.yaml", "ledger.sqlite", "api/nothing", "vendor", "nothing.js"],
)  # fmt: skip
def test_paths_outside_of_the_page_get_404(client: TestClient, path: str) -> None:
    assert client.get(f"/{TOKEN}/{path}").status_code in (404, 401 if ".." in path else 404)


@pytest.mark.parametrize(
    ("name", "query"),
    [("groups", {"run": 7}), ("groups", {"run": -1}), ("group", {"id": 999}), ("image", {"id": 1, "number": 0}),
     ("image", {"id": 999, "number": -1})],
)  # fmt: skip
def test_what_the_runs_do_not_have_gets_404(client: TestClient, name: str, query: dict[str, int]) -> None:
    answer = client.get(f"/{TOKEN}/api/{name}", params=query)
    assert answer.status_code == 404
    assert answer.text.startswith(("there is no run", "run has no group", "group"))


@pytest.mark.parametrize(
    ("query", "message"),
    [({"sort": "x; DROP TABLE entries"}, "there is no property"), 
     ({"reward_min": "lots"}, "reward_min='lots' is not a number"),
     ({"run": "a"}, "run='a' is not an integer"), ({"after": "x|y"}, "is not the start of a page"),
     ({"run": str(2**70)}, "is not an integer"), ({"status": "x"}, "there is no status")],
)  # fmt: skip
def test_wrong_questions_get_one_clear_message(client: TestClient, query: dict[str, str], message: str) -> None:
    answer = client.get(f"/{TOKEN}/api/groups", params=query)
    assert answer.status_code == 400
    assert message in answer.text
    assert answer.text.count("\n") == 1


def test_only_get_is_answered(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, f"/{TOKEN}/api/runs").status_code == 405


def test_every_answer_has_a_strict_policy(client: TestClient) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/api/runs", f"/{TOKEN}/nothing", "/wrong/"):
        headers = client.get(path).headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
        assert "set-cookie" not in headers


def test_the_page_loads_only_its_own_files(client: TestClient) -> None:
    files = static_files()
    page = client.get(f"/{TOKEN}/").text
    for path in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert path == "data:," or client.get(f"/{TOKEN}/{path}").status_code == 200, path
    scripts = {path: content.decode() for path, content in files.items() if path.endswith((".js", ".css", ".html"))}
    for path, text in scripts.items():
        addresses = [found for found in re.findall(r"https?://[^\s\"'`)]+", text) if "github.com/leeoniya" not in found]
        assert not addresses, (path, addresses)
        if not path.startswith("vendor/"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), path
    assert "uPlot.LICENSE" in {path.rpartition("/")[2] for path in files}


def test_the_pages_modules_are_sent_as_one_file(client: TestClient) -> None:
    assert {path for path in served_files() if path.endswith(".js")} == {"app.js", "vendor/uPlot.iife.min.js"}
    script = client.get(f"/{TOKEN}/app.js").text
    assert "async function groupsView" in script
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    assert client.get(f"/{TOKEN}/").text.count("<script ") == 2


def test_what_is_not_known_of_all_groups_is_counted(tmp_path: Path) -> None:
    """The prompt, outcomes and rewards by function of a group go with its tokens, maybe before the first look."""
    finished_run(tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / LEDGER)) as ledger, ledger:
        ledger.execute("DELETE FROM payloads WHERE group_id < 5")
        (num_left,) = ledger.execute("SELECT count(*) FROM payloads").fetchone()
    (tmp_path / "run" / "completions.jsonl").unlink(missing_ok=True)
    page = ask(client_of(tmp_path / "run"), "groups")
    assert page["num_indexed"] == page["num_groups"]
    assert page["num_known"] == num_left < page["num_groups"]


def test_texts_of_models_are_sent_as_data(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=1, planted=ATTACK, episodes=True)
    client = client_of(tmp_path / "run")
    for name, query in [("groups", {}), ("group", {"id": 1}), ("events", {}), ("parts", {}), ("choices", {})]:
        answer = client.get(f"/{TOKEN}/api/{name}", params=query)
        assert answer.headers["content-type"] == "application/json"
        assert ATTACK in json.dumps(answer.json(), ensure_ascii=False).replace('\\"', '"')


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "application/octet-stream"),
        (b"<!DOCTYPE html><script>alert(1)</script>", "application/octet-stream"),
        (b"GIF89a/*<html><script>*/=1;alert(1)//</script>", "image/gif"),
        (b"", "application/octet-stream"),
    ],
)
def test_images_that_are_programs_are_sent_as_images_or_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bytes, kind: str
) -> None:
    monkeypatch.setattr("viewer_cases.picture", lambda: planted)
    finished_run(tmp_path / "run", num_steps=1, images=True)
    client = client_of(tmp_path / "run")
    image = client.get(f"/{TOKEN}/api/image", params={"id": 1, "number": 0})
    assert (image.status_code, image.content, image.headers["content-type"]) == (200, planted, kind)
    assert image.headers["x-content-type-options"] == "nosniff"
    assert "script-src 'self'" in image.headers["content-security-policy"]


def test_one_group_is_shown_with_all_that_the_ledger_has(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=1, episodes=True, images=True)
    client = client_of(tmp_path / "run")
    group = ask(client, "group", id=1)
    assert group["messages"] == [{"role": "user", "text": "What is 1 + 1?"}]
    first, second = group["rollouts"]
    sequence = first["sequences"][0]
    assert "".join(sequence["pieces"]) == "It is 2 ☃, says group 1."
    assert len(sequence["pieces"]) == len(sequence["logprobs"]) == len(sequence["versions"]) == len(sequence["mask"])
    assert "☃" in sequence["pieces"]  # a character of three tokens is one piece
    assert set(sequence["mask"]) == {1}
    assert first["rewards"] == {"right": 0.0, "short": 0.0}
    assert (first["advantage"], second["status"], second["finish_reason"]) == (-0.5, "truncated", "length")
    assert first["versions"] == {"0": len("It is 2 ☃, says group 1.".encode())}
    call = first["episode"]["messages"][0]["calls"][0]
    assert (call["name"], call["arguments"]) == ("search", '{"q": ""}')
    assert first["episode"]["turn_rewards"] == [0.5, 1.0]
    assert group["num_images"] == 1
    assert sequence["differences"][:2] == [0.01, None]
    assert set(sequence["advantages"]) == {-0.5}
    assert second["sequences"][0]["differences"][0] == (0.01 if len(first["sequences"]) == 2 else -0.01)
    assert group["differences"] == {"mean": pytest.approx(0.01, rel=1e-3), "max": pytest.approx(0.01, rel=1e-3)}
    image = client.get(f"/{TOKEN}/api/image", params={"id": 1, "number": 0})
    assert image.content == picture()
    assert image.headers["content-type"] == "image/png"
    assert client.get(f"/{TOKEN}/api/image", params={"id": 1, "number": 1}).status_code == 404


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ({"id": 7, "function": {"name": "search", "arguments": "{}"}}, ("7", "search", "{}")),
        ({"function": None, "name": "search", "arguments": {"q": 1}}, ("", "search", {"q": 1})),
        ({"function": None}, ("", "", {"function": None})),
        ({"function": "search", "id": "c1"}, ("c1", "", {"function": "search", "id": "c1"})),
        ("search(1)", ("", "", "search(1)")),
        ({"name": "search", "parameters": {"q": 1}}, ("", "search", {"q": 1})),
        ({"id": "c1", "type": "tool_use", "name": "f", "input": {"q": 1}}, ("c1", "f", {"input": {"q": 1}})),
        ({"name": "now"}, ("", "now", None)),
        (None, ("", "", None)),
    ],
)
def test_tool_calls_of_any_form_are_shown(call: Any, shown: tuple[str, str, Any]) -> None:
    (message,) = messages_of([{"role": "assistant", "tool_calls": [call]}])
    assert message["calls"] == [dict(zip(("id", "name", "arguments"), shown, strict=True))]
    if call is not None:  # a list that is missing around one call
        for key in ("tool_calls", "function_call"):
            assert messages_of([{"role": "assistant", key: call}])[0]["calls"] == message["calls"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_shown_under_any_of_its_names(key: str) -> None:
    (message,) = messages_of([{"role": "assistant", "content": "", "reasoning_content": None, key: "hmm"}])
    assert message["reasoning"] == "hmm"


def test_long_completions_are_cut_until_they_are_asked_for(client: TestClient) -> None:
    cut = ask(client, "group", id=1, tokens=5)["rollouts"][0]["sequences"][0]
    assert "".join(cut["pieces"]) == "It is"
    whole = len("It is 2 ☃, says group 1.".encode())
    assert cut["num_left"] == whole - 5
    assert ask(client, "group", id=1)["rollouts"][0]["sequences"][0]["num_left"] == 0


def test_a_group_without_tokens_says_why(client: TestClient) -> None:
    group = ask(client, "group", id=3)
    assert group["why_no_tokens"] == "the tokens of discarded groups are not kept"
    assert "rollouts" not in group


def test_a_tokenizer_that_is_missing_leaves_numbers_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    file = tmp_path / "run" / "policy" / "tokenizer.json"
    content = file.read_bytes()
    file.unlink()
    client = client_of(tmp_path / "run")
    group = ask(client, "group", id=1)
    assert "can't be loaded" in group["tokenizer_problem"]
    assert all(piece.isdigit() for piece in group["rollouts"][0]["sequences"][0]["pieces"])
    file.write_bytes(content)
    assert ask(client, "group", id=1)["tokenizer_problem"] == group["tokenizer_problem"], "it is not tried every time"
    monkeypatch.setattr("rlpipe.viewer.viewed_run.TOKENIZER_S", 0.0)
    group = ask(client, "group", id=1)
    assert group["tokenizer_problem"] == ""
    assert "".join(group["rollouts"][0]["sequences"][0]["pieces"]) == "It is 2 ☃, says group 1."
    file.unlink()
    assert ask(client, "group", id=1) == group, "it stays once it is known"
    with closing(Ledger(tmp_path / "run" / LEDGER)) as ledger:
        ledger.set(run_id="another")
    assert "can't be loaded" in ask(client, "group", id=1)["tokenizer_problem"], "another run has taken the folder"


def test_summaries_series_events_and_parts(client: TestClient) -> None:
    (run,) = ask(client, "runs")
    assert (run["name"], run["state"], run["step"], run["num_steps"]) == ("run", "finished", 6, 6)
    assert (run["num_groups"], run["num_indexed"]) == (24, 24)
    series = ask(client, "series", name=["reward", "entropy", "nothing"])
    assert set(series) == {"reward", "entropy"}
    assert series["entropy"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert series["entropy"]["values"][0] == pytest.approx(2.0)
    events = ask(client, "events")
    assert [event["kind"] for event in events["events"]] == ["health", "death"]
    assert events["discards"][0]["count"] == 6
    assert [event["kind"] for event in ask(client, "events", kind="death")["events"]] == ["death"]
    parts = ask(client, "parts")
    assert [part["kind"] for part in parts["parts"]] == ["engine", "scorer", "rank"]
    assert parts["engines"][0]["groups"] == 24
    assert parts["states"] == {"TRAINED": 18, "DISCARDED": 6}
    assert any(line["subject"] == "ending" and "finished" in line["text"] for line in ask(client, "diagnosis"))


def test_the_newest_groups_are_there_before_the_index_is(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    run = ViewedRun(tmp_path / "run", "run")
    run.refresh(lambda: True)  # stopped before anything is indexed
    page = ask(TestClient(make_app([run], TOKEN), base_url="http://localhost"), "groups", size=3)
    assert [row["group_id"] for row in page["rows"]] == [23, 22, 21]
    assert page["rows"][1]["prompt"] == "What is 10 + 10?"
    assert page["num_indexed"] < page["num_groups"]


def test_prompts_of_two_runs_and_of_two_versions_are_compared(tmp_path: Path) -> None:
    finished_run(tmp_path / "one")
    finished_run(tmp_path / "two", reward_of={1: 7.0})
    client = client_of(tmp_path / "one", tmp_path / "two")
    prompts = ask(client, "prompts", left=0, right=1)
    assert prompts[0]["prompt"] == "What is 1 + 1?"  # the largest change first
    assert prompts[0]["right"]["reward"] - prompts[0]["left"]["reward"] == pytest.approx(1.75)
    own = ask(client, "prompts", left=0, right=0)
    assert {(found["left"]["oldest"], found["left"]["newest"]) for found in own} == {(0, 3), (1, 4), (2, 5)}
    assert ask(client, "prompts", left=0, right=0, left_max=0, right_min=5) == []
    spans = ask(client, "prompts", left=0, right=0, left_max=2, right_min=3, text="5 + 5")
    assert [found["prompt"] for found in spans] == ["What is 5 + 5?"]
    answers = ask(client, "answers", left=0, right=1, key=prompts[0]["key"])
    assert [group["group_id"] for group in answers["left"]] == [13, 1]
    assert [group["version"] for group in answers["right"]] == [3, 0]


def test_prompts_are_told_apart_by_their_last_message(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", system_prompt="You are a careful assistant. " * 20)
    client = client_of(tmp_path / "run")
    prompts = ask(client, "prompts", left=0, right=0)
    assert len(prompts) == len({found["prompt"] for found in prompts}) > 1
    assert all(found["prompt"].startswith("What is ") for found in prompts)
    assert ask(client, "prompts", left=0, right=0, text="careful") == prompts, "all of it is searched"


def test_answers_to_held_out_prompts_are_compared(tmp_path: Path) -> None:
    run = ViewerRun(tmp_path / "run").evaluate().train(2).evaluate(num_prompts=2)
    viewed = ViewedRun(tmp_path / "run", "run")
    viewed.refresh()
    client = TestClient(make_app([viewed], TOKEN), base_url="http://127.0.0.1:1234")
    assert ask(client, "runs")[0]["has_evaluations"]
    prompts = ask(client, "prompts", left=0, right=0, prompts="held_out")
    assert [found["prompt"] for found in prompts] == ["Held out: 0 * 3?", "Held out: 1 * 3?"], "both have two answers"
    answers = ask(client, "answers", left=0, right=0, prompts="held_out", key=prompts[0]["key"])["left"]
    assert [(answer["version"], answer["reward"], answer["state"]) for answer in answers] == [
        (2, 1.0, "HELD OUT"),
        (0, 0.0, "HELD OUT"),
    ]
    group = ask(client, "group", id=answers[0]["group_id"])
    assert group["messages"] == [{"role": "user", "text": "Held out: 0 * 3?"}]
    assert group["rollouts"][0]["text"] == "0 says version 2"
    assert client.get(f"/{TOKEN}/api/group?id=-99").status_code == 404
    assert [row["prompt"] for row in ask(client, "prompts", left=0, right=0, prompts="training")] == []
    assert ask(client, "groups", size=50)["num_groups"] == 8
    run.evaluate(num_prompts=1)  # a resumed run drops the later versions' rows, and evaluates again
    viewed.refresh()
    assert [row["prompt"] for row in ask(client, "prompts", left=0, right=0, prompts="held_out")] == [
        "Held out: 0 * 3?"
    ]
    (tmp_path / "run" / "evaluations.jsonl").unlink()
    viewed.refresh()
    assert ask(client, "prompts", left=0, right=0, prompts="held_out") == []
    run.end()


def test_a_run_without_a_ledger_has_curves_and_says_why_it_has_no_groups(tmp_path: Path) -> None:
    run = ViewerRun(tmp_path / "run").train(1)
    run.ledger.close()
    (tmp_path / "run" / "ledger.sqlite").unlink()
    client = client_of(tmp_path / "run")
    assert ask(client, "series", name="reward")["reward"]["steps"] == [1]
    answer = client.get(f"/{TOKEN}/api/groups")
    assert answer.status_code == 400
    assert "has no ledger.sqlite" in answer.text


def test_a_process_with_the_number_of_a_dead_driver_is_not_taken_for_it(tmp_path: Path) -> None:
    with recorded_outcome_of(tmp_path):
        state = json.loads((tmp_path / OUTCOME).read_text())
        assert ViewedRun(tmp_path, "run").summary()["state"] == "running"
        (tmp_path / OUTCOME).write_text(json.dumps({**state, "began_at": state["began_at"] - 86400}))
        run = ViewedRun(tmp_path, "run")
        run.read_metrics()
        summary = run.summary()
        assert summary["state"] == "killed"
        assert summary["ended_at"] == pytest.approx((tmp_path / OUTCOME).stat().st_mtime), "it lasts no longer"
        assert [event["time"] for event in run._commands()] == [summary["ended_at"]]


def test_a_run_whose_process_is_not_seen_here_is_running_while_it_holds_its_folder(tmp_path: Path) -> None:
    """Containers with the network of their host have its name, and processes of their own."""
    with recorded_outcome_of(tmp_path):
        state = json.loads((tmp_path / OUTCOME).read_text())
        (tmp_path / OUTCOME).write_text(json.dumps({**state, "pid": 2**22 + 1}))
        with held(tmp_path):
            assert ViewedRun(tmp_path, "run").summary()["state"] == "running"
        assert ViewedRun(tmp_path, "run").summary()["state"] == "killed"


def test_the_number_of_steps_of_a_run_without_a_ledger_is_that_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "loss": 2.0}\n')
    run = ViewedRun(tmp_path, "run")
    assert run.summary()["num_steps"] is None
    (tmp_path / "config.yaml").write_text("algorithm: {num_steps: 40}\n")
    run.refresh()
    assert run.summary()["num_steps"] == 40


def test_a_run_on_rows_without_any_event_has_none_and_one_that_lost_its_ledger_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "loss": 2.0}\n')
    for kind in ("sft", "rl"):
        (tmp_path / "config.yaml").write_text(f"algorithm: {{kind: {kind}, num_steps: 4}}\n")
        client = client_of(tmp_path)
        if kind == "sft":
            assert ask(client, "events")["events"] == ask(client, "marks") == []
        else:
            assert "no ledger.sqlite" in client.get(f"/{TOKEN}/api/events").text


def test_the_chart_library_is_the_release_that_it_names() -> None:
    files = static_files()
    program = files["vendor/uPlot.iife.min.js"]
    assert b"uPlot (v1.6.32)" in program
    assert sha256(program).hexdigest() == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    style = sha256(files["vendor/uPlot.min.css"]).hexdigest()
    assert style == "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"


def test_marks_have_deaths_that_are_older_than_the_newest_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpipe.viewer.run_events.MAX_MARKS", 3)
    kinds = ["death", "death", "health", "recovery", "death", "death", "recovery"]
    written = ViewerRun(tmp_path / "run").train(1)
    log = StepLog(tmp_path / "log" / EVENTS, 0)
    for number, kind in enumerate(kinds):
        written.ledger.note(kind, "rollout-0", f"event {number}")
        event = LedgerEvent(number=number, time=50.0, kind=kind, subject="rank", message=f"event {number}")
        log.append(number, [asdict(event)])
    written.end()
    marks = ask(client_of(tmp_path / "run"), "marks")
    assert [event["message"] for event in marks] == ["event 6", "event 5", "event 4", "event 1"]
    assert {event["step"] for event in marks} == {1}
    without_ledger = ViewedRun(tmp_path / "log", "log").marks()
    assert {event["message"] for event in without_ledger} == {"event 6", "event 5", "event 4", "event 1"}


def test_where_commands_went_on_and_ended_is_among_events_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with suppress(Interrupted), recorded_outcome_of(path):
        run = ViewerRun(path, num_steps=3).train(1)
        raise Interrupted("stopped by SIGTERM")
    with suppress(RunError), recorded_outcome_of(path):
        run.train(1)
        raise RunError("the learner has died")
    outcome = read_outcome(path)
    assert outcome is not None
    killed = [*outcome.earlier, replace(outcome, state="running", ended_at=None, error=None, message=None, earlier=[])]
    (path / OUTCOME).write_text(json.dumps(asdict(replace(outcome, earlier=killed))))
    run.end()
    client = client_of(path)
    found = ask(client, "events")
    assert [(event["kind"], event["message"]) for event in found["commands"]] == [
        ("end", "failed, RunError: the learner has died"),
        ("resume", "a command went on with the run"),
        ("end", "killed"),
        ("resume", "a command went on with the run"),
        ("end", "interrupted, Interrupted: stopped by SIGTERM"),
    ]
    assert found["kinds"] == {"end": 3, "resume": 2}
    assert ask(client, "marks") == found["commands"]


def test_an_unreadable_record_of_commands_is_left_out(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    for text in ('{"earlier": 5}', "[1]", '{"state": "failed", "earlier": [{}]}', "{"):
        (tmp_path / "run" / OUTCOME).write_text(text)
        assert ask(client_of(tmp_path / "run"), "events")["commands"] == []


def test_discarded_groups_are_marked_by_reason_and_time(client: TestClient) -> None:
    marks = ask(client, "events")["discarded"]
    (reason,) = {mark["subject"] for mark in marks}
    assert sum(int(mark["message"].split()[0]) for mark in marks) == 6
    assert all(mark["message"].endswith(f": {reason}") for mark in marks)
    assert {mark["step"] for mark in marks} <= set(range(1, 7))


def test_events_of_a_run_without_a_ledger_come_from_its_log(tmp_path: Path) -> None:
    log = StepLog(tmp_path / EVENTS, 0)
    for number, kind in enumerate(["health", "death", "health"]):
        event = LedgerEvent(number=number, time=50.0 + number, kind=kind, subject="rank", message=f"event {number}")
        log.append(number + 1, [asdict(event)])
    run = ViewedRun(tmp_path, "run")
    found = run.events()
    assert [(event["message"], event["step"]) for event in found["events"]] == [
        ("event 2", 3),
        ("event 1", 2),
        ("event 0", 1),
    ]
    assert (found["kinds"], found["before"]) == ({"health": 2, "death": 1}, None)
    first = run.events(kind="health", limit=1)
    assert [event["message"] for event in first["events"]] == ["event 2"]
    assert [event["message"] for event in run.events(kind="health", before=first["before"])["events"]] == ["event 0"]


def test_curves_are_shown_where_no_index_can_be_written(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "run")
    empty_cache.rmdir()
    empty_cache.write_text("a file in the place of the cache")
    (tmp_path / "temporary").write_text("a file in the place of the folder")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    run = ViewedRun(tmp_path / "run", "run")
    run.read_metrics()
    assert run.series.last_step == 6
    assert run.summary()["why_no_ledger"].startswith("the index of its groups can't be written: ")
    (tmp_path / "temporary").unlink()
    (tmp_path / "temporary").mkdir()
    run.refresh()
    assert len(run.groups(GroupQuery(), 10)["rows"]) == 10
    assert empty_cache.is_file(), "the index is in a temporary folder"


def test_an_index_that_was_removed_is_made_again(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    run = ViewedRun(tmp_path / "run", "run")
    run.refresh()
    assert run.index is not None
    for file in run.index.path.parent.iterdir():
        file.unlink()
    (tmp_path / "run" / "parts.json").write_text("{}")
    run.refresh()
    assert len(run.groups(GroupQuery(sort="reward"), 10)["rows"]) == 10


def test_damaged_files_of_one_run_leave_the_page_to_the_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        finished_run(tmp_path / name)
    damaged = {"state": "running", "host": socket.gethostname(), "pid": -1, "began_at": 1.0}
    for change in ({}, {"pid": "x"}, {"pid": 5, "began_at": None}, {"pid": 5, "ended_at": "y"}):
        (tmp_path / "one" / "outcome.json").write_text(json.dumps(damaged | change))
        client = client_of(tmp_path / "one", tmp_path / "two")
        assert [run["name"] for run in ask(client, "runs")] == ["one", "two"]


def test_a_damaged_ledger_leaves_the_rest_to_an_exported_page(tmp_path: Path) -> None:
    for name in ("one", "two"):
        finished_run(tmp_path / name)
    runs = ViewedRuns([tmp_path])
    (tmp_path / "one" / LEDGER).write_bytes(b"no database")
    _, left_out = write_page(runs, tmp_path / "page.html")
    assert any(line.startswith("one: its groups, as they can't be read: ") for line in left_out)
    assert any(line.startswith("two: ") and "groups have their completions" in line for line in left_out)


def test_a_metric_that_is_no_number_any_more_is_not_shown_as_its_last_value(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "time": 1.0, "loss": null, "reward": null}\n')
    run = ViewedRun(tmp_path / "run", "run")
    run.read_metrics()
    assert run.summary()["reward"] is None
    curve = run.series.get(["loss"])["loss"]
    assert (curve["steps"][-1], curve["values"][-1]) == (7, None)


def test_what_is_not_finite_or_not_unicode_is_still_json() -> None:
    assert json.loads(to_json({"a": [float("nan"), float("inf"), 1.0], "b": "\ud800"})) == {
        "a": [None, None, 1.0],
        "b": "\ud800",
    }


def test_a_damaged_ledger_is_reported_while_the_curves_are_shown(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=2)
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    runs = ViewedRuns([tmp_path / "run"])
    refresher = Refresher(runs)
    refresher.start()
    client = TestClient(make_app(runs, TOKEN), base_url="http://localhost")
    deadline = time.monotonic() + 20
    while not (found := ask(client, "runs")[0])["problem"] and time.monotonic() < deadline:
        time.sleep(0.05)
    refresher.stop()
    assert "ledger.sqlite is damaged" in found["problem"]
    assert ask(client, "series", name="reward")["reward"]["steps"] == [1, 2]
    assert client.get(f"/{TOKEN}/api/groups").status_code == 400


def test_lines_that_no_run_has_written_hide_no_others(tmp_path: Path) -> None:
    lines = ['{"reward": 1.0}', '{"step": "x"}', '{"step": 1e400}', f'{{"step": {10**30}, "loss": 1}}', "[1]"]
    lines += [
        f'{{"step": 1, "reward": {10**400}}}',
        '{"step": 2, "reward": NaN, "loss": 1.5}',
        '{"step": 3, "loss": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    series = MetricSeries(tmp_path / "metrics.jsonl")
    series.update()
    assert series.get(["loss", "reward"]) == {
        "loss": {"steps": [2, 3], "values": [1.5, 1.0], "stands_for": 1},
        "reward": {"steps": [2], "values": [None], "stands_for": 1},
    }


def test_what_a_run_has_written_ends_no_other_runs_view(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        finished_run(tmp_path / name, num_steps=1)
    (tmp_path / "bad" / "evaluations.jsonl").write_text('{"step": 1}\n')
    runs = ViewedRuns([tmp_path])
    refresher = Refresher(runs)
    refresher._read(ViewedRun.refresh)
    bad, good = runs
    assert bad.problem == "a file of the run can't be read: KeyError: 'prompt'"
    revision = bad.revision
    refresher._read(ViewedRun.refresh)
    assert bad.revision == revision, "nothing is drawn anew while nothing changes"
    assert (good.problem, good.index and good.index.num_indexed) == ("", 4)


def test_an_index_that_takes_long_holds_up_no_other_runs_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("large", "small"):
        finished_run(tmp_path / name, num_steps=1)
    runs, indexed = ViewedRuns([tmp_path]), threading.Event()

    def index_until(self: GroupIndex, ledger: Any, source: Any, stopped: Callable[[], bool]) -> None:
        while not stopped():
            time.sleep(0.001)
        indexed.set()

    monkeypatch.setattr(GroupIndex, "update", index_until)
    monkeypatch.setattr(web_app, "INDEX_S", 0.05)
    refresher = Refresher(runs)
    refresher.start()
    assert indexed.wait(10)
    with (tmp_path / "small" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward": 0.5}\n')
    small = next(run for run in runs if run.name == "small")
    deadline = time.monotonic() + 10
    while small.series.last_step < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    refresher.stop()
    assert small.series.last_step == 2


def test_nothing_is_indexed_while_a_page_asks_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    now, is_asked = 100.0, True
    monkeypatch.setattr(web_app.time, "monotonic", lambda: now)
    runs = ViewedRuns([tmp_path])
    refresher = Refresher(runs, lambda: is_asked)
    refresher._idle_at = now = 101.0
    now = 102.0
    assert not refresher._read(refresher._refresh)
    assert runs[0].index is None or runs[0].index.num_indexed == 0
    now += web_app.LONGEST_WAIT_S
    assert refresher._read(refresher._refresh)
    assert runs[0].index is not None
    assert runs[0].index.num_indexed == 4
    is_asked = False
    assert refresher._read(refresher._refresh)


def test_a_page_counts_as_asking_until_a_moment_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    async def answer(*_: Any) -> None:
        seen.append(guard.is_asked)

    guard = Guard(answer, TOKEN)
    assert not guard.is_asked
    TestClient(guard, base_url="http://localhost", raise_server_exceptions=False).get(f"/{TOKEN}/")
    assert seen == [True]
    assert guard.is_asked
    monkeypatch.setattr(web_app, "ASKING_S", 0.0)
    assert not guard.is_asked


def test_one_diagnosis_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    run, begun, ends = ViewedRun(tmp_path / "run", "run"), threading.Event(), threading.Event()
    first = run.diagnosis()
    assert first[0]["text"] != "it is being examined"

    def diagnose(_: Path, *, reads_contents: bool) -> list[Any]:
        assert not reads_contents, "hashing checkpoints takes a disk and all cores"
        assert not begun.is_set(), "a second one begins"
        begun.set()
        assert ends.wait(10)
        return []

    monkeypatch.setattr("rlpipe.viewer.viewed_run.diagnose", diagnose)
    run.revision += 1
    thread = threading.Thread(target=run.diagnosis)
    thread.start()
    assert begun.wait(10)
    assert run.diagnosis() == first
    ends.set()
    thread.join(10)
    assert run.diagnosis() == []


def test_pages_do_not_wait_for_the_first_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    run, begun, ends = ViewedRun(tmp_path / "run", "run"), threading.Event(), threading.Event()

    def diagnose(_: Path, *, reads_contents: bool) -> list[Any]:
        begun.set()
        assert ends.wait(10)
        raise ValueError("an odd file")

    monkeypatch.setattr("rlpipe.viewer.viewed_run.diagnose", diagnose)
    thread = threading.Thread(target=run.diagnosis)
    thread.start()
    assert begun.wait(10)
    assert [line["text"] for line in run.diagnosis()] == ["it is being examined"]
    ends.set()
    thread.join(10)
    assert [line["text"] for line in run.diagnosis()] == ["ValueError: an odd file"]


def test_an_index_that_is_stopped_again_and_again_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.viewer.group_index.BATCH", 1)
    finished_run(tmp_path / "run", num_steps=20)
    (run,) = ViewedRuns([tmp_path])
    passes = 0
    while passes < 1000:
        left, passes = [True] * 4, passes + 1
        if run.refresh(lambda left=left: not left or not left.pop()):
            break
    assert 5 < passes < 1000
    assert run.index is not None
    assert run.index.num_indexed == run.index.num_groups == 80


def test_long_series_are_means_of_neighbours(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "reward": float(step % 2), "loss": None}) for step in range(1, 9001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9001, "rew')
    series = MetricSeries(tmp_path / "metrics.jsonl")
    series.update()
    found = series.get(["reward", "loss"])["reward"]
    assert found["stands_for"] == 3
    assert (len(found["steps"]), found["steps"][-1]) == (3000, 9000)
    assert set(found["values"]) == {1 / 3, 2 / 3}
    assert series.names == ["loss", "reward"]
    assert series.get(["loss"])["loss"]["values"] == [None] * 3000, "it was never finite"
    (tmp_path / "metrics.jsonl").write_text(lines[0] + "\n")  # a run that was resumed has cut it
    series.update()
    assert series.get(["reward"])["reward"]["steps"] == [1]


def test_an_evaluation_of_an_older_version_takes_no_event_from_its_step(tmp_path: Path) -> None:
    steps = [{"step": step, "time": 10.0 * step, "loss": 0.1} for step in range(1, 14)]
    evaluation = {"step": 9, "time": 127.0, "eval/accuracy": 0.5}
    for rows, moment, expected in (([*steps[:12], evaluation, steps[12]], 125.0, 13), ([evaluation], 125.0, 9)):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        series = MetricSeries(tmp_path / "metrics.jsonl")
        series.update()
        assert series.step_at(moment) == expected


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path / "run"), "--port", str(port)]) == 2
        assert f"--port {port} can't be used (Address already in use)" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "run"), "--port", "70000"]) == 2
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path / "no" / "run.html")]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_the_command_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys, rlpipe.cli, rlpipe.viewer.web_app, rlpipe.viewer.exported_page, uvicorn\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'pandas') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
