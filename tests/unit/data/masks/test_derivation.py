"""Tests that markers are derived from a template's output, and that ambiguous ones are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from chat_families import piece_tokenizer, word_tokenizer
from mask_cases import assert_marks, turns, with_tool

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.masks.rules import find_boundaries, resolve_mask
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tokenizer

DATA = DataConfig(source="jsonl")


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("<|{{ m.role }}|>{{ m.content }}<|end|>", "<|user|>hi<|end|><|assistant|>«yo<|end|>»"),
        ("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|user|>\nhi<|end|>\n<|assistant|>\n«yo<|end|>»\n"),
        (
            "{% if m.role == 'user' %}<|user|> {{ m.content }} <|assistant|>"
            "{% else %} {{ m.content }}<|end|>{% endif %}",
            "<|user|> hi <|assistant|>« yo<|end|>»",
        ),
        ("{{ m.role | title }}: {{ m.content }}<|end|>\n", "User: hi<|end|>\nAssistant: «yo<|end|>»\n"),
        (
            "{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}"
            "{{ '<|end|>' if m.role == 'assistant' }}",
            "<|user|>hi<|assistant|>«yo<|end|>»",
        ),
    ],
)
def test_markers_of_other_templates_are_derived(turn: str, expected: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    assert_marks(tokenizer, turns("hi", "yo"), expected)
    assert find_boundaries(ChatTemplate(tokenizer, DATA), DATA)[0] == "derived from the chat template"


@pytest.mark.parametrize(
    ("jinja", "reason"),
    [
        ("<|user|>{{ m.content }}<|end|>", "turns of user and assistant start the same way, with '<|user|>'"),
        ("{{ m.content }}<|end|>", "turns of user have no marker before them"),
        (
            "<|{{ m.role }}|>{{ m.content }}{{ m.content }}<|end|>",
            "it renders a message of a conversation more than once",
        ),
        ("<|{{ m.role }}|><|end|>", "it does not render each message of a conversation, in order"),
        (
            "<|{{ m.role }}|>{{ m.content }}<|end|>{{ '<|user|>go on<|end|>' if loop.index == 2 }}",
            "its apparent markers do not enclose the messages",
        ),
        ("{{ raise_exception('no') }}", "the chat template raised TemplateError: no"),
    ],
)
def test_templates_that_can_be_read_in_several_ways_are_refused(jinja: str, reason: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{jinja}{{% endfor %}}"
    tokenizer.name_or_path = "my/model"
    with pytest.raises(DataError) as caught:
        find_boundaries(ChatTemplate(tokenizer, DATA), DATA)
    assert str(caught.value).startswith("the chat template of 'my/model' does not show where turns begin and end (")
    assert reason in str(caught.value)
    assert "set data.role_boundaries to its markers, or data.loss_mask=all" in str(caught.value)


TWO_ENDS = {
    "another token": ("{{ '<|end|>' if loop.last else '<|tool|>' }}", "<|end|>"),
    "another token and a line break": ("{{ '<|end|>' if loop.last else '<|tool|>\n' }}", "<|end|>"),
    "none but in the last turn": ("{{ '<|end|>' if loop.last }}", "<|end|>"),
    "none in the last turn": ("{{ '<|end|>' if not loop.last }}", ""),
    "words that begin alike": ("###E{{ 'OS' if loop.last else 'ND' }}", "###EOS"),
}


@pytest.mark.parametrize("case", TWO_ENDS)
@pytest.mark.parametrize("has_system", [False, True])
def test_assistants_whose_last_turn_ends_in_another_way_are_refused(case: str, has_system: bool) -> None:
    """Check a different end of the last turn; after a system turn, that end also precedes each user turn."""
    end, last = TWO_ENDS[case]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        f"{{{{ '<|system|>Be brief.<|tool|>' if {has_system} }}}}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.role == 'assistant' %}}{end}{{% else %}}<|tool|>{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(DataError) as caught:
        find_boundaries(ChatTemplate(tokenizer, DATA), DATA)
    assert f"(the assistant's last turn ends with {last!r}, its earlier turns end differently)" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("{{ '<|end|>' }}{{ '\n' if not loop.last }}", "<|user|>hi<|tool|><|assistant|>«yo<|end|>»"),
        ("<|end|>{{ '<|tool|>' if loop.last }}", "<|user|>hi<|tool|><|assistant|>«yo<|end|>»<|tool|>"),
    ],
)
def test_what_stands_after_the_end_of_the_last_turn_does_not_count(end: str, expected: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.role == 'assistant' %}}{end}{{% else %}}<|tool|>{{% endif %}}{{% endfor %}}"
    )
    assert_marks(tokenizer, turns("hi", "yo"), expected)


@pytest.mark.parametrize(
    ("options", "is_reported"),
    [({}, True), ({"roles_to_train": ["assistant", "user"]}, True), ({"roles_to_train": ["user"]}, False)],
)
def test_turns_without_an_end_are_reported(options: dict, is_reported: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Check a template that ends only user turns, with which a policy would not learn to stop."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|end|>' if m.role == 'user' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    data = DataConfig(source="jsonl", **options)
    with caplog.at_level("INFO"):
        rules = resolve_mask(ChatTemplate(tokenizer, data), data)
    (line,) = caplog.messages
    told = "; turns of assistant have no end marker of their own, so their end is not learned"
    assert line.endswith(told) == is_reported
    assert ("their end is not learned" in line) == is_reported
    text = "<|user|>hi<|end|><|assistant|>yo<|user|>a<|end|><|assistant|>b"
    mask = rules.mark(np.array(tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert mask.any()
    if not options:
        assert [
            tokenizer.decode([token])
            for token, counts in zip(tokenizer(text)["input_ids"], mask, strict=True)
            if counts
        ] == ["y", "o", "b"]


BLANKS = (
    "{% for m in messages %}{{ m.role | title }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
OPEN_BLANK = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("kind", "jinja", "answer", "expected"),
    [
        ("of characters", BLANKS, "the cat", "User: hi<|end|>\nAssistant: «the cat<|end|>»\n"),
        ("of words", BLANKS, "the cat", "User: hi<|end|>\nAssistant:« the cat<|end|>»\n"),  # one token with its space
        ("of words", BLANKS, "<think>", "User: hi<|end|>\nAssistant: «<think><|end|>»\n"),
        ("of words", BLANKS, "", "User: hi<|end|>\nAssistant: «<|end|>»\n"),
        ("of pieces", BLANKS, "the cat", "User: hi<|end|>\nAssistant:« the cat<|end|>»\n"),
        ("of pieces", BLANKS, "<think>", "User: hi<|end|>\nAssistant: «<think><|end|>»\n"),
        # A prompt does not end with this, so that the policy has to write it.
        ("of characters", OPEN_BLANK, "the cat", "[INST] hi [/INST]« the cat<|end|>»"),
        (
            "of characters",
            OPEN_BLANK + "{{ ' ' if add_generation_prompt }}",
            "the cat",
            "[INST] hi [/INST] «the cat<|end|>»",
        ),
    ],
)
def test_a_blank_after_a_start_counts_only_as_part_of_a_token_of_the_answer(
    kind: str, jinja: str, answer: str, expected: str
) -> None:
    tokenizer = {"of characters": make_tokenizer, "of words": word_tokenizer, "of pieces": piece_tokenizer}[kind]()
    tokenizer.chat_template = jinja
    assert_marks(tokenizer, turns("hi", answer), expected)


def test_a_blank_after_the_start_of_a_user_does_not_count_either() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = BLANKS
    expected = "User: «hi<|end|>»\nAssistant: the cat<|end|>\n"
    assert_marks(tokenizer, turns("hi", "the cat"), expected, roles_to_train=["user"])


ELSE = "{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}<|end|>"


@pytest.mark.parametrize("role", ["system", "tool"])
def test_rows_with_other_roles_are_skipped_where_the_template_writes_them_as_the_assistants(role: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{ELSE}{{% endfor %}}"
    assert_marks(tokenizer, turns("hi", "yo"), "<|user|>hi<|end|><|assistant|>«yo<|end|>»")
    first, second = turns("hi", "yo")
    with pytest.raises(UnusableRow, match=rf"message 2 \({role}\) would be trained"):
        assert_marks(tokenizer, [first, {"role": role, "content": "no"}, second], "")
    data = DataConfig(source="jsonl")
    messages = [{"role": role, "content": "no"}, first, second]
    encoded, mask = ConversationMask(ChatTemplate(tokenizer, data), data).tokens(messages, first_message=2)
    token_ids = encoded.token_ids
    assert tokenizer.decode(token_ids[mask]) == "yo<|end|>"


def test_a_role_that_is_written_as_the_assistants_has_no_turns() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{ELSE}{{% endfor %}}"
    with pytest.raises(DataError, match=r"no turns of 'system' can be recognized .*; the roles are assistant, user$"):
        assert_marks(tokenizer, turns("hi", "yo", system="no"), "", roles_to_train=["system"])


def test_rows_with_results_are_skipped_where_nothing_shows_where_these_begin_and_end() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}result {{ m.content }}."
        "{% else %}{{ '' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<|' ~ m.role ~ '|>' }}"
        "{{ m.content }}{{ 'call' if m.tool_calls else '<|end|>' }}{% endif %}{% endfor %}"
    )
    assert_marks(tokenizer, turns("hi", "yo"), "<|user|>hi<|end|><|assistant|>«yo<|end|>»")
    with pytest.raises(UnusableRow, match=r"message 3 \(tool\) would be trained"):
        assert_marks(tokenizer, with_tool(), "")


def test_results_that_the_template_writes_under_the_assistants_name_do_not_count() -> None:
    """Check tool results like Falcon 3's, whose start is longer than that of the assistant's turns."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|assistant|><tool>{{ m.content }}</tool>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}{{ 'call' if m.tool_calls }}<|end|>{% endif %}{% endfor %}"
    )
    expected = "<|user|>hi<|end|><|assistant|>«call<|end|>»<|assistant|><tool>21</tool><|assistant|>«the cat<|end|>»"
    assert_marks(tokenizer, with_tool(), expected)


def test_generation_blocks_are_reported_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        mask = ConversationMask(ChatTemplate(make_tokenizer(), DATA), DATA)
        assert caplog.messages == []  # no conversation has been rendered yet
        mask.tokens(turns("hi", "yo"))
        mask.tokens(turns("hi", "yo"))
    assert caplog.messages == [
        "loss mask: generation blocks of the chat template, with the end tokens right after them"
    ]
