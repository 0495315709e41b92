"""Tests that rows are read from files, data sets and reasoning-gym tasks, or fail with what is wrong and where."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Split

from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.data.row import require_columns
from rlpipe.data.sources.open_rows import load_split, open_held_out_rows, open_rows
from rlpipe.data.sources.readers import open_lines
from rlpipe.errors import DataError

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "bż", "answer": 2}, {"prompt": "c", "answer": 3}]


def read(data: DataConfig, seed: int = 0) -> list[dict[str, Any]]:
    rows = open_rows(data, seed=seed)
    return [dict(rows[index]) for index in range(len(rows))]


def write_jsonl(path: Path, lines: list[str]) -> DataConfig:
    path.write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(source="jsonl", path=str(path))


def test_jsonl_rows_keep_the_line_numbers_of_the_file(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    data = write_jsonl(tmp_path / "rows.jsonl", [lines[0], "", lines[1], "   ", lines[2]])
    assert read(data) == ROWS
    assert open_rows(data, seed=0).location(2) == f"{tmp_path}/rows.jsonl, line 5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "line 2: not JSON"),
        ("[1]", "line 2: expected a JSON object .* found list"),
        ("\x00", "line 2: not JSON"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_rows(write_jsonl(tmp_path / "rows.jsonl", ['{"prompt": "a"}', line]), seed=0)


def test_jsonl_line_without_the_column_is_found_at_the_start(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", ['{"prompt": "a"}', "", '{"question": "b"}'])
    with pytest.raises(DataError, match=r"rows.jsonl, line 3: no column 'prompt'; existing columns: question; set x"):
        open_rows(data, seed=0, check=lambda columns, place, nulls=(): require_columns(columns, ["prompt"], place, "x"))


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_missing_file_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match=f"data.path: there is no file {tmp_path}/none"):
        open_rows(DataConfig(source=source, path=str(tmp_path / "none")), seed=0)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        open_rows(write_jsonl(tmp_path / "rows.jsonl", ["", ""]), seed=0)


def test_parquet_rows_and_columns(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    data = DataConfig(source="parquet", path=str(tmp_path / "rows.parquet"))
    assert read(data) == ROWS
    with pytest.raises(DataError, match=r"rows.parquet: no column 'question'; existing columns: prompt, answer"):
        open_rows(
            data, seed=0, check=lambda columns, place, nulls=(): require_columns(columns, ["question"], place, "x")
        )


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    arguments = pa.array([[("city", "Paris")], [("city", "Rome"), ("day", "1")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"arguments": arguments}), tmp_path / "rows.parquet")
    data = DataConfig(source="parquet", path=str(tmp_path / "rows.parquet"))
    rows = open_rows(data, seed=0)
    assert [rows[0], rows[1]] == [{"arguments": {"city": "Paris"}}, {"arguments": {"city": "Rome", "day": "1"}}]


@pytest.mark.parametrize("name", ["rows.json", "./rows.json", "a[1].json", "."])
def test_data_sets_are_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / ("rows.json" if name == "." else name)).write_text(json.dumps(ROWS))
    monkeypatch.chdir(tmp_path)
    assert read(DataConfig(source="datasets", path=name)) == ROWS


def test_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("hello")
    with pytest.raises(DataError, match="not readable as Parquet"):
        open_rows(DataConfig(source="parquet", path=str(tmp_path / "rows.parquet")), seed=0)


def test_saved_data_set_and_its_splits(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "single"))
    assert read(DataConfig(source="datasets", path=str(tmp_path / "single"))) == ROWS
    DatasetDict({"test": Dataset.from_list(ROWS[:1])}).save_to_disk(str(tmp_path / "split"))
    assert read(DataConfig(source="datasets", path=str(tmp_path / "split"), split="test")) == ROWS[:1]
    with pytest.raises(DataError, match=r"data.split: .* has no split 'train'; its splits are test"):
        open_rows(DataConfig(source="datasets", path=str(tmp_path / "split")), seed=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_single_saved_data_set_has_no_split_but_its_own(tmp_path: Path, streaming: bool) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "none"))
    Dataset.from_list(ROWS, split=Split("test")).save_to_disk(str(tmp_path / "own"))
    none, own = (DataConfig(source="datasets", path=str(tmp_path / name)) for name in ("none", "own"))
    for data in (none, own, replace(own, split="test")):
        assert len(load_split(replace(data, streaming=streaming))) == 3
    for data in (none, own):
        with pytest.raises(DataError, match=r"^data\.split: '.*' is a single .* split 'dev'; leave data\.split out$"):
            load_split(replace(data, split="dev", streaming=streaming))
    held_out = replace(none, held_out=HeldOutConfig(split="test"), streaming=streaming)
    with pytest.raises(DataError, match=r"^data\.held_out\.split: .* split 'test'; set data\.held_out\.size or"):
        open_held_out_rows(held_out)
    with pytest.raises(DataError, match=r"^data\.held_out\.split: .* split 'train'"):
        open_held_out_rows(replace(own, split="test", held_out=HeldOutConfig(split="train")))


def test_folder_of_data_files_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [json.dumps(row) for row in ROWS])
    assert read(DataConfig(source="datasets", path=str(tmp_path / "data"))) == ROWS
    with pytest.raises(DataError, match=r"can't be loaded"):
        open_rows(DataConfig(source="datasets", path=str(tmp_path / "data"), split="dev"), seed=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_single_file_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "other.csv").write_text("prompt,answer\nz,9\n")
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\nb,2\n")
    found = load_split(DataConfig(source="datasets", path=str(tmp_path / "rows.csv"), streaming=streaming))
    assert [*found] == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [json.dumps(row) for row in ROWS])
    rows = open_rows(data, seed=0)
    for content in ("{", None):
        (tmp_path / "rows.jsonl").write_text(content) if content else (tmp_path / "rows.jsonl").unlink()
        with pytest.raises(DataError, match=r"rows\.jsonl, line 2 has changed since the run began \(.*\): put"):
            rows[1]


def test_a_compressed_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert open_lines(path, 16).read() == b""
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz has become shorter since the run began"):
        open_lines(path, 17)


def test_a_value_that_python_can_not_hold_is_named(tmp_path: Path) -> None:
    times = pa.array([0, 4 * 10**11], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "time": times}), tmp_path / "rows.parquet")
    rows = open_rows(DataConfig(source="parquet", path=str(tmp_path / "rows.parquet")), seed=0)
    assert rows[0]["prompt"] == "a"
    with pytest.raises(DataError, match=r"rows\.parquet, row 2 can't be read \("):
        rows[1]


def test_hidden_files_and_folders_hold_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows" / ".ipynb_checkpoints").mkdir(parents=True)
    (tmp_path / "rows" / "folder.jsonl").mkdir()
    for name in ("a.jsonl", ".b.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl"):
        (tmp_path / "rows" / name).write_text('{"prompt": "a"}')
    assert read(DataConfig(source="jsonl", path=str(tmp_path / "rows"))) == [{"prompt": "a"}]
    (tmp_path / "rows" / "gone.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.jsonl can't be read \(FileNotFoundError"):
        open_rows(DataConfig(source="jsonl", path=str(tmp_path / "rows")), seed=0)


def test_data_set_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        open_rows(DataConfig(source="datasets", path=str(tmp_path / "none")), seed=0)


def test_reasoning_gym_rows_carry_what_the_grader_needs() -> None:
    data = DataConfig(source="reasoning_gym", task="chain_sum", task_args={"size": 3}, prompt_column="q")
    rows = read(data, seed=5)
    assert [row["q"] for row in rows] == [row["entry"]["question"] for row in rows]
    assert rows[0]["answer"] == rows[0]["entry"]["answer"]
    assert rows[0]["reasoning_gym_task"] == "chain_sum"
    assert "metadata" in rows[0]["entry"]
    assert read(data, seed=5) == rows != read(data, seed=6)


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("chainsum", {}, "no task 'chainsum'; the closest names are chain_sum"),
        ("chain_sum", {"sizes": 3}, "no argument 'sizes'; did you mean size"),
        ("chain_sum", {"size": -1}, "size must be positive"),
    ],
)
def test_wrong_task_is_explained(task: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_rows(DataConfig(source="reasoning_gym", task=task, task_args=arguments), seed=0)
