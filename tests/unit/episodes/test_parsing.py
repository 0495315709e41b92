"""Tests that calls of many model families are read by vLLM's parsers, found by the chat template alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import one_in
from template_cases import made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.bridge import turn_ends
from rlpipe.episodes.parsing import (
    CUT_OFF,
    MAX_CALLS,
    MAX_CHARS,
    TOO_LONG,
    ParsedTurn,
    _call_marks,
    _rendered_turn,
    open_parser,
    parse_hermes,
    parse_json,
    parse_text,
    parse_turn,
    with_tools,
)
from rlpipe.episodes.reasoning import MARKS, close_reasoning
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
ONE_MARK = {"lfm2_v2", "muse_glimmer"}
"""Families that write a list of calls, or whose first call begins as the prompt ends: marks do not tell calls apart."""
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
    text = _rendered_turn(template, calls)
    for end in template.tokenizer.convert_ids_to_tokens(sorted(turn_ends(template, DataConfig(source="jsonl")))):
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
        assert all(isinstance(own, ToolCall) for own in parser(call[:cut], "0c").calls)
        if cut <= call.rindex("limit"):
            assert all(own.problem for own in parse_turn(parser, call[:cut], "0c", is_cut=True).calls), call[:cut]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ONE_MARK])
def test_of_a_turn_that_is_cut_off_only_whole_calls_are_made(name: str) -> None:
    template, parser = open_for(name)
    calls = [ToolCall(id=f"q8Zk3Lw7{number}", name="search", arguments=ARGUMENTS[number]) for number in range(2)]
    text = written(template, calls)
    thought = "<think>I might write " + written(template, calls[:1])[:25] + "</think>"
    for before in ("", thought):
        parsed = parse_turn(parser, before + text[: text.rindex("limit") + 5], "0c", is_cut=True)
        assert [own.problem for own in parsed.calls] == [None, CUT_OFF]
    assert [own.problem for own in parse_turn(parser, f"{text}\nI hope", "0c", is_cut=True).calls] == [None, None]


@pytest.mark.parametrize("name", FAMILIES)
def test_many_calls_are_all_read_and_a_long_text_is_not_cut_off(name: str) -> None:
    template, parser = open_for(name)
    calls = [ToolCall(id=f"q8Zk3Lw{number}", name="search", arguments=ARGUMENTS[0]) for number in range(10, 22)]
    found = parse_turn(parser, written(template, calls), "0c").calls
    assert [own.problem for own in found] == [None] * len(calls)
    text = "word " * MAX_CHARS
    assert parser(text, "0c") == ParsedTurn(content=text)
    if name == "muse_glimmer":
        return
    long = ToolCall(id="q8Zk3Lw7P", name="search", arguments={"query": text, "limit": 3})
    (own,) = parser(written(template, [long]), "0c").calls
    assert own.problem in (TOO_LONG, "the call can't be read")
    varied = {"query": " ".join(map(str, range(5000))), "limit": 3}
    (own,) = parser(written(template, [ToolCall(id="q8Zk3Lw7P", name="search", arguments=varied)]), "0c").calls
    assert own.problem is None


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ONE_MARK])
def test_a_call_that_cannot_be_read_is_reported(name: str) -> None:
    template, parser = open_for(name)
    call = written(template, [ToolCall(id="q8Zk3Lw7P", name="search", arguments=ARGUMENTS[0])])
    (own,) = parse_turn(parser, call[: call.index("search")] + "\n\n", "0c").calls
    assert own.problem == "the call can't be read"


def test_of_a_list_of_calls_that_is_cut_off_none_is_made_and_a_whole_one_is() -> None:
    _, parser = open_for("lfm2_v2")
    for text, problems in (
        ('<|tool_call_start|>[search(query="a", limit=3)]<|tool_call_end|>I check', [None]),
        ('<|tool_call_start|>[search(query="a", limit=3), search(query="a', [CUT_OFF]),
    ):
        assert [own.problem for own in parse_turn(parser, text, "0c", is_cut=True).calls] == problems


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    """{% for c in m.tool_calls %}{{ '{"name": "' + c.function.name }}"""
    """{{ '", "arguments": ' }}{{ c.function.arguments|tojson }}"""
    """{{ ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}]<|im_end|>"""
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""A template as Mistral's of version 3."""


def test_marks_of_calls_are_tags_and_have_no_ids() -> None:
    marks = _call_marks(ChatTemplate(made_tokenizer(MISTRAL), DataConfig(source="jsonl")))
    assert (marks.start.pattern, marks.end, marks.tag) == (r'\{"name":\ "', '"},', "[TOOL_CALLS]")


def test_llamas_tag_and_semicolons_are_read() -> None:
    call = '{"name": "search", "parameters": {"query": "a"}}'
    for text, number in ((f"<|python_tag|>{call}", 1), (f"{call}; {call}", 2), (f"[{call}, {call}]", 2)):
        assert [own.name for own in parse_json(text, "0c").calls] == ["search"] * number
    (own,) = parse_json(f"<|python_tag|>{call} and so on", "0c").calls
    assert own.problem is not None


def test_an_argument_may_quote_the_marks_of_calls() -> None:
    quoted = '{"name": "search", "arguments": {"query": "</tool_call> and <tool_call>"}}'
    parsed = parse_hermes(f"So <tool_call>\n{quoted}\n</tool_call> then <tool_call>{quoted}", "0c")
    assert [own.arguments for own in parsed.calls] == [{"query": "</tool_call> and <tool_call>"}] * 2
    assert parsed.content == "So  then"


