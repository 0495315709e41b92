"""The options of a config: names, types and defaults, checks of their values, and trees of them as plain data."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.option import CHARACTERS, MISSING, NAME, PROSE, Freezable, TextRule
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, did_you_mean

VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)(?:\s*\})?")
SECRET_NAME = re.compile(
    r"(?:key|token|secret|password|passwd|pwd|credentials?|(?:^|_)(?:pass|pat|auth))$", re.IGNORECASE
)
"""Names of options and environment variables whose values are taken for secrets, such as ``OPENAI_API_KEY``."""


@dataclass(kw_only=True, frozen=True)
class Option:
    """One option; in a dictionary of sections, ``<name>`` stands for the name of the entry."""

    name: str
    """Dotted name from the root."""
    hint: Any
    default: Any
    """Default value; ``MISSING`` if the option is required."""
    metadata: Mapping[str, Any]

    @property
    def pattern(self) -> str:
        """``fnmatch`` pattern of the names that the option covers."""
        return self.name.replace("<name>", "*")

    @property
    def doc(self) -> str:
        return str(self.metadata["doc"])

    @property
    def type(self) -> str:
        return describe_type(self.hint)

    @property
    def allowed(self) -> str:
        return describe_range(self.metadata)


def options(section: type = Config, prefix: str = "", defaults: Any = None) -> Iterator[Option]:
    """Yield every option of a section and of the sections in it, in the schema's order.

    ``defaults`` has the default values, which for a section in another one may differ from its class's.
    """
    hints, defaults = get_type_hints(section), section() if defaults is None else defaults
    for entry in fields(section):
        hint, name, default = hints[entry.name], prefix + entry.name, getattr(defaults, entry.name)
        if is_section(hint):
            yield from options(hint, f"{name}.", default)
        elif (element := element_section(hint)) is not None:
            yield from options(element, f"{name}.<name>.")
        else:
            yield Option(name=name, hint=hint, default=default, metadata=entry.metadata)


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def element_section(hint: Any) -> type | None:
    """Return the section class of a dictionary's entries, as in ``dict[str, RewardConfig]``; None for other types."""
    arguments = get_args(hint)
    if get_origin(hint) is dict and is_section(arguments[1]):
        return arguments[1]  # type: ignore[no-any-return]
    return None


