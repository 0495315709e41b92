"""An environment of the real verifiers, and its server: products of two numbers, with a tool.

Its packages are those of a folder in ``PYTHONPATH``. The address is the only line of the output.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.serve import serve_env

__all__ = ["Multiplying", "Products"]
NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL: Any = {"type": "function", "function": {"name": "multiply", "description": "Multiplies.", "parameters": SCHEMA}}


class ProductData(vf.TaskData):
    answer: int
    way: str = "plays"
    """Behaviour of the environment: it plays, hangs, or fails in one of several places."""
    note: str = ""
    """File that a rollout which hangs writes when it begins and when it is cancelled."""


class Product(vf.Task[ProductData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.way == "scores badly":
            raise ValueError("the answer can't be compared")
        return float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)


class Products(vf.Taskset[Product]):
    def load(self) -> list[Product]:
        return [Product(ProductData(prompt="6 * 7?", answer=42), self.config.task)]


class Multiplying(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        assert isinstance(data, ProductData)
        if data.way == "exits":
            os._exit(3)
        if data.way == "hangs":
            await hang(Path(data.note))
        if data.way == "breaks":
            return vf.ProgramResult(exit_code=3, stdout="", stderr="the board is gone")
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                message = answer.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    given = json.loads(call.function.arguments)  # type: ignore[union-attr]
                    result = str(given["a"] * given["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def hang(note: Path) -> None:
    note.write_text("began")
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        note.write_text("cancelled")
        raise


class Printed:
    """Stand-in for the queue on which the server puts its address."""

    def put(self, address: str) -> None:
        print(address, flush=True)


if __name__ == "__main__":
    name = Path(__file__).stem
    config = {"taskset": {"id": name}, "agent": {"harness": {"id": name}, "runtime": {"type": "subprocess"}}}
    serve_env(max_workers=int(sys.argv[1]), address="tcp://127.0.0.1:0", address_queue=Printed(), config_data=config)
