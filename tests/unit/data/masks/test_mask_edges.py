"""Masks of each family at the edges: truncated rows, padding, batches, and consecutive turns of one role."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chat_families import FAMILIES
from mask_cases import GEMMA_CALL, GEMMA_RESULT, TWO_TURNS, assert_marks, pieces, template_of, turns

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import LossMask
from rlpipe.data.masks.rules import resolve_mask
from rlpipe.data.row import UnusableRow

EVERY = pytest.mark.parametrize("family", FAMILIES)

WITH_RESULTS = {
    "gemma4": f"<bos><|turn>user\nhi<turn|>\n<|turn>model\n«{GEMMA_CALL}<|tool_response>»{GEMMA_RESULT}"
    "«the cat<turn|>»\n",
    "llama3": "<|begin_of_text|><|start_header_id|>assistant<|end_header_id|>\n\n«the cat<|eot_id|>»"
    "<|start_header_id|>ipython<|end_header_id|>\n\n21<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«a<|eot_id|>»",
    "mistral_v7": "<s>[INST]hi[/INST]«[TOOL_CALLS][]</s>»"
    "[TOOL_RESULTS]21[/TOOL_RESULTS][TOOL_RESULTS]21[/TOOL_RESULTS]«a</s>»",
}
CASES = [*TWO_TURNS.items(), *WITH_RESULTS.items()]


def rules_of(family: str) -> LossMask:
    return resolve_mask(template_of(FAMILIES[family]), DataConfig(source="jsonl"))


def encoded(family: str, marked: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a text with ``«trained»`` parts, and which of them are trained."""
    tokenizer = FAMILIES[family].tokenizer()
    parts = [(tokenizer(piece, add_special_tokens=False)["input_ids"], counts) for piece, counts in pieces(marked)]
    return [token for ids, _ in parts for token in ids], [counts for ids, counts in parts for _ in ids]


@pytest.mark.parametrize(("family", "marked"), CASES)
def test_rows_that_are_cut_off_count_as_far_as_they_go(family: str, marked: str) -> None:
    """Check rows that are cut within any turn or marker, and between turns."""
    token_ids, expected = encoded(family, marked)
    rules = rules_of(family)
    assert sum(expected) > 2
    for length in range(len(token_ids) + 1):
        assert rules.mark(np.array(token_ids[:length], np.int32)).tolist() == expected[:length]


@pytest.mark.parametrize(("family", "marked"), CASES)
def test_padding_never_counts_on_either_side(family: str, marked: str) -> None:
    token_ids, expected = encoded(family, marked)
    rules = rules_of(family)
    assert rules.pad_id is not None
    padded = [rules.pad_id] * 3 + token_ids + [rules.pad_id] * 4
    assert rules.mark(np.array(padded, np.int32)).tolist() == [False] * 3 + expected + [False] * 4


@pytest.mark.parametrize(("family", "marked"), CASES)
def test_ends_count_where_they_are_the_padding_too(family: str, marked: str) -> None:
    """Check end tokens as padding; the first one after a truncated turn counts, as it could be that turn's own end."""
    token_ids, expected = encoded(family, marked)
    rules = replace(rules_of(family), pad_id=rules_of(family).end_id)
    assert rules.end_id is not None
    ends = [rules.end_id] * 4
    padded = ends + token_ids + ends
    assert rules.mark(np.array(padded, np.int32)).tolist() == [False] * 4 + expected + [False] * 4
    cut = max(place for place, token in enumerate(token_ids) if token == rules.end_id)
    assert expected[cut - 1 : cut + 1] == [True, True]
    found = rules.mark(np.array(token_ids[:cut] + ends, np.int32))
    assert found.tolist() == [*expected[:cut], True, False, False, False]


@EVERY
def test_rows_of_padding_only_count_nothing(family: str) -> None:
    rules = rules_of(family)
    for pads in (rules, replace(rules, pad_id=rules.end_id)):
        assert not pads.mark(np.full(8, pads.pad_id, np.int32)).any()
        assert not pads.mark(np.full((3, 8), pads.pad_id, np.int32)).any()


@pytest.mark.parametrize(("family", "marked"), CASES)
def test_batches_are_marked_by_rows(family: str, marked: str) -> None:
    """Check whole, truncated and empty rows, padded on the left or on the right."""
    token_ids, expected = encoded(family, marked)
    rules = rules_of(family)
    half = len(token_ids) // 2
    rows = [token_ids, token_ids[:half], token_ids[: half - 1], [], token_ids]
    counts = [expected, expected[:half], expected[: half - 1], [], expected]
    width = len(token_ids) + 2
    right = np.array([[*row, *[rules.pad_id] * (width - len(row))] for row in rows], np.int32)
    assert rules.mark(right).tolist() == [[*row, *[False] * (width - len(row))] for row in counts]
    left = np.array([[*[rules.pad_id] * (width - len(row)), *row] for row in rows], np.int32)
    assert rules.mark(left).tolist() == [[*[False] * (width - len(row)), *row] for row in counts]


IN_A_ROW = {
    "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«the cat<|im_end|>»\n"
    "<|im_start|>assistant\n«a  mat<|im_end|>»\n",
    "gemma4": "<bos><|turn>user\nhi<turn|>\n<|turn>model\n«the cat<turn|>»\n<|turn>model\n«a  mat<turn|>»\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«the cat<|eot_id|>»"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«a  mat<|eot_id|>»",
    "llama4": "<|begin_of_text|><|header_start|>user<|header_end|>\n\nhi<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n«the cat<|eot|>»"
    "<|header_start|>assistant<|header_end|>\n\n«a  mat<|eot|>»",
}
IN_A_ROW["qwen2_vl"] = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + IN_A_ROW["chatml"]
IN_A_ROW["qwen3"] = IN_A_ROW["chatml"].replace("«a  mat", "«<think>\n\n</think>\n\na  mat")


@EVERY
def test_turns_of_the_assistant_in_a_row_count_each(family: str) -> None:
    user, first = turns("hi", "the cat")
    messages = [user, first, {"role": "assistant", "content": "a  mat"}]
    tokenizer = FAMILIES[family].tokenizer()
    refused = {
        "gemma3": "roles must alternate",
        # Nothing prompts the model to write the second one.
        "pixtral": r"message 3 \(assistant\) would not be trained: .* writes none before it",
        "mistral_v7": r"message 3 \(assistant\) would not be trained: .* writes none before it",
    }
    if family in refused:
        with pytest.raises(UnusableRow, match=refused[family]):
            assert_marks(tokenizer, messages, "")
    else:
        assert_marks(tokenizer, messages, IN_A_ROW[family])
