"""Displays of a ledger: tables, one group, and what is followed while a run is written, killed and restored."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import Run
from replay_cases import admit, admitted, bring, group, open_store

from rlpipe import cli
from rlpipe.common.run_files import LEDGER
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.sources.row_source import Cursor
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.replay.ledger.query import Feed, GroupFilter, Row, find_groups, find_steps, to_tree
from rlpipe.replay.ledger.run_ledger import Ledger, StepGroups
from rlpipe.replay.step_queue import StepReport
from rlpipe.tracking.jsonl import StepLog


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run = Run(tmp_path / "run")
    run.train_all()
    run.ledger.note("death", "learner", "the learner group died: \x1b[31mkilled")
    run.ledger.close()
    return tmp_path / "run"


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["inspect", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def ids(lines: list[str]) -> list[int]:
    return [json.loads(line)["group_id"] for line in lines]


def test_groups_are_a_table_with_the_newest_first(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = printed([str(finished)], capsys)
    assert header.split()[:5] == ["group", "step", "state", "prompt", "reward"]
    assert [int(row.split()[0]) for row in rows] == list(range(17, -1, -1))
    assert rows[4].split() == [
        "13",
        "5",
        "TRAINED",
        "p",
        "0.500",
        "0.500",
        "1.000",
        "1",
        "10",
        "rollout-0",
        "0.250",
        "0.000",
    ]
    assert " ".join(rows[7].split()) == "10 DISCARDED the engine refused it"
    assert "(dropped)" in rows[-1]


def test_in_a_terminal_the_table_is_as_wide_as_it(finished: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rlpipe", "inspect", str(finished), "--limit", "2"]
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    subprocess.run(command, stdout=theirs, env=environment, check=True)
    os.close(theirs)
    lines = os.read(ours, 10**5).decode().splitlines()
    os.close(ours)
    assert "\x1b[1m" in lines[0], "the heading is bold"
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= 60


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--limit", "2"], [17, 16]),
        (["--step", "2"], [6, 5]),
        (["--step", "0-1", "--reverse"], [0, 2, 3, 4]),
        (["--step", "5-"], [17, 16, 14, 13]),
        (["--step=-0"], [2, 0]),
        (["--reward", "..0.2"], [16, 9, 2]),
        (["--reward", "0.5..1", "--epoch", "0"], [6, 5, 4, 3, 0]),
        (["--reward=-1..0", "--state", "TRAINED"], [9, 2]),
        (["--reward", "0"], [16, 9, 2]),
        (["--state", "discarded", "--epoch", "1"], [10, 8]),
        (["--state", "DISCARDED,TRAINED", "--prompt-id", "1"], [15, 8, 1]),
        (["--sort", "staleness", "--limit", "3"], [13, 7, 5]),
        (["--sort", "reward", "--reverse", "--limit", "3"], [16, 9, 2]),
        (["--sort", "tokens", "--limit", "0"], [*range(17, 10, -1), *range(9, -1, -1), 10]),
    ],
)
def test_groups_are_chosen_and_sorted(
    finished: Path, arguments: list[str], expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids(printed([str(finished), "--json", *arguments], capsys)) == expected


def test_steps_and_events_have_tables_of_their_own(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, last, *steps = printed([str(finished), "--steps"], capsys)
    assert header.split()[:4] == ["step", "ended", "times", "reward"]
    assert [line.split()[0] for line in (last, *steps)] == ["6", "5", "4", "3", "2", "1", "0"]
    assert "compared" in last
    chosen = printed([str(finished), "--steps", "--step", "1-4", "--limit", "3", "--json"], capsys)
    assert [json.loads(line)["step"] for line in chosen] == [4, 3, 2]
    _, event = printed([str(finished), "--events"], capsys)
    assert event.split(maxsplit=5)[3:] == ["death", "learner", r"the learner group died: \x1b[31mkilled"]


def test_metrics_that_are_not_numbers_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / LEDGER).complete(StepReport(step=0, metrics={"loss": float("nan"), "reward": 0.5}))
    (line,) = printed([str(tmp_path), "--steps", "--json"], capsys)
    assert json.loads(line)["metrics"] == {"loss": None, "reward": 0.5}
    assert " nan" in printed([str(tmp_path), "--steps"], capsys)[1]


def trained_group(folder: Path, model: Path) -> Path:
    """Write a ledger with a group of two completions, "2+2" and "4", that step 3 has trained."""
    tokenizer = load_tokenizer(ModelConfig(path=str(model))) if (model / "tokenizer.json").exists() else None
    one = group(5, [1.0, 0.0], lengths=[3, 1], version=2)
    object.__setattr__(one.prompt, "prompt", [{"role": "user", "content": "what is\n2+2?"}])
    for rollout, text in zip(one, ("2+2", "4"), strict=True):
        if tokenizer is not None:
            rollout.token_ids[2:] = tokenizer.encode(text, add_special_tokens=False)
    one.logged, one.engine = {"words": float("nan")}, "rollout-1"
    ledger = Ledger(folder / LEDGER)
    ledger.set(config={"model": {"path": str(model), "tokenizer": None, "revision": None, "trust_remote_code": False}})
    ledger.admit([admitted(5, version=2)], Cursor(0, 6))
    ledger.generated([one])
    ledger.scored([one])
    ledger.assign(3, StepGroups(fresh=[one]))
    ledger.close()
    return folder


def test_one_group_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = make_tiny_policy(tmp_path / "policy", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    trained_group(tmp_path, policy)
    text = "\n".join(printed([str(tmp_path), "--group", "5"], capsys))
    assert "group 5  step 3  state ASSIGNED  prompt what is 2+2?  reward 0.500" in text
    assert "epoch 0, position 5, prompt 5; admitted with version 2" in text
    assert "user\nwhat is\n2+2?" in text
    first = "rollout 0: reward 1.000 (right 1.000); advantage none; 3 tokens of version 2; completed (stop)\n2+2"
    assert first in text
    (line,) = printed([str(tmp_path), "--group", "5", "--json"], capsys)
    tree = json.loads(line)
    assert (tree["type"], tree["staleness"], tree["prompt"][0]["role"]) == ("group", 1, "user")
    assert [rollout["completion"] for rollout in tree["rollouts"]] == ["2+2", "4"]
    assert tree["rollouts"][0]["versions"] == {"2": 3}
    assert tree["rollouts"][1]["rewards"] == {"right": 0.0}


def test_without_its_tokenizer_a_group_is_shown_as_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    trained_group(tmp_path, tmp_path / "empty")
    text = "\n".join(printed([str(tmp_path), "--group", "5"], capsys))
    assert f"its completions are shown as token ids: model.path: the tokenizer of '{tmp_path / 'empty'}'" in text
    assert "completed (stop)\n[2, 3, 4]" in text
    (line,) = printed([str(tmp_path), "--group", "5", "--json"], capsys)
    assert [(r["completion"], r["completion_ids"]) for r in json.loads(line)["rollouts"]] == [
        (None, [2, 3, 4]),
        (None, [2]),
    ]


@pytest.mark.parametrize(
    ("group_id", "reason"),
    [(0, "its tokens were dropped (ledger.keep_steps)"), (8, "the tokens of discarded groups are not kept")],
)
def test_tokens_that_are_gone_are_said_to_be(
    finished: Path, group_id: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed([str(finished), "--group", str(group_id)], capsys)[-1] == reason


@pytest.mark.parametrize("place", ["", "ledger.sqlite", "checkpoints/step_000006"])
def test_dropped_texts_are_shown_where_they_were_logged(
    finished: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the run's folder, its ledger, and a checkpoint, whose ledger is a copy."""
    if place.startswith("checkpoints"):
        (finished / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(finished / LEDGER, finished / place / LEDGER)
    rollouts = [
        {
            "group_id": 0,
            "sample_index": index,
            "prompt_id": 0,
            "prompt": [{"role": "user\x1b[1m", "content": "what is 2+2?"}],
            "completion": text,
            "rewards": {"right": reward},
            "reward": reward,
            "advantage": None,
            "policy_version": 0,
            "num_tokens": len(text),
            "status": "completed",
            "finish_reason": "stop",
        }
        for index, (text, reward) in enumerate([("4\x1b[31m", 1.0), ("five", 0.0)])
    ]
    log = StepLog(finished / "completions.jsonl", 1)
    log.append(1, rollouts)
    log.append(2, [rollout | {"group_id": 3, "completion": "other"} for rollout in rollouts])
    run = str(finished / place)
    first, second = printed([run], capsys)[-1], printed([run], capsys)[-2]
    assert "what is 2+2?" in first
    assert "(dropped)" in second
    text = "\n".join(printed([run, "--group", "0"], capsys))
    assert "its tokens were dropped (ledger.keep_steps); its texts are from completions.jsonl" in text
    assert "user\\x1b[1m\nwhat is 2+2?" in text
    assert "rollout 0: reward 1.000 (right 1.000); advantage none; 6 tokens; completed (stop)\n4\\x1b[31m" in text
    assert text.endswith("completed (stop)\nfive")
    tree = json.loads(printed([run, "--group", "0", "--json"], capsys)[0])
    assert (tree["type"], tree["prompt"]) == ("group", rollouts[0]["prompt"])
    assert [rollout["completion"] for rollout in tree["rollouts"]] == ["4\x1b[31m", "five"]


def test_a_group_that_is_being_generated_has_no_tokens_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path)
    admit(store, 0)
    assert printed([str(tmp_path), "--group", "0"], capsys)[-1] == "it has no tokens yet"


