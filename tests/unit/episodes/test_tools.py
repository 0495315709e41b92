"""Tests of tools: schemas of functions, and calls that always have an answer."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import pytest

from rlpipe.episodes.parsing import MAX_CALLS, PARSERS, ParsedTurn, parse_hermes, parse_json, parse_turn
from rlpipe.episodes.tools import (
    Environment,
    FunctionTool,
    Toolbox,
    ToolCall,
    ToolResult,
    as_messages,
    as_text,
    cut_off,
    one_at_a_time,
    tool,
)
from rlpipe.errors import ConfigError


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
    """
    return a * b


class Way(Enum):
    NORTH = "north"
    SOUTH = "south"


def walk(way: Way, steps: list[int], how: Literal["fast", "slow"] = "slow") -> dict[str, Any]:
    "Walk."
    return {"way": way, "steps": sum(steps), "how": how}


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


def fail() -> None:
    raise ZeroDivisionError("division by zero")


def flood() -> str:
    return "x" * 100_000


def give_up() -> None:
    raise TimeoutError("the server did not answer")


def run(name: str, functions: list[Callable[..., Any]], **arguments: Any) -> tuple[ToolResult, Toolbox]:
    box = Toolbox(map(FunctionTool, functions), timeout_s=0.3)
    return asyncio.run(box.call(ToolCall(id="1", name=name, arguments=arguments))), box


def test_a_calls_time_begins_when_the_calls_before_it_have_ended() -> None:
    async def call_all() -> list[ToolResult]:
        box = Toolbox(one_at_a_time([FunctionTool(wait)]), timeout_s=0.3)
        calls = [ToolCall(id=str(number), name="wait", arguments={"seconds": 0.12}) for number in range(5)]
        return await asyncio.gather(*map(box.call, calls))

    assert [result.text for result in asyncio.run(call_all())] == ["waited"] * 5


def test_a_schema_has_types_defaults_and_the_docstrings_words() -> None:
    assert FunctionTool(multiply).schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"type": "integer", "default": 2},
                },
                "required": ["a"],
            },
        },
    }
    parameters = FunctionTool(walk).schema["function"]["parameters"]
    assert parameters["properties"]["how"] == {"default": "slow", "enum": ["fast", "slow"], "type": "string"}
    assert parameters["$defs"]["Way"]["enum"] == ["north", "south"]


def test_arguments_are_checked_and_converted() -> None:
    assert run("multiply", [multiply], a=6)[0].text == "12"
    found, _ = run("walk", [walk], way="north", steps=[1, 2])
    assert found.text == '{"way": "north", "steps": 3, "how": "slow"}'
    wrong, _ = run("multiply", [multiply], a="six", c=1)
    assert wrong.failure == "invalid"
    assert "a: Input should be a valid integer" in wrong.text
    assert "c: Extra inputs are not permitted" in wrong.text


@pytest.mark.parametrize(
    ("name", "arguments", "failure", "words"),
    [
        ("fly", {}, "invalid", "there is no tool 'fly'; there are: wait, fail, flood, give_up"),
        ("fail", {}, "error", "Error: ZeroDivisionError: division by zero"),
        ("give_up", {}, "error", "the server did not answer"),
        ("wait", {"seconds": 60}, "timeout", "Error: wait took longer than 0.3 seconds"),
        ("flood", {}, None, "[cut off: 83616 more characters]"),
    ],
)
def test_whatever_a_tool_does_the_policy_reads_a_text(
    name: str, arguments: dict[str, Any], failure: str | None, words: str
) -> None:
    began = time.monotonic()
    found, box = run(name, [wait, fail, flood, give_up], **arguments)
    assert (found.failure, words in found.text) == (failure, True), found.text[:200]
    assert time.monotonic() - began < 5
    assert sum(use.calls for use in box.use.values()) == (failure != "invalid")
    assert sum(use.timeouts for use in box.use.values()) == (failure == "timeout")


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    pass


def of_any_number(*numbers: int) -> None:
    pass


def of_a_lock(lock: asyncio.Lock) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [(untyped, "a has no type"), (of_any_number, "each parameter a name"), (of_a_lock, "no JSON schema")],
)
def test_functions_without_a_schema_are_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FunctionTool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are named multiply"):
        Toolbox([FunctionTool(multiply), FunctionTool(multiply)], timeout_s=1)


class Base(Environment):
    def reset(self, row: Any, seed: int) -> str:
        return ""

    @tool
    def hint(self, kind: str) -> str:
        "Give a hint."
        return kind + "?"


class Odd(Base):
    @tool
    @staticmethod
    def add(number: int) -> int:
        "Add one."
        return number + 1

    @staticmethod
    @tool
    def halve(number: float) -> float:
        "Halve."
        return number / 2

    @classmethod
    @tool
    def where(cls) -> str:
        "Tell where."
        return cls.__name__

    @tool
    @functools.lru_cache  # noqa: B019 - as users do
    def again(self) -> str:
        "Do it again."
        return "so"


