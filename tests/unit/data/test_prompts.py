"""Tests that sources are endless, resume at any prompt, report skipped rows, and never yield a held-out prompt."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.data.prompts import open_prompts, open_sft_rows
from rlpipe.data.row import SkipKind
from rlpipe.data.sources.row_source import MAX_LOGGED_SKIPS, Cursor
from rlpipe.errors import ConfigError, DataError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.types import Prompt, Rollout, RolloutStatus

TOKENIZER = make_tokenizer()


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def data_of(tmp_path: Path, prompts: Sequence[Any], **options: Any) -> DataConfig:
    path = write(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": "y"} for prompt in prompts])
    return DataConfig(source="jsonl", path=path, **options)


def contents(prompts: Sequence[Prompt]) -> list[str]:
    return [str(prompt.prompt[-1]["content"]) for prompt in prompts if not isinstance(prompt.prompt, str)]


LETTERS = list("abcdefghij")
USER, BOT = ({"role": role, "content": role[0]} for role in ("user", "assistant"))


def test_every_epoch_has_all_rows_in_an_order_of_its_own(tmp_path: Path) -> None:
    source, held_out = open_prompts(data_of(tmp_path, LETTERS), TOKENIZER, seed=1)
    first, second = source.take(10), source.take(10)
    assert sorted(contents(first)) == sorted(contents(second)) == LETTERS
    assert contents(first) != contents(second)
    assert {prompt.epoch for prompt in first} == {0}
    assert {prompt.epoch for prompt in second} == {1}
    assert all(LETTERS[prompt.prompt_id] == text for prompt, text in zip(first, contents(first), strict=True))
    assert held_out == []


def test_the_seed_determines_the_order(tmp_path: Path) -> None:
    data = data_of(tmp_path, LETTERS)
    orders = [contents(open_prompts(data, TOKENIZER, seed=seed)[0].take(10)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffle_rows_come_in_file_order(tmp_path: Path) -> None:
    source, _ = open_prompts(data_of(tmp_path, LETTERS, shuffle=False), TOKENIZER, seed=1)
    assert contents(source.take(20)) == LETTERS + LETTERS


@pytest.mark.parametrize("drawn", [0, 3, 8, 9, 25])
def test_seek_reproduces_what_followed(tmp_path: Path, drawn: int) -> None:
    prompts = [*LETTERS[:4], None, *LETTERS[4:], "x" * 2000]
    held_out = HeldOutConfig(size=2)
    source, _ = open_prompts(data_of(tmp_path, prompts, held_out=held_out), TOKENIZER, seed=3)
    source.take(drawn)
    cursor = source.cursor
    expected = [(prompt.prompt_id, prompt.epoch) for prompt in source.take(30)]
    other, _ = open_prompts(data_of(tmp_path, prompts, held_out=held_out), TOKENIZER, seed=3)
    other.seek(cursor)
    assert other.cursor == cursor
    assert [(prompt.prompt_id, prompt.epoch) for prompt in other.take(30)] == expected


@pytest.mark.parametrize("cursor", [Cursor(epoch=0, position=11), Cursor(epoch=-1, position=0)])
def test_cursor_of_other_data_is_refused(tmp_path: Path, cursor: Cursor) -> None:
    source, _ = open_prompts(data_of(tmp_path, LETTERS), TOKENIZER, seed=1)
    with pytest.raises(DataError, match="does not belong to this data"):
        source.seek(cursor)


def test_skipped_rows_are_counted_once_with_position_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(tmp_path, ["a", None, "b", "x" * 50], max_prompt_tokens=20)
    source, _ = open_prompts(data, TOKENIZER, seed=1)
    with caplog.at_level(logging.WARNING):
        assert sorted(contents(source.take(6))) == ["a", "a", "a", "b", "b", "b"]
    by_row = {skipped.row: skipped for skipped in source.skipped}
    assert by_row[1].reason == "column 'prompt' is null"
    assert by_row[1].location.endswith("rows.jsonl, line 2")
    assert by_row[3].kind is SkipKind.TOO_LONG
    assert source.skip_counts == {"unrenderable": 1, "too_long": 1, "held_out": 0}
    assert len({record.getMessage() for record in caplog.records}) == len(caplog.records)


def test_many_skipped_rows_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = data_of(tmp_path, ["a", *[None] * 200], shuffle=False)
    source, _ = open_prompts(data, TOKENIZER, seed=1)
    source.take(2)
    assert len(source.skipped) == 200
    assert len(caplog.records) == MAX_LOGGED_SKIPS + 1


def test_data_without_a_usable_row_fails_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 3 rows .* are skipped, .*line \d because column 'prompt' is null"):
        open_prompts(data_of(tmp_path, [None] * 3), TOKENIZER, seed=1)


def test_missing_column_fails_at_the_start_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"question": "b", "answer": "c"}])
    with pytest.raises(DataError, match=r"line 2: no column 'prompt'; existing columns: question, answer"):
        open_prompts(DataConfig(source="jsonl", path=path), TOKENIZER, seed=1)


def test_a_transform_makes_the_needed_column(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "b"}])
    (tmp_path / "mine.py").write_text("def transform(cfg):\n    return lambda row: {'prompt': row['question'] + '?'}")
    data = DataConfig(source="jsonl", path=path, transform=f"{tmp_path}/mine.py:transform")
    source, _ = open_prompts(data, TOKENIZER, seed=1)
    prompt = source.next()
    assert contents([prompt]) == ["b?"]
    assert prompt.task == {"question": "b"}


def test_a_transformed_row_without_the_needed_column_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": text} for text in "abc"])
    (tmp_path / "mine.py").write_text(
        "def transform(cfg):\n    return lambda row: {} if row['question'] == 'b' else {'prompt': row['question']}"
    )
    data = DataConfig(source="jsonl", path=path, transform=f"{tmp_path}/mine.py:transform", shuffle=False)
    source, _ = open_prompts(data, TOKENIZER, seed=0)
    assert contents([source.next() for _ in range(4)]) == ["a", "c", "a", "c"]


# Held-out prompts -----------------------------------------------------------------------------------------------------


def test_split_off_prompts_and_their_duplicates_are_never_trained_on(tmp_path: Path) -> None:
    data = data_of(tmp_path, LETTERS * 3, held_out=HeldOutConfig(size=4))
    source, held_out = open_prompts(data, TOKENIZER, seed=1)
    kept = set(contents(held_out))
    assert len(held_out) == 4
    trained = contents(source.take(100))
    assert set(trained) == set(LETTERS) - kept
    assert source.skip_counts["held_out"] == 3 * len(kept) - 4


def test_a_message_list_that_renders_like_a_held_out_text_is_kept_out(tmp_path: Path) -> None:
    prompts: list[Any] = [*LETTERS, *([{"role": "user", "content": letter}] for letter in LETTERS)]
    source, held_out = open_prompts(data_of(tmp_path, prompts, held_out=HeldOutConfig(size=5)), TOKENIZER, seed=2)
    assert not set(contents(source.take(40))) & set(contents(held_out))


def test_held_out_file_is_used_whole_and_kept_out(tmp_path: Path) -> None:
    path = write(tmp_path / "held_out.jsonl", [{"prompt": "c"}, {"prompt": "zz"}, {"prompt": None}])
    source, held_out = open_prompts(data_of(tmp_path, LETTERS, held_out=HeldOutConfig(path=path)), TOKENIZER, seed=1)
    assert contents(held_out) == ["c", "zz"]
    assert set(contents(source.take(18))) == set(LETTERS) - {"c"}
    assert source.skip_counts["held_out"] == 1


def test_held_out_split_is_used_whole_and_kept_out(tmp_path: Path) -> None:
    splits = {"train": LETTERS, "test": ["c", "zz"]}
    rows = {name: Dataset.from_dict({"prompt": prompts}) for name, prompts in splits.items()}
    DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(source="datasets", path=str(tmp_path / "saved"), held_out=HeldOutConfig(split="test"))
    source, held_out = open_prompts(data, TOKENIZER, seed=1)
    assert contents(held_out) == ["c", "zz"]
    assert set(contents(source.take(18))) == set(LETTERS) - {"c"}
    with pytest.raises(DataError, match=r"data.held_out.split: .* has no split 'dev'; its splits are train, test"):
        open_prompts(replace(data, held_out=HeldOutConfig(split="dev")), TOKENIZER, seed=1)


def test_held_out_rows_that_can_not_be_rendered_are_replaced(tmp_path: Path) -> None:
    data = data_of(tmp_path, [*LETTERS, *[None] * 10], held_out=HeldOutConfig(size=5))
    _, held_out = open_prompts(data, TOKENIZER, seed=1)
    assert len(set(contents(held_out))) == 5


@pytest.mark.parametrize(
    ("prompts", "size", "usable"),
    [
        (LETTERS, 10, "10 rows, of which 10"),
        (LETTERS, 11, "10 rows, of which 10"),
        ([*LETTERS[:4], None, None], 5, "6 rows, of which 4"),
    ],
)
def test_holding_out_more_than_leaves_rows_is_refused_with_their_number(
    tmp_path: Path, prompts: list[Any], size: int, usable: str
) -> None:
    message = (
        f"^data.held_out.size: {size} rows must come from .*rows.jsonl, which has {usable} can be held out; "
        f"set it below {usable.split()[-1]}, so that some are left to train on$"
    )
    for open_rows in (open_prompts, partial(open_sft_rows, max_tokens=64)):
        with pytest.raises(DataError, match=message):
            open_rows(data_of(tmp_path, prompts, held_out=HeldOutConfig(size=size)), TOKENIZER, seed=1)


def test_holding_out_all_rows_that_can_be_used_is_named_where_the_others_are_skipped(tmp_path: Path) -> None:
    data = data_of(tmp_path, [*LETTERS[:4], None, None], held_out=HeldOutConfig(size=4))
    with pytest.raises(DataError, match=r"all 2 rows .* is null; data\.held_out\.size holds out 4 others$"):
        open_prompts(data, TOKENIZER, seed=1)


@pytest.mark.parametrize("option", ["size", "path"])
def test_where_no_row_can_be_held_out_the_first_reason_is_quoted(tmp_path: Path, option: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": [BOT, USER, BOT]}] * 2)
    other = write(tmp_path / "held_out.jsonl", [{"messages": [BOT, USER, BOT]}])
    held_out = HeldOutConfig(size=1) if option == "size" else HeldOutConfig(path=other)
    with pytest.raises(DataError, match=r"^data\.held_out: none of .*, line \d because the prompt is empty$"):
        open_sft_rows(DataConfig(source="jsonl", path=path, held_out=held_out), TOKENIZER, seed=1, max_tokens=64)


def test_duplicates_of_held_out_prompts_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="held out for evaluation"):
        open_prompts(data_of(tmp_path, ["a"] * 5, held_out=HeldOutConfig(size=1)), TOKENIZER, seed=1)


# SFT ------------------------------------------------------------------------------------------------------------------


def prompt_ids(sequence: Rollout) -> list[int]:
    return sequence.token_ids[: int(sequence.loss_mask.argmax())].tolist()


def test_sft_holds_out_the_same_prompts_as_rl_and_trains_on_the_rest(tmp_path: Path) -> None:
    data = data_of(tmp_path, LETTERS * 2, held_out=HeldOutConfig(size=4))
    _, held_out_of_rl = open_prompts(data, TOKENIZER, seed=1)
    source, held_out = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
    assert [prompt_ids(sequence) for sequence in held_out] == [p.token_ids.tolist() for p in held_out_of_rl]
    trained = {str(TOKENIZER.decode(rollout.token_ids)) for rollout in source.take(60)}
    wanted = set(LETTERS) - set(contents(held_out_of_rl))
    assert trained == {f"<|user|>{letter}<|end|><|assistant|>y<|end|>" for letter in wanted}


def test_sft_source_resumes_and_skips_long_sequences(tmp_path: Path) -> None:
    source, _ = open_sft_rows(data_of(tmp_path, [*LETTERS, "x" * 30]), TOKENIZER, seed=1, max_tokens=20)
    source.take(13)
    cursor = source.cursor
    expected = [rollout.name for rollout in source.take(20)]
    source.seek(cursor)
    assert [rollout.name for rollout in source.take(20)] == expected
    assert source.skip_counts["too_long"] == 1


def test_sft_on_conversations_keeps_out_held_out_prompts(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter * 2}]}
        for letter in LETTERS * 2
    ]
    data = DataConfig(source="jsonl", path=write(tmp_path / "chat.jsonl", rows), held_out=HeldOutConfig(size=3))
    source, held_out = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
    trained = {str(TOKENIZER.decode(rollout.completion_ids)) for rollout in source.take(50)}
    kept = {str(TOKENIZER.decode(sequence.completion_ids)) for sequence in held_out}
    assert len(kept) == 3
    assert trained == {f"{letter * 2}<|end|>" for letter in LETTERS} - kept


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [BOT, USER, BOT]}, {}),
        ({"prompt": "", "completion": "y"}, {"chat": False}),
        ({"messages": [{"role": "user", "content": "x" * 40}, BOT]}, {"roles_to_train": ["user", "assistant"]}),
        ({"messages": [{"role": "user", "content": "x" * 40}, BOT]}, {"train_on_inputs": True}),
    ],
)
@pytest.mark.parametrize("held_out", ["size", "path"])
def test_rows_without_a_prompt_are_trained_whether_or_not_others_are_held_out(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], held_out: str
) -> None:
    others = [{"prompt": letter, "completion": "y", "messages": None} for letter in LETTERS[:3]]
    path = write(tmp_path / "rows.jsonl", [row, *others])
    file = write(tmp_path / "held_out.jsonl", [row, others[0]])
    data = DataConfig(source="jsonl", path=path, max_prompt_tokens=30, **options)
    kept_out = HeldOutConfig(size=1) if held_out == "size" else HeldOutConfig(path=file)
    for config, num_held_out in ((data, 0), (replace(data, held_out=kept_out), 1)):
        for seed in range(4):
            source, evaluated = open_sft_rows(config, TOKENIZER, seed=seed, max_tokens=64)
            assert {sequence.prompt_id for sequence in source.take(12)} >= {0}
            assert len(evaluated) == num_held_out
            assert source.skip_counts["unrenderable"] == source.skip_counts["too_long"] == 0


def test_sft_learns_the_answers_of_a_reasoning_gym_task() -> None:
    data = DataConfig(
        source="reasoning_gym", task="basic_arithmetic", task_args={"size": 20}, held_out=HeldOutConfig(size=4)
    )
    source, held_out = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=512)
    rollout = source.next()
    assert TOKENIZER.decode(rollout.completion_ids) == rollout.task["entry"]["answer"] + "<|end|>"
    assert len(held_out) == 4
    assert held_out[0].task["reasoning_gym_task"] == "basic_arithmetic"


# Raw text -------------------------------------------------------------------------------------------------------------


def text_data(tmp_path: Path, texts: Sequence[Any], **options: Any) -> DataConfig:
    path = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    return DataConfig(source="jsonl", path=path, text_column="text", **options)


def test_every_token_of_a_text_but_the_first_is_trained(tmp_path: Path) -> None:
    source, _ = open_sft_rows(text_data(tmp_path, ["hello"]), TOKENIZER, seed=1, max_tokens=64)
    sequence = source.next()
    assert TOKENIZER.decode(sequence.token_ids) == "hello<|end|>"
    assert sequence.loss_mask.tolist() == [False] + [True] * 5
    assert sequence.status is RolloutStatus.COMPLETED


def test_a_long_text_gives_another_window_in_each_epoch(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(500))
    source, _ = open_sft_rows(text_data(tmp_path, [text]), TOKENIZER, seed=1, max_tokens=20)
    windows = source.take(8)
    assert all(len(window.token_ids) == 20 for window in windows)
    assert all(window.status is RolloutStatus.TRUNCATED for window in windows)
    assert all(TOKENIZER.decode(window.token_ids).removesuffix("<|end|>") in text for window in windows)
    assert len({window.token_ids.tobytes() for window in windows}) > 3
    again, _ = open_sft_rows(text_data(tmp_path, [text]), TOKENIZER, seed=1, max_tokens=20)
    assert [w.token_ids.tobytes() for w in again.take(8)] == [w.token_ids.tobytes() for w in windows]


@pytest.mark.parametrize("length", [18, 19, 20, 38, 39, 200])
def test_all_tokens_of_a_long_text_are_trained_once_in_an_epoch_of_chunks(tmp_path: Path, length: int) -> None:
    long = "".join(chr(ord("a") + index % 26) for index in range(length))
    data = text_data(tmp_path, ["short", long, ""], long_texts="chunks", shuffle=False)
    source, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=20)
    num_chunks = -(-length // 19)
    assert source.num_rows == 2 + num_chunks
    short, *chunks = source.take(1 + num_chunks)
    assert TOKENIZER.decode(short.token_ids) == "short<|end|>"
    trained = [TOKENIZER.decode(chunk.token_ids[chunk.loss_mask]) for chunk in chunks]
    assert long[0] + "".join(trained) == f"{long}<|end|>"
    assert all(len(chunk.token_ids) <= 20 and not chunk.loss_mask[0] for chunk in chunks)
    assert TOKENIZER.decode(source.next().token_ids) == "short<|end|>"
    assert [row.reason for row in source.skipped] == ["the text is empty"]


def test_chunks_are_shuffled_and_come_again_after_a_seek(tmp_path: Path) -> None:
    data = text_data(tmp_path, [letter * 100 for letter in "abcd"], long_texts="chunks")
    source, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=20)
    assert source.num_rows == 4 * 6
    first = [sequence.token_ids.tobytes() for sequence in source.take(10)]
    assert len({content[:4] for content in first[:6]}) > 1
    cursor = source.cursor
    rest = [sequence.token_ids.tobytes() for sequence in source.take(20)]
    again, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=20)
    again.seek(cursor)
    assert [sequence.token_ids.tobytes() for sequence in again.take(20)] == rest
    place = source.at(Cursor(0, 0))
    assert place is not None
    assert " of 6" in source.parts[0].rows.location(place.row)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "data.long_texts: only texts are cut into chunks"),
        (["data.text_column=text", "data.streaming=true"], "chunks are counted at the start, so they need"),
    ],
)
def test_chunks_are_refused_where_there_are_none(options: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(
            ["algorithm=sft", "model.path=m", "data.source=jsonl", "data.path=x", "data.long_texts=chunks", *options],
            need_files=False,
        )


def test_held_out_texts_are_never_trained(tmp_path: Path) -> None:
    data = text_data(tmp_path, [*LETTERS, *LETTERS], held_out=HeldOutConfig(size=4))
    source, held_out = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
    kept = {TOKENIZER.decode(sequence.token_ids) for sequence in held_out}
    assert kept
    assert not kept & {TOKENIZER.decode(sequence.token_ids) for sequence in source.take(40)}


def test_empty_texts_are_not_held_out_in_place_of_others(tmp_path: Path) -> None:
    data = text_data(tmp_path, [*LETTERS, *[""] * 10], held_out=HeldOutConfig(size=5))
    for seed in range(4):
        assert len(open_sft_rows(data, TOKENIZER, seed=seed, max_tokens=64)[1]) == 5


def test_what_is_no_text_is_skipped_with_the_reason(tmp_path: Path) -> None:
    source, _ = open_sft_rows(text_data(tmp_path, ["a", 3, "", None]), TOKENIZER, seed=1, max_tokens=64)
    source.take(4)
    assert {row.reason for row in source.skipped} == {
        "column 'text' holds a int, not a string",
        "the text is empty",
        "column 'text' is null",
    }


def test_a_missing_text_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no column 'text'; existing columns: prompt, completion; set data\.text_column"
    ):
        open_sft_rows(replace(data_of(tmp_path, ["a"]), text_column="text"), TOKENIZER, seed=1, max_tokens=64)


def test_where_all_rows_are_skipped_the_most_frequent_reason_is_quoted(tmp_path: Path) -> None:
    rows = [None, *("x" * length for length in range(50, 56))]
    with pytest.raises(DataError, match=r"all 7 rows .* line 2 because 5\d prompt tokens, more than data\.max_prompt"):
        open_prompts(data_of(tmp_path, rows, max_prompt_tokens=9, shuffle=False), TOKENIZER, seed=1)
