"""Tests that prepared rows are those that the run would render, and that runs that would render others ignore them."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from prepared_cases import config_of, is_found, open_run, plain, prepare, story, write

from rlpipe import cli
from rlpipe.data.row import dump_values, load_values
from rlpipe.data.sources.row_source import RowRef
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import CHAT_TEMPLATE, make_tokenizer

DYING = """
import os

def die(cfg):
    def map_row(row):
        if row["id"] == 66 and os.getpid() != cfg.survivor:
            os.kill(os.getpid(), 9)
        return {}
    return map_row
"""
WAITING = """
import os
import time
from pathlib import Path

def wait(cfg):
    def map_row(row):
        folder = Path(cfg.folder)
        if os.getpid() != cfg.other:
            (folder / "started").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        return {}
    return map_row
"""
RECIPE = """
def rename(cfg):
    def map_row(row):
        prompt, completion = (message["content"] for message in row["messages"][:2])
        return {"prompt": prompt, "completion": completion, "level": cfg.level}
    return map_row, {"remove_columns": ["messages"]}

def turns(cfg):
    def map_batch(batch):
        (messages,) = batch["messages"]
        if messages is None:
            raise ValueError("no messages")
        pairs = list(zip(messages[::2], messages[1::2]))
        return {"prompt": [a["content"] for a, _ in pairs], "completion": [b["content"] for _, b in pairs]}
    return map_batch, {"remove_columns": "__all__", "batched": True}