# Following ------------------------------------------------------------------------------------------------------------


def names(rows: list[Row]) -> list[tuple[str, Any]]:
    trees = [to_tree(row) for row in rows]
    return [(tree["type"], tree.get("group_id", tree.get("step", tree.get("number")))) for tree in trees]


def test_a_feed_gives_everything_once(tmp_path: Path) -> None:
    store, feed = open_store(tmp_path), Feed(GroupFilter())

    def news() -> list[tuple[str, Any]]:
        return names(feed.look(store.ledger, (0, 0)))

    admit(store, 0, 1, 2, 3)
    bring(store, 0, [1.0, 0.0])
    assert news() == [], "what is there is old"
    bring(store, 2, [1.0, 0.0])
    store.generated([group(1, [1.0], scored=False)])
    assert news() == [("group", 2)], "groups come once they are scored"
    store.ledger.discard({3: "too slow"})
    store.batches(0)
    store.ledger.complete(StepReport(step=0, metrics={}))
    store.ledger.note("death", "learner", "x")
    assert news() == [("group", 3), ("step", 0), ("event", 1)]
    store.checkpointed(1)
    assert news() == [], "trained groups are known already"
    store.ledger.complete(StepReport(step=0, metrics={"loss": 1.0}))
    assert news() == [("step", 0)], "it was trained again"


