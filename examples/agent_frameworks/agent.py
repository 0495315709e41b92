"""An agent that multiplies with a tool, in four frameworks; it knows nothing of who answers.

It is a function of a row and an endpoint. As a command it reads the row as JSON from standard input, takes the
framework from the command line, and writes the reward in its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

SYSTEM = "Use the tool."


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def with_openai(question: str, endpoint: Any) -> str:
    from openai import OpenAI

    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tool: Any = {
        "type": "function",
        "function": {"name": "multiply", "description": "Multiplies.", "parameters": schema},
    }
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while True:
        message = client.chat.completions.create(model="any", messages=messages, tools=[tool]).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = multiply(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def with_langgraph(question: str, endpoint: Any) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="any", base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = create_react_agent(model, [multiply], prompt=SYSTEM)
    return str(agent.invoke({"messages": [("user", question)]})["messages"][-1].content)


def with_openai_agents(question: str, endpoint: Any) -> str:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = OpenAIChatCompletionsModel(model="any", openai_client=client)
    agent = Agent(name="calculator", instructions=SYSTEM, tools=[function_tool(multiply)], model=model)
    return str(asyncio.run(Runner.run(agent, question)).final_output)


def with_smolagents(question: str, endpoint: Any) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    model = OpenAIServerModel(model_id="any", api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = ToolCallingAgent(
        tools=[tool(multiply)],
        model=model,
        prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": SYSTEM},
        verbosity_level=0,
        max_steps=4,
    )
    return str(agent.run(question))


PROGRAMS: dict[str, Callable[[str, Any], str]] = {
    "openai": with_openai,
    "langgraph": with_langgraph,
    "openai-agents": with_openai_agents,
    "smolagents": with_smolagents,
}


def solve(program: Callable[[str, Any], str], row: Mapping[str, Any], episode: Any) -> float:
    """Return 1 if the agent's answer has the row's."""
    return float(str(row["answer"]) in program(row["question"], episode))


openai, langgraph, openai_agents, smolagents = (partial(solve, program) for program in PROGRAMS.values())


def main(programs: Mapping[str, Callable[[str, Any], str]]) -> None:
    """Play as a command, whose endpoint is in the variables that OpenAI's clients read."""
    endpoint = SimpleNamespace(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    print(solve(programs[sys.argv[1]], json.load(sys.stdin), endpoint))


if __name__ == "__main__":
    main(PROGRAMS)