"""


def talk(index: int) -> dict[str, Any]:
    texts = ["q" * (index % 9 + 1), f"a{index}", "and?", "yes" * (index % 4 + 1)]
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)], "id": index}


LONG = [
    [{"role": "user", "content": "q" * asked}, {"role": "assistant", "content": "a" * 1010}] for asked in (1100, 100)
]
CONVERSATIONS = [
    *map(talk, range(70)),
    {"messages": [], "id": 70},
    *({"messages": messages, "id": None} for messages in LONG),
    *map(talk, range(5)),
]
PROMPTS = [
    {"prompt": "p" * (index % 40 + 1), "ground_truth": f"t{index}", "nested": {"list": [1, 2.5, None, True]}}
    for index in range(90)
] + [{"prompt": None, "ground_truth": "t", "nested": {}}, {"prompt": "same", "ground_truth": None, "nested": {}}]
TEXTS = [{"text": f"{index} " * (index * 5 + 1)} for index in range(40)] + [{"text": ""}, {"text": 3}]


def source_options(folder: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    make_tokenizer().save_pretrained(folder / "tokenizer")
    write(folder / "rows.jsonl", rows)
    (folder / "recipe.py").write_text(RECIPE)
    return [
        *("model.path=org/policy", f"model.tokenizer={folder / 'tokenizer'}"),
        *("data=jsonl", f"data.path={folder / 'rows.jsonl'}", f"data.cache={folder / 'cache'}", "seed=3"),
    ]


def sft(folder: Path, rows: Sequence[dict[str, Any]] = CONVERSATIONS) -> list[str]:
    return [*source_options(folder, rows), "algorithm=sft", "learner.max_tokens_per_microbatch=1030"]


def texts(folder: Path) -> list[str]:
    options = [*sft(folder, TEXTS), "data.text_column=text", "algorithm.groups_per_step=4"]
    return [*options, "learner.max_tokens_per_microbatch=60", "data.held_out.size=3"]


def reasoning(folder: Path) -> list[str]:
    options = [option for option in sft(folder) if not option.startswith(("data=", "data.path"))]
    return [*options, "data=reasoning_gym", "data.task=basic_arithmetic", "data.task_args.size=70"]


def held_out_file(folder: Path) -> list[str]:
    write(folder / "held_out.jsonl", [*CONVERSATIONS[3:9], {"messages": [], "id": 0}])
    return [*sft(folder), f"data.held_out.path={folder / 'held_out.jsonl'}"]


def batched(folder: Path) -> list[str]:
    return [*sft(folder), f"data.transform={folder / 'recipe.py'}:turns", "data.held_out.size=4"]


def renamed(folder: Path) -> list[str]:
    return [*sft(folder), f"data.transform={folder / 'recipe.py'}:rename", "data.transform_args.level=2"]


def prompts(folder: Path) -> list[str]:
    return [*source_options(folder, PROMPTS), "algorithm=grpo", "data.held_out.size=5", "data.max_prompt_tokens=30"]


def plain_prompts(folder: Path) -> list[str]:
    return [*prompts(folder), "data.chat=false", "data.shuffle=false"]


def truths(folder: Path) -> list[str]:
    turns = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "more"}]
    rows = [*PROMPTS, *({**row, "remaining_turns": turns} for row in PROMPTS[:3])]
    return [*source_options(folder, rows), "algorithm=ebft", "data.max_prompt_tokens=30"]


def tables(folder: Path) -> list[str]:
    """Write columns of types that JSON lacks, and return the options of a run on them."""
    rows = [
        {"prompt": row["prompt"], "at": datetime.datetime(2024, 1, index % 28 + 1), "raw": bytes([index])}
        for index, row in enumerate(PROMPTS)
    ]
    options = [option for option in prompts(folder) if not option.startswith(("data=", "data.path"))]
    DatasetDict({"train": Dataset.from_list(rows), "dev": Dataset.from_list(rows[4:9])}).save_to_disk(folder / "set")
    return [*options, "data.held_out.size=0", "data=datasets", f"data.path={folder / 'set'}", "data.held_out.split=dev"]


def tools(folder: Path) -> list[str]:
    """Write rows with tools of their own, which the template renders, and return the options of a run on them."""
    schema = {"type": "function", "function": {"name": "look"}}
    rows = [{**row, "tools": [schema] * (number % 3)} for number, row in enumerate(CONVERSATIONS)]
    (folder / "template.jinja").write_text("{{ tools | length }}" + CHAT_TEMPLATE)
    return [*sft(folder, rows), "data.held_out.size=2", f"model.chat_template={folder / 'template.jinja'}"]


def parquet(folder: Path) -> list[str]:
    options = [option for option in prompts(folder) if not option.startswith(("data=", "data.path"))]
    Dataset.from_list(PROMPTS).to_parquet(folder / "rows.parquet")
    return [*options, "data=parquet", f"data.path={folder / 'rows.parquet'}"]


CASES = [
    *(sft, texts, held_out_file, prompts, truths, tables),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (reasoning, batched, renamed, plain_prompts, tools, parquet)
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_prepared_rows_are_those_that_a_run_renders(
    case: Callable[[Path], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = case(tmp_path)
    rendered = story(config_of(options))
    prepare(options)
    with caplog.at_level(logging.INFO):
        prepared = story(config_of(options))
    assert "prepared rows are read from" in caplog.text
    assert prepared == rendered


def test_windows_of_prepared_texts_differ_by_epoch(tmp_path: Path) -> None:
    options = texts(tmp_path)
    prepare(options)
    source, _ = open_run(config_of(options))
    first, second = [source.render(RowRef(0, 30, epoch)).token_ids.tolist() for epoch in (0, 1)]
    assert len(first) == len(second) == 60
    assert first != second


def test_chunks_of_prepared_texts_are_those_that_a_run_cuts(tmp_path: Path) -> None:
    options = [*texts(tmp_path), "data.long_texts=chunks"]
    rendered = story(config_of(options))
    prepare(options)
    assert story(config_of(options)) == rendered


def test_workers_write_the_same_file(tmp_path: Path) -> None:
    options = batched(tmp_path)
    contents = []
    for workers in (1, 3):
        prepare(options, workers)
        (file,) = (tmp_path / "cache").rglob("*.arrow")
        contents.append(file.read_bytes())
        file.unlink()
    assert contents[0] == contents[1]


def test_rows_are_prepared_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = held_out_file(tmp_path)
    prepare(options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"prepared 78 rows of {tmp_path / 'rows.jsonl'}, 2 of them skipped: ")
    assert lines[1].startswith(f"prepared 7 rows of {tmp_path / 'held_out.jsonl'}, 1 of them skipped: ")
    prepare(options)
    assert capsys.readouterr().out.count("already prepared: ") == 2


def test_the_log_says_once_more_how_the_loss_mask_was_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [*sft(tmp_path), "data.train_on_eos=none"]
    prepare(options)
    assert is_found(options, caplog)
    assert len([line for line in caplog.messages if line.startswith("loss mask: derived from the chat template")]) == 1


def test_notes_of_the_mask_are_kept_whichever_row_is_the_first_to_need_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": [], "id": index} for index in range(64)]
    options = [*sft(tmp_path, [*rows, talk(1)]), "data.train_on_eos=none"]
    prepare(options)
    assert is_found(options, caplog)
    assert len([line for line in caplog.messages if line.startswith("loss mask: derived")]) == 1


def change_byte(folder: Path) -> list[str]:
    content = bytearray((folder / "rows.jsonl").read_bytes())
    content[content.index(b"yes")] = ord("Y")
    (folder / "rows.jsonl").write_bytes(content)
    return []


def change_template(folder: Path) -> list[str]:
    (folder / "template.jinja").write_text(CHAT_TEMPLATE + " ")
    return [f"model.chat_template={folder / 'template.jinja'}"]


def change_tokenizer(folder: Path) -> list[str]:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["and?"])
    tokenizer.save_pretrained(folder / "tokenizer")
    return []


def change_transform(folder: Path) -> list[str]:
    (folder / "recipe.py").write_text(RECIPE + "# one more line\n")
    return []


CHANGES = [
    change_byte,
    change_template,
    change_tokenizer,
    change_transform,
    lambda folder: ["data.transform_args.level=3"],
    lambda folder: ["data.system_prompt=Be brief."],
    lambda folder: ["data.train_on_eos=none"],
    lambda folder: ["algorithm=grpo", "learner.max_tokens_per_microbatch=2000"],
    *(
        pytest.param(change, marks=pytest.mark.slow)
        for change in (
            lambda folder: ["data.max_prompt_tokens=1000"],
            lambda folder: ["data.chat_template_kwargs.thinking=true"],
            lambda folder: ["data.tools_column=null"],
            lambda folder: ["data.roles_to_train=[assistant,user]"],
        )
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_rows_are_made_from_is_seen(
    change: Callable[[Path], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = renamed(tmp_path)
    prepare(options)
    assert is_found(options, caplog)
    assert not is_found([*options, *change(tmp_path)], caplog)


def test_rows_that_are_prepared_to_hold_some_out_have_their_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = sft(tmp_path)
    prepare(options)
    assert not is_found([*options, "data.held_out.size=2"], caplog)
    prepare([*options, "data.held_out.size=2"])
    assert is_found([*options, "data.held_out.size=3"], caplog)
    assert is_found(options, caplog)


@pytest.mark.parametrize("option", ["seed=4", "data.shuffle=false", "learner.max_tokens_per_microbatch=1100"])
def test_rows_are_the_same_in_another_order_or_length(
    option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = sft(tmp_path)
    prepare(options)
    assert is_found([*options, option], caplog)


def test_rows_of_a_task_are_those_of_its_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = reasoning(tmp_path)
    prepare(options)
    assert is_found(options, caplog)
    assert not is_found([*options, "seed=4"], caplog)
    assert not is_found([*options, "data.task_args.size=71"], caplog)


def test_files_of_a_data_set_are_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [*tables(tmp_path), "data.held_out.split=null"]
    prepare(options)
    assert is_found(options, caplog)
    (file,) = (tmp_path / "set" / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"same", b"Same"))
    assert not is_found(options, caplog)


def test_truths_are_prepared_as_their_options_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = truths(tmp_path)
    prepare(options)
    assert is_found(options, caplog)
    assert not is_found([*options, "algorithm.ebft.gt_length_multiplier=7"], caplog)


def test_a_damaged_file_is_not_used_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = sft(tmp_path)
    prepare(options)
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    file.write_bytes(file.read_bytes()[:-40])
    assert not is_found(options, caplog)
    assert "prepared rows are not used" in caplog.text
    prepare(options)
    assert is_found(options, caplog)


def dying(folder: Path) -> list[str]:
    """Return the options of a transform that kills its process at row 66, unless it is this process."""
    (folder / "recipe.py").write_text(DYING)
    return [f"data.transform={folder / 'recipe.py'}:die", f"data.transform_args.survivor={os.getpid()}"]


def test_a_killed_preparation_leaves_nothing_that_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [*sft(tmp_path), *dying(tmp_path)]
    child = multiprocessing.get_context("fork").Process(target=prepare, args=(options,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list((tmp_path / "cache").rglob("*.writing"))
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert not is_found(options, caplog)
    prepare(options)
    assert is_found(options, caplog)
    assert not list((tmp_path / "cache").rglob("*.writing"))


def test_two_preparations_at_one_time_do_not_write_the_same_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*sft(tmp_path), f"data.transform={tmp_path / 'recipe.py'}:wait"]
    options += [f"data.transform_args.folder={tmp_path}", f"data.transform_args.other={os.getpid()}"]
    (tmp_path / "recipe.py").write_text(WAITING)
    first = multiprocessing.get_context("fork").Process(target=prepare, args=(options,), daemon=True)
    first.start()
    while not (tmp_path / "started").exists():
        assert first.is_alive()
        first.join(0.01)
    assert cli.main(["data", "prepare", *options, "--workers", "1"]) == 1
    assert "another rlpipe data prepare is writing to" in capsys.readouterr().err
    (tmp_path / "go").touch()
    first.join()
    assert first.exitcode == 0
    prepare(options)
    assert "already prepared: 78 rows" in capsys.readouterr().out


def test_a_worker_that_dies_ends_the_preparation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*sft(tmp_path), *dying(tmp_path)]
    assert cli.main(["data", "prepare", *options, "--workers", "2"]) == 1
    assert "a worker of rlpipe data prepare died" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = sft(tmp_path, [{"other": 1}])
    assert cli.main(["data", "prepare", *options]) == 2
    assert cli.main(["data", "prepare", *options, f"data.path={tmp_path / 'nothing.jsonl'}"]) == 2
    streams = capsys.readouterr()
    assert streams.err.count("\n") == 2
    assert "no columns 'prompt' and 'completion'" in streams.err
    assert "nothing.jsonl" in streams.err


@pytest.mark.parametrize("command", ["prepare", "preview", "stats"])
@pytest.mark.parametrize("below", ["", "/rows"])
def test_a_cache_that_is_a_file_is_refused_by_name(
    command: str, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "taken").write_text("")
    assert cli.main(["data", command, *sft(tmp_path), f"data.cache={file}{below}"]) == 2
    assert capsys.readouterr().err == f"rlpipe: error: data.cache: {file} is a file; name a folder\n"


def test_times_of_parquet_are_stored() -> None:
    types = [
        pa.timestamp("ns"),
        pa.timestamp("ns", tz="America/New_York"),
        pa.timestamp("us", tz="UTC"),
        pa.duration("ns"),
    ]
    rows = pa.table({str(kind): pa.array([1, 10**15 + 7], kind) for kind in types}).to_pylist()
    for value in (value for row in rows for value in row.values()):
        found = load_values(dump_values(value, "here"))
        assert (found, type(found), getattr(found, "tzinfo", None)) == (
            value,
            type(value),
            getattr(value, "tzinfo", None),
        )


def test_only_plain_values_are_stored() -> None:
    value = {"a": (1, [2.5, None]), "b": {3, 4}, "c": datetime.date(2024, 1, 1), "d": np.arange(3), "e": np.float32(2)}
    assert plain(load_values(dump_values(value, "here"))) == plain(value)
    with pytest.raises(DataError, match="row 3: its columns can't be stored"):
        dump_values({"path": Path("x")}, "row 3")
    with pytest.raises(DataError, match="can't be stored"):
        dump_values({"call": lambda: 1}, "row 3")
