"""Masks of the built-in families, token by token, and boundaries that are derived from a template alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, Family
from transformers import PreTrainedTokenizerBase

from rlpipe.configs.role_boundaries import RoleMarkers
from rlpipe.configs.schema_data import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.masks.derivation import derive_markers
from rlpipe.data.masks.families import FAMILIES as BUILT_IN
from rlpipe.data.masks.markers import encode_markers
from rlpipe.data.masks.probe import Probe
from rlpipe.data.masks.resolve import are_found, find_boundaries, resolve_mask
from rlpipe.data.template import ChatTemplate
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import ChatMessages

NAMES = {
    "chatml": "ChatML, Qwen",
    "qwen2_vl": "ChatML, Qwen",
    "qwen3": "ChatML, Qwen",
    "gemma3": "Gemma 2, 3, 3n",
    "gemma4": "Gemma 4",
    "llama3": "Llama 3",
    "llama4": "Llama 4",
    "pixtral": "Pixtral, Mistral V3",
    "mistral_v7": "Mistral V7 Tekken",
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


def template_of(family: Family, jinja: str | None = None) -> ChatTemplate:
    tokenizer = family.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if jinja is None else jinja
    return ChatTemplate(tokenizer, DataConfig(source="jsonl"))


def turns(*contents: Any, system: str | None = None) -> ChatMessages:
    """Of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def pieces(text: str) -> list[tuple[str, bool]]:
    """``«what counts»`` and what does not, in order."""
    return [(piece, bool(index % 2)) for index, piece in enumerate(re.split("[«»]", text))]


def assert_marks(tokenizer: PreTrainedTokenizerBase, messages: ChatMessages, expected: str, **options: Any) -> None:
    """``expected`` is the rendered text with ``«...»`` around what counts, which are tokens of their own."""
    data = DataConfig(source="jsonl", **options)
    token_ids, mask = ConversationMask(ChatTemplate(tokenizer, data), data).tokens(messages)
    parts = [(tokenizer(piece, add_special_tokens=False)["input_ids"], counts) for piece, counts in pieces(expected)]
    assert tokenizer.decode(token_ids) == re.sub("[«»]", "", expected)
    assert token_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert mask.tolist() == [counts for ids, counts in parts for _ in ids]


TWO_TURNS = {
    "chatml": "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    "«the cat<|im_end|>»\n<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n«a  mat<|im_end|>»\n",
    "gemma3": "<bos><start_of_turn>user\nsys\n\nhi<end_of_turn>\n<start_of_turn>model\n«the cat<end_of_turn>»\n"
    "<start_of_turn>user\nwho<end_of_turn>\n<start_of_turn>model\n«a  mat<end_of_turn>»\n",
    "gemma4": "<bos><|turn>system\nsys<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\n«the cat<turn|>»\n"
    "<|turn>user\nwho<turn|>\n<|turn>model\n«a  mat<turn|>»\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nsys<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "«the cat<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nwho<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«a  mat<|eot_id|>»",
    "llama4": "<|begin_of_text|><|header_start|>system<|header_end|>\n\nsys<|eot|><|header_start|>user<|header_end|>\n\n"
    "hi<|eot|><|header_start|>assistant<|header_end|>\n\n«the cat<|eot|>»<|header_start|>user<|header_end|>\n\n"
    "who<|eot|><|header_start|>assistant<|header_end|>\n\n«a  mat<|eot|>»",
    "pixtral": "<s>[INST]hi[/INST]«the cat</s>»[INST]who[/INST]«a  mat</s>»",
    "mistral_v7": "<s>[SYSTEM_PROMPT]sys[/SYSTEM_PROMPT][INST]hi[/INST]«the cat</s>»[INST]who[/INST]«a  mat</s>»",
}
TWO_TURNS["qwen2_vl"] = TWO_TURNS["chatml"]
TWO_TURNS["qwen3"] = TWO_TURNS["chatml"].replace("«a  mat", "«<think>\n\n</think>\n\na  mat")


@EVERY
def test_the_assistants_turns_count_with_their_ends(family: str) -> None:
    messages = turns("hi", "the cat", "who", "a  mat", system="sys")
    assert_marks(FAMILIES[family].tokenizer(), messages, TWO_TURNS[family])


