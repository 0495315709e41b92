"""Tests of the episodes of a group: what becomes a rollout, and what a failure does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from episode_cases import CALL, Guess
from player_cases import DATA, KIND, TEMPLATES, agent_kind, play, player_of, request_of
from template_cases import made_tokenizer
from transformers import AutoTokenizer

from rlpipe.common.imports import import_object
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.agents import EndpointAccess, read_reward
from rlpipe.episodes.bridge import USER_MESSAGE, Bridge, turn_ends
from rlpipe.episodes.builtin_tools import McpServer
from rlpipe.episodes.groups import GroupPlayer, open_player, refused_messages
from rlpipe.episodes.isolation import isolate
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.episodes.parsing import PARSERS, open_parser, parse_text
from rlpipe.episodes.session import SampledTurn, read_turn
from rlpipe.episodes.tools import FunctionTool, InvalidArguments, Step, Tool
from rlpipe.errors import ConfigError, EnvironmentFailed
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.replay.ledger.database import pack_arrays, pack_record, unpack_group
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.types import NO_TURN, PlacedImage, RolloutStatus


def test_siblings_play_the_same_game_and_each_is_a_rollout() -> None:
    group, turns = play(["16", "20"], ["x", CALL, "20"])
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 0.9]
    assert [list(rollout.episode.turn_rewards) for rollout in group if rollout.episode] == [[0, 1], [-0.1, 0, 1]]
    assert [rollout.status for rollout in group] == [RolloutStatus.COMPLETED] * 2
    assert {request.min_version for request in turns.requests} == {3}
    assert {request.temperature for request in turns.requests} == {0.7}
    assert len({request.seed for request in turns.requests}) == len(turns.requests) == 5
    for rollout, num_turns in zip(group, (2, 3), strict=True):
        assert rollout.turns is not None
        assert np.array_equal(rollout.turns != NO_TURN, rollout.loss_mask)
        assert {*rollout.turns[rollout.loss_mask].tolist()} == {*range(num_turns)}
    assert isinstance(group.prompt.prompt, list)
    assert "1-32? (seed 0)" in group.prompt.prompt[-1]["content"]
    assert group.logged["episodes/turns"] == 2.5
    assert group.logged["tools/hint/calls"] == 0.5
    assert group.failure is None


def test_an_environment_that_changes_its_row_changes_nobody_elses() -> None:
    class Greedy(Guess):
        def reset(self, row: Mapping[str, Any], seed: int) -> str:
            row["steps"].pop()
            return super().reset(row, seed)

    group, _ = play(["20"], ["20"], kind=replace(KIND, make=Greedy), row={"number": 20, "steps": [1]})
    assert group.failure is None
    assert [rollout.task["steps"] for rollout in group] == [[1], [1]]


def test_rows_may_have_the_first_messages_themselves() -> None:
    def multiply(a: int, b: int) -> int:
        "Multiply two numbers."
        return a * b

    kind = EpisodeKind(make=import_kind(EnvironmentConfig()).make, tools=[FunctionTool(multiply)], has_reward=False)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    asked = [{"role": "user", "content": "6 * 7?"}]
    group, turns = play([call, "42"], ["41"], kind=kind, prompt=asked)
    assert [len(rollout.episode.messages) for rollout in group if rollout.episode] == [3, 1]
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [None, None]
    tokenizer = made_tokenizer(TEMPLATES["trl/qwen2_5"])
    assert "Multiply two numbers." in tokenizer.decode(turns.requests[0].prompt.token_ids)
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(group.rollouts[0].token_ids)


AGENT = """
import json, sys
from openai import OpenAI