def describe_type(hint: Any) -> str:
    """Describe a type in words, as in "a list of numbers, or null"."""
    if get_origin(hint) is UnionType:
        return ", or ".join(describe_type(argument) for argument in get_args(hint))
    if get_origin(hint) is list:
        return "a list" if get_args(hint)[0] is Any else f"a list of {plural(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a dictionary" if get_args(hint)[1] is Any else f"a dictionary of {plural(get_args(hint)[1])}"
    words = {str: "a string", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
    return words.get(hint, "anything")


def plural(hint: Any) -> str:
    return describe_type(hint).split(maxsplit=1)[1] + "s"


def describe_range(metadata: Mapping[str, Any]) -> str:
    """Describe the choices, or the range, in words; empty if any value of the type is allowed."""
    if metadata["choices"] is not None:
        return f"one of {', '.join(metadata['choices'])}"
    bounds = {"minimum": "at least", "above": "above", "maximum": "at most"}
    limits = [
        f"{words} {show_bound(metadata[bound])}" for bound, words in bounds.items() if metadata[bound] is not None
    ]
    return " and ".join(limits)


def show_bound(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else f"{bound}"


def describe_default(option: Option) -> str:
    """Describe the default as a YAML file would have it, on one line."""
    if option.default == MISSING:
        return "required"
    words = {None: "null", True: "true", False: "false", "": "''"}
    if option.default in (None, "") or option.hint is bool:
        return words[option.default]
    text = f"{option.default}"
    return text if text.isprintable() else json.dumps(text)


@cache
def all_names() -> tuple[str, ...]:
    """Return the dotted names of all options and of the sections that hold them."""
    names: dict[str, None] = {}
    for option in options():
        words = option.name.split(".")
        names |= dict.fromkeys(".".join(words[:count]) for count in range(1, len(words) + 1))
    return tuple(names)


def nearest_name(wrong: str) -> str | None:
    """Return the option or section that ``wrong`` was most likely meant to be; None if nothing is similar.

    In order of preference: the same last word elsewhere, a similar last word in the same section, a similar whole name.
    Names of entries that the user gave, such as a reward's, stay.
    """
    parent, _, word = wrong.rpartition(".")
    names = [_fill_entries(name, wrong.split(".")) for name in all_names()]
    same_word = [name for name in names if name.rpartition(".")[2] == word]
    siblings = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == parent]
    similar = difflib.get_close_matches(word, siblings, n=1, cutoff=0.6)
    if same_word:
        return difflib.get_close_matches(wrong, same_word, n=1, cutoff=0)[0]
    if similar:
        return f"{parent}.{similar[0]}" if parent else similar[0]
    candidates = [name for name in names if not wrong.startswith(f"{name}.")]
    return next(iter(difflib.get_close_matches(wrong, candidates, n=1, cutoff=0.6)), None)


def _fill_entries(name: str, source: Sequence[str]) -> str:
    """Replace ``<name>`` in an option's name by the word that ``source`` has there, in the same section."""
    words = name.split(".")
    for index, word in enumerate(words[: len(source)]):
        if word == "<name>" and words[:index] == source[:index]:
            words[index] = source[index]
    return ".".join(words)


FREE_ON_RESUME = (
    "name",
    "output",
    "resume",
    "resume_changes",
    "model.adapter.merge",
    "model.attention",
    "model.gradient_checkpointing",
    "model.reentrant_checkpointing",
    "model.prepare",
    "data.cache",
    "data.held_out.every_steps",
    "data.held_out.correct_at",
    "data.held_out.correct_by",
    "algorithm.ebft.features.weights",
    "algorithm.ebft.features.micro_batch_tokens",
    "algorithm.ebft.features.num_cpus",
    "algorithm.ebft.features.num_gpus",
    "algorithm.ebft.features.timeout_s",
    "algorithm.ebft.features.serve",
    "rollout.engine",
    "rollout.num_engines",
    "rollout.num_cpus",
    "rollout.num_gpus",
    "rollout.resources",
    "rollout.num_threads",
    "rollout.tensor_parallel_size",
    "rollout.max_model_len",
    "rollout.engine_args",
    "scoring.num_processes",
    "scoring.num_cpus",
    "scoring.memory_gb",
    "scoring.on_rollouts_scored",
    *(f"scoring.rewards.*.{name}" for name in ("timeout_s", "isolation", "memory_gb", "serve")),
    *(f"scoring.rewards.*.{name}" for name in ("num_processes", "num_cpus", "num_gpus")),
    *(f"environment.{name}" for name in ("host", "port", "timeout_s", "tool_timeout_s", "isolation", "memory_gb")),
    *(f"environment.{name}" for name in ("num_processes", "num_cpus", "concurrency")),
    "learner.strategy",
    "learner.num_ranks",
    "learner.num_cpus",
    "learner.num_gpus",
    "learner.resources",
    "learner.num_threads",
    "learner.max_tokens_per_microbatch",
    "learner.logprob_chunk_tokens",
    "learner.fsdp",
    "learner.zero3",
    "learner.chunked.num_*",
    "learner.chunked.sharing",
    "learner.chunked.*_memory_gib",
    "learner.chunked.chunk_mib",
    "learner.profile_steps",
    "learner.max_bad_steps",
    "learner.max_failures",
    "learner.collective_timeout_s",
    "replay.streaming",
    "ledger",
    "weights",
    "checkpoint",
    "tracking",
    "health",
    "cluster",
)
"""Options and whole sections that determine how a run is executed, but not what it trains."""
DTYPE = "model.dtype"


def default_tree(section: type) -> DictConfig:
    """Return the defaults of a section as a typed tree; a copy takes a fifth of the time that building one takes."""
    return deepcopy(_structured(section))


@cache
def _structured(section: type) -> DictConfig:
    return OmegaConf.structured(section)  # type: ignore[no-any-return]


def to_tree(config: Config | ModelConfig) -> dict[str, Any]:
    """Convert a config to nested dictionaries and lists of plain values, in the schema's order."""
    tree = plain(asdict(config))
    assert isinstance(tree, dict)
    return tree


def model_of(tree: Mapping[str, Any]) -> ModelConfig:
    """Read a ``ModelConfig`` from a tree of ``to_tree``; options that are newer than the tree get their defaults.

    Raises ``ConfigError`` if a text in it was taken from an environment variable that is not set here.
    """
    try:
        return cast(ModelConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), tree)))
    except InterpolationResolutionError as error:
        raise ConfigError(
            f"model.{error.full_key}, as the run stored it: {first_line(error)}; set the variable"
        ) from error


