"""The same game as a program for any OpenAI-compatible endpoint; it knows nothing of rlpipe."""

import asyncio
import json
import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from openai import AsyncOpenAI

LARGEST, NUM_GUESSES = 32, 5
REWARD_PER_BIT, REWARD_OF_RIGHT = 0.15, 0.25


async def play(number: int, client: AsyncOpenAI) -> dict[str, float]:
    """Let a model guess the number, and return the rewards of its answers, by their ids."""
    messages: list[Any] = [{"role": "user", "content": f"1-{LARGEST}?"}]
    rewards: dict[str, float] = {}
    low, high = 1, LARGEST
    for _ in range(NUM_GUESSES):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer, size = completion.choices[0].message.content or "", high - low + 1
        if answer == str(number):
            return {**rewards, completion.id: REWARD_PER_BIT * math.log2(size) + REWARD_OF_RIGHT}
        if answer.isdecimal() and int(answer) < number:
            hint, low = "higher", max(low, int(answer) + 1)
        elif answer.isdecimal():
            hint, high = "lower", min(high, int(answer) - 1)
        else:
            hint = "a number"
        rewards[completion.id] = REWARD_PER_BIT * math.log2(size / (high - low + 1))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": hint}]
    return rewards


@cache
def shared_client() -> AsyncOpenAI:
    """Return the client of this process: making one takes 20 ms of CPU, for its certificates, and a copy nothing."""
    return AsyncOpenAI(api_key="each episode has its own")


async def solve(row: Mapping[str, Any], episode: Any) -> dict[str, float]:
    """Play as a function: ``environment.agent=examples/guess/agent.py:solve``."""
    client = shared_client().with_options(base_url=episode.base_url, api_key=episode.api_key)
    return await play(row["number"], client)


if __name__ == "__main__":  # as a command: environment.agent={command: [python, examples/guess/agent.py]}
    print(json.dumps(asyncio.run(play(json.load(sys.stdin)["number"], AsyncOpenAI()))))
