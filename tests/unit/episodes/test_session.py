"""Tests of one episode, with a policy that says what the test writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from template_cases import made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.bridge import Bridge, prove, turn_ends
from rlpipe.episodes.environment import Environment, Step, tool
from rlpipe.episodes.parsing import parse_hermes
from rlpipe.episodes.session import DrawnTurn, Episode, Rules, Session
from rlpipe.types import IntArray, RolloutStatus

TEMPLATES = dict(shipped_templates())
DATA = DataConfig(source="jsonl", system_prompt="Guess.")
RULES = Rules(max_turns=5, max_tokens=200, max_model_len=4000, timeout_s=20, tool_timeout_s=5)
CALL = '<tool_call>\n{"name": "hint", "arguments": {"kind": "size"}}\n</tool_call>'


class Guess(Environment):
    """Guess a number; it notes whether it was closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.number = int(row["number"])
        return f"1-32? (seed {seed})"

    async def step(self, action: str) -> Step:
        if not action.isdigit():
            return Step("say a number", reward=-0.1)
        if int(action) == self.number:
            return Step("right", reward=1.0, done=True)
        return Step("higher" if int(action) < self.number else "lower")

    @tool
    def hint(self, kind: str) -> str:
        "Give a hint."
        return f"{kind}: {'large' if self.number > 16 else 'small'}"

    def close(self) -> None:
        self.num_closed += 1


class Policy:
    """A policy that says given texts, and notes what it was asked with."""

    def __init__(self, template: ChatTemplate, said: Sequence[str], *, cut: Sequence[int] = ()) -> None:
        self._template, self._said, self._cut = template, said, cut
        self.contexts: list[IntArray] = []

    async def __call__(self, token_ids: IntArray, *, max_tokens: int, turn: int) -> DrawnTurn:
        self.contexts.append(token_ids)
        own = self._template.token_ids(self._said[turn]).tolist()[:max_tokens]
        is_cut = turn in self._cut
        own += [] if is_cut else [self._template.tokenizer.eos_token_id]
        return DrawnTurn(
            token_ids=own,
            logprobs=[-0.5] * len(own),
            policy_versions=[turn] * len(own),
            finish_reason="length" if is_cut else "stop",
        )


def play(
    *said: str,
    name: str = "trl/qwen2_5",
    environment: Environment | None = None,
    rules: Rules = RULES,
    cut: Sequence[int] = (),
) -> tuple[Episode, Policy, Environment, Session]:
    template = ChatTemplate(made_tokenizer(TEMPLATES[name]), DATA)
    bridge = Bridge(template, turn_ends(template, DATA))
    policy, environment = Policy(template, said, cut=cut), environment or Guess()
    session = Session(
        environment,
        [],
        bridge=replace(bridge, refused=prove(bridge).refused),
        parser=parse_hermes,
        draw=policy,
        rules=rules,
    )
    return asyncio.run(session.play({"number": 20}, 3)), policy, environment, session


def test_an_episode_is_one_sequence_with_loss_on_what_was_said() -> None:
    episode, policy, environment, _ = play("16", "24", "20")
    assert (episode.reward, episode.status, episode.end) == (1.0, RolloutStatus.COMPLETED, "done")
    (branch,) = episode.graph.branches()
    tokenizer = made_tokenizer(TEMPLATES["trl/qwen2_5"])
    texts = [tokenizer.decode(branch.token_ids[branch.turns == turn]) for turn in range(3)]
    assert texts == ["16<|im_end|>", "24<|im_end|>", "20<|im_end|>"]
    assert sorted({*branch.policy_versions[branch.loss_mask].tolist()}) == [0, 1, 2]
    assert episode.num_turns == len(policy.contexts) == 3
    assert environment.num_closed == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["trl/qwen2_5", "trl/qwen3_instruct_2507", "trl/llama3_1", "trl/lfm2"])
