"""``rlpipe.train`` for Python: a run from keywords, with rows and rewards that are in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast, runtime_checkable

from rlpipe.common import run_files
from rlpipe.common.atomic_io import writing_path
from rlpipe.configs.compose import list_groups, load_config, nested
from rlpipe.configs.data_sources import SUFFIXES
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, DataError
from rlpipe.run import pipeline
from rlpipe.run.prepare import RewardLike, hold_output, naming_output


@runtime_checkable
class Table(Protocol):
    """Rows that can write themselves to a file, as ``datasets.Dataset`` and ``pandas.DataFrame`` can."""

    def __len__(self) -> int: ...

    def to_parquet(self, path: str) -> object: ...


TRL_ARGUMENTS = {
    "reward_funcs": "rewards",
    "train_dataset": "dataset",
    "eval_dataset": "the option data.held_out.path, or data.held_out.size",
    "processing_class": "the option model.tokenizer",
    "peft_config": "model='lora' with options such as model.adapter.r",
    "args": "the options themselves, such as **{'learner.optimizer.lr': 1e-6}",
}
"""Names of what TRL's trainers take, and what takes it here."""


class Summary(TypedDict, total=False):
    """Figures of a whole run, as in ``summary.json``; those that a run does not have are missing."""

    steps: int
    seconds: float
    engine: str
    adapter: str
    reward_start: float
    """Mean reward of the first ten steps; ``reward_end`` is that of the last ten."""
    reward_end: float
    eval_accuracy_start: float
    eval_accuracy_end: float
    eval_loss_start: float
    eval_loss_end: float
    mean_length: float
    tokens_per_second: float
    staleness_mean: float
    staleness_max: float
    max_logprob_difference: float
    time: dict[str, float]
    """Seconds of each phase, over all steps."""


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    rewards: RewardLike | Sequence[RewardLike] = (),
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dataset: Iterable[Mapping[str, Any]] | Table | str | os.PathLike[str] | None = None,
    num_epochs: float | None = None,
    **options: Any,
) -> Summary:
    """Train, and return the summary of the run.

    ``config`` is a finished ``Config``, a YAML file, or options by section or name,
    ``{"learner": {"optimizer": {"lr": 1e-5}}}`` or ``{"learner.optimizer.lr": 1e-5}``; further ``options`` are added to
    it. A section may also be the name of one of its files (``algorithm="dapo"``, ``learner="single_gpu"``,
    ``experiment="gsm8k"``). ``model`` is a folder, a hub id, or one of ``lora``, ``qlora`` and ``full``. ``dataset`` is
    a file, a folder, a hub id, or rows: dictionaries with the columns that prompts and rewards need, a
    ``datasets.Dataset`` or a ``DataFrame``, which are stored in the run's output. ``num_epochs`` sets
    ``algorithm.num_steps`` by their number. ``rewards`` are reward functions or ``RewardActor`` classes in addition to
    those of the config, each with weight 1 under its ``__name__``.

    A run that has ended is left as it is. Raises ``InputError`` if the input is wrong, ``RunError`` if the run fails.
    """
    if foreign := next((name for name in options if name in TRL_ARGUMENTS), None):
        raise ConfigError(f"{foreign}: rlpipe.train has no such argument; it is {TRL_ARGUMENTS[foreign]} here")
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    dataset = os.fspath(dataset) if isinstance(dataset, os.PathLike) else dataset
    arguments = {"model": model, "dataset": dataset, "num_epochs": num_epochs}
    reward_list = _as_list(rewards)
    if not isinstance(config, Config):
        file = os.fspath(config) if isinstance(config, str | os.PathLike) else None
        trees: list[Any] = [{} if file else config or {}, options, {} if model is None else {"model": model}]
        config = make_config(trees, dataset, num_epochs, file)
    elif surplus := [*options, *(name for name, value in arguments.items() if value is not None)]:
        raise ConfigError(f"{surplus[0]}: a finished Config takes no further options; pass its options as a dictionary")
    return cast(Summary, pipeline.train(config, reward_list))


def _as_list(rewards: Any) -> list[RewardLike]:
    if callable(rewards):
        return [rewards]
    reward_list = [*rewards] if isinstance(rewards, Iterable) and not isinstance(rewards, str | Mapping) else [rewards]
    if all(callable(reward) for reward in reward_list):
        return reward_list
    raise ConfigError(
        f"rewards={rewards!r:.100}: give a reward function or RewardActor class, or a list of them; "
        "one that is named by its path is an option, such as {'scoring.rewards.NAME.path': 'module:name'}"
    )


