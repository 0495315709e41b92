"""Translation of the data sets of another system's run into options of ``data``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rlpipe.configs.foreign.foreign_run import MAX_ENTRIES, Computed, read_value
from rlpipe.configs.foreign.foreign_values import ForeignValues
from rlpipe.configs.foreign.setting_rules import Made, UsedBy
from rlpipe.configs.schema.option import MISSING

KINDS = {".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet"}
LOADERS = {"json": "jsonl", "parquet": "parquet"}
"""Sources by the names that ``load_dataset`` has for formats of files."""
COLUMNS = {
    "field_messages": "messages_column",
    "field": "text_column",
    "field_chosen": "chosen_column",
    "field_rejected": "rejected_column",
    "field_prompt": "prompt_column",
    "field_completion": "completion_column",
    "field_label": "label_column",
    "split": "split",
    "name": "name",
    "type": "",
    "path": "path",
}
"""Options of ``data`` by the names of a data set's entries; an empty one chooses nothing but is understood."""
PREFERENCE_COLUMNS = ("field_prompt", "field_chosen", "field_rejected", "field_completion", "field_label")
"""Entries that a type of the user's own may have in its place, such as ``type.field_label``."""
COLUMNS |= {f"type.{name}": COLUMNS[name] for name in PREFERENCE_COLUMNS}
UNDERSTOOD = {
    **dict.fromkeys(("message_field_role", "message_property_mappings.role"), ("role", "from")),
    **dict.fromkeys(("message_field_content", "message_property_mappings.content"), ("content", "value")),
    "ds_type": ("json", "jsonl", "parquet"),
}
"""Settings of a data set that need no option if they have one of these values."""
CHOICES: Mapping[str, type] = {"roles_to_train": list, "train_on_eos": str}
KNOWN_TYPES = ("alpaca", "chat_template", "completion", "pretrain", "sharegpt", "stepwise_supervised")
"""Formats of axolotl whose rows need no transform."""
ALPACA = "alpaca"
"""The format whose prompts are not rendered through a chat template."""
PREFERENCE_TYPES = {
    f"{template}.{form}"
    for template in ("chatml", "llama3")
    for form in ("argilla", "argilla_chat", "icr", "intel", "prompt_pairs", "ultra")
}
"""Formats of axolotl's preferences whose rows are detected; the template is the model's, or its chat_template."""
LISTS = ("datasets", "pretraining_dataset")
NO_TYPE = "its rows have another form: see data.transform"
LISTED_FILES = "several files can't be listed: set data.path to their folder or a pattern"
SELECTED_FILES = "files of a repository can't be chosen: fetch them, and set data.path to their folder or a pattern"
WHOLE_FILE = "files are read whole: write the rows that you want to a file of their own"
CONCATENATED = "there they are concatenated; set data.sources.<name>.weight to the number of their rows"
NO_ENTRY = "set the option of data, or a data.transform"


def entry_of(name: str) -> tuple[int, str] | None:
    """Return the index and the key of a setting such as ``datasets.0.path``; None for other settings."""
    words = name.split(".", 2)
    return (int(words[1]), words[2]) if len(words) == 3 and words[0] in LISTS and words[1].isdecimal() else None


def describe_entry(index: int, key: str, values: ForeignValues, value: Any) -> Made:
    """Return what a setting of a data set is part of, or the reason why it makes no option."""
    if key == "step_separator" and values.run.method == "process_reward_model":
        return {"algorithm.process_reward_model.separator": value}
    if index >= MAX_ENTRIES:
        return f"more than {MAX_ENTRIES} data sets: set data.path to a folder or a pattern"
    if key == "type":
        kind = str(value)
        if kind == ALPACA and translate_data(values)["data"] != "mix":
            return {"data.chat": False}
        is_known = kind.split(".")[0] in KNOWN_TYPES or kind in (*PREFERENCE_TYPES, "bradley_terry.chat_template")
        return UsedBy("data") if is_known else NO_TYPE
    if key == "data_files":
        return UsedBy("data")  # or ``unread_files`` says why not
    is_known = value in UNDERSTOOD.get(key, ()) or isinstance(value, CHOICES.get(key, ()))
    return UsedBy("data") if is_known or (COLUMNS.get(key) and isinstance(value, str)) else NO_ENTRY


def translate_data(values: ForeignValues) -> dict[str, Any]:
    """Return the options of the data, with the choice of the group under ``data``."""
    entries = _entries(values)
    sources = [source for source in map(_source, entries if len(entries) <= MAX_ENTRIES else []) if source]
    if len(sources) > 1:
        named = {f"set_{index}": source for index, source in enumerate(sources, start=1)}
        return {"data": "mix", "data.sources": named}
    if not sources:
        return {"data": "jsonl", "data.path": MISSING}
    sources[0].pop("weight", None)
    return {"data": sources[0].pop("source"), **{f"data.{name}": value for name, value in sources[0].items()}}


