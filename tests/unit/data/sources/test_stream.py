"""Tests that streams give every row once in an epoch, keep only a few blocks, and can resume anywhere."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.data.prompts import PromptSource, open_prompts, open_sft_rows
from rlpipe.data.row import Row
from rlpipe.data.sources import row_source
from rlpipe.data.sources.open_rows import open_rows, open_stream
from rlpipe.data.sources.readers import KEPT_BLOCKS, BlockOrder, StreamedRow, StreamRows
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.types import Prompt

TOKENIZER = make_tokenizer()
KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "datasets", "saved"]


def make(folder: Path, kind: str, rows: Sequence[Row], **options: Any) -> DataConfig:
    """Write the rows in three files (one in a saved data set), with a blank line in each JSONL file."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    third = -(-len(rows) // 3)
    for number in range(3):
        part, path = rows[number * third : (number + 1) * third], folder / "data" / f"part-{number}.{kind}"
        text = (
            "".join(json.dumps(row) + "\n" for row in part[:1]) + "\n" + "\n".join(json.dumps(row) for row in part[1:])
        )
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(list(part), schema=SCHEMA), path, row_group_size=2)
        elif kind == "datasets":
            path.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in part))
        elif kind == "jsonl.gz":
            path.write_bytes(gzip.compress(text.encode()))
        elif kind == "jsonl.zst":
            with pa.output_stream(str(path), compression="zstd") as file:
                file.write(text.encode())
        elif kind == "jsonl":
            path.write_text(text)
    source = {"parquet": "parquet", "datasets": "datasets", "saved": "datasets"}.get(kind, "jsonl")
    if kind == "saved":
        Dataset.from_list(list(rows)).save_to_disk(str(folder / "data"))
    return DataConfig(source=source, path=str(folder / "data"), **options)


SCHEMA = pa.schema([("prompt", pa.string()), ("completion", pa.string())])


def numbers(count: int) -> list[Row]:
    return [{"prompt": f"p{number}", "completion": "y"} for number in range(count)]


def opened(data: DataConfig, seed: int = 1) -> PromptSource:
    return open_prompts(data, TOKENIZER, seed=seed)[0]


def text(prompt: Prompt) -> str:
    return str(prompt.prompt[-1]["content"]) if not isinstance(prompt.prompt, str) else prompt.prompt


def texts(rows: Sequence[Row]) -> list[str]:
    return [row["prompt"] for row in rows]


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streaming", [True, False])
def test_rows_of_several_files_come_one_after_the_other(tmp_path: Path, kind: str, streaming: bool) -> None:
    data = make(tmp_path, kind, numbers(20), streaming=streaming, shuffle=False, shuffle_rows=6)
    prompts = opened(data).take(45)
    assert [text(prompt) for prompt in prompts] == texts(numbers(20)) * 2 + texts(numbers(5))
    assert [prompt.epoch for prompt in prompts] == [0] * 20 + [1] * 20 + [2] * 5
    assert [prompt.prompt_id for prompt in prompts] == [*range(20), *range(20), *range(5)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("streaming", [True, False])
def test_locations_name_the_file_and_the_row_in_it(tmp_path: Path, kind: str, streaming: bool) -> None:
    data = make(tmp_path, kind, numbers(20), shuffle_rows=4)
    rows = open_stream(data) if streaming else open_rows(data, seed=0)
    place = "row 3" if kind == "parquet" else "line 4"
    assert rows.location(9) == f"{tmp_path}/data/part-1.{kind}, {place}"


def test_a_pattern_stands_for_the_files_that_it_matches(tmp_path: Path) -> None:
    data = make(tmp_path, "jsonl", numbers(9), shuffle=False)
    for pattern, expected in (("part-[12].jsonl", texts(numbers(9)[3:])), ("**/part-0*", texts(numbers(3)))):
        some = DataConfig(source="jsonl", path=f"{data.path}/{pattern}", shuffle=False)
        assert [text(prompt) for prompt in opened(some).take(len(expected))] == expected
    with pytest.raises(DataError, match=r"data\.path: no file matches .*/none-\*"):
        opened(DataConfig(source="jsonl", path=f"{data.path}/none-*"))
    with pytest.raises(DataError, match=r"data\.path: no file in the folder .* ends with \.parquet"):
        opened(DataConfig(source="parquet", path=data.path))


# Order and cursor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_are_permuted_within_blocks_by_the_seed(tmp_path: Path, kind: str) -> None:
    data = make(tmp_path, kind, numbers(20), streaming=True, shuffle_rows=6)
    first, again, other = ([text(p) for p in opened(data, seed).take(40)] for seed in (1, 1, 2))
    assert first == again != other
    assert first[:20] != first[20:]
    for start in range(0, 20, 6):
        block = texts(numbers(20)[start : start + 6])
        assert sorted(first[start : min(start + 6, 20)]) == sorted(block)
        assert sorted(first[20 + start : 20 + min(start + 6, 20)]) == sorted(block)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [18, 20])