def make_config(
    given: Sequence[Mapping[str, Any]], dataset: Any, num_epochs: float | None, file: str | None = None
) -> Config:
    """Return the config of a run, whose rows, if they are in memory, are stored in its output.

    ``given`` are options by section or name; later ones are added to those before them, and all to those of a ``file``.
    """
    if num_epochs is not None and not (isinstance(num_epochs, Real) and 0 < num_epochs < math.inf):
        raise ConfigError(f"num_epochs={num_epochs!r}: give a number above 0")
    if invalid := next((tree for tree in given if not isinstance(tree, Mapping)), None):
        raise ConfigError(f"config={invalid!r:.100}: give a YAML file, or a dictionary of options")
    groups, choices = list_groups(), list[str]()
    options = [] if dataset is None else [{"data": _describe_rows(dataset)}]
    for name, value in chain.from_iterable(tree.items() for tree in given):
        if dataset is not None and (
            name == "data.path" or (name == "data" and isinstance(value, Mapping) and "path" in value)
        ):
            raise ConfigError("data.path: the argument dataset gives the rows; leave one of them out")
        if name == "model" and isinstance(value, str) and value not in groups["model"]:
            options.append({name: {"path": value}})
        elif name in groups and isinstance(value, str):
            choices.append(f"{name}={value}")
        else:
            options.append(nested(str(name), value))
    rows = None if dataset is None or isinstance(dataset, str) else _in_memory(dataset)
    config = load_config(choices, file=file, options=options, need_files=False)
    if rows is not None:
        _store_rows(rows, Path(str(config.data.path)), Path(config.output))
    if num_epochs is not None:
        if rows is None:
            raise ConfigError("num_epochs: only rows in memory have a known number; set algorithm.num_steps instead")
        num_steps = math.ceil(num_epochs * (len(rows) - config.data.held_out.size) / config.algorithm.groups_per_step)
        choices.append(f"algorithm.num_steps={max(num_steps, 1)}")
    return load_config(choices, file=file, options=options)


def _describe_rows(dataset: Any) -> dict[str, Any]:
    """Return the options of ``data`` that read a data set."""
    if isinstance(dataset, str):
        sources = (source for source, endings in SUFFIXES.items() if dataset.endswith(endings))
        return {"source": next(sources, "datasets"), "path": dataset}
    if not isinstance(dataset, Iterable):
        raise DataError(f"dataset={dataset!r:.100}: give a file, a folder, a hub id, or rows")
    source = "parquet" if isinstance(dataset, Table) else "jsonl"
    return {"source": source, "path": f"${{output}}/dataset.{source}"}


def _in_memory(dataset: Any) -> Table | list[str]:
    """Return a table, or the lines of JSON of other rows; raise ``DataError`` for rows that can't be stored."""
    if isinstance(dataset, Table):
        rows: Table | list[str] = dataset
    else:
        rows = [_json_line(row, index) for index, row in enumerate(dataset)]
    if not len(rows):
        raise DataError("dataset: there are no rows in it")
    return rows


def _json_line(row: Any, index: int) -> str:
    if not isinstance(row, Mapping):
        raise DataError(
            f"dataset[{index}] is a {type(row).__name__}; a row is a dictionary, such as {{'prompt': '1+1='}}"
        )
    try:
        return json.dumps(dict(row), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"dataset[{index}] can't be stored as JSON ({error}); pass plain values, or a datasets.Dataset for images"
        ) from None


def _plain(value: Any) -> Any:
    """Return an array or scalar of NumPy or torch as plain values."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} is no plain value")
    return value.tolist()


def _have_equal_rows(path: Path, other: Path) -> bool:
    """Return whether two files have the same rows; Parquet's also name the version of the library that wrote them."""
    if path.read_bytes() == other.read_bytes():
        return True
    if path.suffix != ".parquet":
        return False
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        return bool(read_table(path).equals(read_table(other)))
    except (ArrowException, OSError):  # a damaged file has other rows
        return False


def _store_rows(rows: Table | list[str], path: Path, output: Path) -> None:
    """Write the rows; raise ``ConfigError`` if the run in ``output`` was begun with others, or is going on."""
    with hold_output(output), naming_output(output):
        temporary = writing_path(path)
        try:
            if isinstance(rows, list):
                temporary.write_text("".join(f"{line}\n" for line in rows))
            else:
                rows.to_parquet(str(temporary))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise DataError(f"dataset: these rows can't be stored as Parquet ({error})") from error
        has_begun = (output / run_files.LEDGER).exists() or any((output / run_files.CHECKPOINTS).glob("step_*"))
        if path.is_file() and has_begun and not _have_equal_rows(path, temporary):
            temporary.unlink()
            raise ConfigError(
                f"dataset: the run in {output} began with other rows; pass those, or choose another output"
            )
        temporary.replace(path)
