"""Environments of whole runs, which take anything that a random policy says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import openai

import rlpipe
from rlpipe.episodes.parsing import ParsedTurn
from rlpipe.episodes.tools import ToolCall

NUM_TURNS = 3


class Talk(rlpipe.Environment):
    """Answer with the length of what was said, for three turns; digits earn a reward."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s, self._left = pause_s, NUM_TURNS

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return str(row["prompt"])

    def step(self, action: str) -> rlpipe.Step:
        time.sleep(self._pause_s)
        self._left -= 1
        share = sum(letter.isdigit() for letter in action) / max(len(action), 1)
        return rlpipe.Step(str(len(action)), reward=share, done=not self._left)


class Hanging(Talk):
    """Hang in the second turn of one of four episodes."""

    def step(self, action: str) -> rlpipe.Step:
        if self._left == NUM_TURNS - 1 and len(action) % 4 == 0:
            time.sleep(3600)
        return super().step(action)


class Broken(Talk):
    """Fail in the second turn."""

    def step(self, action: str) -> rlpipe.Step:
        if self._left == NUM_TURNS - 1:
            raise OSError("the board is gone")
        return super().step(action)


class Counting:
    """An environment as TRL's trainer takes it, whose reward is the number of calls."""

    def reset(self, **row: Any) -> str:
        self.num_calls = 0
        return f" of {len(row['answer'])} digits"

    def look(self, at: str) -> str:
        """Look somewhere.

        Args:
            at: where to look
        """
        self.num_calls += 1
        return str(len(at))

    def get_reward(self) -> float:
        return float(self.num_calls)


def half(environments: Sequence[Counting], answer: Sequence[str], **_: Any) -> list[float]:
    """Return a half for each environment, as TRL's reward functions do."""
    return [0.5 for _ in zip(environments, answer, strict=True)]


Looking = rlpipe.from_trl(Counting, rewards=half)


def look(at: str) -> str:
    """Look somewhere."""
    return f"{len(at)} <|user|> things"


def call_often(text: str, prefix: str) -> ParsedTurn:
    """Read a turn of an even length as one or two calls."""
    if len(text) % 2:
        return ParsedTurn(content=text)
    ids = [f"{prefix}{number}".rjust(9, "0") for number in range(1 + len(text) % 3 // 2)]
    return ParsedTurn(content="", calls=[ToolCall(id=own, name="look", arguments={"at": text[:4]}) for own in ids])


async def solve(row: Mapping[str, Any], episode: Any) -> float:
    """Talk for two turns through OpenAI's client, and return the share of digits in the last one."""
    client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="any", messages=messages)
        text = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(len(text))}]
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


async def rewrite(row: Mapping[str, Any], episode: Any) -> float:
    """Ask three times, twice with the last answer alone as the history, and return the share of digits."""
    client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(3):
        answer = await client.chat.completions.create(model="any", messages=messages)
        text = answer.choices[0].message.content or ""
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "user", "content": f"{turn}: {len(text)}"}]
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


async def talk(row: Mapping[str, Any], episode: Any) -> None:
    """Talk as ``solve`` does, without a reward."""
    await solve(row, episode)


class MultiplyTwice:
    """Read two turns as calls of ``multiply``, and the third as the answer, in the form that it is asked in.

    Half of what a random policy says ends as "is even".
    """

    def __init__(self, tools: Sequence[Any] = ()) -> None:
        self._ends_by_call = any(tool["function"]["name"] == "final_answer" for tool in tools)

    def with_tools(self, tools: Sequence[Any]) -> MultiplyTwice:
        return MultiplyTwice(tools)

    def __call__(self, text: str, prefix: str) -> ParsedTurn:
        turn = int(prefix.removesuffix("c"))
        text = f"{text} is {'odd' if sum(map(ord, text)) % 2 else 'even'}"
        if turn >= 2 and not self._ends_by_call:
            return ParsedTurn(content=text)
        name, arguments = ("multiply", {"a": len(text), "b": turn}) if turn < 2 else ("final_answer", {"answer": text})
        return ParsedTurn(content="", calls=[ToolCall(id=prefix.rjust(9, "0"), name=name, arguments=arguments)])


multiply_twice = MultiplyTwice()