row, client = json.load(sys.stdin), OpenAI()
messages = [{"role": "user", "content": "1-32?"}]
for _ in range(5):
    text = client.chat.completions.create(model="any", messages=messages).choices[0].message.content
    if int(text) == row["number"]:
        break
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "no"}]
print("some words")
print(float(int(text) == row["number"]))
"""


def solve(row: dict[str, Any], episode: EndpointAccess) -> float:
    """Play as the command does, in a thread."""
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": "1-32?"}]
    while True:
        text = client.chat.completions.create(model="any", messages=messages).choices[0].message.content
        if text == str(row["number"]):
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "no"}]


@pytest.mark.parametrize("as_command", [True, False])
def test_a_program_plays_and_each_conversation_is_one_sequence(as_command: bool, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    command = {"command": [sys.executable, str(tmp_path / "agent.py")]}
    group, turns = play(["16", "20"], ["20"], kind=agent_kind(command if as_command else f"{__file__}:solve"))
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]
    assert [len(rollout.episode.messages) for rollout in group if rollout.episode] == [3, 1]
    assert group.logged["episodes/branches"] == 1.0
    assert len(turns.requests) == 3
    for rollout, num_turns in zip(group, (2, 1), strict=True):
        assert rollout.turns is not None
        assert {*rollout.turns[rollout.loss_mask].tolist()} == {*range(num_turns)}


def test_a_program_that_meets_a_limit_is_truncated() -> None:
    group, _ = play(["1"] * 9, ["2"] * 9, kind=agent_kind(f"{__file__}:solve"), max_turns=3)
    assert [(rollout.status, rollout.finish_reason) for rollout in group] == [
        (RolloutStatus.TRUNCATED, "max_turns")
    ] * 2
    assert [rollout.num_loss_tokens for rollout in group] == [6, 6]


def meet_a_limit_beside_another_conversation(row: dict[str, Any], episode: EndpointAccess) -> None:
    """Raise the error of a conversation that is too long after another one went on, as parallel ones do."""
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    try:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 5000}])
    finally:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])


def test_a_program_that_meets_a_limit_in_one_of_its_conversations_is_truncated() -> None:
    kind = agent_kind(f"{__file__}:meet_a_limit_beside_another_conversation")
    group, _ = play(["1"], ["2"], kind=kind)
    assert [(rollout.status, rollout.finish_reason) for rollout in group] == [(RolloutStatus.TRUNCATED, "length")] * 2


def fail_after_making_room(row: dict[str, Any], episode: EndpointAccess) -> None:
    """Go on after a conversation that was too long, and fail for another reason."""
    with suppress(openai.BadRequestError):
        meet_a_limit_beside_another_conversation(row, episode)
    raise KeyError("a fault of the program")


def test_a_program_that_fails_after_it_has_made_room_has_failed() -> None:
    group, _ = play(["1"], ["2"], kind=agent_kind(f"{__file__}:fail_after_making_room"))
    assert "KeyError: 'a fault of the program'" in (group.failure or "")


def give_up_on_long_games(row: dict[str, Any], episode: EndpointAccess) -> float:
    """Return the reward, which a client's error after too many turns prevents."""
    return solve(row, episode)


def test_a_truncated_episode_counts_as_0_alongside_rewarded_ones() -> None:
    group, _ = play(["1"] * 9, ["20"], kind=agent_kind(f"{__file__}:give_up_on_long_games"), max_turns=3)
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [0.0, 1.0]


async def wait_for_a_cancelled_task(row: dict[str, Any], episode: EndpointAccess) -> float:
    """Play, and wait for a task that the program itself has cancelled."""
    client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])
    (task := asyncio.create_task(asyncio.sleep(1000))).cancel()
    await task
    return 1.0


def test_a_program_that_waits_for_a_cancelled_task_has_failed() -> None:
    group, _ = play(["1"], ["2"], kind=agent_kind(f"{__file__}:wait_for_a_cancelled_task"), on_error="zero")
    assert [(own.status, own.episode.reward) for own in group if own.episode] == [(RolloutStatus.FAILED, 0.0)] * 2


CANCELLED = """
import asyncio, rlpipe

class Cancelled(rlpipe.Environment):
    def reset(self, row, seed):
        return "Wait."

    async def step(self, action):
        (task := asyncio.create_task(asyncio.sleep(1000))).cancel()
        await task
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_environment_that_waits_for_a_cancelled_task_has_failed(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CANCELLED)
    options = {"path": f"{tmp_path}/own.py:Cancelled", "isolation": isolation}
    kinds = isolated(**options) if isolation == "process" else nullcontext(import_kind(EnvironmentConfig(**options)))
    with kinds as kind:
        group, _ = play(["1"], ["2"], kind=kind)
    assert "it waited for a task that was cancelled" in (group.failure or "")


def test_rows_with_images_are_refused() -> None:
    player, _ = player_of([["1"], ["2"]], kind=KIND)
    request = request_of({}, group_size=2)
    prompt = replace(request.prompt, images=(PlacedImage(content=b"", start=0, num_tokens=1),))
    assert (
        asyncio.run(player.play(replace(request, prompt=prompt))).failure
        == "the row has images, and episodes have texts only"
    )


class Painted(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return [{"role": "user", "content": [{"type": "text", "text": "?"}, row["part"]]}]


@pytest.mark.parametrize("part", [{"type": "image", "image": "x.png"}, {"image": "x.png"}, "x"])
def test_observations_with_images_are_refused(part: Any) -> None:
    group, _ = play(["1"], ["2"], kind=EpisodeKind(make=Painted, tools=[], has_reward=True), row={"part": part})
    assert f"reset's observation has the part {part!r}: episodes have texts only" in (group.failure or "")


SENDS_ITS_REWARD = """
import json, os, sys, urllib.request
from openai import OpenAI

OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(url + "/reward", json.dumps({"reward": 0.5}).encode())
request.add_header("Authorization", "Bearer " + key)
request.add_header("Content-Type", "application/json")
urllib.request.urlopen(request)
print(42)
"""


def test_a_reward_that_was_sent_is_not_replaced_by_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SENDS_ITS_REWARD)
    group, _ = play(["1"], ["2"], kind=agent_kind({"command": [sys.executable, str(tmp_path / "agent.py")]}))
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [0.5, 0.5]


def send_and_return(row: dict[str, Any], episode: EndpointAccess) -> float:
    """Ask, send a reward, as a program that the policy has written might, and return another."""
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])
    client.post("/reward", body={"reward": 1.0}, cast_to=object)
    return 0.25


def test_what_a_function_returns_counts_whatever_was_sent() -> None:
    group, _ = play(["1"], ["2"], kind=agent_kind(f"{__file__}:send_and_return"))
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [0.25, 0.25]


LEAVES_ITS_ROW = """
import subprocess
from openai import OpenAI

OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])
subprocess.Popen(["sleep", "321"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(0.5)
"""


def test_a_command_may_end_without_its_row_and_leave_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(LEAVES_ITS_ROW)
    kind = agent_kind({"command": [sys.executable, str(tmp_path / "agent.py")]})
    group, _ = play(["1"], ["2"], kind=kind, row={"text": "x" * 1_000_000}, timeout_s=30.0)
    ends = [(rollout.finish_reason, rollout.episode.reward) for rollout in group if rollout.episode]
    assert ends == [("done", 0.5)] * 2


class Holding(Guess):
    """A game that has something open from its beginning on."""

    num_open = 0

    def __init__(self) -> None:
        type(self).num_open += 1

    def close(self) -> None:
        type(self).num_open -= 1


def triple(number: int) -> int:
    """Triple a number.

    Args:
        number: the number
    """
    return 3 * number


def test_no_environment_that_is_only_tried_stays_open() -> None:
    path = f"{__file__}:Holding"
    kind = import_kind(EnvironmentConfig(path=path, isolation="thread"))
    holding = import_object(path, what="path", error=ConfigError)
    assert holding.num_open == 0
    play(["1"], ["2"], kind=replace(kind, tools=[FunctionTool(triple)]))
    assert holding.num_open == 0


class WithoutTools(Holding):
    """A game whose tools can't be listed."""

    num_open = 0

    def tools(self) -> list[Tool]:
        """Fail as a server that lists them does."""
        raise OSError("no server")


def test_an_environment_whose_tools_fail_is_closed() -> None:
    group, _ = play(["1"], ["2"], kind=replace(KIND, make=WithoutTools))
    assert group.failure is not None
    assert "no server" in group.failure
    assert WithoutTools.num_open == 0


def rewrite(row: dict[str, Any], episode: EndpointAccess) -> float:
    """Ask twice; the second conversation has the first answer in other words."""
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": "1-32?"}]
    client.chat.completions.create(model="any", messages=messages, stop=["z"])
    messages += [{"role": "assistant", "content": "I said something"}, {"role": "user", "content": "again"}]
    client.chat.completions.create(model="any", messages=messages)
    return 1.0


def test_rewards_see_the_whole_conversation_after_a_rewritten_turn() -> None:
    group, turns = play(["1", "2"], kind=agent_kind(f"{__file__}:rewrite"), run_stop=["STOP"])
    (rollout,) = group.rollouts
    assert rollout.episode is not None
    assert [message["content"] for message in rollout.episode.messages] == ["I said something", "again", "2"]
    assert [own.sampling and own.sampling.stop for own in turns.requests] == [["STOP", "z"], None]


class SlowToMake(Guess):
    def __init__(self) -> None:
        time.sleep(2)


def test_an_environment_that_blocks_while_it_is_made_costs_its_own_episode() -> None:
    began = time.monotonic()
    group, _ = play(["1"], ["2"], kind=EpisodeKind(make=SlowToMake, tools=[], has_reward=True), timeout_s=0.5)
    assert time.monotonic() - began < 10
    assert group.failure is not None
    assert "took longer than 0.5 seconds to start (environment.timeout_s)" in group.failure


def test_names_of_tools_that_clash_are_found_at_the_start() -> None:
    def hint() -> str:
        "Give another hint."
        return "x"

    with pytest.raises(ConfigError, match="two tools are named hint"):
        play(["1"], kind=EpisodeKind(make=Guess, tools=[FunctionTool(hint)], has_reward=True))


def test_invalid_calls_are_counted() -> None:
    wrong = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    group, _ = play([wrong, "<tool_call>{", "20"], ["20"])
    assert group.logged["tools/invalid"] == 1.0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('no such map')", "ended with exit code 1: no such map"),
        ("import os; os.kill(os.getpid(), 9)", "ended with exit code -9: it wrote no error"),
        ("print({'a': 1}, flush=True); raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_a_command_that_fails_fails_its_episode(code: str, words: str) -> None:
    group, _ = play(["1"], ["2"], kind=agent_kind({"command": [sys.executable, "-c", code]}))
    assert group.failure is not None
    assert words in group.failure


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time, os\n"
        f"child = subprocess.Popen(['sleep', '321'], start_new_session=True)\n"
        f"open({str(tmp_path)!r} + '/' + str(child.pid), 'w').close()\n"
        "sys.stdout.write('x' * 10_000_000); time.sleep(321)"
    )
    began = time.monotonic()
    group, _ = play(["1"], ["2"], kind=agent_kind({"command": [sys.executable, "-c", code]}), timeout_s=2.0)
    assert time.monotonic() - began < 10
    assert group.failure is not None
    assert "it ended without a turn of the policy (timeout)" in group.failure
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert len(children) == 2
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children)


@contextmanager
def isolated(**options: Any) -> Iterator[EpisodeKind]:
    """Yield a config's kind of episodes in processes of their own, which end with the context."""
    config = EnvironmentConfig(**options)
    kind: Any = isolate(import_kind(config), config)
    try:
        yield kind
    finally:
        (kind.make.__self__ if kind.agent is None else kind.agent._isolation).close()


OBEY = """
import os, signal, time
import numpy, openai

async def obey(row, episode):
    client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])
    match answer.choices[0].message.content:
        case "hang":
            time.sleep(1000)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError("no such map")
    return {answer.id: numpy.float32(0.5)}
"""


def test_an_agent_that_hangs_or_dies_costs_its_own_episode(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OBEY)
    said = [["hang"], ["die"], ["raise"], ["play"]]
    with isolated(agent=f"{tmp_path}/own.py:obey") as kind:
        began = time.monotonic()
        group, _ = play(*said, kind=kind, timeout_s=5.0, on_error="zero")
        assert time.monotonic() - began < 60
        with pytest.raises(EnvironmentFailed, match="KeyError: 'no such map'"):
            play(["raise"], ["play"], kind=kind, on_error="raise")
    assert group.failure is None
    ends = [(rollout.finish_reason, rollout.episode.reward) for rollout in group if rollout.episode]
    assert ends == [("timeout", 0.0), ("failed", 0.0), ("failed", 0.0), ("done", 0.5)]


STUCK = """
import time, rlpipe

class Stuck(rlpipe.Environment):
    def reset(self, row, seed):
        return "Look."

    @rlpipe.tool
    def look(self) -> str:
        "Look."
        time.sleep(1000)
"""


def test_a_method_that_hangs_as_a_tool_truncates_its_episode(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STUCK)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    with isolated(path=f"{tmp_path}/own.py:Stuck") as kind:
        group, _ = play([call, "more"], ["done"], kind=kind, tool_timeout_s=1.0)
    assert [rollout.finish_reason for rollout in group] == ["timeout", "done"]
    assert group.rollouts[0].num_loss_tokens > 0, "its turn is trained"


def ask_once(row: dict[str, Any], episode: EndpointAccess) -> None:
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1-32?"}])


def test_a_program_without_a_reward_is_scored_by_functions() -> None:
    group, _ = play(["1"], ["2"], kind=agent_kind(f"{__file__}:ask_once"))
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [None, None]


ANSWER = """
import json, os, sys, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "1-32?"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
print(sys.argv[1])
"""


def test_a_result_that_a_command_prints_is_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    kind = agent_kind({"command": [sys.executable, "-c", ANSWER, '{"answer": 42}']})
    group, _ = play(["1"], ["2"], kind=kind)
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [None, None]
    assert not caplog.records
    group, _ = play(["1"], ["2"], kind=agent_kind({"command": [sys.executable, "-c", ANSWER, "42"]}))
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [42.0, 42.0]
    assert caplog.text.count("the last line of the command, 42, counts as its reward beside the reward functions") == 1


def test_a_command_gets_none_of_the_runs_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    code = f"import json, os; open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))\n{ANSWER}"
    group, _ = play(["1"], ["2"], kind=agent_kind({"command": [sys.executable, "-c", code, "1"]}))
    assert group.failure is None
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["PYTHONPATH"] == "somewhere"
    assert "WANDB_API_KEY" not in seen
    assert seen["HOME"] != os.environ["HOME"]


def test_without_reward_functions_a_program_must_give_a_reward() -> None:
    group, _ = play(["1"], ["2"], kind=agent_kind(f"{__file__}:ask_once"), is_scored=False)
    assert "the program gave no reward, and the run has no reward functions" in (group.failure or "")
    group, _ = play(["1"] * 9, ["20"], kind=agent_kind(f"{__file__}:solve"), max_turns=3, is_scored=False)
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [0.0, 1.0]


@pytest.mark.parametrize(("code", "is_scored"), [("print(1.0)", True), ("pass", False)])
def test_a_program_that_never_asks_fails_its_episode(code: str, is_scored: bool) -> None:
    kind = agent_kind({"command": [sys.executable, "-c", code]})
    group, _ = play(["1"], ["2"], kind=kind, is_scored=is_scored)
    assert group.failure is not None
    assert "it ended without a turn of the policy (done)" in group.failure


@pytest.mark.parametrize(
    "agent",
    [5, {"command": []}, {"command": "ls"}, {"command": ["no-such-program", "x"]}, {"other": 1}, [1], "no_module:f"],
)
def test_what_is_no_program_is_refused_by_name(agent: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.agent"):
        import_kind(EnvironmentConfig(agent=agent))


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("1", 1),
        ("x\n0.5\n", 0.5),
        ('{"a": 1}', {"a": 1}),
        ("", None),
        ("true", True),
        ("False", False),
        ("Reward: 1.0", None),
        ("done", None),
        ("[" * 9999, None),
    ],
)
def test_the_reward_of_a_command_is_its_last_line(output: str, reward: Any) -> None:
    assert read_reward(output) == reward


