"""Episodes of ``benchmarks.chaos``: options of its runs, an MCP server, and a program that plays.

This file needs the standard library alone, so that the server and the program start fast.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve()
ENVIRONMENT = FILE.with_name("chaos_environment.py")
LOOK = {"name": "look", "description": "Look at the sum again.", "inputSchema": {"type": "object", "properties": {}}}
GROUPS_PER_STEP, GROUP_SIZE = 4, 4


def options(way: str) -> list[str]:
    """Return the options of a run that plays episodes: ``environment`` or ``agent``."""
    common = [
        *("environment.num_cpus=0", "environment.max_turns=3", "data.max_prompt_tokens=100"),
        *(f"algorithm.groups_per_step={GROUPS_PER_STEP}", f"algorithm.group_size={GROUP_SIZE}"),
    ]
    if way == "agent":
        return [*common, f"environment.agent={{command: [{sys.executable}, {FILE}, agent]}}"]
    return [
        *common,
        f"environment.path={ENVIRONMENT}:Sums",
        f"environment.tools=[{{mcp: {{command: [{sys.executable}, {FILE}, server]}}}}]",
        f"environment.parser={ENVIRONMENT}:read_turn",
    ]


def serve() -> None:
    """Speak as much of MCP over standard input and output as a client needs to call one tool."""
    for line in sys.stdin:
        asked = json.loads(line)
        match asked.get("method"):
            case "initialize":
                result: dict[str, Any] = {
                    "protocolVersion": asked["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "sums", "version": "1"},
                }
            case "tools/list":
                result = {"tools": [LOOK]}
            case "tools/call":
                result = {"content": [{"type": "text", "text": "the same"}], "isError": False}
            case _:
                result = {}
        if "id" in asked:
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)


def play() -> None:
    """Ask for a sum twice, and print the share of right answers."""
    row = json.load(sys.stdin)
    messages, right = [{"role": "user", "content": str(row["prompt"])}], 0
    for _ in range(2):
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        right += said == str(row["completion"])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": str(row["prompt"])}]
    print(right / 2)


if __name__ == "__main__":
    play() if sys.argv[1] == "agent" else serve()
