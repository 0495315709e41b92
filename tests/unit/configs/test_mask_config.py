"""Tests that the config selects the trained tokens and the markers, and that impossible values are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import FAMILIES
from mask_cases import TWO_TURNS, assert_marks, template_of, turns
from tokenizers import normalizers

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.masks.rules import resolve_mask
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.models.tiny_model import make_tokenizer

EVERY = pytest.mark.parametrize("family", FAMILIES)

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
        for content in ("sys", "hi", "who"):  # Mistral's user turn has no end of its own
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
    first = "<|im_start|>"  # no earlier token predicts it
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
    with pytest.raises(UnusableRow, match="it has no token in a turn of any role"):
        assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), "", roles_to_train=[])


def test_a_role_without_markers_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"roles_to_train: no turns of 'asistant' .* assistant, system, tool, user"):
        assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), "", roles_to_train=["asistant"])


def test_the_loss_mask_is_printed_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of(FAMILIES["pixtral"])
    ids = template.tokenizer.convert_tokens_to_ids
    with caplog.at_level("INFO"):
        resolve_mask(template, DataConfig(source="jsonl", train_on_eos="last"))
    (line,) = caplog.messages
    assert line.startswith("loss mask: built in for Pixtral, Mistral V3; trained roles assistant, end markers last; ")
    assert f"user [{ids('[INST]')}] to [{ids('[/INST]')}], without end" in line
    assert f"assistant [{ids('[/INST]')}] to [{ids('</s>')}]" in line


@pytest.mark.parametrize("options", [{"train_on_inputs": True}, {"loss_mask": "all"}])
def test_no_roles_are_printed_where_all_tokens_count(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        resolve_mask(template_of(FAMILIES["pixtral"]), DataConfig(source="jsonl", **options))
    assert caplog.messages == ["loss mask: all tokens count, except padding and those of images, audio and videos"]


# Markers of the config ------------------------------------------------------------------------------------------------

USER = {"role": "user", "start": "<|im_start|>user\n", "end": "<|im_end|>"}
ASSISTANT = {"role": "assistant", "start": "<|im_start|>assistant\n", "end": "eos_token"}


def test_the_configs_markers_take_the_place_of_the_built_in_ones() -> None:
    expected = PLAIN.replace("<|im_start|>assistant\nthe cat<|im_end|>", "«<|im_start|>assistant\nthe cat»<|im_end|>")
    own = ASSISTANT | {"include_start": True, "include_end": False}
    assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), expected, role_boundaries=[USER, own])
    data = DataConfig(source="jsonl", role_boundaries=[ASSISTANT], roles_to_train=["user"])
    with pytest.raises(DataError, match="no turns of 'user' can be recognized"):
        resolve_mask(template_of(FAMILIES["chatml"]), data)


def test_a_turn_without_end_marker_counts_up_to_the_end() -> None:
    expected = PLAIN.replace("the cat<|im_end|>\n", "«the cat<|im_end|>\n»")
    own = ASSISTANT | {"end": None}
    assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), expected, role_boundaries=[USER, own])


def test_turns_without_end_marker_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    data = DataConfig(source="jsonl", role_boundaries=[USER, ASSISTANT | {"end": None}])
    with caplog.at_level("INFO"):
        resolve_mask(template_of(FAMILIES["chatml"]), data)
    assert caplog.messages[0].endswith(
        "; turns of assistant have no end marker of their own, so their end is not learned"
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"data.role_boundaries: empty"),
        ([USER, "assistant"], r"data.role_boundaries\[1\]: 'assistant' is not a mapping"),
        (
            [{"rol": "user", "start": "a", "end": None}],
            r"data.role_boundaries\[0\]: no such key 'rol'; did you mean role",
        ),
        ([{"role": "user", "start": "a"}], r"data.role_boundaries\[0\]: end is missing; null if there is no marker"),
        ([USER | {"role": ""}], r"data.role_boundaries\[0\].role: '' is not a non-empty string"),
        ([USER | {"start": None}], r"data.role_boundaries\[0\].start: None is not a non-empty string"),
        ([USER | {"end": ""}], r"data.role_boundaries\[0\].end: '' is not a non-empty string"),
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


# At load --------------------------------------------------------------------------------------------------------------

GIVEN = ["data=jsonl", "data.path=rows.jsonl", "model.path=policy", "algorithm=sft"]
ENTRY = "{role: assistant, start: a, end: null}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["data.role_boundaries=[{rol: user, start: a, end: null}]"],
            r"data.role_boundaries\[0\]: no such key 'rol'; did",
        ),
        (
            ["data.role_boundaries=[{role: '', start: a, end: null}]"],
            r"data.role_boundaries\[0\].role: '' is not a non-empty string",
        ),
        (
            ["data.role_boundaries=[{role: a, start: '', end: b}]"],
            r"data.role_boundaries\[0\].start: '' is not a non-empty string",
        ),
        (
            ["data.role_boundaries=[{role: a, start: b, end: ''}]"],
            r"data.role_boundaries\[0\].end: '' is not a non-empty string",
        ),
        (
            ["data.role_boundaries=[{role: a, start: b, end: c, interrupts: 1}]"],
            r"\[0\].interrupts: 1 is not true or false",
        ),
        (
            [f"data.role_boundaries=[{ENTRY}, {{role: user, start: a, end: b}}]"],
            r"data.role_boundaries\[1\].start: 'a' starts turns of assistant already, in \[0\]",
        ),
        (["data.role_boundaries=[]"], r"data.role_boundaries: empty, so no token .* add entries, or set null"),
        (["data.train_on_eos=every"], r"data.train_on_eos: 'every' is not one of turn, all, none, last"),
        (["data.loss_mask=role"], r"data.loss_mask: 'role' is not one of roles, all; did you mean roles\?"),
        (["data.roles_to_train=[]"], r"data.roles_to_train: empty, so no token .* name roles, as in \[assistant\]"),
        (
            ["data.roles_to_train=[user, asistant]"],
            r"data.roles_to_train: no turns of 'asistant' .* did you mean assistant",
        ),
        (
            ["data.roles_to_train=[bot]"],
            r"no turns of 'bot' can be recognized; there are system, user, assistant, tool",
        ),
        (
            [f"data.role_boundaries=[{ENTRY}]", "data.roles_to_train=[user]"],
            r"data.roles_to_train: no turns of 'user' can be recognized by data.role_boundaries; there are assistant",
        ),
    ],
)
def test_what_can_not_be_is_refused_when_the_config_is_read(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config([*GIVEN, *options], need_files=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        [f"data.role_boundaries=[{ENTRY}]"],
        ["data.role_boundaries=[{role: bot, start: a, end: null}]", "data.roles_to_train=[bot]"],
        ["data.roles_to_train=[]", "data.train_on_eos=all"],
        ["data.roles_to_train=[]", "data.chat=false"],
        ["data.roles_to_train=[tool]"],
    ],
)
def test_what_trains_something_is_taken(options: list[str]) -> None:
    load_config([*GIVEN, *options], need_files=False)


def test_markers_are_read_as_written() -> None:
    read = load_config([*GIVEN, f"data.role_boundaries=[{ENTRY}]"], need_files=False)
    assert [dict(entry) for entry in read.data.role_boundaries or ()] == [
        {"role": "assistant", "start": "a", "end": None}
    ]


def test_markers_of_the_config_are_encoded_before_any_row() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("nothing", "")
    tokenizer.chat_template = None
    for given, message in [
        ([USER, ASSISTANT | {"start": "nothing"}], r"data.role_boundaries\[1\].start: 'nothing' has no tokens"),
        (
            [USER, ASSISTANT | {"start": "nothing" + USER["start"]}],
            r"\[1\].start: has the same tokens as the start of user",
        ),
    ]:
        data = DataConfig(source="jsonl", role_boundaries=given)
        with pytest.raises(ConfigError, match=message):
            ConversationMask(ChatTemplate(tokenizer, data), data)


@pytest.mark.parametrize("marker", ["€", "A€"])
def test_markers_that_are_unknown_to_the_tokenizer_are_refused(marker: str) -> None:
    data = DataConfig(source="jsonl", role_boundaries=[USER, ASSISTANT | {"start": marker}])
    message = (
        rf"data.role_boundaries\[1\].start: '{marker}' has text that the tokenizer .* does not know \(<\|unknown\|>\)"
    )
    with pytest.raises(ConfigError, match=message):
        resolve_mask(ChatTemplate(make_tokenizer(), data), data)


def test_an_unknown_token_that_is_written_out_is_a_marker() -> None:
    tokenizer = make_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token  # as in GPT-2's tokenizer
    data = DataConfig(source="jsonl", role_boundaries=[ASSISTANT | {"start": "<|assistant|>", "end": "<|end|>"}])
    assert resolve_mask(ChatTemplate(tokenizer, data), data).boundaries[0].end == (tokenizer.eos_token_id,)


def test_turns_that_a_template_marks_with_unknown_text_are_not_told() -> None:
    tokenizer = make_tokenizer()
    marker = "{{ '€' if message.role == 'user' else '<|assistant|>' }}"
    tokenizer.chat_template = "{% for message in messages %}" + marker + "{{ message.content }}<|end|>{% endfor %}"
    data = DataConfig(source="jsonl")
    with pytest.raises(
        DataError,
        match=r"where turns begin and end \(its markers\[0\]\.start: '€' has text .*: set data\.role_boundaries",
    ):
        resolve_mask(ChatTemplate(tokenizer, data), data)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("roles_to_train", "[asistant]", r"data\.sources\.b\.roles_to_train: no turns of 'asistant'"),
        ("roles_to_train", "[]", r"data\.sources\.b\.roles_to_train: empty"),
        ("role_boundaries", "[{role: x}]", r"data\.sources\.b\.role_boundaries\[0\]: start is missing"),
    ],
)
def test_the_options_of_a_mix_s_sources_are_checked_under_their_names(option: str, value: str, message: str) -> None:
    sources = f"{{a: {{source: jsonl, path: a}}, b: {{source: jsonl, path: b, {option}: {value}}}}}"
    with pytest.raises(ConfigError, match=message):
        load_config(["algorithm=sft", "model.path=x", "data.source=mix", f"data.sources={sources}"], need_files=False)


def test_answers_that_go_to_the_end_of_the_row_are_refused_where_more_follows() -> None:
    endless = [{"role": "assistant", "start": "<|im_start|>assistant\n", "end": None}]
    expected = PLAIN.replace("the cat<|im_end|>\n", "«the cat<|im_end|>\n»")
    assert_marks(FAMILIES["chatml"].tokenizer(), turns("hi", "the cat"), expected, role_boundaries=endless)
    with pytest.raises(UnusableRow, match=r"message 3 \(user\) would be trained: with end: null .* the end of the row"):
        assert_marks(
            FAMILIES["chatml"].tokenizer(), turns("hi", "the cat", "who", "a mat"), "", role_boundaries=endless
        )


MASK_OPTIONS = [
    "data.loss_mask=all",
    "data.train_on_inputs=true",
    "data.roles_to_train=[user]",
    "data.train_on_eos=none",
    "data.role_boundaries=[{role: assistant, start: a, end: b}]",
]


@pytest.mark.parametrize("option", MASK_OPTIONS)
def test_options_of_masks_are_refused_where_completions_are_trained(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} has no effect: algorithm.kind=rl trains the completions"):
        load_config(["model.path=m", "data.source=jsonl", "data.path=x", option])


@pytest.mark.parametrize("kind", ["reward_model", "process_reward_model"])
@pytest.mark.parametrize("option", MASK_OPTIONS[:4])
def test_options_of_masks_are_refused_where_values_are_trained(option: str, kind: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} has no effect: algorithm.kind={kind} trains values of completions"):
        load_config([f"algorithm={kind}", "model.path=m", "data.source=jsonl", "data.path=x", option])


@pytest.mark.parametrize("option", MASK_OPTIONS[2:])
@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        ("data.text_column=text", "all tokens of data.text_column are trained"),
        ("data.loss_mask=all", "data.loss_mask=all or data.train_on_inputs=true trains all tokens"),
        ("data.train_on_inputs=true", "data.loss_mask=all or data.train_on_inputs=true trains all tokens"),
    ],
)
def test_options_of_masks_are_refused_where_all_tokens_are_trained(option: str, whole: str, reason: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} has no effect: {reason}"):
        load_config(["algorithm=sft", "model.path=m", "data.source=jsonl", "data.path=x", whole, option])


MIX = [
    "algorithm=sft",
    "model.path=m",
    "data.source=mix",
    "data.roles_to_train=[user]",
    "data.sources.chats={source: jsonl, path: x}",
]


def test_options_of_a_mix_are_for_the_sources_that_need_them() -> None:
    load_config([*MIX, "data.sources.texts={source: jsonl, path: y, text_column: text}"], need_files=False)
    own = "data.sources.texts={source: jsonl, path: y, text_column: text, train_on_eos: none}"
    with pytest.raises(ConfigError, match=r"data.sources.texts.train_on_eos has no effect: all tokens of"):
        load_config([*MIX, own], need_files=False)