class Fragile(Guess):
    async def step(self, action: str) -> Step:
        if action == "0":
            raise OSError("the board is gone")
        return await super().step(action)


FRAGILE = EpisodeKind(make=Fragile, tools=[], has_reward=True)


def test_a_failed_episode_is_left_out_if_two_remain() -> None:
    group, _ = play(["16", "0"], ["20"], ["20"], kind=FRAGILE)
    assert group.failure is None
    assert [rollout.sample_index for rollout in group] == [0, 1]
    assert group.logged["episodes/failed"] == pytest.approx(1 / 3)
    group, _ = play(["16", "0"], ["20"], kind=FRAGILE)
    assert group.failure == "1 of 2 episodes failed, the first with: OSError: the board is gone"


def test_a_failed_episode_may_cost_its_group_or_count_as_0_or_stop_the_run() -> None:
    said = [["16", "0"], ["20"], ["20"]]
    assert play(*said, kind=FRAGILE, on_error="drop_group")[0].failure is not None
    group, _ = play(*said, kind=FRAGILE, on_error="zero")
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [0.0, 1.0, 1.0]
    assert group.rollouts[0].num_loss_tokens > 0, "what was sampled is trained"
    assert group.rollouts[0].episode is not None
    assert not any(group.rollouts[0].episode.turn_rewards), "what it earned before it failed does not count, either"
    with pytest.raises(EnvironmentFailed, match="the board is gone"):
        play(*said, kind=FRAGILE, on_error="raise")