def test_a_slip_in_a_call_as_json_is_no_final_answer() -> None:
    (own,) = parse_json(' {"name": "search", "parameters": {"query": "x"}', "0c").calls
    assert own.problem is not None
    assert parse_json('{"answer": ', "0c").calls == []


THOUGHT = "<|channel|>analysis<|message|>I might look.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>It is <|far|>."


def test_turns_of_gpt_oss_are_read_by_their_channels() -> None:
    _, parser = open_for("gptoss")
    assert with_tools(parser, []) is parse_text
    for own in (parser, parse_text):
        assert own(THOUGHT + ANSWER, "0c") == ParsedTurn(content="It is <|far|>.", reasoning="I might look.")
        assert own(THOUGHT[:-7], "0c") == ParsedTurn(content="", reasoning="I might look.")
        assert own("It is far.", "0c") == ParsedTurn(content="It is far.")
    for header in (
        "<|start|>assistant to=functions.search<|channel|>commentary json",
        "<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json",
        "<|start|>assistant<|channel|>analysis to=functions.search code",
    ):
        parsed = parser(f'{THOUGHT}{header}<|message|>{{"query": "a", "limit": 3}}<|call|>', "0c")
        (call,) = parsed.calls
        assert (call.name, call.arguments) == ("search", {"query": "a", "limit": 3})
        assert (parsed.content, parsed.reasoning) == ("", "I might look.")
    header = "<|start|>assistant<|channel|>commentary to=functions.sea"
    assert [own.problem is None for own in parser(THOUGHT + header, "0c").calls] == [False]
    text = f"{THOUGHT}{header}rch code<|message|>x = 1<|call|>"
    assert [own.problem is None for own in parser(text, "0c").calls] == [False]
    assert parse_text(text, "0c").content == "<|channel|>commentary to=functions.search code<|message|>x = 1"
    (call,) = parser(f'{THOUGHT}<|start|>assistant to=python<|channel|>analysis code<|message|>print("', "0c").calls
    assert "not JSON" in str(call.problem)


@pytest.mark.parametrize(("start", "end"), MARKS)
def test_reasoning_is_read_with_tools_and_without(start: str, end: str) -> None:
    for parser in (parse_text, parse_hermes, parse_json):
        for text in (f"{start}\nso\n{end}\n\nwest", f"so{end}west"):
            assert parser(text, "0c") == ParsedTurn(content="west", reasoning="so")
        assert parser(close_reasoning(f"{start} so", "go"), "0c").content == ""
        assert parser(close_reasoning("so", f"go {start}\n"), "0c").content == ""
        assert parser(close_reasoning("so", "go"), "0c").content == "so"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
)
def test_a_policy_that_repeats_itself_does_not_hold_up_its_process(name: str) -> None:
    """GLM's parser alone takes minutes for 100 calls, and Qwen's for 200 beginnings of calls."""
    template, parser = open_for(name)
    call = written(template, [ToolCall(id="q8Zk3Lw7P", name="search", arguments=ARGUMENTS[0])])
    begun = call[: len(call) // 2]
    within = (
        *("<arg_key>query</arg_key>\n", "{", "<parameter=query>\n", "<function=a>\n<parameter=b>", "<b>", '<|"|>'),
        *("[", "search(", "<think>", "</think>"),
    )
    texts = (call * 100, begun * 200, call[:12] * 1000, call[-12:] * 1000, call[:-5] + " " * 20_000)
    for text in (*texts, *(begun + part * (30_000 // len(part)) for part in within)):
        calls = parse_turn(parser, text, "0c").calls
        assert len(calls) <= MAX_CALLS + 1
        assert all(own.problem is not None for own in calls[MAX_CALLS:]), "the policy is told that it was too many"


def test_a_parser_may_be_named_and_an_unknown_one_is_reported() -> None:
    template = ChatTemplate(made_tokenizer(TEMPLATES["trl/qwen3_6"]), DataConfig(source="jsonl"))
    assert open_parser("qwen3_xml", template, has_tools=True)("no call", "0c").content == "no call"
    known = r"auto, hermes, json, harmony or file\.py:name"
    with pytest.raises(ConfigError, match=rf"'hermse' is not {known}; vLLM has .*qwen3_xml"):
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


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("[THINK]how to close </think> tags[/THINK]final", "final", "how to close </think> tags"),
        ("<|channel>thought\nhm<channel|>yes<|channel>thought\nmore<channel|>final", "yesfinal", "hm\nmore"),
        ("a</think>b <think>c</think>d", "b d", "a\nc"),
        ("Sure. <think>x</think>yes", "Sure. yes", "x"),
        ("<think>a</think>so <think>b", "so <think>b", "a"),
    ],
)
def test_all_reasoning_is_left_out_by_the_marks_with_which_a_turn_begins(
    text: str, content: str, reasoning: str
) -> None:
    assert parse_text(text, "0c") == ParsedTurn(content=content, reasoning=reasoning)


def test_reasoning_that_is_cut_off_is_closed_by_its_own_mark() -> None:
    assert close_reasoning("[THINK]a about </think>", "x") == "[THINK]a about </think>[/THINK]"
    assert close_reasoning("<think>a</think>so <think>never", "x") == "<think>a</think>so <think>never</think>"
    assert close_reasoning("a</think>so", "<think>") == "a</think>so"
