"""Tests of tool-call messages without content, for which templates get a value that they render as nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from template_cases import made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import RowLocation, UnusableRow
from rlpipe.data.row_renderer import PromptRenderer, SequenceRenderer
from rlpipe.models.tiny_model import make_tokenizer

TURN = "<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}BODY{% endgeneration %}{% else %}BODY"
LOOP = "{% for message in messages %}" + TURN + "{% endif %}{% endfor %}"
CALLS = "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}<|end|>"
PRINTS = LOOP.replace("BODY", "{{ message.content }}" + CALLS)
"""A template that prints the content, like GLM-4.5's."""
WITHOUT_CALLS = LOOP.replace("BODY", "{{ message.content }}<|end|>")
"""A template that knows no tool calls."""
PARTS = LOOP.replace("BODY", "{% for part in message.content %}{{ part.text }}{% endfor %}" + CALLS)
"""A template that loops over content parts, like Qwen3-VL's, but without text content."""
ASKS = LOOP.replace(
    "BODY", "{% if message['content'] is none %}" + CALLS + "{% else %}{{ message.content }}<|end|>{% endif %}"
)
"""A template that tests whether the content is none, like DeepSeek's."""
ASKS_OF_REASONING = LOOP.replace(
    "BODY",
    "{% if message.reasoning_content is not none %}{% if '</think>' in message.content %}{% endif %}{% endif %}"
    "{{ message.content }}" + CALLS,
)
"""A template that tests the reasoning, like Qwen3's first template."""
PLACE = RowLocation(row=0, epoch=0, location="row 1")
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
ASKED = {"role": "user", "content": "hi"}
FOUND = [{"role": "tool", "content": "a cat"}, {"role": "assistant", "content": "ok"}]