@pytest.mark.parametrize("name", ["trl/qwen2_5", "trl/deepseekv3"])
def test_the_ledger_keeps_episodes_with_all_their_sequences(name: str, tmp_path: Path) -> None:
    group, _ = play([CALL, "20"], ["16", "20"], name=name)
    assert len(group.sequences) == (3 if name == "trl/deepseekv3" else 2)
    group.rollouts[0].advantages = np.where(group.rollouts[0].loss_mask, 0.5, 0).astype(np.float32)
    for sequence in group.sequences[1:]:  # those of turns and of tokens
        sequence.advantages = np.where(sequence.loss_mask, np.arange(len(sequence.token_ids)) // 2, 0).astype(
            np.float32
        )
    found = unpack_group(7, pack_record(group), pack_arrays(group), {"number": 20})
    for own, stored in zip(group.sequences, found.sequences, strict=True):
        for array in ("token_ids", "loss_mask", "logprobs", "policy_versions", "turns"):
            assert np.array_equal(getattr(own, array), getattr(stored, array)), array
        assert own.advantages is not None
        assert stored.advantages is not None
        assert np.array_equal(own.advantages[own.loss_mask], stored.advantages[own.loss_mask])
    for first, other in zip(group, found, strict=True):
        assert first.episode is not None
        assert other.episode is not None
        assert first.episode.messages == other.episode.messages
        assert first.episode.turn_rewards == other.episode.turn_rewards
    assert found.prompt.prompt == group.prompt.prompt
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.get("schema") == 1
    ledger.generated([group])
    assert ledger.get("schema") == 2
    assert Ledger(tmp_path / "ledger.sqlite", read_only=True).get("schema") == 2


