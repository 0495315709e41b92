"""Tests that pairs, conversations and reasoning become rows with a prompt and a ground truth, or are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.data.prompts import PromptSource, open_prompts, open_sft_rows
from rlpipe.data.render.formats import apply_transform
from rlpipe.data.row import Row, Rows, UnusableRow
from rlpipe.data.sources.open_rows import open_rows
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import CHAT_TEMPLATE, make_tokenizer
from rlpipe.types import ChatMessages, Prompt

TOKENIZER = make_tokenizer()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


CHAT = [user("2+2?"), assistant("4"), user("3+3?"), assistant("6"), user("thanks")]
CALL = {"function": {"name": "add", "arguments": {"a": 2}}}


def config(tmp_path: Path, name: str, rows: Sequence[Row], **options: Any) -> DataConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    transform = f"rlpipe.data.ebft_rows:{name}"
    return DataConfig(source="jsonl", path=str(file), transform=transform, shuffle=False, **options)


def transformed(tmp_path: Path, name: str, rows: Sequence[Row], **options: Any) -> Rows:
    data = config(tmp_path, name, rows, **options)
    return apply_transform(open_rows(data, seed=0), data, TOKENIZER)


def list_rows(rows: Rows) -> list[Row]:
    return [rows[index] for index in range(len(rows))]


def one(tmp_path: Path, name: str, row: Row, **options: Any) -> Row:
    rows = transformed(tmp_path, name, [row], **options)
    assert len(rows) == 1
    return rows[0]


def of_chat(tmp_path: Path, name: str, messages: Any, **arguments: Any) -> Row:
    return one(tmp_path, name, {"messages": messages}, transform_args=arguments)


# Pairs ----------------------------------------------------------------------------------------------------------------


def test_pairs_become_prompts_and_truths_and_keep_the_other_columns(tmp_path: Path) -> None:
    row = {"input": "2+2?", "output": "4", "unit_tests": ["f(2) == 4"]}
    expected = {"prompt": "2+2?", "ground_truth": "4", "unit_tests": ["f(2) == 4"]}
    assert one(tmp_path, "input_output", row) == expected


def test_pairs_are_read_from_and_written_to_other_columns(tmp_path: Path) -> None:
    arguments = {"input_column": "prompt", "output_column": "reply", "truth_column": "answer"}
    row = {"prompt": [user("2+2?")], "reply": "4", "input": "kept"}
    found = one(tmp_path, "input_output", row, prompt_column="question", transform_args=arguments)
    assert found == {"question": [user("2+2?")], "answer": "4", "input": "kept"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input": None, "output": "4"}, "column 'input' is null"),
        ({"input": "2+2?", "output": ""}, "column 'output' is empty"),
        ({"input": "2+2?", "output": 4}, "column 'output' holds a int, not a string or messages"),
    ],
)
def test_pairs_that_lack_a_side_are_unusable(tmp_path: Path, row: Row, reason: str) -> None:
    with pytest.raises(UnusableRow, match=f"^{reason}$"):
        one(tmp_path, "input_output", row)


# Conversations --------------------------------------------------------------------------------------------------------


def test_first_turn_keeps_what_follows_up_to_the_last_answer(tmp_path: Path) -> None:
    assert one(tmp_path, "first_turn", {"messages": CHAT, "answer": 4}) == {
        "prompt": [user("2+2?")],
        "ground_truth": "4",
        "remaining_turns": [user("3+3?"), assistant("6")],
        "answer": 4,
    }
    assert of_chat(tmp_path, "first_turn", CHAT[:3])["remaining_turns"] == []


def test_last_turn_has_all_others_as_its_prompt(tmp_path: Path) -> None:
    row = {"messages": CHAT, "answer": 4}
    assert one(tmp_path, "last_turn", row) == {"prompt": CHAT[:3], "ground_truth": "6", "answer": 4}


def test_all_turns_makes_a_row_of_each_answer(tmp_path: Path) -> None:
    chats = [{"messages": CHAT, "id": 1}, {"messages": [user("hi")], "id": 2}, {"messages": CHAT[:2], "id": 3}]
    rows = transformed(tmp_path, "all_turns", chats)
    assert len(rows) == 4
    assert [rows[index] for index in (0, 1, 3)] == [
        {"prompt": CHAT[:1], "ground_truth": "4", "id": 1},
        {"prompt": CHAT[:3], "ground_truth": "6", "id": 1},
        {"prompt": CHAT[:1], "ground_truth": "4", "id": 3},
    ]
    assert rows.location(1).endswith("rows.jsonl, line 1, part 2 of 2")
    assert rows.location(2).endswith("rows.jsonl, line 2")
    with pytest.raises(UnusableRow, match=r"^column 'messages' has no assistant turn; its roles are user$"):
        rows[2]


def test_turns_that_are_more_than_text_stay_messages(tmp_path: Path) -> None:
    call = assistant(None, tool_calls=[CALL])
    assert of_chat(tmp_path, "last_turn", [user("2+2?"), call])["ground_truth"] == [call]
    drawn: Any = [{"type": "text", "text": "4"}, {"type": "image", "image": "four.png"}]
    assert of_chat(tmp_path, "last_turn", [user("2+2?"), assistant(drawn)])["ground_truth"] == [assistant(drawn)]


def test_conversations_can_be_in_another_column(tmp_path: Path) -> None:
    row = {"conversations": CHAT, "messages": "kept"}
    found = one(tmp_path, "last_turn", row, messages_column="conversations")
    assert found == {"prompt": CHAT[:3], "ground_truth": "6", "messages": "kept"}


CHAT_TRANSFORMS = ["first_turn", "last_turn", "all_turns", "reasoning"]


@pytest.mark.parametrize("name", CHAT_TRANSFORMS)
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "column 'messages' is null"),
        ("hello", "expected a list of chat messages, found str; a transform can read the JSON in it"),
        ([], "column 'messages' is an empty list"),
        ([{"role": "human", "content": "hi"}], "has no assistant turn; its roles are human"),
        ([user("hi"), assistant("")], "message 2, an assistant turn, is empty"),
        (
            [user("hi"), assistant("a"), assistant("b")],
            "messages 2 and 3 are both the assistant's; merge them into one",
        ),
        (
            [{"from": "human", "value": "hi"}, {"from": "gtp", "value": "ho"}],
            "column 'messages': message 2: its key 'from' is 'gtp', which is not a role; did you mean gpt?",
        ),
    ],
)
def test_conversations_without_a_usable_answer_say_why(tmp_path: Path, name: str, messages: Any, reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        of_chat(tmp_path, name, messages)


@pytest.mark.parametrize("name", CHAT_TRANSFORMS)
def test_sharegpt_rows_make_the_same_rows_as_chat_messages(tmp_path: Path, name: str) -> None:
    speakers = {"user": "human", "assistant": "gpt"}
    chat = THINKING if name == "reasoning" else CHAT
    turns = [{"from": speakers[message["role"]], "value": message["content"]} for message in chat]
    expected = list_rows(transformed(tmp_path, name, [{"messages": chat}]))
    assert list_rows(transformed(tmp_path, name, [{"conversations": turns}])) == expected
    assert list_rows(transformed(tmp_path, name, [{"messages": None, "conversations": turns}])) == expected


# Reasoning ------------------------------------------------------------------------------------------------------------

THOUGHT = "<think>two and two</think>\n\n4"
THINKING = [user("1+1?"), assistant("<think>one\nand one</think>\n\n2"), user("2+2?"), assistant(THOUGHT)]


@pytest.mark.parametrize(("thinking", "truth"), [("keep", THOUGHT), ("strip", "4")])
def test_reasoning_counts_in_the_last_turn_only(tmp_path: Path, thinking: str, truth: str) -> None:
    found = of_chat(tmp_path, "reasoning", [*THINKING, user("thanks")], thinking=thinking)
    assert found == {"prompt": [user("1+1?"), assistant("2"), user("2+2?")], "ground_truth": truth}


def test_reasoning_is_kept_unless_told(tmp_path: Path) -> None:
    assert of_chat(tmp_path, "reasoning", THINKING)["ground_truth"] == THOUGHT


def test_reasoning_next_to_the_content_counts_as_its_span(tmp_path: Path) -> None:
    messages = [
        user("1+1?"),
        assistant("2", reasoning_content="one"),
        user("?"),
        assistant("4", reasoning_content="two\n"),
    ]
    expected = {"prompt": [user("1+1?"), assistant("2"), user("?")], "ground_truth": "<think>\ntwo\n</think>\n\n4"}
    assert of_chat(tmp_path, "reasoning", messages) == expected
    assert of_chat(tmp_path, "reasoning", messages, thinking="strip") == {**expected, "ground_truth": "4"}


def test_reasoning_without_an_answer_is_a_truth_where_it_is_kept(tmp_path: Path) -> None:
    messages = [user("?"), assistant(None, reasoning_content="two")]
    assert of_chat(tmp_path, "reasoning", messages)["ground_truth"] == "<think>\ntwo\n</think>\n\n"
    with pytest.raises(UnusableRow, match=r"^message 2 has only reasoning, and no answer$"):
        of_chat(tmp_path, "reasoning", messages, thinking="strip")


def test_a_span_in_the_content_is_not_doubled(tmp_path: Path) -> None:
    messages = [user("?"), assistant(THOUGHT, reasoning_content="two and two")]
    assert of_chat(tmp_path, "reasoning", messages)["ground_truth"] == THOUGHT


def test_every_span_of_a_turn_is_stripped_and_a_span_without_its_start(tmp_path: Path) -> None:
    several = "<think>a</think>So <think>b</think>4"
    assert of_chat(tmp_path, "reasoning", [user("?"), assistant(several)], thinking="strip")["ground_truth"] == "So 4"
    tail = "two and two</think>\n4"
    assert of_chat(tmp_path, "reasoning", [user("?"), assistant(tail)], thinking="strip")["ground_truth"] == "4"


def test_answers_without_a_span_pass_only_where_it_would_be_stripped(tmp_path: Path) -> None:
    messages = [user("1+1?"), assistant(" 2\n"), user("?"), assistant(" 4\n")]
    found = of_chat(tmp_path, "reasoning", messages, thinking="strip")
    assert found == {"prompt": messages[:3], "ground_truth": " 4\n"}
    with pytest.raises(UnusableRow, match=r"^message 4 has no complete <think>\.\.\.</think> span$"):
        of_chat(tmp_path, "reasoning", messages)


@pytest.mark.parametrize(
    ("messages", "thinking", "reason"),
    [
        ([user("?"), assistant("<think>two")], "keep", "message 2 has no complete <think>...</think> span"),
        ([user("?"), assistant("two</think>4")], "keep", "message 2 has no complete <think>...</think> span"),
        ([user("?"), assistant("<think>two")], "strip", "message 2 has a <think> without </think>"),
        ([user("?"), assistant("<think>x"), *THINKING], "keep", "message 2 has a <think> without </think>"),
        ([user("?"), assistant("<think>two</think>\n")], "strip", "message 2 has only reasoning, and no answer"),
        ([user("?"), assistant([{"type": "image"}])], "keep", "the content of message 2 is a list, not a string"),  # type: ignore[arg-type]
    ],
)
def test_reasoning_that_is_not_complete_is_unusable(
    tmp_path: Path, messages: ChatMessages, thinking: str, reason: str
) -> None:
    with pytest.raises(UnusableRow) as caught:
        of_chat(tmp_path, "reasoning", messages, thinking=thinking)
    assert caught.value.reason == reason


def test_calls_after_reasoning_stay_calls(tmp_path: Path) -> None:
    messages = [user("?"), assistant(None, reasoning_content="call", tool_calls=[CALL])]
    kept = assistant("<think>\ncall\n</think>\n\n", tool_calls=[CALL])
    assert of_chat(tmp_path, "reasoning", messages)["ground_truth"] == [kept]
    stripped = of_chat(tmp_path, "reasoning", messages, thinking="strip")["ground_truth"]
    assert stripped == [assistant("", tool_calls=[CALL])]


# Columns and arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("input_output", {"question": "x", "output": "y"}, "'input'; .*: question, .*transform_args.input_column"),
        ("input_output", {"input": "x", "answer": "y"}, "'output'; .*: input, .*transform_args.output_column"),
        *((name, {"chat": []}, "'messages'; .*: chat; set data.messages_column") for name in CHAT_TRANSFORMS),
    ],
)
def test_missing_columns_are_named_with_the_line(tmp_path: Path, name: str, row: Row, message: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: data\.transform: no column {message}"):
        one(tmp_path, name, row)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("input_output", {"input_colum": "x"}, "has no argument 'input_colum'; did you mean input_column"),
        ("last_turn", {"keep": 1}, "last_turn has no argument 'keep'; its arguments are truth_column"),
        ("reasoning", {"thinking": "yes"}, "data.transform_args.thinking: 'yes' is neither 'keep' nor 'strip'"),
    ],
)
def test_unknown_arguments_are_refused(tmp_path: Path, name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        one(tmp_path, name, {"messages": CHAT}, transform_args=arguments)


# Whole paths ----------------------------------------------------------------------------------------------------------


def opened(data: DataConfig) -> PromptSource:
    return open_prompts(data, TOKENIZER, seed=0, ebft=EbftConfig())[0]


def prompt_text(prompt: Prompt) -> str:
    return str(TOKENIZER.decode(prompt.token_ids))


def truth_text(prompt: Prompt) -> str:
    assert prompt.truth is not None
    return str(TOKENIZER.decode(prompt.truth.token_ids))


def test_pairs_are_prompts_with_truths(tmp_path: Path) -> None:
    prompt = opened(config(tmp_path, "input_output", [{"input": "2+2?", "output": "4", "answer": 4}])).next()
    assert prompt_text(prompt) == "<|user|>2+2?<|end|><|assistant|>"
    assert truth_text(prompt) == "4<|end|>"
    assert prompt.task["answer"] == 4


def test_first_turns_are_prompts_whose_further_turns_are_generated_in_turn(tmp_path: Path) -> None:
    prompt = opened(config(tmp_path, "first_turn", [{"messages": CHAT}], system_prompt="Add.")).next()
    assert prompt_text(prompt) == "<|system|>Add.<|end|><|user|>2+2?<|end|><|assistant|>"
    assert truth_text(prompt) == "4<|end|><|user|>3+3?<|end|><|assistant|>6<|end|>"
    assert [TOKENIZER.decode(gap) for gap in prompt.turns] == ["<|user|>3+3?<|end|><|assistant|>"]
    single = opened(config(tmp_path, "first_turn", [{"messages": CHAT[:2]}])).next()
    assert (truth_text(single), list(single.turns)) == ("4<|end|>", [])


@pytest.mark.parametrize(
    "jinja", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")]
)
def test_what_sft_trains_does_not_change_the_truth(tmp_path: Path, jinja: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = jinja
    options = {"roles_to_train": ["user"], "train_on_eos": "none", "train_on_inputs": True, "loss_mask": "all"}
    truths = []
    for changed in ({}, *({name: value} for name, value in options.items()), options):
        data = config(tmp_path, "first_turn", [{"messages": CHAT}], **changed)
        source, _ = open_prompts(data, tokenizer, seed=0, ebft=EbftConfig())
        truth = source.next().truth
        assert truth is not None
        truths.append([str(tokenizer.decode(truth.token_ids[start:end])) for start, end in truth.turns()])
    assert truths == [["4<|end|>", "6<|end|>"]] * 6


def test_rows_of_tables_are_read_as_rows_of_json(tmp_path: Path) -> None:
    call = assistant(None, tool_calls=[CALL])
    table = pyarrow.Table.from_pylist([{"messages": CHAT}, {"messages": [user("2+2?"), call]}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    data = DataConfig(
        source="parquet", path=str(tmp_path / "rows.parquet"), transform="rlpipe.data.ebft_rows:all_turns"
    )
    rows = apply_transform(open_rows(data, seed=0), data, TOKENIZER)
    assert [rows[index]["ground_truth"] for index in range(len(rows))] == ["4", "6", [call]]
    assert rows[1]["prompt"] == CHAT[:3]
    assert rows.location(1).endswith("rows.parquet, row 1, part 2 of 2")


def test_every_turn_is_a_prompt_and_those_that_cannot_be_are_skipped(tmp_path: Path) -> None:
    greeting = [assistant("Hi!"), user("2+2?"), assistant("4")]
    source = opened(config(tmp_path, "all_turns", [{"messages": m} for m in (CHAT, [user("hi")], greeting)]))
    assert source.num_rows == 5
    prompts = source.take(3)
    assert [prompt.prompt_id for prompt in prompts] == [0, 1, 4]
    assert [truth_text(prompt) for prompt in prompts] == ["4<|end|>", "6<|end|>", "4<|end|>"]
    assert prompt_text(prompts[1]) == "<|user|>2+2?<|end|><|assistant|>4<|end|><|user|>3+3?<|end|><|assistant|>"
    assert prompt_text(prompts[2]) == "<|assistant|>Hi!<|end|><|user|>2+2?<|end|><|assistant|>"
    assert [(row.row, row.location.removeprefix(f"{tmp_path}/"), row.reason) for row in source.skipped] == [
        (2, "rows.jsonl, line 2", "column 'messages' has no assistant turn; its roles are user"),
        (3, "rows.jsonl, line 3, part 1 of 2", "column 'prompt' is an empty list"),
    ]


def test_reasoning_is_in_the_truth_and_not_in_the_prompt(tmp_path: Path) -> None:
    prompt = opened(config(tmp_path, "reasoning", [{"messages": THINKING}])).next()
    assert prompt_text(prompt) == "<|user|>1+1?<|end|><|assistant|>2<|end|><|user|>2+2?<|end|><|assistant|>"
    assert truth_text(prompt) == f"{THOUGHT}<|end|>"


HIDES_REASONING = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def test_templates_that_open_and_hide_reasoning_get_it_in_the_truth(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = HIDES_REASONING
    data = config(tmp_path, "reasoning", [{"messages": THINKING}])
    source, _ = open_prompts(data, tokenizer, seed=0, ebft=EbftConfig())
    prompt = source.next()
    assert prompt_text(prompt) == "<|user|>1+1?<|end|><|assistant|>2<|end|><|user|>2+2?<|end|><|assistant|><think>"
    assert truth_text(prompt) == f"{THOUGHT.removeprefix('<think>')}<|end|>"


def test_data_in_another_format_fails_at_the_start_with_the_fix(tmp_path: Path) -> None:
    wrong = [{"speaker": "human", "text": "2+2?"}, {"speaker": "gpt", "text": "4"}]
    for name in CHAT_TRANSFORMS:
        with pytest.raises(DataError, match=r"all 2 rows .* skipped, .*line 1 because .*message 1: .* no key 'role'"):
            opened(config(tmp_path, name, [{"messages": wrong}] * 2))


@pytest.mark.parametrize(
    ("name", "completions"),
    [
        ("input_output", ["out<|end|>"]),
        ("first_turn", ["2<|end|>"]),
        ("last_turn", [f"{THOUGHT}<|end|>"]),
        ("all_turns", ["<think>one\nand one</think>\n\n2<|end|>", f"{THOUGHT}<|end|>"]),
        ("reasoning", [f"{THOUGHT}<|end|>"]),
    ],
)
def test_the_same_rows_serve_sft_and_strided_ebft(tmp_path: Path, name: str, completions: list[str]) -> None:
    messages = [user("1+1?"), assistant("2"), *THINKING[2:]] if name == "first_turn" else THINKING
    row = {"input": "in", "output": "out"} if name == "input_output" else {"messages": messages}
    data = config(tmp_path, name, [row], completion_column="ground_truth")
    source, _ = open_sft_rows(data, TOKENIZER, seed=0, max_tokens=200)
    assert [TOKENIZER.decode(rollout.completion_ids) for rollout in source.take(len(completions))] == completions


def test_a_ground_truth_that_does_not_fit_into_a_micro_batch_is_skipped_where_it_is_trained(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "ground_truth": "b" * length} for length in (2, 40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(source="jsonl", path=str(file), held_out=HeldOutConfig())
    for limit, num_left_out in ((None, 0), (20, 1)):
        source, _ = open_prompts(data, TOKENIZER, seed=0, ebft=EbftConfig(), max_truth_tokens=limit)
        lengths = {len(prompt.with_truth()[0]) for prompt in source.take(4)}
        assert source.skip_counts["too_long"] >= num_left_out
        assert (max(lengths) <= 20) is bool(num_left_out)