def test_a_stream_continues_from_any_cursor(tmp_path: Path, kind: str, length: int) -> None:
    data = make(
        tmp_path, kind, [*numbers(length - 1), {"prompt": None, "completion": "y"}], streaming=True, shuffle_rows=6
    )
    source = opened(data)
    cursors, items = [], []
    for _ in range(60):
        cursors.append(source.cursor)
        items.append(source.next())
    visited, fresh = source, opened(data)
    for drawn in (47, 3, 30, 0, 17, 18, 19, 20, 44):
        for found in (visited, fresh, opened(data)):
            found.seek(cursors[drawn])
            assert found.cursor == cursors[drawn]
            expected = [(p.prompt_id, p.epoch, text(p)) for p in items[drawn : drawn + 12]]
            assert [(p.prompt_id, p.epoch, text(p)) for p in found.take(len(expected))] == expected


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 25),
    block=st.integers(1, 9),
    jumps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 24)), max_size=8),
    after=st.lists(st.integers(0, 120), max_size=4),
)
def test_the_row_at_a_position_does_not_depend_on_the_way_there(
    tmp_path: Path, length: int, block: int, jumps: list[tuple[int, int]], after: list[int]
) -> None:
    def order() -> BlockOrder:
        return BlockOrder(StreamRows(CountedReader(length), block_size=block, check=None), seeds=[3], shuffle=True)

    walked = order()
    epochs = {e: [walked.row(Cursor(e, p)) for p in range(length)] for e in range(4)}
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs.values())  # type: ignore[type-var]
    jumping = order()
    for count in after:
        assert jumping.after(count) == Cursor(*divmod(count, length))
    for epoch, position in jumps:
        if position < length:
            assert jumping.row(Cursor(epoch, position)) == epochs[epoch][position]
        elif position == length:
            assert jumping.row(Cursor(epoch, position)) is None
        else:
            with pytest.raises(DataError, match=f"has {length} rows, so .* does not belong to this data"):
                jumping.row(Cursor(epoch, position))


class CountedReader:
    """A reader of rows that are their numbers, which records the starts of its reads."""

    def __init__(self, length: int) -> None:
        self.name = "counted"
        self.num_rows: int | None = None
        self.asked: list[int] = []
        self._length = length

    def read(self, start: int, count: int) -> list[StreamedRow]:
        self.asked.append(start)
        if start + count > self._length:
            self.num_rows = self._length
        return [StreamedRow({"row": row}, f"row {row}") for row in range(start, min(start + count, self._length))]


def test_blocks_are_read_once_and_the_last_ones_are_kept() -> None:
    reader = CountedReader(100)
    rows = StreamRows(reader, block_size=10, check=None)
    order = BlockOrder(rows, seeds=[1], shuffle=True)
    for position in range(100):
        row = order.row(Cursor(0, position))
        assert row is not None
        assert rows[row] == {"row": row}
        if position == 55:
            assert order.row(Cursor(0, 45)) is not None
    assert reader.asked == list(range(0, 100, 10))
    assert KEPT_BLOCKS == 2


def test_a_position_far_ahead_is_reached_without_the_blocks_before_it() -> None:
    reader = CountedReader(100)
    order = BlockOrder(StreamRows(reader, block_size=10, check=None), seeds=[1], shuffle=True)
    assert order.row(Cursor(0, 95)) in range(90, 100)
    assert reader.asked == [0, 90]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cursor_after_the_end_is_refused(tmp_path: Path, kind: str) -> None:
    data = make(tmp_path, kind, numbers(20), streaming=True, shuffle_rows=6)
    with pytest.raises(DataError, match=r"has 20 rows, so .* does not belong to this data"):
        opened(data).seek(Cursor(0, 57))
    source = opened(data)
    source.seek(Cursor(3, 20))
    assert source.next().epoch == 4


def test_the_length_of_a_stream_is_known_where_its_files_say_it(tmp_path: Path) -> None:
    assert opened(make(tmp_path / "a", "parquet", numbers(20), streaming=True)).num_rows == 20
    source = opened(make(tmp_path / "b", "jsonl", numbers(20), streaming=True, shuffle_rows=6))
    assert source.num_rows is None
    source.take(21)
    assert source.num_rows == 20


# Rows that can't be used ----------------------------------------------------------------------------------------------