def test_methods_of_every_kind_are_tools() -> None:
    tools = {own.name: own for own in Odd().tools()}
    assert [*tools] == ["hint", "add", "halve", "where", "again"]
    values = [
        asyncio.run(tools[name].call(given)) for name, given in (("add", {"number": 2}), ("halve", {"number": 1}))
    ]
    assert values == [3, 0.5]
    assert [asyncio.run(tools[name].call({})) for name in ("where", "again")] == ["Odd", "so"]
    assert tools["again"].schema["function"]["description"] == "Do it again."
    with pytest.raises(TypeError, match=r"@tool marks methods, and <property .* is none"):
        tool(property(lambda self: 1))  # type: ignore[type-var]


class Game(Base):
    @tool
    async def look(self) -> str:
        return "dark"

    @tool
    def hint(self, kind: str) -> str:
        "Give a better hint."
        return kind + "!"


def test_an_environments_methods_are_tools() -> None:
    hint, look = Game().tools()
    assert (hint.name, look.name) == ("hint", "look")
    assert hint.schema["function"]["description"] == "Give a better hint."
    assert asyncio.run(hint.call({"kind": "cold"})) == "cold!"
    assert asyncio.run(look.call({})) == "dark"


def test_calls_are_read_from_a_turn() -> None:
    text = '<think>\nwell\n</think>\n\nI look. <tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    found = parse_hermes(text, "0c")
    assert (found.content, found.reasoning) == ("I look.", "well")
    assert [(call.name, dict(call.arguments), call.problem) for call in found.calls] == [("look", {"at": "x"}, None)]
    assert len({call.id for call in [*found.calls, *parse_hermes(text, "1c").calls]}) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "look", "arguments"', "the call is not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a call is an object with "name"'),
        ('<tool_call>["look"]</tool_call>', 'a call is an object with "name"'),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "its arguments are not an object"),
        ('<tool_call>{"name": "look", "arguments": "{x"}</tool_call>', "its arguments are not JSON"),
        ("<tool_call>" + "[" * 100_000, "the call is not JSON"),
    ],
)
def test_a_call_in_a_wrong_form_says_what_is_wrong(text: str, problem: str) -> None:
    (call,) = parse_hermes(text, "0c").calls
    assert call.problem is not None
    assert problem in call.problem


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parse_hermes, '<tool_call>{"name": "look"}</tool_call>' * 200),
        (parse_json, "[" + ", ".join(['{"name": "look"}'] * 200) + "]"),
    ],
)
def test_a_policy_that_repeats_a_call_makes_it_a_few_times(parser: Callable[[str, str], ParsedTurn], text: str) -> None:
    *made, refused = parse_turn(parser, text, "0c").calls
    assert [call.problem for call in made] == [None] * MAX_CALLS
    assert refused.problem == f"a turn has at most {MAX_CALLS} calls; the last {200 - MAX_CALLS} were not made"


@pytest.mark.parametrize("parser", PARSERS.values())
def test_calls_in_closed_thoughts_are_not_made(parser: Callable[[str, str], ParsedTurn]) -> None:
    call = '<tool_call>{"name": "look"}</tool_call>'
    closed = parser(f" <think>I might {call} but</think>", "0c")
    assert closed == ParsedTurn(content="", reasoning=f"I might {call} but")
    assert len(parse_hermes(f"<think>so</think>{call}", "0c").calls) == 1
    assert len(parse_hermes(f"<think>so {call}", "0c").calls) == 1, "some models do not close their thoughts"


def test_a_turn_of_json_is_calls_and_any_other_a_text() -> None:
    found = parse_json('{"name": "look", "parameters": {"at": "x"}}', "0c")
    assert [(call.name, dict(call.arguments)) for call in found.calls] == [("look", {"at": "x"})]
    for text in ('{"answer": 4}', "4", "[]", "look(x)", '["look"]'):
        assert parse_json(text, "0c") == ParsedTurn(content=text)


@pytest.mark.parametrize("parser", PARSERS.values())
def test_long_turns_are_read_in_linear_time(parser: Callable[[str, str], ParsedTurn]) -> None:
    for text in (" " * 200_000, "<tool_call>" + " " * 200_000 + "x", "<tool_call>" * 20_000, "<think>" * 20_000):
        began = time.monotonic()
        parser(text, "0c")
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("parser", PARSERS.values())
@pytest.mark.parametrize("text", ["", "</think>", "\x00", "<tool_call>", "🙂" * 9, "{" * 9, "<think>never ends"])
def test_no_text_breaks_a_parser(parser: Callable[[str, str], ParsedTurn], text: str) -> None:
    assert parser(text, "0c").as_message()["role"] == "assistant"


def test_a_result_that_is_cut_off_stays_so_and_no_result_has_half_a_character() -> None:
    once = cut_off("x" * 20_000)
    assert once.endswith("x\n[cut off: 3616 more characters]")
    assert cut_off(once) == once
    assert as_text("a\ud83d") == as_messages([{"role": "user", "content": "a\ud83d"}], "reset")[0]["content"]
    assert as_text("a\ud83d") == "a\\ud83d"
    as_text({"a": "\ud83d"}).encode()


@pytest.mark.parametrize("observation", [None, 4, ["north"], {"role": "user"}])
def test_what_is_no_observation_is_named_with_its_method(observation: Any) -> None:
    with pytest.raises(TypeError, match=r"step's observation is .*: give a text or a list of messages"):
        as_messages(observation, "step's observation")
