"""Masks of the built-in families, token by token, and boundaries that are derived from a template alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from chat_families import FAMILIES
from mask_cases import GEMMA_CALL, GEMMA_RESULT, TWO_TURNS, assert_marks, template_of, turns, with_tool

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import encode_markers
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.masks.derivation import FAMILIES as BUILT_IN
from rlpipe.data.masks.derivation import Probe, derive_markers
from rlpipe.data.masks.rules import are_found, find_boundaries

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
    unseen = {
        "gemma4": "<|turn>tool\n",  # in an earlier template
        "qwen3": "<|im_start|>tool\n",  # results are part of the user's turn
    }
    assert derived == [marker for marker in known if marker.start != unseen.get(family)]
    assert are_found(encode_markers(derived, template.tokenizer), Probe(template))


CALLED = '{"name": "weather", "arguments": {"city": "Rome"}}'


# Tools, reasoning, images ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"«{GEMMA_CALL}<|tool_response>»{GEMMA_RESULT}«the cat<turn|>»"),
        ({"train_on_eos": "none"}, f"«{GEMMA_CALL}»<|tool_response>{GEMMA_RESULT}«the cat»<turn|>"),
        ({"train_on_eos": "last"}, f"«{GEMMA_CALL}»<|tool_response>{GEMMA_RESULT}«the cat<turn|>»"),
        ({"roles_to_train": ["tool"]}, f"{GEMMA_CALL}<|tool_response>«{GEMMA_RESULT}»the cat<turn|>"),
    ],
)
@pytest.mark.parametrize("is_derived", [False, True])
def test_results_within_the_assistants_turn_do_not_count(
    options: dict[str, Any], expected: str, is_derived: bool
) -> None:
    """Check that the start of a tool result ends what the model writes."""
    tokenizer = FAMILIES["gemma4"].tokenizer()
    if is_derived:
        options |= {
            "role_boundaries": [asdict(marker) for marker in derive_markers(Probe(template_of(FAMILIES["gemma4"])))]
        }
    start = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    assert_marks(tokenizer, with_tool(), f"{start}{expected}\n", **options)


def test_only_the_first_of_several_results_is_asked_for_by_the_model() -> None:
    results = f"{GEMMA_RESULT}<|tool_response>{GEMMA_RESULT}"
    start = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    expected = f"{start}«{GEMMA_CALL}<|tool_response>»{results}«the cat<turn|>»\n"
    assert_marks(FAMILIES["gemma4"].tokenizer(), with_tool(2), expected)


def test_calls_without_an_answer_end_where_the_next_turn_starts() -> None:
    user, call, result, answer = with_tool()
    start = f"<bos><|turn>user\nhi<turn|>\n<|turn>model\n«{GEMMA_CALL}<|tool_response>»"
    again = "<|turn>user\nhi<turn|>\n<|turn>model\n«the cat<turn|>»\n"
    tokenizer = FAMILIES["gemma4"].tokenizer()
    assert_marks(tokenizer, [user, call], start)
    assert_marks(tokenizer, [user, call, result, user, answer], f"{start}{GEMMA_RESULT}{again}")
    assert_marks(tokenizer, [user, call, user, answer], f"{start}{again}")
    assert_marks(
        tokenizer,
        [user, call, result, call, result, answer],
        f"{start}{GEMMA_RESULT}«{GEMMA_CALL}<|tool_response>»{GEMMA_RESULT}«the cat<turn|>»\n",
    )


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
    """Check images both in trained user turns and in those of the assistant."""
    own = FAMILIES[family]
    image = [{"type": "image"}, {"type": "text", "text": "the cat"}]
    answer: Any = image if family != "qwen3" else "the cat"
    template = template_of(own)
    data = DataConfig(source="jsonl", roles_to_train=["user", "assistant"])
    encoded, mask = ConversationMask(template, data).tokens(turns(image, answer))
    token_ids = encoded.token_ids
    is_image = token_ids == template.tokenizer.convert_tokens_to_ids(own.image)
    assert is_image.any()
    assert not mask[is_image].any()
    text = template.tokenizer.decode(token_ids[mask])
    assert text.count("the cat") == 2
