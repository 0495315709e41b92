"""Programs that multiply with a tool, written for OpenAI's interface; they know nothing of who answers.

The row is read as JSON from standard input, the framework from the command line; the last line is the reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

SYSTEM = "Use the tool."


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def with_openai(question: str) -> str:
    from openai import OpenAI

    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tool: Any = {
        "type": "function",
        "function": {"name": "multiply", "description": "Multiplies.", "parameters": schema},
    }
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while True:
        message = client.chat.completions.create(model="any", messages=messages, tools=[tool]).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = multiply(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def with_responses(question: str) -> str:
    from openai import OpenAI

    client, answer, given = OpenAI(), None, [{"role": "user", "content": question}]
    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tool: Any = {"type": "function", "name": "multiply", "description": "Multiplies.", "parameters": schema}
    while True:
        answer = client.responses.create(
            model="any", input=given, instructions=SYSTEM, tools=[tool], previous_response_id=answer and answer.id
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(multiply(**json.loads(call.arguments))),
            }
            for call in calls
        ]


def with_langgraph(question: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="any"), [multiply], prompt=SYSTEM)
    return str(agent.invoke({"messages": [("user", question)]})["messages"][-1].content)


def with_langgraph_responses(question: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="any", use_responses_api=True), [multiply], prompt=SYSTEM)
    return str(agent.invoke({"messages": [("user", question)]})["messages"][-1].text)


def with_openai_agents(question: str) -> str:
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    return _with_openai_agents(question, OpenAIChatCompletionsModel(model="any", openai_client=AsyncOpenAI()))


def with_openai_agents_responses(question: str) -> str:
    return _with_openai_agents(question, "any")  # its own default


def _with_openai_agents(question: str, model: Any) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="calculator", instructions=SYSTEM, tools=[function_tool(multiply)], model=model)
    return str(asyncio.run(Runner.run(agent, question)).final_output)


def with_openai_agents_stream(question: str) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="calculator", instructions=SYSTEM, tools=[function_tool(multiply)], model="any")

    async def run() -> str:
        running = Runner.run_streamed(agent, question)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(run())


def with_smolagents(question: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(
        model_id="any", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    agent = ToolCallingAgent(tools=[tool(multiply)], model=model, verbosity_level=0, max_steps=4)
    return str(agent.run(question))


PROGRAMS = {
    "openai": with_openai,
    "responses": with_responses,
    "langgraph": with_langgraph,
    "langgraph-responses": with_langgraph_responses,
    "openai-agents": with_openai_agents,
    "openai-agents-responses": with_openai_agents_responses,
    "openai-agents-stream": with_openai_agents_stream,
    "smolagents": with_smolagents,
}

if __name__ == "__main__":
    row = json.load(sys.stdin)
    answer = PROGRAMS[sys.argv[1]](row["question"])
    print(float(str(row["answer"]) in answer))