def test_what_cannot_be_an_environment_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import rlpipe\nclass Own(rlpipe.Environment):\n"
        "    def __init__(self, size): self.size = size\n    def reset(self, row, seed): return 'x'\n"
        "class Other: pass\ndef tool(a): return a\n"
    )
    assert import_kind(EnvironmentConfig(path=f"{file}:Own", kwargs={"size": 3})).make().size == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Own can't be created: TypeError: .*'size'"):
        import_kind(EnvironmentConfig(path=f"{file}:Own"))
    with pytest.raises(ConfigError, match=r"not a class derived from rlpipe.Environment"):
        import_kind(EnvironmentConfig(path=f"{file}:Other"))
    with pytest.raises(ConfigError, match="its parameter a has no type"):
        import_kind(EnvironmentConfig(tools=[f"{file}:tool"]))


def test_callable_objects_are_tools_under_their_own_names(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import functools\n\ndef add(a: int, b: int = 1) -> int:\n    'Add.'\n    return a + b\n\n"
        "add_two = functools.partial(add, b=2)\nnumber = 3\n"
    )
    (found,) = import_kind(EnvironmentConfig(tools=[f"{file}:add_two"])).tools
    assert (found.name, found.schema["function"]["description"]) == ("add_two", "Add.")
    assert asyncio.run(found.call({"a": 1})) == 3
    assert list(found.schema["function"]["parameters"]["properties"]) == ["a"], "what is bound is not the policy's"
    with pytest.raises(InvalidArguments):
        asyncio.run(found.call({"a": 1, "b": 7}))
    with pytest.raises(ConfigError, match=r"environment\.tools: .*:number is 3, which can't be called"):
        import_kind(EnvironmentConfig(tools=[f"{file}:number"]))


@pytest.mark.parametrize(
    ("name", "parser"),
    [("trl/qwen2_5", "hermes"), ("trl/qwen3", "hermes"), ("trl/llama3_1", "json"), ("trl/gptoss", "harmony")],
)
def test_the_parser_follows_from_the_template(name: str, parser: str) -> None:
    template = ChatTemplate(made_tokenizer(TEMPLATES[name]), DATA)
    assert open_parser("auto", template, has_tools=True) is PARSERS[parser]