def trained(template: str, message: dict[str, Any], role_boundaries: Any = None) -> tuple[str, str]:
    """Return the rendered conversation, and the trained part of it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    renderer = SequenceRenderer(tokenizer, DataConfig(source="jsonl", role_boundaries=role_boundaries), max_tokens=512)
    sequence = renderer.render({"messages": [ASKED, message, *FOUND]}, PLACE)
    counted = sequence.token_ids[np.flatnonzero(sequence.loss_mask)]
    return tokenizer.decode(sequence.token_ids), tokenizer.decode(counted)


@pytest.mark.parametrize("template", [PRINTS, PARTS, ASKS, ASKS_OF_REASONING])
@pytest.mark.parametrize("message", [CALL, CALL | {"content": None}])
@pytest.mark.parametrize("given", [None, [{"role": "assistant", "start": "<|assistant|>", "end": "<|end|>"}]])
def test_a_call_without_content_is_rendered_as_the_call_alone(
    template: str, message: dict[str, Any], given: Any
) -> None:
    text, counted = trained(template, message, given)
    assert text == "<|user|>hi<|end|><|assistant|>(look)<|end|><|tool|>a cat<|end|><|assistant|>ok<|end|>"
    assert counted == "(look)<|end|>ok<|end|>"


def test_a_call_that_the_template_does_not_render_makes_a_row_unusable() -> None:
    with pytest.raises(UnusableRow, match="the chat template leaves out tool_calls of a turn without content"):
        trained(WITHOUT_CALLS, CALL)


@pytest.mark.parametrize(
    "message",
    [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": None, "tool_call_id": "1"}],
)
def test_a_message_with_nothing_in_the_place_of_its_content_makes_a_row_unusable(message: dict[str, Any]) -> None:
    with pytest.raises(UnusableRow, match="message 2: its key 'content' is null"):
        trained(PRINTS, message)


def test_nulls_that_tables_add_to_calls_are_dropped() -> None:
    template = PRINTS.replace("call.function.name", "call.function.arguments | tojson")
    arguments = {"city": "x", "unit": None, "more": [{"a": 1, "b": None}]}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    assert trained(template, call)[1] == '({"city": "x", "more": [{"a": 1}]})<|end|>ok<|end|>'


def test_a_prompt_does_not_continue_a_turn_without_content() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PRINTS
    with pytest.raises(UnusableRow, match="its last turn, which the completion would continue, has no content"):
        PromptRenderer(tokenizer, DataConfig(source="jsonl")).render({"prompt": [ASKED, CALL]}, PLACE)


JSON_CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "x", "far": true}'}}],
}
WRITES_JSON = PRINTS.replace("call.function.name", "call.function.arguments | tojson")
WRITES_TEXT = PRINTS.replace("call.function.name", "'=' + call.function.arguments")
WRITES_ITEMS = PRINTS.replace(
    "({{ call.function.name }})",
    "{% for key, value in call.function.arguments.items() %}({{ key }}={{ value }}){% endfor %}",
)


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WRITES_JSON, '({"at": "x", "far": true})'),
        (WRITES_TEXT, '(={"at": "x", "far": true})'),
        (WRITES_ITEMS, "(at=x)(far=True)"),
    ],
)
def test_arguments_are_given_in_the_form_that_the_template_takes(template: str, expected: str, is_text: bool) -> None:
    call = JSON_CALL if is_text else json.loads(json.dumps(JSON_CALL))
    if not is_text:
        call["tool_calls"][0]["function"]["arguments"] = {"at": "x", "far": True}
    assert trained(template, call)[1] == f"{expected}<|end|>ok<|end|>"


def test_no_empty_turn_is_trained_with_a_call_with_an_empty_content() -> None:
    """Check a template that writes a turn for the content and another for the calls."""
    body = (
        "{% if message.content is string %}{{ message.content }}<|end|>{% endif %}"
        "{% for call in message.tool_calls or [] %}({{ call.function.name }})<|end|>{% endfor %}"
    )
    text, counted = trained(LOOP.replace("BODY", body), CALL | {"content": ""})
    assert text == "<|user|>hi<|end|><|assistant|>(look)<|end|><|tool|>a cat<|end|><|assistant|>ok<|end|>"
    assert counted == "(look)<|end|>ok<|end|>"


def test_a_call_with_a_text_that_the_template_leaves_out_makes_a_row_unusable() -> None:
    with pytest.raises(UnusableRow, match=r"the chat template leaves out tool_calls$"):
        trained(WITHOUT_CALLS, CALL | {"content": "I look."})


def test_schemas_of_tools_may_be_json_in_parts() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}" + PRINTS
    schema = {"name": "look", "parameters": {"type": "object"}}
    renderer = PromptRenderer(tokenizer, DataConfig(source="jsonl"))
    texts = set()
    for tool in (
        {"type": "function", "function": schema},
        {"type": "function", "function": schema | {"parameters": json.dumps(schema["parameters"])}},
        {"type": "function", "function": json.dumps(schema)},
        json.dumps({"type": "function", "function": schema}),
    ):
        texts.add(tokenizer.decode(renderer.render({"prompt": [ASKED], "tools": [tool]}, PLACE).token_ids))
    assert len(texts) == 1
    with pytest.raises(UnusableRow, match=r"column 'tools', tool 1: its key 'parameters' is '{', not a schema"):
        renderer.render({"prompt": [ASKED], "tools": [schema | {"parameters": "{"}]}, PLACE)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["trl/gptoss", "trl/lfm2_2_5", "trl/qwen3", "vllm/template_minicpmv45", "trl/llama3"])
def test_reasoning_is_rendered_under_whatever_key_it_comes(name: str, key: str) -> None:
    template = ChatTemplate(made_tokenizer(dict(shipped_templates())[name]), DataConfig(source="jsonl"))
    text = template.text([ASKED, {"role": "assistant", "content": "a cat", key: "It purrs."}])
    assert ("It purrs." in text) == (name != "trl/llama3")
    assert text.count("a cat") == 1


def test_a_call_of_gpt_oss_keeps_the_reasoning_before_it() -> None:
    template = ChatTemplate(made_tokenizer(dict(shipped_templates())["trl/gptoss"]), DataConfig(source="jsonl"))
    called = CALL | {"reasoning_content": "I must look."}
    for message, is_shown in ((called, True), (called | {"content": "Wait."}, False)):
        text = template.text([ASKED, message, FOUND[0]], add_generation_prompt=True)
        assert ("<|channel|>analysis<|message|>I must look.<|end|>" in text) == is_shown
        assert "to=functions.look" in text
