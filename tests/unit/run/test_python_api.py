"""Runs from Python keywords: their configs, and rows that are in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

import rlpipe
from rlpipe.common.atomic_io import held
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, DataError, InputError
from rlpipe.run import pipeline
from rlpipe.run.python_api import make_config

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "policy"
    folder.mkdir()
    return {"model": str(folder), "output": str(tmp_path / "run")}


def length(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def test_keywords_are_options_sections_and_files_of_groups(base: dict[str, Any], tmp_path: Path) -> None:
    given = {
        **base,
        "algorithm": "dapo",
        "learner": {"optimizer": {"lr": 1e-5}},
        "learner.max_grad_norm": 0.5,
        "seed": 7,
    }
    config = make_config([given], ROWS, 2)
    assert config.model.path == base["model"]
    assert (
        config.algorithm
        == load_config(
            ["model.path=x", "algorithm=dapo", "data=jsonl", "data.path=x", "algorithm.num_steps=5"], need_files=False
        ).algorithm
    )
    assert (config.learner.optimizer.lr, config.learner.max_grad_norm, config.seed) == (1e-5, 0.5, 7)
    assert make_config([{**base, "model": "full", "model.path": base["model"]}], ROWS, 1).model.adapter.kind == "none"


def test_later_options_are_added_to_those_before(base: dict[str, Any]) -> None:
    given = [{"learner": {"optimizer": {"lr": 1e-5}}}, {"learner": {"max_grad_norm": 0.5}}, base]
    learner = make_config(given, ROWS, 1).learner
    assert (learner.optimizer.lr, learner.max_grad_norm) == (1e-5, 0.5)
    again = [{"learner.optimizer.lr": 1e-5}, {"learner.optimizer.lr": 1e-4}, base]
    assert make_config(again, ROWS, 1).learner.optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        (ROWS, "dataset.jsonl"),
        (iter(ROWS), "dataset.jsonl"),
        ((row for row in ROWS), "dataset.jsonl"),
        (datasets.Dataset.from_list(ROWS), "dataset.parquet"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "dataset.jsonl"),
        (pandas.DataFrame(ROWS), "dataset.parquet"),
    ],
)
def test_rows_in_memory_are_stored_in_the_output(
    base: dict[str, Any], dataset: Iterable[Any], file: str, tmp_path: Path
) -> None:
    config = make_config([{**base, "data.held_out.size": 4}], dataset, 3)
    assert config.data.path == f"{tmp_path}/run/{file}"
    stored = datasets.load_dataset(config.data.source.replace("jsonl", "json"), data_files=config.data.path)["train"]
    assert stored.to_list() == ROWS
    assert config.algorithm.num_steps == 6, "3 epochs of 16 rows, of which a step takes 8"


@pytest.mark.parametrize("started", ["checkpoints/step_000001", "ledger.sqlite"])
def test_a_resumed_run_has_the_same_rows(base: dict[str, Any], tmp_path: Path, started: str) -> None:
    make_config([base], ROWS, 1)
    make_config([base], ROWS[1:], 1)  # nothing is trained yet
    (tmp_path / "run" / started).mkdir(parents=True)
    make_config([base], ROWS[1:], 1)
    with pytest.raises(ConfigError, match=r"^dataset: the run in .*/run began with other rows; pass those, or choose"):
        make_config([base], ROWS, 1)
    assert (tmp_path / "run" / "dataset.jsonl").read_text().count("\n") == 19


def test_the_rows_of_a_run_that_is_going_on_stay(base: dict[str, Any], tmp_path: Path) -> None:
    make_config([base], ROWS, 1)
    with held(tmp_path / "run"), pytest.raises(ConfigError, match=r"^another run writes to output="):
        make_config([base], ROWS[1:], 1)
    assert (tmp_path / "run" / "dataset.jsonl").read_text().count("\n") == 20


def test_arrays_in_rows_are_plain_values(base: dict[str, Any], tmp_path: Path) -> None:
    make_config([base], [{"prompt": "a", "grid": np.arange(3), "size": np.float32(0.5)}] * 2, 1)
    row = json.loads((tmp_path / "run" / "dataset.jsonl").read_text().splitlines()[0])
    assert row == {"prompt": "a", "grid": [0, 1, 2], "size": 0.5}


def test_rows_and_places_that_can_not_be_written_are_named(base: dict[str, Any], tmp_path: Path) -> None:
    mixed = pandas.DataFrame({"prompt": ["a", 1]})
    with pytest.raises(DataError, match=r"^dataset: these rows can't be stored as Parquet \("):
        make_config([base], mixed, 1)
    full = pandas.DataFrame(ROWS)
    full.to_parquet = lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(ConfigError, match=r"^output=.*/run can't be written \(.*No space left on device"):
        make_config([base], full, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^output=.*/file/run can't be written \("):
        make_config([{**base, "output": str(tmp_path / "file" / "run")}], ROWS, 1)


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ([], r"^dataset: there are no rows in it$"),
        (["a"], r"^dataset\[0\] is a str; a row is a dictionary, such as {'prompt': '1\+1='}$"),
        ([ROWS[0], {"prompt": object()}], r"^dataset\[1\] can't be stored as JSON \(a object is no plain value\)"),
    ],
)
def test_rows_that_can_not_be_stored_are_named(base: dict[str, Any], dataset: list[Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        make_config([base], dataset, 1)


def test_files_and_names_of_the_hub_are_read_where_they_are(base: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    config = make_config([base], str(rows), None)
    assert (config.data.source, config.data.path) == ("jsonl", str(rows))
    hub = make_config([{**base, "data": {"split": "test"}}], "openai/gsm8k", None)
    assert (hub.data.source, hub.data.path, hub.data.split) == ("datasets", "openai/gsm8k", "test")
    with pytest.raises(ConfigError, match=r"^num_epochs: only rows in memory have a known number; set algorithm\.num_"):
        make_config([base], str(rows), 1)


def test_names_of_other_libraries_get_their_hint(base: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^learning_rate: no such option; did you mean learner\.optimizer\.lr\?$"):
        make_config([{**base, "learning_rate": 1e-5}], ROWS, 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reward_funcs", "it is rewards here"),
        ("train_dataset", "it is dataset here"),
        ("args", "the options themselves"),
    ],
)
def test_arguments_of_trls_trainers_get_their_hint(base: dict[str, Any], name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: rlpipe.train has no such argument; .*{hint}"):
        rlpipe.train(base, length, **{name: ROWS})


def test_one_reward_or_several(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Config, Any]] = []
    monkeypatch.setattr(pipeline, "train", lambda config, rewards: calls.append((config, rewards)) or {"steps": 3})
    assert rlpipe.train(**base, dataset=ROWS, rewards=length, num_epochs=1)["steps"] == 3
    rlpipe.train({"seed": 3}, [length, length], **base, dataset=ROWS)
    rlpipe.train(calls[0][0])
    assert [(config.seed, rewards) for config, rewards in calls] == [(0, [length]), (3, [length] * 2), (0, [])]
    for name, value in {"seed": 2, "num_epochs": 3, "model": "full"}.items():
        with pytest.raises(ConfigError, match=f"^{name}: a finished Config takes no further options"):
            rlpipe.train(calls[0][0], **{name: value})


def test_a_config_file_takes_further_options(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Config] = []
    monkeypatch.setattr(pipeline, "train", lambda config, rewards: calls.append(config) or {})
    file = tmp_path / "run.yaml"
    file.write_text("defaults: [{algorithm: dapo}]\nseed: 3\nlearner: {optimizer: {lr: 1e-6}}\n")
    for kind in (str, Path):
        rlpipe.train(kind(file), **base, dataset=ROWS, seed=4)
    assert calls[0] == calls[1]
    assert (calls[0].seed, calls[0].learner.optimizer.lr, calls[0].algorithm.loss.clip_high) == (4, 1e-6, 0.28)
    with pytest.raises(InputError, match=r"the config file .*none\.yaml does not exist"):
        rlpipe.train(tmp_path / "none.yaml")


def test_tuples_are_lists(base: dict[str, Any]) -> None:
    config = make_config([base, {"learner": {"optimizer": {"betas": (0.8, 0.9)}}}], ROWS, None)
    assert list(config.learner.optimizer.betas) == [0.8, 0.9]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rewards": "module:name"}, r"^rewards='module:name': give a reward function or RewardActor class, or a list"),
        ({"rewards": [length, "module:name"]}, r"^rewards=\[.*'module:name'\]: give a reward function"),
        ({"rewards": {"length": length}}, "^rewards={'length': .*: give a reward function"),
        ({"rewards": 5}, "^rewards=5: give a reward function"),
        ({"config": ["seed=3"]}, r"^config=\['seed=3'\]: give a YAML file, or a dictionary of options$"),
        ({"config": {3: 4}}, "^3: no such option"),
        ({"num_epochs": float("nan")}, "^num_epochs=nan: give a number above 0$"),
        ({"num_epochs": float("inf")}, "^num_epochs=inf: give a number above 0$"),
        ({"num_epochs": -1}, "^num_epochs=-1: give a number above 0$"),
        ({"num_epochs": "2"}, "^num_epochs='2': give a number above 0$"),
        ({"data.path": "rows.jsonl"}, "^data.path: the argument dataset gives the rows; leave one of them out$"),
        ({"data": {"path": "rows.jsonl"}}, "^data.path: the argument dataset gives the rows"),
        ({"dataset": 5}, "^dataset=5: give a file, a folder, a hub id, or rows$"),
    ],
)
def test_arguments_of_other_types_are_named(base: dict[str, Any], arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        rlpipe.train(**{**base, "dataset": ROWS, **arguments})


def test_paths_are_texts_as_well(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Config] = []
    monkeypatch.setattr(pipeline, "train", lambda config, rewards: calls.append(config) or {})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0]) + "\n")
    for kind in (str, Path):
        rlpipe.train(output=base["output"], model=kind(base["model"]), dataset=kind(rows))
    assert calls[0] == calls[1]
    assert calls[0].data.path == str(rows)
