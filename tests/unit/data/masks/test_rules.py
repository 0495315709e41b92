"""Tests that a message, or a span of its text, that the row excludes is not trained."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import FAMILIES
from mask_cases import assert_marks, turns

from rlpipe.data.row import UnusableRow
from rlpipe.models.tiny_model import CHAT_TEMPLATE, make_tokenizer

CHATML = FAMILIES["chatml"]
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n"


def conversation(**keys: Any) -> list[dict[str, Any]]:
    """Return four messages, the first answer with further keys."""
    user, answer, *rest = turns("hi", "the cat sat", "who", "a mat")
    return [user, answer | keys, *rest]


@pytest.mark.parametrize(
    "keys", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"train": 0}]
)
def test_a_message_that_is_excluded_does_not_count_nor_does_its_end(keys: dict[str, Any]) -> None:
    expected = f"{ASKED}the cat sat<|im_end|>\n{AGAIN}«a mat<|im_end|>»\n"
    assert_marks(CHATML.tokenizer(), conversation(**keys), expected)


@pytest.mark.parametrize("keys", [{"weight": 1}, {"train": True}, {"weight": None}, {"train": True, "weight": 1.0}])
def test_a_message_that_is_included_counts(keys: dict[str, Any]) -> None:
    expected = f"{ASKED}«the cat sat<|im_end|>»\n{AGAIN}«a mat<|im_end|>»\n"
    assert_marks(CHATML.tokenizer(), conversation(**keys), expected)


@pytest.mark.parametrize("content", ["", "the cat sat"])
@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace("generation", "if true", 1)])
def test_messages_are_excluded_from_generation_blocks_too(jinja: str, content: str) -> None:
    jinja = jinja.replace("endgeneration", "endif") if "if true" in jinja else jinja
    tokenizer = make_tokenizer()
    tokenizer.chat_template = jinja
    expected = f"<|user|>hi<|end|><|assistant|>{content}<|end|><|user|>who<|end|><|assistant|>«a mat<|end|>»"
    assert_marks(tokenizer, conversation(weight=0, content=content), expected)


def test_messages_that_a_template_joins_are_excluded_alone() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not loop.index0 or messages[loop.index0 - 1].role != m.role %}<|{{ m.role }}|>"
        "{% endif %}{{ m.content }}{% if loop.last or messages[loop.index].role != m.role %}<|end|>{% endif %}"
        "{% endfor %}"
    )
    user, answer = turns("hi", "one")
    more = {"role": "assistant", "content": "two"}
    assert_marks(tokenizer, [user, answer | {"weight": 0}, more], "<|user|>hi<|end|><|assistant|>one«two<|end|>»")
    assert_marks(tokenizer, [user, answer, more | {"weight": 0}], "<|user|>hi<|end|><|assistant|>«one»two<|end|>")


SPANS = [
    # (begin_offset, end_offset), the last one included
    ([(0, 2, False), (3, 10, True)], "the« cat sat<|im_end|>»"),
    ([(0, 2, True), (3, 6, False), (7, 10, True)], "«the» cat« sat<|im_end|>»"),
    ([(0, 6, True), (7, 10, False)], "«the cat» sat<|im_end|>"),
    ([(0, 6, True)], "«the cat» sat<|im_end|>"),
    # A token of which a part is excluded does not count.
    ([(0, 1, True), (2, 10, False)], "the cat sat<|im_end|>"),
    ([(0, 10, False)], "the cat sat<|im_end|>"),
    ([], "the cat sat<|im_end|>"),
]


@pytest.mark.parametrize(("spans", "expected"), SPANS)
@pytest.mark.parametrize("key", ["train_detail", "training_detail"])
def test_only_the_trained_spans_of_a_message_count(spans: list[tuple[int, int, bool]], expected: str, key: str) -> None:
    details = [{"begin_offset": start, "end_offset": last, "train": trains} for start, last, trains in spans]
    expected = f"{ASKED}{expected}\n{AGAIN}«a mat<|im_end|>»\n"
    assert_marks(CHATML.tokenizer(), conversation(**{key: details}), expected)


def test_spans_are_counted_from_the_start_of_the_content_also_where_the_template_trims_it() -> None:
    details = [{"begin_offset": 5, "end_offset": 8, "train": True}]
    messages = turns("hi", "  the cat", "who", "a mat")
    messages[1]["train_detail"] = details
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    asked, answered = head.format("user"), head.format("assistant")
    first = f"<|begin_of_text|>{asked}hi<|eot_id|>{answered}the« cat<|eot_id|>»"
    assert_marks(FAMILIES["llama3"].tokenizer(), messages, f"{first}{asked}who<|eot_id|>{answered}«a mat<|eot_id|>»")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weight": 0.5}, r"message 2: its key 'weight' is 0.5; a message can count \(1, true\) or not \(0, false\)"),
        ({"train": "no"}, "message 2: its key 'train' is 'no'"),
        ({"train": True, "weight": 0}, "message 2: its keys 'weight' and 'train' contradict each other"),
        ({"train_detail": "all"}, "message 2: its key 'train_detail': expected a list of begin_offset"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 3}]}, "expected a list of begin_offset, end_offset and"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 11, "train": True}]},
            "which is not within its 11 characters",
        ),
    ],
)
def test_keys_that_are_not_understood_make_a_row_unusable(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        assert_marks(CHATML.tokenizer(), conversation(**keys), "")


def test_a_message_of_another_role_that_asks_to_be_trained_makes_a_row_unusable() -> None:
    messages = conversation()
    messages[0]["train"] = True
    with pytest.raises(
        UnusableRow, match=r"message 1 \(user\) is marked as trained, but its role is not in data.roles_to_train"
    ):
        assert_marks(CHATML.tokenizer(), messages, "")


def test_spans_of_a_content_that_the_template_rewrites_make_a_row_unusable() -> None:
    messages = turns("hi", "<think>\nx\n</think>\n\nthe cat", "who", "a mat")
    messages[1]["train_detail"] = [{"begin_offset": 0, "end_offset": 3, "train": True}]
    with pytest.raises(UnusableRow, match="message 2: the chat template rewrites its content"):
        assert_marks(FAMILIES["qwen3"].tokenizer(), messages, "")


def test_excluded_messages_do_not_count_where_all_tokens_do() -> None:
    asked = ASKED.replace("<|im_start|>user", "<|im_start|>«user")  # the first token has no predecessor
    expected = f"{asked}»the cat sat«<|im_end|>\n{AGAIN}a mat<|im_end|>\n»"
    assert_marks(CHATML.tokenizer(), conversation(weight=0), expected, train_on_inputs=True)
