"""Masks of the built-in families, token by token, and boundaries that are derived from a template alone."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, Family, piece_tokenizer, word_tokenizer
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema_data import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.masks.derivation import derive_markers
from rlpipe.data.masks.families import FAMILIES as BUILT_IN
from rlpipe.data.masks.markers import encode_markers
from rlpipe.data.masks.probe import Probe
from rlpipe.data.masks.resolve import are_found, find_boundaries, resolve_mask
from rlpipe.data.rows import UnusableRow
from rlpipe.data.template import ChatTemplate
from rlpipe.errors import ConfigError, DataError
from rlpipe.tiny import make_tokenizer
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
DATA = DataConfig(source="jsonl")
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
    "llama4": "<|begin_of_text|><|header_start|>system<|header_end|>\n\nsys<|eot|>"
    "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\n«the cat<|eot|>»"
    "<|header_start|>user<|header_end|>\n\nwho<|eot|><|header_start|>assistant<|header_end|>\n\n«a  mat<|eot|>»",
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
    unseen = {
        "gemma4": "<|turn>tool\n",  # of an earlier template
        "qwen3": "<|im_start|>tool\n",  # results are a part of the user's turn
    }
    assert derived == [marker for marker in known if marker.start != unseen.get(family)]
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


GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>'
GEMMA_RESULT = 'response:weather{value:<|"|>21<|"|>}<tool_response|>'


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
    """The start of a result is the end of what the model writes."""
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


# What the config chooses ----------------------------------------------------------------------------------------------

PLAIN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"


@EVERY
@pytest.mark.parametrize("ends", ["turn", "all", "none", "last"])
def test_end_markers_count_as_the_config_says(family: str, ends: str) -> None:
    own = FAMILIES[family]
    expected = TWO_TURNS[family]
    first, second = (f"the cat{own.end}»", f"a  mat{own.end}»")
    if ends in ("none", "last"):
        expected = expected.replace(first, f"the cat»{own.end}")
    if ends == "none":
        expected = expected.replace(second, f"a  mat»{own.end}")
    if ends == "all":
        for content in ("sys", "hi", "who"):  # of which Mistral's user has no end of its own
            expected = expected.replace(f"{content}{own.end}", f"{content}«{own.end}»")
        expected = expected.replace("sys[/SYSTEM_PROMPT]", "sys«[/SYSTEM_PROMPT]»")
    messages = turns("hi", "the cat", "who", "a  mat", system="sys")
    assert_marks(own.tokenizer(), messages, expected, train_on_eos=ends)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["user"], PLAIN.replace("hi<|im_end|>", "«hi<|im_end|>»")),
        (["assistant"], PLAIN.replace("the cat<|im_end|>", "«the cat<|im_end|>»")),
        (
            ["user", "assistant"],
            PLAIN.replace("hi<|im_end|>", "«hi<|im_end|>»").replace("the cat<|im_end|>", "«the cat<|im_end|>»"),
        ),
    ],
)
def test_roles_count_as_the_config_says(roles: list[str], expected: str) -> None:
    assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), expected, roles_to_train=roles)


def test_a_system_message_in_the_users_turn_counts_with_it() -> None:
    expected = TWO_TURNS["gemma3"].replace("«", "").replace("»", "")
    expected = expected.replace("sys\n\nhi<end_of_turn>", "«sys\n\nhi<end_of_turn>»")
    expected = expected.replace("who<end_of_turn>", "«who<end_of_turn>»")
    messages = turns("hi", "the cat", "who", "a  mat", system="sys")
    assert_marks(FAMILIES["gemma3"].tokenizer(), messages, expected, roles_to_train=["user"])


@pytest.mark.parametrize("options", [{"train_on_inputs": True}, {"loss_mask": "all"}])
def test_all_tokens_count_where_the_config_says_so(options: dict[str, Any]) -> None:
    first = "<|im_start|>"  # which nothing predicts
    assert_marks(
        FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), f"{first}«{PLAIN.removeprefix(first)}»", **options
    )


def test_a_model_without_known_turns_is_trained_whole_if_the_config_says_so() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    with pytest.raises(DataError, match=r"'made here' does not show where turns begin and end .* data.role_boundaries"):
        assert_marks(tokenizer, turns("hi", "the cat"), "")
    assert_marks(tokenizer, turns("hi", "the cat"), "h«i the cat »", loss_mask="all")


def test_no_token_counts_of_no_role() -> None:
    with pytest.raises(UnusableRow, match="no token of a turn of any role"):
        assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), "", roles_to_train=[])


def test_a_role_without_markers_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"roles_to_train: no turns of 'asistant' .* assistant, system, tool, user"):
        assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), "", roles_to_train=["asistant"])


def test_the_loss_mask_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of(FAMILIES["pixtral"])
    ids = template.tokenizer.convert_tokens_to_ids
    with caplog.at_level("INFO"):
        resolve_mask(template, DataConfig(source="jsonl", train_on_eos="last"))
    (line,) = caplog.messages
    assert line.startswith("loss mask: built in for Pixtral, Mistral V3; trained roles assistant, end markers last; ")
    assert f"user [{ids('[INST]')}] to [{ids('[/INST]')}], without end" in line
    assert f"assistant [{ids('[/INST]')}] to [{ids('</s>')}]" in line


# Markers of the config ------------------------------------------------------------------------------------------------

USER = {"role": "user", "start": "<|im_start|>user\n", "end": "<|im_end|>"}
ASSISTANT = {"role": "assistant", "start": "<|im_start|>assistant\n", "end": "eos_token"}


def test_the_configs_markers_take_the_place_of_the_built_in_ones() -> None:
    expected = PLAIN.replace("<|im_start|>assistant\nthe cat<|im_end|>", "«<|im_start|>assistant\nthe cat»<|im_end|>")
    own = ASSISTANT | {"include_start": True, "include_end": False}
    assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), expected, role_boundaries=[USER, own])
    data = DataConfig(source="jsonl", role_boundaries=[ASSISTANT], roles_to_train=["user"])
    with pytest.raises(DataError, match="no turns of 'user' can be told"):
        resolve_mask(template_of(FAMILIES["chatml"]), data)


def test_a_turn_without_end_marker_counts_up_to_the_end() -> None:
    expected = PLAIN.replace("the cat<|im_end|>\n", "«the cat<|im_end|>\n»")
    own = ASSISTANT | {"end": None}
    assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), expected, role_boundaries=[USER, own])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"data.role_boundaries: empty"),
        ([USER, "assistant"], r"data.role_boundaries\[1\]: 'assistant' is no mapping"),
        (
            [{"rol": "user", "start": "a", "end": None}],
            r"data.role_boundaries\[0\]: no such key 'rol'; did you mean role",
        ),
        ([{"role": "user", "start": "a"}], r"data.role_boundaries\[0\]: end is missing; null if there is no marker"),
        ([USER | {"role": ""}], r"data.role_boundaries\[0\].role: '' is not a text of at least one character"),
        ([USER | {"start": None}], r"data.role_boundaries\[0\].start: None is not a text"),
        ([USER | {"end": ""}], r"data.role_boundaries\[0\].end: '' is not a text"),
        ([USER | {"include_end": "yes"}], r"data.role_boundaries\[0\].include_end: 'yes' is not true or false"),
    ],
)
def test_impossible_markers_are_refused_with_their_place(entries: list[Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        resolve_mask(template_of(FAMILIES["chatml"]), DataConfig(source="jsonl", role_boundaries=entries))


def test_markers_that_the_tokenizer_does_not_have_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("nothing", "")
    template = ChatTemplate(tokenizer, DataConfig(source="jsonl"))
    entries = [USER | {"start": "nothing"}]
    with pytest.raises(ConfigError, match=r"data.role_boundaries\[0\].start: 'nothing' has no tokens"):
        resolve_mask(template, DataConfig(source="jsonl", role_boundaries=entries))
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"data.role_boundaries\[0\].end: the tokenizer .* has no end token"):
        resolve_mask(template, DataConfig(source="jsonl", role_boundaries=[USER | {"end": "eos_token"}]))


# Other templates ------------------------------------------------------------------------------------------------------


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
        ("<|user|>{{ m.content }}<|end|>", "turns of user and assistant start alike, with '<|user|>'"),
        ("{{ m.content }}<|end|>", "nothing stands before turns of user"),
        (
            "<|{{ m.role }}|>{{ m.content }}{{ m.content }}<|end|>",
            "it renders a message of a conversation more than once",
        ),
        ("<|{{ m.role }}|><|end|>", "it does not render each message of a conversation, in order"),
        (
            "<|{{ m.role }}|>{{ m.content }}<|end|>{{ '<|user|>go on<|end|>' if loop.index == 2 }}",
            "do not hold what they should",
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
    """Where a system turn comes first, the other end stands before each turn of the user."""
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
    assert f"(the assistant's turns end with {last!r} where they come last, and otherwise before" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("{{ '<|end|>' }}{{ '\n' if not loop.last }}", "<|user|>hi<|tool|><|assistant|>«yo<|end|>»"),
        ("<|end|>{{ '<|tool|>' if loop.last }}", "<|user|>hi<|tool|><|assistant|>«yo<|end|>»<|tool|>"),
    ],
)
def test_what_stands_behind_the_end_of_the_last_turn_does_not_count(end: str, expected: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.role == 'assistant' %}}{end}{{% else %}}<|tool|>{{% endif %}}{{% endfor %}}"
    )
    assert_marks(tokenizer, turns("hi", "yo"), expected)


@pytest.mark.parametrize(
    ("options", "is_told"),
    [({}, True), ({"roles_to_train": ["assistant", "user"]}, True), ({"roles_to_train": ["user"]}, False)],
)
def test_turns_without_an_end_are_told(options: dict, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of a template that ends only turns of the user; a policy that is trained so does not learn to stop."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|end|>' if m.role == 'user' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    data = DataConfig(source="jsonl", **options)
    with caplog.at_level("INFO"):
        rules = resolve_mask(ChatTemplate(tokenizer, data), data)
    (line,) = caplog.messages
    told = "; no end is learned of turns of assistant, which have no end marker of their own"
    assert line.endswith(told) == is_told
    assert ("no end is learned" in line) == is_told
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
        ("of words", BLANKS, "the cat", "User: hi<|end|>\nAssistant:« the cat<|end|>»\n"),  # one token with its blank
        ("of words", BLANKS, "<think>", "User: hi<|end|>\nAssistant: «<think><|end|>»\n"),
        ("of words", BLANKS, "", "User: hi<|end|>\nAssistant: «<|end|>»\n"),
        ("of pieces", BLANKS, "the cat", "User: hi<|end|>\nAssistant:« the cat<|end|>»\n"),
        ("of pieces", BLANKS, "<think>", "User: hi<|end|>\nAssistant: «<think><|end|>»\n"),
        # Which a prompt does not end with, so that the policy has to write it.
        ("of characters", OPEN_BLANK, "the cat", "[INST] hi [/INST]« the cat<|end|>»"),
        (
            "of characters",
            OPEN_BLANK + "{{ ' ' if add_generation_prompt }}",
            "the cat",
            "[INST] hi [/INST] «the cat<|end|>»",
        ),
    ],
)
def test_a_blank_behind_a_start_counts_only_as_part_of_a_token_of_the_answer(
    kind: str, jinja: str, answer: str, expected: str
) -> None:
    tokenizer = {"of characters": make_tokenizer, "of words": word_tokenizer, "of pieces": piece_tokenizer}[kind]()
    tokenizer.chat_template = jinja
    assert_marks(tokenizer, turns("hi", answer), expected)


ELSE = "{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}<|end|>"


@pytest.mark.parametrize("role", ["system", "tool"])
def test_rows_with_other_roles_are_skipped_where_the_template_writes_them_as_the_assistants(role: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{ELSE}{{% endfor %}}"
    assert_marks(tokenizer, turns("hi", "yo"), "<|user|>hi<|end|><|assistant|>«yo<|end|>»")
    first, second = turns("hi", "yo")
    with pytest.raises(UnusableRow, match=f"its turns of {role} would count as the assistant's: the chat template"):
        assert_marks(tokenizer, [first, {"role": role, "content": "no"}, second], "")
    data = DataConfig(source="jsonl")
    messages = [{"role": role, "content": "no"}, first, second]
    token_ids, mask = ConversationMask(ChatTemplate(tokenizer, data), data).tokens(messages, first_message=2)
    assert tokenizer.decode(token_ids[mask]) == "yo<|end|>"


def test_results_that_the_template_writes_under_the_assistants_name_do_not_count() -> None:
    """As Falcon 3 does; their start is longer than that of the assistant's turns."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|assistant|><tool>{{ m.content }}</tool>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}{{ 'call' if m.tool_calls }}<|end|>{% endif %}{% endfor %}"
    )
    expected = "<|user|>hi<|end|><|assistant|>«call<|end|>»<|assistant|><tool>21</tool><|assistant|>«the cat<|end|>»"
    assert_marks(tokenizer, with_tool(), expected)


def test_generation_blocks_are_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ConversationMask(ChatTemplate(make_tokenizer(), DATA), DATA)
    assert caplog.messages == [
        "loss mask: generation blocks of the chat template, with the end tokens right behind them"
    ]


def test_impossible_markers_and_ends_are_refused_when_the_config_is_read() -> None:
    given = ["data=jsonl", "data.path=rows.jsonl", "model.path=policy", "algorithm=sft"]
    with pytest.raises(ConfigError, match=r"data.role_boundaries\[0\]: no such key 'rol'; did you mean role"):
        load_config([*given, "data.role_boundaries=[{rol: user, start: a, end: null}]"], need_files=False)
    with pytest.raises(ConfigError, match=r"data.train_on_eos: 'every' is not one of turn, all, none, last"):
        load_config([*given, "data.train_on_eos=every"], need_files=False)
    read = load_config([*given, 'data.role_boundaries=[{role: user, start: "a", end: null}]'], need_files=False)
    assert [dict(entry) for entry in read.data.role_boundaries or ()] == [{"role": "user", "start": "a", "end": None}]
