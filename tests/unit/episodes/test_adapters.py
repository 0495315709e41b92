"""Tests of other libraries' environments as rlpipe's."""

from __future__ import annotations

from typing import Any

import pytest
from test_groups import play

import rlpipe
from rlpipe.episodes.adapters import read_action
from rlpipe.episodes.kinds import EpisodeKind
from rlpipe.errors import ConfigError

LEFT, DOWN, RIGHT, UP = "0", "1", "2", "3"
MAP = ["SF", "HG"]


def kind(made: type[rlpipe.Environment]) -> EpisodeKind:
    return EpisodeKind(make=made, tools=[], has_reward=True)


def test_a_gymnasium_environment_is_played_by_its_actions() -> None:
    lake = rlpipe.from_gymnasium("FrozenLake-v1", render_mode="ansi", is_slippery=False)
    row = {"make": {"desc": MAP}, "seed": 5}
    group, _ = play([RIGHT, "jump", "9", DOWN], [DOWN], kind=kind(lake), row=row)
    first, second = (rollout.episode for rollout in group)
    assert first is not None
    assert second is not None
    assert (first.reward, first.end, second.reward, second.end) == (1.0, "done", 0.0, "done")
    assert "\x1b[41mS\x1b[0m" in group.prompt.prompt[-1]["content"]  # type: ignore[index]
    answers = [message["content"] for message in first.messages if message["role"] == "user"]
    assert "(Right)" in answers[0]
    assert answers[1:] == [
        "'jump' is not an action; actions are Discrete(4)",
        "'9' is not an action; actions are Discrete(4)",
    ]


def test_actions_and_observations_may_be_shown_in_other_words() -> None:
    words = {"left": 0, "right": 1}
    pole = rlpipe.from_gymnasium(
        "CartPole-v1", show=lambda env, seen: f"{len(seen)} numbers", read=lambda text, space: words[text]
    )
    group, _ = play(["left"] * 5, ["right"] * 5, kind=kind(pole), row={})
    assert group.prompt.prompt[-1]["content"] == "4 numbers"  # type: ignore[index]
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [5.0, 5.0]


def test_actions_of_other_spaces_are_json() -> None:
    from gymnasium import spaces

    box = spaces.Box(-1, 1, (2,))
    assert read_action("[0.5, -1]", box).tolist() == [0.5, -1.0]
    assert read_action("look", spaces.Text(10)) == "look"
    for text in ("[2, 0]", "[0]", "x", "[" * 9999, '{"a": 1}'):
        with pytest.raises(ValueError, match="is not an action"):
            read_action(text, box)


class Counter:
    """An environment as TRL's trainer takes it."""

    def reset(self, **row: Any) -> str:
        self.count = int(row["number"])
        return f" Start: {self.count}"

    def add(self, amount: int) -> int:
        """Add to the count.

        Args:
            amount: how much
        """
        self.count += amount
        return self.count

    def _hidden(self) -> None:
        pass

    async def get_reward(self) -> float:
        return float(self.count)


def test_a_class_for_trl_has_its_methods_as_tools_and_its_own_reward() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"amount": 5}}</tool_call>'
    row = {"number": 20, "prompt": [{"role": "user", "content": "Count."}]}
    group, _ = play([call, "done"], [call] * 5, kind=kind(rlpipe.from_trl(Counter)), row=row)
    assert group.prompt.prompt[-1]["content"] == "Count. Start: 20"  # type: ignore[index]
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [25.0, 45.0]
    assert [rollout.finish_reason for rollout in group] == ["done", "max_turns"], "a truncated one has its reward, too"
    assert group.logged["tools/add/calls"] == 3.0
    with pytest.raises(ConfigError, match="has no method reset"):
        rlpipe.from_trl(dict)
