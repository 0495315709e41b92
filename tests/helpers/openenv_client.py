"""Plays an environment through clients of the real OpenEnv, and prints what the policy sees, as JSON.

Its packages are those of a folder in ``PYTHONPATH``; the address of the server is an argument.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core import GenericEnvClient

import rlpipe


async def play(made: type[rlpipe.Environment], *said: str) -> list[Any]:
    environment: Any = made()
    shown: list[Any] = [await environment.reset({"reset": {"number": 7}, "seed": 3}, 0)]
    for action in said:
        step = await environment.step(action)
        shown.append([step.observation, step.reward, step.done])
    await environment.close()
    return shown


async def main(url: str) -> None:
    generic = rlpipe.from_openenv(lambda: GenericEnvClient(base_url=url))
    own = rlpipe.from_openenv(
        lambda: GenericEnvClient(base_url=url),
        show=lambda seen: seen["text"].upper(),
        read=lambda text: {"message": text.strip("!")},
    )
    played = {
        "generic": await play(generic, "7", '{"number": 7}', '{"message": "7"}'),
        "own": await play(own, "8!", "7!"),
    }
    print(json.dumps(played))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