def test_a_feed_of_a_state_waits_for_it(tmp_path: Path) -> None:
    store, feed = open_store(tmp_path), Feed(GroupFilter(states=("TRAINED",)))
    admit(store, 0, 1, 2)
    for group_id in range(3):
        bring(store, group_id, [1.0, 0.0])
    assert feed.look(store.ledger, (0, 0)) == []
    store.batches(0)
    assert feed.look(store.ledger, (0, 0)) == []
    store.checkpointed(1)
    assert names(feed.look(store.ledger, (0, 0))) == [("group", 0), ("group", 1)]


def test_a_feed_of_some_steps_has_no_others(tmp_path: Path) -> None:
    store, feed = open_store(tmp_path), Feed(GroupFilter(first_step=1, last_step=2))
    assert feed.look(store.ledger, (0, 0)) == []
    for step in range(4):
        store.ledger.complete(StepReport(step=step, metrics={}))
    assert names(feed.look(store.ledger, (0, 0))) == [("step", 1), ("step", 2)]


def test_a_feed_continues_with_a_copy(tmp_path: Path) -> None:
    store, feed = open_store(tmp_path), Feed(GroupFilter())
    feed.look(store.ledger, (0, 0))
    admit(store, 0, 1, 2)
    store.ledger.note("death", "engine", "first")
    for group_id in range(2):
        bring(store, group_id, [1.0, 0.0])
    store.batches(0)
    store.ledger.complete(StepReport(step=0, metrics={}))
    (tmp_path / "copy").mkdir()
    store.ledger.back_up(tmp_path / "copy" / LEDGER)
    store.ledger.checkpointed(1)
    bring(store, 2, [1.0, 0.0])
    admit(store, 3)
    bring(store, 3, [1.0, 0.0])
    store.ledger.note("death", "replay", "second")
    seen = names(feed.look(store.ledger, (0, 0)))
    assert seen == [*(("group", number) for number in range(4)), ("step", 0), ("event", 1), ("event", 2)]
    store.ledger.close()
    copy = open_store(tmp_path / "copy")
    copy.ledger.note("recovery", "replay", "from the copy")
    assert names(feed.look(copy.ledger, (0, 1))) == [("event", 2)], "what the copy holds was shown"
    bring(copy, 2, [0.0, 1.0])
    admit(copy, 3)
    bring(copy, 3, [1.0, 0.0])
    assert names(feed.look(copy.ledger, (0, 1))) == [("group", 2), ("group", 3)], "generated again"