def equal_weights(values: ForeignValues) -> list[tuple[str, str]]:
    """Return the data sets of a mix without weights, from which rows are drawn equally often here, with the reason."""
    sources = translate_data(values).get("data.sources", {})
    is_mix = sources and not any("weight" in source for source in sources.values())
    return [("data: " + ", ".join(source["path"] for source in sources.values()), CONCATENATED)] if is_mix else []


def unread_splits(values: ForeignValues) -> list[tuple[str, str]]:
    """Return the parts of files that a run reads, which rlpipe reads whole, with the reason."""
    splits = [
        str(entry["split"])
        for entry in _entries(values)
        if "[" in str(entry.get("split")) and _source(entry).get("source", "datasets") != "datasets"
    ]
    return [(f"split: {split}", WHOLE_FILE) for split in splits]


def unread_files(values: ForeignValues) -> list[tuple[str, str]]:
    """Return the files of data sets that a run reads alone, where rlpipe can't select them, with the reason."""
    chosen = [(entry.get("path"), entry.get("data_files")) for entry in _entries(values)]
    return [
        (f"data_files: {files}", LISTED_FILES if isinstance(path, str) and path in LOADERS else SELECTED_FILES)
        for path, files in chosen
        if not (files is None or isinstance(files, Computed) or (isinstance(files, str) and path in LOADERS))
    ]


def _entries(values: ForeignValues) -> list[Mapping[str, Any]]:
    """Return the data sets as mappings with a path, as axolotl has them."""
    for name in LISTS:
        listed = _listed(values, name)
        if listed:
            return listed
    paths = values.get("data.train_files", "prompt_data", "dataset_name", "dataset", *LISTS)
    weights: list[Any] = []
    if isinstance(paths, str) and values.run.system == "openrlhf":
        paths = paths.split(",")
        shares = [read_value(text) for text in str(values.get("prompt_data_probs", "dataset_probs")).split(",")]
        are_numbers = all(type(share) in (int, float) and share >= 0 for share in shares) and any(shares)
        weights = shares if are_numbers and len(shares) == len(paths) > 1 else []
    entries = paths if isinstance(paths, list) else [] if paths is None else [paths]
    configuration = values.get("dataset_config", "dataset_config_name", "name")
    split = values.get("dataset_train_split", "prompt_split", "train_split", "dataset_split", "split")
    split = split[0] if isinstance(split, list) and split else split
    extra = {key: value for key, value in (("name", configuration), ("split", split)) if isinstance(value, str)}
    files = values.get("data_files", "data_files.train")
    extra |= {} if files is None else {"data_files": files}
    data_sets: list[Mapping[str, Any]] = [{"path": entry, **extra} for entry in entries]
    if values.run.system == "openrlhf":
        data_sets = [{**entry, **_at_folder(entry["path"])} for entry in data_sets]
    return (
        [{**entry, "weight": weight} for entry, weight in zip(data_sets, weights, strict=True) if weight]
        if weights
        else data_sets
    )


def _at_folder(path: Any) -> dict[str, str]:
    """Return the data set and the folder of ``json@folder`` or ``name@folder``, as OpenRLHF writes them."""
    name, _, folder = path.partition("@") if isinstance(path, str) else ("", "", "")
    return {"path": name, "data_files": folder} if folder else {}


def _listed(values: ForeignValues, name: str) -> list[Mapping[str, Any]]:
    """Return the entries of a list of data sets, which are settings such as ``datasets.0.path``."""
    entries: dict[int, dict[str, Any]] = {}
    for setting in values.run.settings:
        entry = entry_of(setting.name)
        if entry is not None and setting.name.startswith(f"{name}."):
            entries.setdefault(entry[0], {})[entry[1]] = setting.value
    return list(entries.values())


def _source(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a data set, with its ``source``."""
    path = entry.get("path")
    if not isinstance(path, str) or isinstance(path, Computed):
        return {}
    source, files = KINDS.get(PurePath(path).suffix, "datasets"), entry.get("data_files")
    options = {option: entry[key] for key, option in COLUMNS.items() if option and isinstance(entry.get(key), str)}
    if path in LOADERS:
        if not isinstance(files, str):
            return {}
        source, options["path"] = LOADERS[path], files
    options |= {
        key: entry[key] for key in ("roles_to_train", "train_on_eos") if isinstance(entry.get(key), CHOICES[key])
    }
    if str(entry.get("type")) in ("completion", "pretrain"):
        options.setdefault("text_column", "text")
    options |= {"chat": False} if entry.get("type") == ALPACA else {}
    if source != "datasets":
        options = {name: value for name, value in options.items() if name not in ("split", "name")}
    weight = {"weight": entry["weight"]} if "weight" in entry else {}
    return {"source": source, **options, **weight}
