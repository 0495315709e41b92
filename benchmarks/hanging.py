"""Seconds that hanging tools, environments and agents cost their episodes beyond their limits.

Each case plays episodes that do not hang and then some that do, one after the other, with an engine whose turns take no
time. Its figure is the largest time of a hanging episode less its limit: for tools, that of a call and the time of an
episode that does not hang. Needs no Ray and no engine. Run: ``python -m benchmarks.hanging``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import rlpipe
from rlpipe.episodes.agents import EndpointAccess
from rlpipe.episodes.parsing import ParsedTurn
from rlpipe.episodes.tools import ToolCall

TOOL_LIMIT_S, EPISODE_LIMIT_S, ENDLESS_S = 2.0, 10.0, 1000.0
"""The episode's limit leaves time for a program's imports."""


def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


class Waits(rlpipe.Environment):
    """Wait in the first turn for the seconds of the row, and end after the second one."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._waits = [0.0, row["seconds"]]
        return "Go on."

    def step(self, action: str) -> rlpipe.Step:
        time.sleep(self._waits.pop())
        return rlpipe.Step("Go on.", done=not self._waits)


class Waiter(rlpipe.Environment):
    """Offer a tool that waits."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return "Call the tool."

    @rlpipe.tool
    def wait(self, seconds: float) -> str:
        """Wait."""
        return wait(seconds)


def ask_and_wait(row: Mapping[str, Any], episode: EndpointAccess) -> float:
    """Ask once, and wait for the seconds of the row."""
    import openai

    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Go on."}])
    time.sleep(row["seconds"])
    return 0.0


def ask_as_command() -> None:
    """Do as ``ask_and_wait`` does, with the row of standard input."""
    import os

    access = EndpointAccess(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    print(ask_and_wait(json.loads(sys.stdin.read()), access))


def serve_tool() -> None:
    """Serve the tool that waits as an MCP server."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("waits")
    server.tool()(wait)
    server.run()


def _call(prefix: str, seconds: float) -> ParsedTurn:
    """Return the first turn of an episode as a call, and later ones as an answer."""
    if int(prefix.removesuffix("c")):
        return ParsedTurn(content="done")
    return ParsedTurn(content="", calls=[ToolCall(id="0".rjust(9, "0"), name="wait", arguments={"seconds": seconds})])


def call_for_ever(text: str, prefix: str) -> ParsedTurn:
    return _call(prefix, ENDLESS_S)


def call_briefly(text: str, prefix: str) -> ParsedTurn:
    return _call(prefix, 0.0)


THIS = [sys.executable, "-m", "benchmarks.hanging"]
CASES: dict[str, list[str]] = {
    "tool": ["environment.tools=[benchmarks.hanging:wait]"],
    "tool_in_sandbox": ["environment.tools=[benchmarks.hanging:wait]", "environment.isolation=sandbox"],
    "mcp_tool": [f"environment.tools=[{{mcp: {{command: {json.dumps([*THIS, '--serve'])}}}}}]"],
    "method": ["environment.path=benchmarks.hanging:Waiter"],
    "environment": ["environment.path=benchmarks.hanging:Waits"],
    "agent": ["environment.agent=benchmarks.hanging:ask_and_wait"],
    "command": [f"environment.agent={{command: {json.dumps([*THIS, '--ask'])}}}"],
}
HAVE_TOOLS = {"tool", "tool_in_sandbox", "mcp_tool", "method"}


async def measure(name: str, repeats: int) -> float:
    """Return the most seconds that an episode took beyond its limit."""
    from benchmarks.episodes import FIXED_TURN, make_config, make_requests
    from rlpipe.episodes.groups import open_player
    from rlpipe.rollout.engine import build_rollout

    async def sample(request: Any, _: Any) -> Any:
        return build_rollout(request, 0, FIXED_TURN)

    which, limit_s = ("tool_timeout_s", TOOL_LIMIT_S) if name in HAVE_TOOLS else ("timeout_s", EPISODE_LIMIT_S)
    seconds: dict[float, list[float]] = {0.0: [], ENDLESS_S: []}
    for waits, found in seconds.items():
        # Episodes that don't hang have more time, so that no slow start counts as a hang.
        limits = {"tool_timeout_s": 60.0, "timeout_s": 60.0}
        if waits:
            limits[which] = limit_s
        options = [f"environment.{key}={value}" for key, value in limits.items()]
        if name in HAVE_TOOLS:
            options.append(f"environment.parser=benchmarks.hanging:{'call_for_ever' if waits else 'call_briefly'}")
        config = make_config(*CASES[name], *options)
        player, _ = open_player(config, sample)
        await player.start()
        for _ in range(1 + repeats):
            (request,) = make_requests(config, 1, [{"seconds": waits}])
            began = time.perf_counter()
            group = await player.play(request)
            found.append(time.perf_counter() - began)
            assert group.failure is None, group.failure
    if name in HAVE_TOOLS:
        limit_s += median(seconds[0.0][1:])  # the rest of the episode
    return max(seconds[ENDLESS_S][1:]) - limit_s


def main() -> None:
    from rlpipe.scoring.sandbox.confinement import find_obstacle

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_tool()
    elif arguments.ask:
        ask_as_command()
    else:
        found = {}
        for name in CASES:
            if name != "tool_in_sandbox" or find_obstacle() is None:
                found[name] = round(asyncio.run(measure(name, arguments.repeats)), 3)
                print(f"{name}: {found[name]} s", flush=True)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