def test_a_template_without_calls_needs_no_parser_unless_there_are_tools() -> None:
    tokenizer = made_tokenizer("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    template = ChatTemplate(tokenizer, DATA)
    assert open_parser("auto", template, has_tools=False) is parse_text
    with pytest.raises(ConfigError, match=r"environment\.parser"):
        open_parser("auto", template, has_tools=True)


COUNTS_IF_THERE_ARE_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if tools %}{{ messages | length }} messages{% endif %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        (KIND, False),
        (replace(KIND, environment_schemas=[FunctionTool(Guess().hint).schema]), True),
        (replace(KIND, servers=[McpServer(command=["ls"])]), True),
        (agent_kind({"command": ["ls"]}), True),
    ],
)
def test_bridges_are_tried_with_the_tools_of_the_episodes(kind: EpisodeKind, is_refused: bool) -> None:
    template = ChatTemplate(made_tokenizer(COUNTS_IF_THERE_ARE_TOOLS), DATA)
    bridge = Bridge(template, turn_ends(template, DATA))
    assert (USER_MESSAGE in refused_messages(bridge, kind)) == is_refused


def test_methods_that_run_programs_of_the_policy_need_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "risky.py").write_text(
        "import rlpipe\n\nclass Risky(rlpipe.Environment):\n    def reset(self, row, seed):\n        return 'go'\n\n"
        "    @rlpipe.tool\n    def run(self, code: str) -> str:\n        'Run code.'\n        return code\n\n"
        "    run.needs_sandbox = True\n"
    )
    with pytest.raises(ConfigError, match=r"environment\.path: .*Risky\.run runs code .*isolation=sandbox"):
        import_kind(EnvironmentConfig(path=f"{tmp_path}/risky.py:Risky"))
    assert import_kind(EnvironmentConfig(path=f"{tmp_path}/risky.py:Risky", isolation="sandbox")).has_tools


def test_a_user_learns_how_long_conversations_may_be(tmp_path: Path) -> None:
    policy = make_tiny_policy(tmp_path / "policy", hidden_size=32, num_layers=1, intermediate_size=32)
    options = [
        "data=jsonl",
        "data.path=rows.jsonl",
        f"model.path={policy}",
        "data.max_prompt_tokens=40",
        "rollout.sampling.max_tokens=8",
    ]
    for more, said in (([], ["a conversation ends after 48 tokens"]), (["rollout.max_model_len=90"], [])):
        config = load_config([*options, *more], need_files=False)
        _, notes = open_player(config, sample=None)  # type: ignore[arg-type]
        assert [note.partition(" (")[0] for note in notes] == said


def read(player: GroupPlayer, token_ids: list[int]) -> str:
    nothing = [0] * len(token_ids)
    sampled = SampledTurn(token_ids=token_ids, logprobs=nothing, policy_versions=nothing, finish_reason="stop")
    return read_turn(sampled, player._bridge, np.zeros(0, np.int32))


def test_turns_end_where_the_engine_ends_them_and_where_the_template_does(tmp_path: Path) -> None:
    policy = make_tiny_policy(tmp_path / "policy", hidden_size=32, num_layers=1, intermediate_size=32)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    end, pad, tool_id, unknown = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>", "<|tool|>", "<|unknown|>"])
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [pad, unknown]}))
    plain = tokenizer.convert_tokens_to_ids("a")
    options = ["data=jsonl", "data.path=rows.jsonl", f"model.path={policy}"]
    config = load_config([*options, f"rollout.sampling.stop_token_ids=[{tool_id},{plain}]"], need_files=False)
    player, _ = open_player(config, sample=None)  # type: ignore[arg-type]
    for token in (end, pad, unknown, tool_id):
        assert read(player, [plain, token]) == "a"
    assert read(player, [plain, plain]) == "aa", "a text may end with it"
    assert not player._sends_sampling

    tokenizer.eos_token = "<|pad|>"  # as the tokenizers of base models have another end than the template
    tokenizer.save_pretrained(policy)
    player, _ = open_player(load_config(options, need_files=False), sample=None)  # type: ignore[arg-type]
    assert player._sampling.stop_token_ids == [end]
    _, turns = play(["20"], stop_token_ids=[end])
    assert [own.sampling and own.sampling.stop_token_ids for own in turns.requests] == [[end]]
    assert [own.sampling for own in play(["20"])[1].requests] == [None]
