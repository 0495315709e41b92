"""Tests of NeMo Gym's agents as players of episodes, against servers that make its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from gym_servers import TOOL, GymServers
from player_cases import player_of, request_of

from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.agents import AgentFailed, read_agents
from rlpipe.episodes.load_environment import import_kind
from rlpipe.errors import ConfigError
from rlpipe.types import RolloutGroup

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
ROW = {
    "agent_ref": {"type": "responses_api_agents", "name": "calculator"},
    "responses_create_params": {"input": [{"role": "user", "content": "6 * 7?"}], "tools": [TOOL]},
    "verifier_metadata": {"answer": 42},
}


def play(
    *said: list[str], row: dict[str, Any] = ROW, name: str | None = None, fails: bool = False
) -> tuple[RolloutGroup, GymServers]:
    async def run() -> tuple[RolloutGroup, GymServers]:
        async with GymServers() as servers:
            servers.fails = fails
            agent = {"nemo_gym": servers.urls["head"], **({"name": name} if name else {})}
            player, _ = player_of(said, kind=import_kind(EnvironmentConfig(agent=agent)))
            await player.start()
            assert player.base_url is not None
            servers.policy_base_url = player.base_url
            return await player.play(request_of(row, group_size=len(said))), servers

    return asyncio.run(run())


def test_its_agents_play_and_the_tokens_are_those_that_were_sampled() -> None:
    group, servers = play([CALL, "It is 42."], [CALL, "It is 41."])
    assert group.failure is None
    assert sorted(rollout.episode.reward for rollout in group if rollout.episode) == [0.0, 1.0]
    assert group.logged["episodes/branches"] == 1.0
    assert group.logged["episodes/turns"] == 2.0
    for rollout in group:
        assert rollout.turns is not None
        assert {*np.unique(rollout.turns[rollout.loss_mask])} == {0, 1}
    users = {body["responses_create_params"]["user"] for body in servers.asked}
    assert len(users) == 2, "each episode has a key of its own"
    assert all(body["verifier_metadata"] == {"answer": 42} for body in servers.asked)


def test_rows_without_a_reference_go_to_the_named_agent() -> None:
    row = {name: value for name, value in ROW.items() if name != "agent_ref"}
    assert play(["42"], ["42"], row=row, name="calculator")[0].failure is None
    group, _ = play(["42"], ["42"], row=row)
    assert "no agent is named, by agent_ref of the row or by name; it has calculator" in str(group.failure)
    group, _ = play(["42"], ["42"], row={**ROW, "agent_ref": {"name": "poet"}})
    assert "there is no agent 'poet'; it has calculator" in str(group.failure)


def test_a_row_may_have_a_prompt_instead_of_parameters() -> None:
    row = {"prompt": "6 * 7?", "verifier_metadata": {"answer": 42}}
    group, servers = play(["42"], ["42"], row=row, name="calculator")
    assert group.failure is None
    assert {body["responses_create_params"]["input"] for body in servers.asked} == {"6 * 7?"}


def test_a_run_that_fails_fails_its_episode_and_is_not_repeated() -> None:
    group, servers = play(["42"], ["42"], fails=True)
    assert "it answered 500" in str(group.failure)
    assert len(servers.asked) == 2


def test_a_head_server_that_is_not_there_is_named() -> None:
    kind = import_kind(EnvironmentConfig(agent={"nemo_gym": "http://127.0.0.1:9"}))

    async def run() -> RolloutGroup:
        player, _ = player_of([["42"], ["42"]], kind=kind)
        await player.start()
        return await player.play(request_of(ROW, group_size=2))

    assert "NeMo Gym's head server at http://127.0.0.1:9 does not answer" in str(asyncio.run(run()).failure)


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "agent: {responses_api_agents: {x: {host: '${nowhere}'}}}", "7"])
def test_what_is_no_list_of_servers_is_named(text: str) -> None:
    with pytest.raises(AgentFailed, match="no list of servers"):
        read_agents(text)


def test_other_entries_are_left_alone() -> None:
    others = "a: 1\nb: {responses_api_agents: null}\nc: {x: '${nowhere}'}"
    assert read_agents(f"{others}\nd: {{responses_api_agents: {{x: {{host: h, port: 2}}}}}}") == {"d": "http://h:2"}


@pytest.mark.parametrize(
    "agent", [{"nemo_gym": "127.0.0.1:1"}, {"nemo_gym": 3}, {"nemo_gym": "http://a", "other": 1}, {"command": []}, {}]
)
def test_an_agent_that_is_none_is_refused(agent: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.agent"):
        import_kind(EnvironmentConfig(agent=agent))
