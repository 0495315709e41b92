"""Tests that rows written for other libraries train like message rows, or are refused by the name of the wrong key."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.prompts import open_sft_rows
from rlpipe.data.render.messages import chat_messages
from rlpipe.data.row import Row, RowLocation, UnusableRow
from rlpipe.data.row_renderer import PromptRenderer, SequenceRenderer
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.types import Rollout

PLACE = RowLocation(row=4, epoch=2, location="rows.jsonl, line 5")
TOKENIZER = make_tokenizer()
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def rendered(row: Row, **options: Any) -> Rollout:
    return SequenceRenderer(TOKENIZER, DataConfig(source="jsonl", **options), max_tokens=400).render(row, PLACE)


def texts(row: Row, **options: Any) -> tuple[str, str]:
    """Return the text of the whole sequence, and the text of its trained tokens."""
    rollout = rendered(row, **options)
    return str(TOKENIZER.decode(rollout.token_ids)), str(TOKENIZER.decode(rollout.token_ids[rollout.loss_mask]))


# Conversations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": CHAT}, {}),
        ({"messages": SHAREGPT}, {}),
        ({"conversations": SHAREGPT}, {}),
        ({"conversations": CHAT}, {}),
        ({"messages": None, "conversations": SHAREGPT}, {}),
        ({"messages": CHAT, "conversations": None}, {}),
        ({"dialog": SHAREGPT}, {"messages_column": "dialog"}),
        ({"dialog": CHAT, "messages": "another"}, {"messages_column": "dialog"}),
        ({"conversations": SHAREGPT}, {"messages_column": "conversations"}),
        ({"messages": [{**turn, "from": None, "value": None} for turn in CHAT]}, {}),
        ({"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]}, {}),
        ({"messages": None, "prompt": "a", "completion": "b"}, {}),
        ({"messages": None, "prompt": CHAT[:1], "completion": CHAT[1:]}, {}),
        ({"prompt": SHAREGPT[:1], "completion": SHAREGPT[1:]}, {}),
        ({"instruction": "a", "output": "b"}, {}),
        ({"instruction": "a", "input": "", "output": "b"}, {}),
        ({"messages": None, "instruction": "a", "input": None, "output": "b"}, {}),
        ({"prompt": None, "completion": None, "instruction": "a", "output": "b"}, {}),
        ({"prompt": None, "completion": "x", "instruction": "a", "output": "b"}, {}),
        ({"prompt": "a", "completion": "b", "instruction": None, "output": None}, {}),
    ],
)
def test_every_format_gives_the_same_sequence(row: Row, options: dict[str, Any]) -> None:
    assert texts(row, **options) == ("<|user|>a<|end|><|assistant|>b<|end|>", "b<|end|>")


NULL_PAIR = {"prompt": None, "completion": None, "instruction": "a", "output": "b"}


def test_null_columns_of_a_pair_make_room_for_those_of_alpaca_without_a_template() -> None:
    sequence, counted = texts(NULL_PAIR, chat=False)
    assert sequence.endswith("### Instruction:\na\n\n### Response:\nb<|end|>")
    assert counted == "b<|end|>"
    assert rendered({**NULL_PAIR, "level": 1}).task == {"level": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": []}, "column 'completion' is an empty list"),
        ({"prompt": [], "completion": "b"}, "column 'prompt' is an empty list"),
        ({"prompt": "a", "completion": 3}, "column 'completion' holds a int, not a string or messages"),
        ({"prompt": 3, "completion": "b"}, "column 'prompt' holds a int, not a string or messages"),
        ({"prompt": ["a"], "completion": "b"}, "column 'prompt': message 1: a chat message must be a dict"),
        ({"prompt": "a", "completion": [{"role": "assistant"}]}, "column 'completion': message 1: its key 'content'"),
        ({"prompt": None, "completion": "b"}, "column 'prompt' is null"),
        ({"prompt": None, "completion": None, "instruction": None, "output": None}, "column 'prompt' is null"),
        ({"messages": None, "instruction": "a", "output": None}, "column 'output' is None, not a string"),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
def test_wrong_prompts_and_completions_are_unusable_and_the_column_is_named(row: Row, reason: str, chat: bool) -> None:
    with pytest.raises(UnusableRow, match=f"^{reason}"):
        rendered(row, chat=chat)


@pytest.mark.parametrize(
    ("prompt", "reason"), [([], "is an empty list"), (3, "holds a int, not a string or messages"), ({}, "holds a dict")]
)
def test_wrong_prompts_of_rl_are_unusable_and_the_column_is_named(prompt: Any, reason: str) -> None:
    renderer = PromptRenderer(TOKENIZER, DataConfig(source="jsonl", prompt_column="q", system_prompt="S"))
    with pytest.raises(UnusableRow, match=f"^column 'q' {reason}"):
        renderer.render({"q": prompt}, PLACE)


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"conversations": SHAREGPT}, {"instruction": "a", "output": "b"}])
def test_the_other_columns_are_kept_alongside_the_sequence(row: Row) -> None:
    assert rendered({**row, "level": 1}).task == {"level": 1}


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"conversations": SHAREGPT}, {"instruction": "a", "output": "b"}])
def test_held_out_prompts_are_the_same_in_every_format(row: Row) -> None:
    prompt = SequenceRenderer(TOKENIZER, DataConfig(source="jsonl"), max_tokens=100).prompt(row, PLACE)
    assert TOKENIZER.decode(prompt.token_ids) == "<|user|>a<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        *[(name, "assistant") for name in ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call")],
        *[(name, "tool") for name in ("tool", "observation", "function", "function_response")],
        *[(name, "user") for name in ("human", "user")],
        ("system", "system"),
    ],
)
def test_speakers_of_sharegpt_have_the_roles_of_chats(speaker: str, role: str) -> None:
    assert chat_messages([{"from": speaker, "value": "x"}]) == [{"role": role, "content": "x"}]


def test_the_system_column_of_sharegpt_comes_first_unless_a_turn_does() -> None:
    assert texts({"conversations": SHAREGPT, "system": "S"})[0].startswith("<|system|>S<|end|><|user|>a")
    own = [{"from": "system", "value": "own"}, *SHAREGPT]
    assert texts({"conversations": own, "system": "S"})[0].startswith("<|system|>own<|end|><|user|>a")
    assert texts({"conversations": SHAREGPT, "system": ""}, system_prompt="D")[0].startswith("<|system|>D<|end|>")
    assert rendered({"messages": CHAT, "system": "S"}).task == {"system": "S"}


def test_a_prompt_may_be_a_list_of_sharegpt_turns() -> None:
    prompt = PromptRenderer(TOKENIZER, DataConfig(source="jsonl")).render({"prompt": SHAREGPT[:1]}, PLACE)
    assert prompt.prompt == CHAT[:1]
    assert TOKENIZER.decode(prompt.token_ids) == "<|user|>a<|end|><|assistant|>"


def test_parts_lose_the_keys_that_a_table_filled_with_nulls() -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "image", "text": None, "image": "a.png"}]
    expected = [{"type": "text", "text": "a"}, {"type": "image", "image": "a.png"}]
    assert chat_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": expected}]


CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}


@pytest.mark.parametrize("others", [{"tool_calls": [CALL]}, {"reasoning_content": "so"}])
def test_a_message_without_content_is_one_if_it_says_something_else(others: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, **others}
    assert chat_messages([message]) == [message]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "expected a list of chat messages, found str; a transform can read the JSON in it"),
        ({"role": "user"}, "expected a list of chat messages, found dict"),
        ([], "is an empty list"),
        (["hello"], "message 1: a chat message must be a dict with role and content, found 'hello'"),
        ([*CHAT, {"content": "x"}], "message 3: .* no key 'role' in"),
        ([{"role": 3, "content": "x"}], "message 1: .* the role is 3"),
        ([{"from": "hmuan", "value": "x"}], "message 1: its key 'from' is 'hmuan', .* did you mean human"),
        ([{"from": ["gpt"], "value": "x"}], "message 1: its key 'from' is"),
        ([*SHAREGPT, {"from": "gpt"}], "message 3: its key 'value' is missing or null"),
        ([*SHAREGPT, {"from": "gpt", "value": None}], "message 3: its key 'value' is missing or null"),
        ([{"from": "gpt", "value": 3}], "message 1: its content is a int"),
        ([{"role": "assistant", "content": {"text": "x"}}], "message 1: its content is a dict"),
        ([{"role": "assistant"}], "message 1: its key 'content' is missing"),
        ([{"role": "assistant", "content": None}], "message 1: its key 'content' is null"),
        ([{"role": "assistant", "content": [3]}], "message 1, part 1: a content part must be"),
        ([{"role": "assistant", "content": [{"text": "x"}]}], "message 1, part 1: .* the key 'type'"),
        ([{"role": "assistant", "content": [{"type": "text"}]}], "message 1, part 1: its key 'text' is None"),
        (CHAT[:1], "has no assistant turn; its roles are user"),
        (SHAREGPT[:1], "has no assistant turn; its roles are user"),
    ],
)
def test_wrong_messages_are_unusable_and_say_why(messages: Any, reason: str) -> None:
    for column in ("messages", "conversations"):
        with pytest.raises(UnusableRow, match=f"column '{column}'.*{reason}"):
            rendered({column: messages})


def test_conversations_without_an_answer_are_rows_where_others_are_trained() -> None:
    assert texts({"messages": CHAT[:1]}, roles_to_train=["user"])[1] == "a<|end|>"
    assert texts({"messages": CHAT[:1]}, loss_mask="all")[1].endswith("a<|end|>")


# Alpaca ---------------------------------------------------------------------------------------------------------------


def test_alpaca_rows_are_conversations_with_their_input_history_and_system_turn() -> None:
    row = {"instruction": "add", "input": "2 3", "output": "5", "history": [["hi", "ho"]], "system": "S"}
    expected = "<|system|>S<|end|><|user|>hi<|end|><|assistant|>ho<|end|><|user|>add\n2 3<|end|><|assistant|>5<|end|>"
    assert texts(row) == (expected, "ho<|end|>5<|end|>")


def test_alpaca_rows_without_a_template_have_the_prompt_of_alpaca() -> None:
    with_input, counted = texts({"instruction": "add", "input": "2 3", "output": "5"}, chat=False)
    assert with_input.endswith("### Instruction:\nadd\n\n### Input:\n2 3\n\n### Response:\n5<|end|>")
    assert counted == "5<|end|>"
    without, _ = texts({"instruction": "add", "output": "5"}, chat=False)
    assert without.endswith("completes the request.\n\n### Instruction:\nadd\n\n### Response:\n5<|end|>")
    with pytest.raises(UnusableRow, match=r"need data\.chat=true"):
        rendered({"instruction": "add", "output": "5", "history": [["hi", "ho"]]}, chat=False)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "a", "output": None}, "column 'output' is None, not a string"),
        ({"instruction": 3, "output": "b"}, "column 'instruction' is 3, not a string"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "column 'history': expected a pair"),
        ({"instruction": "a", "output": "b", "input": 5}, "column 'input' is 5, not a string"),
        ({"instruction": "a", "output": "b", "system": 5}, "column 'system' is 5, not a string"),
        ({"instruction": "a", "output": "b", "history": 5}, "column 'history' is 5, not a list of pairs of strings"),
        ({"instruction": "a", "output": "b", "history": [["a", None]]}, "expected a pair of question and answer"),
    ],
)
def test_wrong_alpaca_rows_are_unusable_and_say_why(row: Row, reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        rendered(row)


def test_the_columns_that_the_config_names_come_before_those_of_alpaca() -> None:
    row = {"instruction": "x", "output": "y", "question": "a", "answer": "b"}
    assert texts(row, prompt_column="question", completion_column="answer")[1] == "b<|end|>"


# Rows whose conversation is null --------------------------------------------------------------------------------------


def open_file(tmp_path: Path, source: str, rows: list[Row], **options: Any) -> None:
    path = tmp_path / "rows"
    if source == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif source == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        Dataset.from_list(rows).save_to_disk(str(path))
    data = DataConfig(source=source, path=str(path), **options)
    open_sft_rows(data, TOKENIZER, seed=1, max_tokens=100)


SOURCES = [("jsonl", "line"), ("parquet", "row"), ("datasets", "row")]


@pytest.mark.parametrize(("source", "place"), SOURCES)
def test_null_in_both_columns_is_an_error_at_the_start(tmp_path: Path, source: str, place: str) -> None:
    rows: list[Row] = [
        {"messages": CHAT, "conversations": None},
        {"messages": None, "conversations": SHAREGPT},
        {"messages": None, "conversations": None},
    ]
    with pytest.raises(DataError, match=rf"rows.*, {place} 3: columns 'messages' and 'conversations' are null"):
        open_file(tmp_path, source, rows)
    open_file(tmp_path / "rows" if source == "datasets" else tmp_path, source, rows[:2])


@pytest.mark.parametrize(("source", "place"), SOURCES)
def test_null_in_one_column_without_the_other_is_an_error_that_names_both(
    tmp_path: Path, source: str, place: str
) -> None:
    rows: list[Row] = [{"messages": CHAT}, {"messages": None}]
    message = rf"{place} 2: column 'messages' is null, and there is no column 'conversations'"
    with pytest.raises(DataError, match=message):
        open_file(tmp_path, source, rows)


def test_null_made_by_a_transform_is_skipped_with_the_same_message() -> None:
    with pytest.raises(UnusableRow, match="column 'messages' is null, and there is no column 'conversations'"):
        rendered({"messages": None})


def test_large_tables_are_looked_through_for_nulls_without_being_read_row_by_row(tmp_path: Path) -> None:
    count = 50_000
    table = pa.table({"prompt": ["a"] * count, "completion": ["b"] * count, "level": np.arange(count)})
    table = table.append_column("messages", pa.array([None] * count, pa.string()))
    pq.write_table(table, tmp_path / "rows.parquet")
    data = DataConfig(source="parquet", path=str(tmp_path / "rows.parquet"))
    source, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=100)
    assert TOKENIZER.decode(source.next().completion_ids) == "b<|end|>"