def test_broken_lines_and_missing_columns_are_skipped_with_their_place(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"prompt": ', '{"question": "c"}', "[1]", '{"prompt": "e"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"), streaming=True)
    source = opened(data)
    assert {text(prompt) for prompt in source.take(6)} == {"a", "e"}
    reasons = {skipped.location.rpartition(", ")[2]: skipped.reason for skipped in source.skipped}
    assert reasons.keys() == {"line 2", "line 3", "line 4"}
    assert reasons["line 2"].startswith("not JSON")
    assert reasons["line 3"].startswith("no column 'prompt'; existing columns: question")
    assert source.skip_counts["unrenderable"] == 3


@pytest.mark.parametrize("first", ['{"question": "c"}', '{"prompt": ', "", "[1]"])
def test_a_stream_whose_first_row_is_wrong_fails_at_the_start(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.jsonl").write_text(first)
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        opened(DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"), streaming=True))


def test_null_conversations_are_refused_in_the_first_row_and_skipped_later(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": chat}, {"messages": None}]
    for number, order in enumerate([rows, rows[::-1]]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in order))
        data = DataConfig(source="jsonl", path=str(path), streaming=True)
        if number == 0:
            source, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
            source.take(3)
            assert "columns 'messages'" not in source.skipped[0].reason
            assert "'messages' is null, and there is no column 'conversations'" in source.skipped[0].reason
        else:
            with pytest.raises(DataError, match=r"line 1: column 'messages' is null, .* 'conversations'"):
                open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stream_without_a_usable_row_fails_at_the_start(tmp_path: Path, kind: str) -> None:
    data = make(tmp_path, kind, [{"prompt": None, "completion": "y"}] * 20, streaming=True, shuffle_rows=6)
    with pytest.raises(DataError, match=r"all 20 rows for training are skipped, for example .*column 'prompt' is null"):
        opened(data)


def test_a_long_stream_without_a_usable_row_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": null}\n' * (row_source.MAX_FIRST_SKIPS + 50_000))
    data = DataConfig(source="jsonl", path=str(path), streaming=True, shuffle_rows=1000)
    with pytest.raises(DataError, match=r"the first 10000 rows for training are skipped"):
        opened(data)


def test_a_batched_transform_is_refused(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    data = make(tmp_path, "jsonl", rows, streaming=True, transform="rlpipe.data.ebft_rows:all_turns")
    with pytest.raises(DataError, match=r"is batched, .* set data\.streaming=false"):
        opened(data)


# Held-out rows, mixes, and what is trained on them --------------------------------------------------------------------


def test_held_out_splits_and_files_are_kept_out_of_streams(tmp_path: Path) -> None:
    splits = {"train": Dataset.from_list(numbers(6)), "test": Dataset.from_list(numbers(2))}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(
        source="datasets", path=str(tmp_path / "saved"), streaming=True, held_out=HeldOutConfig(split="test")
    )
    source, held_out = open_prompts(data, TOKENIZER, seed=1)
    assert [text(prompt) for prompt in held_out] == ["p0", "p1"]
    assert {text(prompt) for prompt in source.take(12)} == {"p2", "p3", "p4", "p5"}


@pytest.mark.parametrize("drawn", [0, 7, 33, 70])
def test_streams_are_mixed_and_resumed(tmp_path: Path, drawn: int) -> None:
    a = make(tmp_path / "a", "jsonl", numbers(7))
    b = make(tmp_path / "b", "parquet", [{"prompt": f"q{number}", "completion": "y"} for number in range(10)])
    sources = {
        "a": {"source": "jsonl", "path": a.path, "weight": 2, "shuffle_rows": 3},
        "b": {"source": "parquet", "path": b.path, "shuffle_rows": 4},
        "c": {"source": "jsonl", "path": a.path, "streaming": False},
    }
    data = DataConfig(source="mix", sources=sources, streaming=True)
    source = opened(data)
    source.take(drawn)
    cursor = source.cursor
    expected = [(prompt.prompt_id, prompt.epoch, text(prompt)) for prompt in source.take(40)]
    other = opened(data)
    other.seek(cursor)
    assert [(prompt.prompt_id, prompt.epoch, text(prompt)) for prompt in other.take(40)] == expected
    assert source.metrics["rows/taken/a"] == pytest.approx((drawn + 40) / 2, abs=2)


def test_streams_feed_supervised_training_and_ground_truths(tmp_path: Path) -> None:
    data = make(tmp_path, "jsonl", numbers(5), streaming=True)
    source, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
    assert {TOKENIZER.decode(sequence.completion_ids) for sequence in source.take(5)} == {"y<|end|>"}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = make(tmp_path / "chat", "jsonl", [{"messages": chat}], streaming=True)
    turns = DataConfig(source="jsonl", path=data.path, streaming=True, transform="rlpipe.data.ebft_rows:last_turn")
    prompts, _ = open_prompts(turns, TOKENIZER, seed=1, ebft=EbftConfig())
    truth = prompts.next().truth
    assert truth is not None
    assert TOKENIZER.decode(truth.token_ids) == "b<|end|>"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_damaged_compressed_file_is_named(streaming: bool, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-30])
    data = DataConfig(source="jsonl", path=str(path), streaming=streaming)
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        open_prompts(data, make_tokenizer(), seed=0)