WRITER = """
import sys
from pathlib import Path
from ledger_cases import Run
run = Run(Path(sys.argv[1]), num_steps=int(sys.argv[2]))
first = run.ledger.last_step + 1
run.ledger.note("start", "writer", f"begins with step {first}")
print(first, flush=True)
run.train_all(first=first)
"""


def start(*command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), *sys.path])
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def write(folder: Path, num_steps: int) -> subprocess.Popen[str]:
    process = start("-c", WRITER, str(folder), str(num_steps))
    assert process.stdout is not None
    process.stdout.readline()
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_following_survives_the_writer_and_ends_with_the_run(tmp_path: Path) -> None:
    run, num_steps = Run(tmp_path, num_steps=150), 150
    run.train(0)
    run.ledger.close()
    follower = start("-m", "rlpipe", "inspect", str(tmp_path), "--follow", "--json", "--limit", "1")
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["type"] == "group", "it has begun"
    reader = Ledger(tmp_path / LEDGER, read_only=True)
    for steps in (20, 50):
        writer = write(tmp_path, num_steps)
        wait_until(lambda steps=steps: reader.last_step >= steps)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    reader.close()
    run = Run(tmp_path, num_steps=num_steps)
    copy = tmp_path / "copy.sqlite"
    run.ledger.back_up(copy)
    run.ledger.close()
    (tmp_path / LEDGER).rename(tmp_path / "ledger-1.sqlite")
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"{LEDGER}{suffix}").unlink(missing_ok=True)
    time.sleep(0.6)
    copy.rename(tmp_path / LEDGER)
    last = write(tmp_path, num_steps)
    output, _ = follower.communicate(timeout=120)
    assert (follower.returncode, last.wait()) == (0, 0)
    rows = [json.loads(line) for line in output.splitlines()]
    with_reward = Ledger(tmp_path / LEDGER, read_only=True)
    expected = {row.group_id for row in find_groups(with_reward, GroupFilter())}
    shown = [row["group_id"] for row in rows if row["type"] == "group"]
    assert set(shown) >= {number for number in expected if number > 3}
    assert len(shown) == len(set(shown)), "every group once"
    assert {row["step"] for row in rows if row["type"] == "step"} >= set(range(1, num_steps + 1))
    assert len([row for row in rows if row["type"] == "event"]) == 3
    assert [step.step for step in find_steps(with_reward)] == list(range(num_steps + 1))


def test_following_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0)
    follower = start("-m", "rlpipe", "inspect", str(tmp_path), "--follow", "--steps", "--limit", "5")
    assert follower.stdout is not None
    assert follower.stdout.readline().startswith("step 0  ended ")
    run.train(1)
    assert follower.stdout.readline().startswith("step 1  ended ")
    follower.send_signal(signal.SIGINT)
    assert follower.wait(30) == 0


def test_following_a_finished_run_ends_at_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([str(finished), "--follow"], capsys) == []
    lines = printed([str(finished), "--follow", "--groups", "--limit", "2", "--json"], capsys)
    assert ids(lines) == [16, 17], "in the order in which they came"
