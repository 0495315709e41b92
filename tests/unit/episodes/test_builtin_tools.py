"""Tests of tools of MCP servers, which each episode has for itself."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from player_cases import play

from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.builtin_tools import ServerProcess, _list_tools
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.errors import ConfigError
from rlpipe.types import RolloutGroup

FILE = Path(__file__).parents[2] / "helpers" / "mcp_server.py"
ASKED = [{"role": "user", "content": "Count."}]


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def kind(pids: Path) -> EpisodeKind:
    command = [sys.executable, str(FILE), str(pids)]
    return import_kind(EnvironmentConfig(tools=[{"mcp": {"command": command, "env": {"WORD": "times"}}}]))


def results(group: RolloutGroup, index: int) -> list[str]:
    episode = group.rollouts[index].episode
    assert episode is not None
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


def assert_ended(pids: Path) -> None:
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_episode_has_a_server_of_its_own(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    said = [call("count", '{"step": 2}'), call("count", '{"step": "x"}'), call("fail"), "done"]
    group, _ = play(said, said, kind=kind(pids), prompt=ASKED, timeout_s=60.0)
    for index in range(2):
        first, second, third = results(group, index)
        assert first == "2 times"
        assert second.startswith("Error: count does not take these arguments: 'x' is not of type 'integer'")
        assert third == "Error: ServerToolFailed: Error executing tool fail"
    assert len({*pids.read_text().split()}) >= 2
    assert_ended(pids)


def test_a_server_that_ends_by_itself_leaves_nothing_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    group, _ = play([call("start"), "done"], kind=kind(pids), prompt=ASKED, timeout_s=60.0)
    assert results(group, 0) == ["started"]
    assert len(pids.read_text().split()) == 3, "a server to try, one of the episode, and what that one has started"
    assert_ended(pids)


def test_a_server_whose_output_is_no_text_serves_on(tmp_path: Path) -> None:
    said = [call("litter"), call("count", '{"step": 1}'), "done"]
    group, _ = play(said, said, kind=kind(tmp_path / "pids"), prompt=ASKED, timeout_s=60.0)
    assert group.failure is None
    assert [results(group, index) for index in range(2)] == [["written", "1 times"]] * 2


def test_half_a_character_in_a_call_costs_nothing_else(tmp_path: Path) -> None:
    said = [call("count", r'{"step": "\ud83d", "\ud83d": 1}'), call("count", '{"step": 1}'), "done"]
    group, _ = play(said, said, kind=kind(tmp_path / "pids"), prompt=ASKED, timeout_s=60.0)
    assert group.failure is None
    assert results(group, 0)[1] == "1 times"


def test_a_server_that_hangs_or_dies_costs_its_calls(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    began = time.monotonic()
    hanging = [call("hang"), call("count", '{"step": 1}'), "done"]
    dying = [call("leave"), call("count", '{"step": 1}'), "done"]
    group, _ = play(hanging, dying, kind=kind(pids), prompt=ASKED, timeout_s=60.0, tool_timeout_s=2.0)
    assert time.monotonic() - began < 40
    ended = "Error: ServerToolFailed: the server was ended, because a call took too long"
    assert results(group, 0) == ["Error: hang took longer than 2 seconds", ended]
    assert all(text.startswith("Error: ") for text in results(group, 1))
    assert [rollout.finish_reason for rollout in group] == ["done", "done"]
    assert_ended(pids)


def test_a_server_that_cannot_be_started_fails_before_the_run(tmp_path: Path) -> None:
    broken = import_kind(EnvironmentConfig(tools=[{"mcp": {"command": [str(tmp_path / "nothing")]}}]))
    with pytest.raises(ConfigError, match=r"environment\.tools: .*nothing"):
        play(["x"], ["x"], kind=broken, prompt=ASKED)


@pytest.mark.parametrize(
    "entry", [{"mcp": {}}, {"mcp": {"command": "ls"}}, {"mcp": {"command": ["a"], "b": 1}}, {}, {"x": 1}]
)
def test_what_is_no_server_is_refused_by_name(entry: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tools"):
        import_kind(EnvironmentConfig(tools=[entry]))


def test_all_pages_of_a_servers_tools_are_read_and_an_empty_text_is_no_picture() -> None:
    class Paged:
        async def list_tools(self, *, cursor: str | None) -> SimpleNamespace:
            number = int(cursor or 0)
            made = SimpleNamespace(name=f"tool{number}", description=None, input_schema={"type": "object"})
            return SimpleNamespace(tools=[made], next_cursor=str(number + 1) if number < 2 else None)

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> SimpleNamespace:
            page = SimpleNamespace(type="resource", resource=SimpleNamespace(text="a page"))
            content = [SimpleNamespace(type="text", text=""), SimpleNamespace(type="image"), page]
            if name == "tool1":
                return SimpleNamespace(content=[], structured_content={"miles": 3}, is_error=False)
            return SimpleNamespace(content=content, structured_content=None, is_error=False)

    async def scenario() -> None:
        client: Any = Paged()
        found = await _list_tools(client, ServerProcess())
        assert [own.name for own in found] == ["tool0", "tool1", "tool2"]
        assert await found[0].call({}) == "\n[image]\na page"
        assert await found[1].call({}) == '{"miles": 3}'

    asyncio.run(scenario())
