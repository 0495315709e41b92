"""Tests that tokenizers load or fail with one line, and that rows become prompts and SFT sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.row import RowLocation, SkipKind, UnusableRow
from rlpipe.data.row_renderer import PromptRenderer, SequenceRenderer
from rlpipe.errors import ConfigError, DataError, ModelError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.types import NO_VERSION, Prompt, Rollout

PLACE = RowLocation(row=4, epoch=2, location="rows.jsonl, line 5")
TOKENIZER = make_tokenizer()


def prompt_of(row: dict[str, Any], **options: Any) -> Prompt:
    return PromptRenderer(TOKENIZER, DataConfig(source="jsonl", **options)).render(row, PLACE)


def sequence_of(row: dict[str, Any], *, max_tokens: int = 100, **options: Any) -> Rollout:
    renderer = SequenceRenderer(TOKENIZER, DataConfig(source="jsonl", **options), max_tokens=max_tokens)
    return renderer.render(row, PLACE)


def texts(rollout: Rollout) -> tuple[str, str]:
    """Return the text of the tokens without loss, and of those with loss."""
    return (
        str(TOKENIZER.decode(rollout.token_ids[~rollout.loss_mask])),
        str(TOKENIZER.decode(rollout.token_ids[rollout.loss_mask])),
    )


# Tokenizers -----------------------------------------------------------------------------------------------------------


def test_tokenizer_loads_from_a_folder_with_another_template(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "policy")
    (tmp_path / "mine.jinja").write_text("\ufeffmine", encoding="utf-8")
    config = ModelConfig(
        path="no/matter", tokenizer=str(tmp_path / "policy"), chat_template=str(tmp_path / "mine.jinja")
    )
    tokenizer = load_tokenizer(config)
    assert tokenizer.chat_template == "mine", "without its byte order mark"
    assert tokenizer("ab")["input_ids"] == TOKENIZER("ab")["input_ids"]


def test_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).pad_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such/folder"])
def test_missing_folder_is_a_model_error(path: str) -> None:
    with pytest.raises(ModelError, match=f"model.path: there is no folder '{path}'"):
        load_tokenizer(ModelConfig(path=path))


def test_offline_hub_id_fails_without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model.tokenizer: the tokenizer of 'nobody/nothing' .*cache holds no copy"):
        load_tokenizer(ModelConfig(path="x", tokenizer="nobody/nothing"))


def test_folder_without_tokenizer_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.path: the tokenizer of .* can't be loaded") as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


# Prompts --------------------------------------------------------------------------------------------------------------


def test_text_becomes_a_user_turn_after_the_system_prompt() -> None:
    prompt = prompt_of({"prompt": "2+2?", "answer": "4"}, system_prompt="Add.")
    assert TOKENIZER.decode(prompt.token_ids) == "<|system|>Add.<|end|><|user|>2+2?<|end|><|assistant|>"
    assert prompt.prompt == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    assert prompt.task == {"answer": "4"}
    assert (prompt.prompt_id, prompt.epoch) == (4, 2)


def test_messages_keep_their_own_system_turn() -> None:
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    prompt = prompt_of({"prompt": messages}, system_prompt="Other.")
    assert TOKENIZER.decode(prompt.token_ids) == "<|system|>Mine.<|end|><|user|>hi<|end|><|assistant|>"


def test_an_assistant_turn_at_the_end_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure:"}]
    prompt = prompt_of({"prompt": messages})
    assert TOKENIZER.decode(prompt.token_ids) == "<|user|>hi<|end|><|assistant|>Sure:"


def test_plain_text_is_not_rendered() -> None:
    prompt = prompt_of({"prompt": "2+2="}, chat=False, system_prompt="Add.")
    assert TOKENIZER.decode(prompt.token_ids) == "2+2="
    assert prompt.prompt == "2+2="


def test_template_gets_its_options_and_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ mood }} {{ tools[0].function.name }}"
    tool = {"type": "function", "function": {"name": "add"}}
    data = DataConfig(source="jsonl", chat_template_kwargs={"mood": "calm"}, tools=[tool])
    prompt = PromptRenderer(tokenizer, data).render({"prompt": "x"}, PLACE)
    assert tokenizer.decode(prompt.token_ids) == "calm add"


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ 2.0 ** 5000 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"]
)
def test_a_template_that_fails_is_named(template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UnusableRow, match="the chat template raised"):
        PromptRenderer(tokenizer, DataConfig(source="jsonl")).render({"prompt": "x"}, PLACE)


def test_a_rows_own_template_options_are_used_in_prompts_and_sequences() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ mood }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<|end|>{% endfor %}"
    )
    data = DataConfig(source="jsonl", chat_template_kwargs={"mood": "calm"})
    row = {"prompt": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"mood": "glad", "other": None}}
    prompts, sequences = PromptRenderer(tokenizer, data), SequenceRenderer(tokenizer, data, max_tokens=100)
    assert tokenizer.decode(prompts.render(row, PLACE).token_ids).startswith("glad[user]x")
    row["completion"] = [{"role": "assistant", "content": "y"}]
    assert tokenizer.decode(sequences.render(row, PLACE).token_ids).startswith("glad[user]x")
    with pytest.raises(UnusableRow, match="'tools' is set for each row already"):
        prompts.render({**row, "chat_template_kwargs": {"tools": []}}, PLACE)
    as_json = prompts.render({**row, "chat_template_kwargs": '{"mood": "glad"}'}, PLACE)
    assert tokenizer.decode(as_json.token_ids).startswith("glad[user]x")
    with pytest.raises(UnusableRow, match="expected a dictionary"):
        prompts.render({**row, "chat_template_kwargs": [1]}, PLACE)
    with pytest.raises(UnusableRow, match="'chat_template_kwargs': not JSON"):
        prompts.render({**row, "chat_template_kwargs": "loud"}, PLACE)


def test_nulls_that_tables_add_to_messages_are_dropped() -> None:
    prompt = prompt_of({"prompt": [{"role": "user", "content": "hi", "tool_calls": None}]})
    assert prompt.prompt == [{"role": "user", "content": "hi"}]


def test_missing_column_is_named_with_the_row_and_the_columns() -> None:
    message = "rows.jsonl, line 5: no column 'prompt'; existing columns: question, answer; set data.prompt_column"
    with pytest.raises(DataError, match=message):
        prompt_of({"question": "x", "answer": "y"})


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (None, SkipKind.UNRENDERABLE, "column 'prompt' is null"),
        (7, SkipKind.UNRENDERABLE, "column 'prompt' holds a int, not a string or messages"),
        (["hi"], SkipKind.UNRENDERABLE, "must be a dict"),
        ([], SkipKind.UNRENDERABLE, "column 'prompt' is an empty list"),
        ([{"role": None, "content": "hi"}], SkipKind.UNRENDERABLE, "must be a dict with role"),
        ([{"from": "hmuan", "value": "hi"}], SkipKind.UNRENDERABLE, "message 1: .* did you mean human"),
        ("x" * 30, SkipKind.TOO_LONG, "33 prompt tokens, more than data.max_prompt_tokens=32"),
    ],
)
def test_unusable_prompts_say_why(value: Any, kind: SkipKind, reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason) as caught:
        prompt_of({"prompt": value}, max_prompt_tokens=32)
    assert caught.value.kind is kind


def test_empty_plain_prompt_is_unusable() -> None:
    with pytest.raises(UnusableRow, match="empty"):
        prompt_of({"prompt": ""}, chat=False)


def test_chat_needs_a_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template; set model.chat_template, or data.chat=false"):
        PromptRenderer(tokenizer, DataConfig(source="jsonl"))


# SFT sequences --------------------------------------------------------------------------------------------------------


def test_completion_becomes_an_assistant_turn_after_the_prompt_of_rl() -> None:
    row = {"prompt": "2+2?", "completion": "4", "level": 1}
    rollout = sequence_of(row, system_prompt="Add.")
    assert texts(rollout) == ("<|system|>Add.<|end|><|user|>2+2?<|end|><|assistant|>", "4<|end|>")
    prompt = prompt_of(row, system_prompt="Add.")
    assert np.array_equal(rollout.token_ids[: len(prompt.token_ids)], prompt.token_ids)
    assert rollout.task == {"level": 1}


def test_sequences_carry_advantage_one_on_loss_tokens_and_no_policy_version() -> None:
    rollout = sequence_of({"prompt": "2+2?", "completion": "4"})
    assert np.array_equal(rollout.advantages, rollout.loss_mask.astype(np.float32))
    assert not rollout.logprobs.any()
    assert (rollout.policy_versions == NO_VERSION).all()
    assert (rollout.prompt_id, rollout.name) == (4, "4/2")


def test_conversation_learns_every_assistant_turn() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rollout = sequence_of({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert texts(rollout)[1] == "b<|end|>d<|end|>"


def test_only_the_completion_counts_after_a_prompt_with_assistant_turns() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    prompt = [{"role": role, "content": content} for role, content in turns]
    rollout = sequence_of({"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]})
    assert texts(rollout)[1] == "d<|end|>"


def test_plain_completion_ends_with_the_end_token() -> None:
    rollout = sequence_of({"prompt": "2+2=", "completion": "4"}, chat=False)
    assert texts(rollout) == ("2+2=", "4<|end|>")


def test_conversation_prompt_is_what_precedes_the_first_answer() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns], "level": 1}
    prompt = SequenceRenderer(TOKENIZER, DataConfig(source="jsonl"), max_tokens=100).prompt(row, PLACE)
    assert TOKENIZER.decode(prompt.token_ids) == "<|user|>a<|end|><|assistant|>"
    assert prompt.task == {"level": 1}


def test_long_sequences_and_long_prompts_are_unusable() -> None:
    row = {"prompt": "2+2?", "completion": "four"}
    with pytest.raises(UnusableRow, match=r"12 tokens, more than learner.max_tokens_per_microbatch=11") as caught:
        sequence_of(row, max_tokens=11)
    assert caught.value.kind is SkipKind.TOO_LONG
    with pytest.raises(UnusableRow, match=r"7 prompt tokens, more than data.max_prompt_tokens=6"):
        sequence_of(row, max_prompt_tokens=6)


def test_row_with_neither_conversation_nor_completion_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"line 5: no columns 'prompt' and 'completion'; existing columns: text"):
        sequence_of({"text": "x"})


def test_template_whose_turns_can_not_be_told_apart_names_the_row() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
    renderer = SequenceRenderer(tokenizer, DataConfig(source="jsonl"), max_tokens=100)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    with pytest.raises(DataError, match=r"^rows.jsonl, line 5: the chat template .* start the same way"):
        renderer.render({"messages": [{"role": role, "content": content} for role, content in turns]}, PLACE)


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, "2<|end|>"),
        ({"train_on_inputs": True}, "+1=2<|end|>"),
        ({"loss_mask": "all"}, "+1=2<|end|>"),
        ({"train_on_eos": "none"}, "2"),
    ],
)
def test_plain_pairs_follow_the_options_of_the_loss_mask(options: dict[str, Any], trained: str) -> None:
    row = {"prompt": "1+1=", "completion": "2"}
    assert texts(sequence_of(row, chat=False, **options))[1] == trained


@pytest.mark.parametrize("options", [{}, {"chat": False}, {"text_column": "completion"}])
def test_half_a_character_makes_a_row_unusable(options: dict[str, Any]) -> None:
    row = {"prompt": "a", "completion": "b\ud83d"}
    with pytest.raises(UnusableRow, match=r"an unpaired surrogate, '\\ud83d'"):
        sequence_of(row, **options)


def test_raw_texts_need_no_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    renderer = SequenceRenderer(tokenizer, DataConfig(source="jsonl", text_column="text"), max_tokens=100)
    assert renderer.render({"text": "abc"}, PLACE).num_loss_tokens == 3


def test_end_tokens_that_a_tokenizer_adds_are_not_part_of_a_prompt() -> None:
    tokenizer = make_tokenizer()
    ends = processors.TemplateProcessing(single="<|user|> $A <|end|>", special_tokens=[("<|user|>", 4), ("<|end|>", 2)])
    tokenizer.backend_tokenizer.post_processor = ends
    data = DataConfig(source="jsonl", chat=False, completion_column="answer")
    row = {"prompt": "ab", "answer": "c"}
    assert tokenizer.decode(tokenizer("ab")["input_ids"]) == "<|user|>ab<|end|>"
    assert tokenizer.decode(PromptRenderer(tokenizer, data).render(row, PLACE).token_ids) == "<|user|>ab"
    sequence = SequenceRenderer(tokenizer, data, max_tokens=100).render(row, PLACE)
    assert tokenizer.decode(sequence.token_ids) == "<|user|>abc<|end|>"
    raw = SequenceRenderer(tokenizer, DataConfig(source="jsonl", text_column="text"), max_tokens=100)
    assert tokenizer.decode(raw.render({"text": "ab"}, PLACE).token_ids) == "<|user|>ab<|end|>"


@pytest.mark.parametrize("blank", ["", " ", "\n\t ", "\u3000"])
def test_a_blank_prompt_is_skipped(blank: str) -> None:
    with pytest.raises(UnusableRow, match=r"^the prompt is empty$"):
        prompt_of({"prompt": blank})


def test_an_empty_completion_is_skipped() -> None:
    options: dict[str, Any] = {"chat": False, "train_on_eos": "none"}
    with pytest.raises(UnusableRow, match=r"^it has no tokens to train: its completion is empty$"):
        sequence_of({"prompt": "1+1=", "completion": ""}, **options)


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([1], r"data\.tools\[0\]: expected a JSON schema with a name, found 1"),
        ([{"name": "f"}, {"function": []}], r"data\.tools\[1\]: its key 'function' is \[\], not a schema"),
        ([{"type": "function"}], r"data\.tools\[0\]: its key 'name' is None, not a string"),
    ],
)
def test_tools_of_the_config_are_schemas(tools: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}$"):
        prompt_of({"prompt": "a"}, tools=tools, chat=True)
