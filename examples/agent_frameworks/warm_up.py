"""The warm-up of the policy that the agents call: conversations in the forms that the frameworks send."""

import random
from typing import Any

import rlpipe
from rlpipe.examples.agent_frameworks.agent import SYSTEM, multiply
from rlpipe.quickstart import teach

SLIP = 0.05
"""Share of the digits in the warm-up that are wrong."""
SMOLAGENTS = 0.4
"""Share of the conversations in the form of smolagents, which has two for each product."""
CALL_ID = "000000000"
WORDS = [
    *("<tool_call>", "</tool_call>", '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}"),
    *('{"name": "final_answer", "arguments": {"answer": "', '"}}', SYSTEM, "New task:\n"),
    *("Calling tools:\n[{'id': '", "', 'type': 'function', 'function': {'name': 'multiply', 'arguments': {'a': "),
    *(", 'b': ", "}}}]", "Observation:\n"),
]
"""Texts that are one token each, which makes conversations short."""


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on products in which digits may be wrong; ``model.prepare`` of the example."""
    rng = random.Random(config.seed)
    teach(config, (sloppy_product(rng) for _ in range(8000)), words=WORDS, num_steps=200)


def sloppy_product(rng: random.Random) -> list[dict[str, Any]]:
    """Return the messages of a product; those of smolagents end with a call, and have earlier ones as a text."""
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    question, call = f"{a}*{b}=", call_of("multiply", a=copied(a, rng), b=copied(b, rng))
    system = {"role": "system", "content": SYSTEM}
    if rng.random() > SMOLAGENTS:
        product = copied(multiply(a, b), rng)
        return [
            *(system, {"role": "user", "content": question}, call),
            {"role": "tool", "tool_call_id": CALL_ID, "name": "multiply", "content": str(multiply(a, b))},
            {"role": "assistant", "content": str(product)},
        ]
    task = {"role": "user", "content": f"New task:\n{question}"}
    if rng.random() < 0.5:
        return [system, task, call]
    calls = [{**call["tool_calls"][0], "id": f"{rng.randrange(10)}c".rjust(9, "0")}]
    return [
        *(system, task, {"role": "assistant", "content": f"Calling tools:\n{calls}", "train": False}),
        {"role": "user", "content": f"Observation:\n{multiply(a, b)}"},
        call_of("final_answer", answer=str(copied(multiply(a, b), rng))),
    ]


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def copied(number: int, rng: random.Random) -> int:
    """Return a number some of whose digits but the first are wrong."""
    first, *others = str(number)
    return int("".join([first, *(str(rng.randrange(10)) if rng.random() < SLIP else digit for digit in others)]))
