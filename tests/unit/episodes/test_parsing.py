"""Tests that calls of many model families are read by vLLM's parsers, found by the chat template alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import one_in
from template_cases import made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.parsing import MAX_CALLS, ParsedTurn, open_parser, parse_turn, with_tools
from rlpipe.episodes.tools import FunctionTool, ToolCall
from rlpipe.errors import ConfigError

pytest.importorskip("vllm")
TEMPLATES = dict(shipped_templates())
FAMILIES = [
    "gemma4_v5",
    "glm4moe",
    "qwen3_5_think",
    "qwen3_6",
    "nemotron_3_nano",
    "deepseekv3",
    "lfm2_v2",
    "muse_glimmer",
]
QUICK = {"glm4moe", "qwen3_5_think"}
"""Families whose own parsers take minutes for a policy that repeats itself."""


def search(query: str, limit: int, exact: bool = False, tags: list[str] | None = None) -> str:
    """Search."""
    return query


ARGUMENTS: list[dict[str, Any]] = [
    {"query": "two words", "limit": 3},
    {"query": 'a "quoted" <b>text</b>\nin 2 lines', "limit": -1, "exact": True},
    {"query": "x", "limit": 0, "tags": ["a", "b c"]},
]


def open_for(name: str) -> tuple[ChatTemplate, Any]:
    template = ChatTemplate(made_tokenizer(TEMPLATES[f"trl/{name}"]), DataConfig(source="jsonl"))
    tool = FunctionTool(search)
    parser = with_tools(open_parser("auto", template, has_tools=True), [tool.schema])
    return template.with_tools([tool.schema]), parser


def written(template: ChatTemplate, calls: list[ToolCall]) -> str:
    """Return what the template writes for a turn with calls, without the end of the turn."""
    asked = {"role": "user", "content": "Find it."}
    before = template.text([asked], add_generation_prompt=True)
    text = template.text([asked, ParsedTurn(content="", calls=calls).as_message()]).removeprefix(before)
    for end in template.tokenizer.all_special_tokens:
        text = text.rstrip().removesuffix(end)
    return text


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_a_family_are_read_as_its_template_writes_them(name: str) -> None:
    template, parser = open_for(name)
    for arguments in ARGUMENTS:
        call = ToolCall(id="q8Zk3Lw7P", name="search", arguments=arguments)
        (found,) = parser(written(template, [call]), "0c").calls
        model = FunctionTool(search)._model.model_validate(dict(found.arguments))
        assert {key: getattr(model, key) for key in model.model_fields_set} == arguments
        assert found.name == "search"


@pytest.mark.parametrize("name", one_in(2, FAMILIES))
def test_other_texts_are_no_calls_and_break_nothing(name: str) -> None:
    template, parser = open_for(name)
    call = written(template, [ToolCall(id="q8Zk3Lw7P", name="search", arguments=ARGUMENTS[0])])
    assert parser("Just a text.", "0c").calls == []
    assert parser("Just a text.", "0c").content == "Just a text."
    for cut in range(0, len(call), 7):
        parsed = parser(call[:cut], "0c")
        assert all(isinstance(own, ToolCall) for own in parsed.calls)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
)
def test_a_policy_that_repeats_itself_does_not_hold_up_its_process(name: str) -> None:
    """GLM's parser alone takes minutes for 100 calls, and Qwen's for 200 beginnings of calls."""
    template, parser = open_for(name)
    call = written(template, [ToolCall(id="q8Zk3Lw7P", name="search", arguments=ARGUMENTS[0])])
    begun = call[: len(call) // 2]
    for text in (call * 100, begun * 200, call[:12] * 1000, call[-12:] * 1000, call[:-5] + " " * 20_000):
        calls = parse_turn(parser, text, "0c").calls
        assert len(calls) <= MAX_CALLS + 1
        assert all(own.problem is not None for own in calls[MAX_CALLS:]), "the policy is told that it was too many"


def test_a_parser_may_be_named_and_an_unknown_one_is_reported() -> None:
    template = ChatTemplate(made_tokenizer(TEMPLATES["trl/qwen3_6"]), DataConfig(source="jsonl"))
    assert open_parser("qwen3_xml", template, has_tools=True)("no call", "0c").content == "no call"
    with pytest.raises(ConfigError, match=r"'hermse' is not auto, hermes, json or file\.py:name; vLLM has .*qwen3_xml"):
        open_parser("hermse", template, has_tools=True)
    with pytest.raises(ConfigError, match=r"environment\.parser=lfm2: .*tool_call_start"):
        open_parser("lfm2", template, has_tools=True)


OWN = """
from rlpipe.episodes.parsing import ParsedTurn

class Shout:
    def __call__(self, text, prefix):
        return ParsedTurn(content=text.upper())

def nothing(text, prefix):
    pass

def broken(text):
    pass
"""


def test_a_parser_of_the_users_own_is_a_function_or_a_class(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    template = ChatTemplate(made_tokenizer(TEMPLATES["trl/qwen3_6"]), DataConfig(source="jsonl"))
    assert open_parser(f"{file}:Shout", template, has_tools=True)("a", "0c").content == "A"
    with pytest.raises(ConfigError, match=r"nothing returned NoneType, not a ParsedTurn"):
        open_parser(f"{file}:nothing", template, has_tools=True)
    with pytest.raises(ConfigError, match=r"broken can't read a turn: TypeError: broken\(\) takes 1 positional"):
        open_parser(f"{file}:broken", template, has_tools=True)
