"""The agents of the example ``agent_frameworks``, and further ones: with the Responses API, and with streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rlpipe.examples.agent_frameworks.agent import PROGRAMS, SYSTEM, main, multiply


def with_responses(question: str, endpoint: Any) -> str:
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


def with_langgraph_responses(question: str, endpoint: Any) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="any", use_responses_api=True), [multiply], prompt=SYSTEM)
    return str(agent.invoke({"messages": [("user", question)]})["messages"][-1].text)


def with_openai_agents_responses(question: str, endpoint: Any) -> str:
    from agents import Runner

    return str(asyncio.run(Runner.run(_agent(), question)).final_output)


def with_openai_agents_stream(question: str, endpoint: Any) -> str:
    from agents import Runner

    async def run() -> str:
        running = Runner.run_streamed(_agent(), question)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(run())


def _agent() -> Any:
    """Return an agent of openai-agents whose model is the package's own default."""
    from agents import Agent, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    return Agent(name="calculator", instructions=SYSTEM, tools=[function_tool(multiply)], model="any")


if __name__ == "__main__":
    main(
        {
            **PROGRAMS,
            "responses": with_responses,
            "langgraph-responses": with_langgraph_responses,
            "openai-agents-responses": with_openai_agents_responses,
            "openai-agents-stream": with_openai_agents_stream,
        }
    )