def first_line(error: Exception) -> str:
    return f"{str(error).strip().split(chr(10))[0]:.300}"


class FromEnvironment(str):
    """A text that a config takes from the environment, and that is stored as its reference, ``${oc.env:NAME}``."""

    reference: str

    def __new__(cls, value: str, reference: str) -> FromEnvironment:
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.reference

    def __repr__(self) -> str:
        return repr(self.reference)


def plain(value: Any) -> Any:
    """Return nested values as dictionaries, lists and plain values, with references for texts of the environment."""
    if isinstance(value, Mapping):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value.reference if isinstance(value, FromEnvironment) else value


def native(value: Any) -> Any:
    """Return a value with NumPy's scalars and arrays in it as plain ones."""
    if isinstance(value, Mapping):
        return {key: native(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [native(child) for child in value]
    return value.tolist() if hasattr(value, "tolist") else value


def to_yaml(config: Config) -> str:
    """Return the resolved config as YAML, which ``rlpipe train --config`` reads back."""
    return tree_to_yaml(asdict(config))


def tree_to_yaml(tree: Any) -> str:
    """Return a resolved tree as YAML that is read back as it is."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(escaped_tree(tree))))


def escaped_tree(value: Any) -> Any:
    """Return a tree in which texts with ``${`` are written so that they are read back as they are."""
    if isinstance(value, Mapping):
        return {key: escaped_tree(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [escaped_tree(child) for child in value]
    if not isinstance(value, str) or isinstance(value, FromEnvironment):
        return value
    return escaped(value)


def escaped(text: str) -> str:
    """Return a text in which ``${`` is written so that it is read back as it is."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def changed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the differences between two trees of ``to_tree`` that matter for training, as "option: old -> new".

    Options that are newer than the old tree count as their defaults there. ``model.dtype=auto`` equals any other type.
    """
    before, after = dict(leaves(old)), dict(leaves(new))
    defaults = {option.name: plain(option.default) for option in options()}
    before = {name: defaults[name] for name in after if name in defaults} | before
    names = dict.fromkeys([*training_options(old), *training_options(new)])
    return [
        f"{name}: {show(before, name)} -> {show(after, name)}"
        for name in names
        if show(before, name) != show(after, name) and not (name == DTYPE and "auto" in (before[name], after[name]))
    ]


def show(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], sort_keys=True) if name in settings else "absent"


def training_options(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted names of the tree's leaves that a resumed run must not change.

    A run may be made longer or shorter if its learning rate does not depend on its length, and its policy may be moved
    to the host or back if chunked offload updates it in the same type.
    """
    learner = tree["learner"]
    free = list(FREE_ON_RESUME)
    if learner["schedule"]["name"] == "constant":
        free.append("algorithm.num_steps")
    if all(learner.get("chunked", {}).get(name, "float32") == "float32" for name in ("state_dtype", "gradient_dtype")):
        free.append("learner.offload")
    for name, _ in leaves(tree):
        if not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in free):
            yield name


def changed(section: Any, names: Iterable[str]) -> list[str]:
    """Return which of the named options of a config section differ from their defaults."""
    usual = type(section)()
    return [name for name in names if getattr(section, name) != getattr(usual, name)]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def keep_references(value: Any, written: Any) -> Any:
    """Return a resolved config, or tree of one, whose texts from the environment are ``FromEnvironment``.

    ``written`` is the same tree before its interpolations were resolved. The texts are those in dictionaries and lists
    without a schema, such as ``scoring.rewards.<name>.kwargs``; of other options, because a stored config should tell
    them, only those from variables with the name of a secret. Dataclasses are changed in place.
    """
    names = sorted(set(VARIABLE.findall(json.dumps(written, default=str))))
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    return _marked(value, written, "", values) if values else value


def _marked(value: Any, written: Any, name: str, values: Mapping[str, str]) -> Any:
    def child(key: Any, element: Any) -> Any:
        inside = written[key] if isinstance(written, dict | list) else written  # a text refers to the whole section
        return _marked(element, inside, f"{name}.{key}" if name else f"{key}", values)

    if is_dataclass(value):
        for entry in fields(value):
            setattr(value, entry.name, child(entry.name, getattr(value, entry.name)))
    elif isinstance(value, dict):
        return {key: child(key, element) for key, element in value.items()}
    elif isinstance(value, list):
        return [child(index, element) for index, element in enumerate(value)]
    elif isinstance(value, str) and isinstance(written, str) and "${" in written:
        return _with_references(value, written, name, values)
    return value


def _with_references(value: str, written: str, name: str, values: Mapping[str, str]) -> str:
    is_free, text = any(fnmatchcase(name, pattern) for pattern in _free_form()), escaped(value)
    kept = {variable: part for variable, part in values.items() if is_free or SECRET_NAME.search(variable)}
    if VARIABLE.sub(lambda found: values.get(found[1], ""), written) == value:
        reference = VARIABLE.sub(lambda part: part[0] if part[1] in kept else escaped(values.get(part[1], "")), written)
    else:  # through other references; there, a short value may also be any other part of the text
        names = {part: variable for variable, part in kept.items() if len(part) > 3 or part == text}
        parts = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        reference = re.sub(parts, lambda part: f"${{oc.env:{names[part[0]]}}}", text) if names else text
    return value if reference == text else FromEnvironment(value, reference)


@cache
def _free_form() -> tuple[str, ...]:
    """Return the patterns of the names inside options that are dictionaries or lists."""
    return tuple(f"{option.pattern}.*" for option in options() if get_origin(option.hint) in (dict, list))


def find_out_of_range(section: Freezable, prefix: str = "") -> Iterator[ConfigError]:
    """Yield an error for every option of a section with a wrong type or value; null is always valid."""
    hints = get_type_hints(type(section))
    for entry in fields(section):  # type: ignore[arg-type]
        value, name = getattr(section, entry.name), prefix + entry.name
        if is_section(hints[entry.name]):
            yield from find_out_of_range(value, f"{name}.")
        elif not entry.metadata:
            for key, child in value.items():
                yield from check_text(name, key, NAME)
                yield from find_out_of_range(child, f"{name}.{key}.")
        elif value is not None and not has_type(value, hints[entry.name]):
            yield ConfigError(f"{name}: {value!r:.200} is not {describe_type(hints[entry.name])}")
        elif value is not None:
            yield from check_range(name, value, entry.metadata)


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type; OmegaConf does not check what interpolations of lists refer to."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(has_type(value, argument) for argument in arguments)
    if kind is list:
        return isinstance(value, list | tuple) and all(has_type(child, arguments[0]) for child in value)
    if kind is dict:
        return isinstance(value, Mapping) and all(has_type(child, arguments[1]) for child in value.values())
    if hint in (int, float) and isinstance(value, bool):
        return False
    return hint is Any or isinstance(value, int | float if hint is float else hint)


def check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield errors of a value, and of those in a list or dictionary; ``metadata`` is that of the option."""
    choices = metadata["choices"]
    if choices is not None and value not in choices:
        hint = did_you_mean(str(value), choices)
        yield ConfigError(f"{name}: {value!r:.200} is not {describe_range(metadata)}{hint}")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from check_range(f"{name}[{index}]", child, metadata)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from check_text(name, key, CHARACTERS)
            yield from check_range(f"{name}.{key}", child, {**metadata, "text": PROSE})
    elif isinstance(value, str):
        yield from check_text(name, value, metadata["text"])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from check_number(name, value, metadata)


def check_text(name: str, value: Any, rule: TextRule) -> Iterator[ConfigError]:
    if not isinstance(value, str) or not rule.accepts(value):
        yield ConfigError(f"{name}: {value!r:.80} is not {rule.words}")


def check_number(name: str, value: float, metadata: Mapping[str, Any]) -> Iterator[ConfigError]:
    minimum, above, maximum = (metadata[key] for key in ("minimum", "above", "maximum"))
    allowed = describe_range(metadata) or "an integer of at most 64 bits"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield ConfigError(f"{name}: a number of {value.bit_length()} bits is out of range; it must be {allowed}")
    elif not math.isfinite(value):
        yield ConfigError(f"{name}: {value} is not a finite number")
    elif (
        (minimum is not None and value < minimum)
        or (above is not None and value <= above)
        or (maximum is not None and value > maximum)
    ):
        yield ConfigError(f"{name}: {value} is out of range; it must be {allowed}")