@EVERY
def test_the_families_markers_are_built_in(family: str) -> None:
    template = template_of(FAMILIES[family])
    source, boundaries = find_boundaries(template, DataConfig(source="jsonl"))
    assert source == f"built in for {NAMES[family]}"
    assert are_found(boundaries, Probe(template))


@EVERY
def test_the_families_markers_are_derived_from_the_template_alone(family: str) -> None:
    template = template_of(FAMILIES[family])
    derived = derive_markers(Probe(template))
    known = list(BUILT_IN[NAMES[family]])
    renders = {marker.role for marker in known} - {
        "gemma4": {"tool"},  # results are a part of the model's turn
        "qwen3": {"tool"},  # results are a part of the user's turn
    }.get(family, set())
    assert derived == [marker for marker in known if marker.role in renders]
    assert are_found(encode_markers(derived, template.tokenizer), Probe(template))


# Tools, reasoning, images ---------------------------------------------------------------------------------------------

CALL = {"id": "q8Zk3Lw7P", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "q8Zk3Lw7P"}
CALLED = '{"name": "weather", "arguments": {"city": "Rome"}}'


def with_tool(num_results: int = 1) -> ChatMessages:
    caller = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return [
        {"role": "user", "content": "hi"},
        caller,
        *[RESULT] * num_results,
        {"role": "assistant", "content": "the cat"},
    ]


@pytest.mark.parametrize("num_results", [1, 2])
def test_tool_calls_count_and_results_do_not(num_results: int) -> None:
    results = "<|im_start|>user" + "\n<tool_response>\n21\n</tool_response>" * num_results + "<|im_end|>\n"
    assert_marks(
        FAMILIES["qwen3"].tokenizer(),
        with_tool(num_results),
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<tool_call>\n{CALLED}\n</tool_call><|im_end|>»\n"
        f"{results}<|im_start|>assistant\n«<think>\n\n</think>\n\nthe cat<|im_end|>»\n",
    )
    result = '[TOOL_RESULTS]{"content": 21, "call_id": "q8Zk3Lw7P"}[/TOOL_RESULTS]' * num_results
    for family in ("pixtral", "mistral_v7"):
        expected = f"<s>[INST]hi[/INST]«[TOOL_CALLS][{CALLED}]</s>»{result}«the cat</s>»"
        assert_marks(FAMILIES[family].tokenizer(), with_tool(num_results), expected)


def test_results_count_where_the_role_of_tools_is_trained() -> None:
    assert_marks(
        FAMILIES["llama3"].tokenizer(),
        with_tool(),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{CALLED}<|eot_id|>"
        '<|start_header_id|>ipython<|end_header_id|>\n\n«"21"<|eot_id|>»'
        "<|start_header_id|>assistant<|end_header_id|>\n\nthe cat<|eot_id|>",
        roles_to_train=["tool"],
    )


def test_reasoning_counts_where_the_template_keeps_it() -> None:
    assert_marks(
        FAMILIES["qwen3"].tokenizer(),
        turns("hi", "<think>\nthe mat\n</think>\n\nthe cat", "who", "<think>\nthe cat\n</think>\n\na  mat"),
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«the cat<|im_end|>»\n<|im_start|>user\nwho<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nthe cat\n</think>\n\na  mat<|im_end|>»\n",
    )


@EVERY
def test_images_never_count(family: str) -> None:
    """Neither in turns of users that are trained, nor in those of the assistant."""
    own = FAMILIES[family]
    image = [{"type": "image"}, {"type": "text", "text": "the cat"}]
    answer: Any = image if family != "qwen3" else "the cat"
    template = template_of(own)
    data = DataConfig(source="jsonl", roles_to_train=["user", "assistant"])
    token_ids, mask = ConversationMask(template, data).tokens(turns(image, answer))
    is_image = token_ids == template.tokenizer.convert_tokens_to_ids(own.image)
    assert is_image.any()
    assert not mask[is_image].any()
    text = template.tokenizer.decode(token_ids[mask])
    assert text.count("the cat") == 2