def test_what_the_policy_is_asked_with_is_the_whole_conversation_rendered(name: str) -> None:
    """Check templates that keep earlier turns; the policy's texts are split as the tokenizer splits them."""
    episode, policy, _, session = play("16", "x", "20", name=name)
    template = session._template
    for context, number in zip(policy.contexts, (2, 4, 6), strict=True):
        rendered = template.token_ids(template.text(episode.messages[:number], add_generation_prompt=True))
        assert template.tokenizer.decode(context) == template.tokenizer.decode(rendered)
    for before, after in zip(policy.contexts, policy.contexts[1:], strict=False):
        assert np.array_equal(after[: len(before)], before), "tokens of earlier turns stay as they are"


def test_calls_are_answered_by_tools_and_other_turns_by_the_environment() -> None:
    episode, policy, _, session = play(CALL, "20")
    roles = [message["role"] for message in episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert episode.messages[3]["content"] == "size: large"
    assert episode.messages[3]["tool_call_id"] == episode.messages[2]["tool_calls"][0]["id"]
    assert "<tool_response>\nsize: large\n</tool_response>" in session._template.tokenizer.decode(policy.contexts[1])
    assert "Give a hint." in session._template.tokenizer.decode(policy.contexts[0]), "the policy knows the tool"
    assert session.toolbox.use["hint"].calls == 1
    assert episode.reward == 1.0


def test_a_call_in_a_wrong_form_is_answered_by_what_is_wrong() -> None:
    episode, _, _, _ = play("<tool_call>{", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "20")
    answers = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert "the call is not JSON" in answers[0]
    assert "there is no tool 'fly'" in answers[1]
    assert episode.reward == 1.0


def test_a_turn_that_was_cut_off_is_closed_without_loss() -> None:
    episode, policy, _, session = play("17", "20", cut=[0])
    (branch,) = episode.graph.branches()
    tokenizer = session._template.tokenizer
    assert tokenizer.decode(branch.token_ids[branch.turns == 0]) == "17"
    assert "17<|im_end|>\n<|im_start|>user\nhigher" in tokenizer.decode(policy.contexts[1])


def test_turns_may_run_out() -> None:
    episode, _, environment, _ = play(*["1"] * 5)
    assert (episode.status, episode.end, episode.num_turns) == (RolloutStatus.TRUNCATED, "max_turns", 5)
    assert len(episode.graph.branches()[0].token_ids)
    assert environment.num_closed == 1  # type: ignore[attr-defined]


def test_room_may_run_out() -> None:
    first = len(play("20")[1].contexts[0])
    short = Rules(max_turns=5, max_tokens=200, max_model_len=first + 60, timeout_s=20, tool_timeout_s=5)
    episode, policy, _, _ = play(*["no number " * 8] * 5, rules=short, cut=[0, 1, 2, 3, 4])
    assert (episode.status, episode.end) == (RolloutStatus.TRUNCATED, "length")
    (branch,) = episode.graph.branches()
    assert len(branch.token_ids) <= first + 60
    assert episode.reward == pytest.approx(-0.1 * (len(policy.contexts) - 1))


class Slow(Guess):
    async def step(self, action: str) -> Step:
        await asyncio.sleep(60)
        return Step()


def test_time_may_run_out_and_what_was_said_counts() -> None:
    began = time.monotonic()
    rules = Rules(max_turns=5, max_tokens=200, max_model_len=4000, timeout_s=0.5, tool_timeout_s=5)
    episode, _, environment, _ = play(CALL, "16", environment=Slow(), rules=rules)
    assert time.monotonic() - began < 5
    assert (episode.status, episode.end) == (RolloutStatus.TRUNCATED, "timeout")
    assert [node.turn for node in episode.graph.nodes if node.loss_mask.any()] == [0]
    assert environment.num_closed == 1  # type: ignore[attr-defined]


class Broken(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        raise KeyError("number")


def test_an_environments_exception_is_the_callers_and_it_is_closed() -> None:
    environment = Broken()
    with pytest.raises(KeyError):
        play("1", environment=environment)
    assert environment.num_closed == 1


def test_what_cannot_be_bridged_is_rendered_anew() -> None:
    episode, policy, _, _ = play(CALL, "20", name="trl/deepseekv3")
    assert episode.branches_by_reason == {"unbridgeable": 1}
    assert len(episode.graph.branches()) == 2
    assert len(policy.contexts) == 2
