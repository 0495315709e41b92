"""Composition of a config from groups, files and command-line overrides, and its validation."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, get_type_hints

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from rlpipe.configs.constraints import contradictions
from rlpipe.configs.data_sources import find_missing_files, find_wrong_sources
from rlpipe.configs.foreign.setting_names import foreign_name
from rlpipe.configs.options import (
    default_tree,
    describe_type,
    element_section,
    escaped,
    find_out_of_range,
    first_line,
    is_section,
    keep_references,
    native,
    nearest_name,
    options,
    tree_to_yaml,
)
from rlpipe.configs.schema.learner_config import ADAPTER_FACTOR, FULL_LR, SUPERVISED_FACTOR
from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.yaml_file import MAX_DEPTH, read_yaml
from rlpipe.errors import ConfigError, InputError, did_you_mean

PRIMARY = "config"
"""Name of the file with the defaults of all groups."""
MAX_PROBLEMS = 8
"""Problems that one message lists."""
PLAIN_TEXT = r"write \${ for a literal ${"
HOW_TO_CHOOSE = "to choose a file of the group, write `defaults: [{}: {!s:.80}]`"
HAVE_PATHS = ("model", "data")
"""Groups with an option ``path``, which people write after the group's name."""
TEXTS = (str, str | None, list[str], list[str] | None)
"""Types of options that take a text, or several."""
type_hints = cache(get_type_hints)


@cache
def config_folder() -> Path:
    return Path(next(iter(importlib.import_module("rlpipe.configs").__path__))).absolute()


def list_groups() -> dict[str, list[str]]:
    """Return every config group with its choices, both sorted."""
    folders = sorted(path for path in config_folder().iterdir() if path.is_dir())
    choices = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}
    return {group: names for group, names in choices.items() if names}


def describe_choice(group: str, choice: str) -> str:
    """Return the first sentence of the comment at the top of the choice's file; empty if there is none."""
    lines = (config_folder() / group / f"{choice}.yaml").read_text().splitlines()
    comments = takewhile(lambda line: line.startswith("# "), (line for line in lines if "@package" not in line))
    text = " ".join(line.removeprefix("# ") for line in comments)
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def validate(config: Config, *, need_files: bool = True) -> None:
    """Raise the problems of the config, as an ``InputError`` of one line that names the options and the fixes.

    Rewards may still be missing, because Python callers pass them to ``rlpipe.train``; see ``require_rewards``.
    """
    # Whether values contradict each other shows only once each is right by itself.
    raise_all(chain(find_out_of_range(config), find_wrong_sources(config.data)))
    by_option = {problem.partition(":")[0]: problem for problem in reversed(list(contradictions(config)))}
    raise_all(ConfigError(problem) for problem in reversed(by_option.values()))
    raise_all(find_missing_files(config) if need_files else [])


class MultipleErrors(ConfigError):
    """Error with the messages of several, of which it shows the first ``MAX_PROBLEMS``."""

    def __init__(self, messages: Sequence[str]) -> None:
        listed = [f"({number}) {message}" for number, message in enumerate(messages[:MAX_PROBLEMS], start=1)]
        more = [f"and {len(messages) - MAX_PROBLEMS} more"] if len(messages) > MAX_PROBLEMS else []
        super().__init__(f"{len(messages)} problems: {'; '.join([*listed, *more])}")
        self.messages = list(messages)


def raise_all(problems: Iterable[InputError]) -> None:
    """Raise the only problem, or one error with all of several; do nothing if there is none."""
    errors = list(problems)
    nested = [problem.messages if isinstance(problem, MultipleErrors) else [str(problem)] for problem in errors]
    messages = list(dict.fromkeys(chain.from_iterable(nested)))
    if len(messages) == 1:
        raise errors[0]
    if messages:
        raise MultipleErrors(messages)


def require_rewards(config: Config, rewards: Sequence[Any] = ()) -> None:
    """Raise ``ConfigError`` if an RL run has no reward, neither in the config nor among ``rewards``."""
    rewarded = config.algorithm.ebft.reward or config.scoring.rewards or rewards or config.environment.takes_rows
    if config.algorithm.kind == "rl" and not rewarded:
        raise ConfigError(
            "scoring.rewards: reinforcement learning needs a reward; set "
            "scoring.rewards.<name>.path=package.module:function (or file.py:function)"
        )


def load_config(
    overrides: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    options: Sequence[Mapping[str, Any]] = (),
    need_files: bool = True,
) -> Config:
    """Compose, validate and freeze the config of a run.

    ``overrides`` are Hydra's: ``algorithm=dapo`` chooses a group's file, ``algorithm.loss.clip_high=0.28`` sets an
    option, ``~scoring.rewards.length`` removes an entry. ``file`` is a YAML file with options, and optionally a
    ``defaults`` list of group choices; ``options`` are trees like that of a file, each with
    precedence over those before it, and the overrides over all. Raises ``InputError`` if anything in them
    is unknown, of the wrong type, missing or contradictory, or, with ``need_files``, names a file that does not exist.
    """
    return build_config(compose_tree(overrides, file=file, options=options), need_files=need_files)


def compose_tree(
    overrides: Sequence[str] = (), *, file: str | Path | None = None, options: Sequence[Mapping[str, Any]] = ()
) -> DictConfig:
    """Merge the tree of ``load_config``, typed by the schema; required options may still be missing in it."""
    groups = list_groups()
    parsed = [parse_override(text) for text in overrides]
    file_tree, file_choices = read_file(Path(file).expanduser()) if file is not None else ({}, [])
    choices = dict(file_choices)
    for override in parsed:
        if chooses_group(override, groups):
            choices[override.key_or_group] = group_choice(override)
    tree = default_tree(Config)
    for layer in group_layers(config_folder(), tuple(choices.values())):
        merge(tree, layer)
    merge(tree, Layer(content=file_tree, source=str(file)))
    for content in options:
        merge(tree, Layer(content=content))
    raise_all(
        problem
        for override in parsed
        if not chooses_group(override, groups)
        for problem in problems_of(apply_override, tree, override)
    )
    return tree


def quoted(value: object) -> str:
    """Return a text, such as a path, as the value of an override, in which characters such as ``=`` mean something."""
    text = re.sub(r'(\\*)(?="|$)', r"\1\1", escaped(str(value)))
    return '"' + text.replace('"', r"\"") + '"'


def problems_of(step: Callable[..., None], *arguments: Any) -> Iterator[ConfigError]:
    """Run a step, and yield its error instead of raising it."""
    try:
        step(*arguments)
    except ConfigError as error:
        yield error


def build_config(tree: DictConfig, *, need_files: bool = True) -> Config:
    """Build the ``Config`` of a complete tree: resolve interpolations, validate, and freeze."""
    try:
        check_required(OmegaConf.missing_keys(tree))
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise interpolation_error(error) from error
    assert isinstance(config, Config)
    if config.learner.optimizer.lr is None:
        config.learner.optimizer.lr = default_lr(config)
    keep_references(config, OmegaConf.to_container(tree, resolve=False))
    validate(config, need_files=need_files)
    config.freeze()
    return config


def default_lr(config: Config) -> float:
    """Return a learning rate that is common for what the run trains, and how."""
    factor = ADAPTER_FACTOR if config.model.adapter.kind != "none" else 1
    if config.algorithm.kind in ("sft", "reward_model", "process_reward_model"):
        factor *= SUPERVISED_FACTOR
    return round(FULL_LR * factor, 9)


def show_tree(tree: DictConfig) -> str:
    """Return the tree as YAML, with interpolations resolved; required options that are not set show as ``???``.

    Secrets from the environment show as their references.
    """
    written = OmegaConf.to_container(tree, resolve=False)
    try:
        return tree_to_yaml(keep_references(OmegaConf.to_container(tree, resolve=True), written))
    except OmegaConfBaseException as error:
        raise interpolation_error(error) from error


def interpolation_error(error: OmegaConfBaseException) -> ConfigError:
    fix = "set the variable" if "Environment variable" in str(error) else f"name another option, or {PLAIN_TEXT}"
    return ConfigError(f"{error.full_key}: {first_line(error)}; {fix}")


def check_required(missing: Collection[str]) -> None:
    for option in options():
        for name in sorted(missing):
            if fnmatchcase(name, option.pattern):
                raise ConfigError(f"{name} is required, and is not set: {option.doc}")


@dataclass(kw_only=True, frozen=True)
class Layer:
    """Options that are merged over those of earlier layers."""

    content: Mapping[str, Any]
    """A tree from the root."""
    source: str | None = None
    """The file that the options come from, for error messages; None for the command line."""
    typed: str | None = None
    """The number or boolean of an override as typed, which options that take a text keep: 2024_11_30, 12e4567."""

    def error(self, message: str) -> ConfigError:
        return ConfigError(message if self.source is None else f"{self.source}: {message}")


def merge(tree: DictConfig, layer: Layer) -> None:
    check_keys(layer.content, "", layer)
    merge_section(tree, layer.content, Config, "", layer)


def check_keys(value: Any, name: str, layer: Layer) -> None:
    """Raise an error if a key is not a text, or if the value is nested deeper than a file may be."""
    if name.count(".") > MAX_DEPTH:
        raise layer.error(f"{name:.80}...: nested more than {MAX_DEPTH} levels deep; no option needs that, use fewer")
    if isinstance(value, list):
        for index, child in enumerate(value):
            check_keys(child, f"{name}.{index}", layer)
    for key, child in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(key, str):
            location, kind = name or "options", "null" if key is None else f"a {type(key).__name__}"
            raise layer.error(f"{location}: YAML reads its key {key!r:.80} as {kind}; write it in quotes")
        check_keys(child, f"{name}.{key}" if name else key, layer)


def merge_section(node: DictConfig, content: Mapping[str, Any], section: type, prefix: str, layer: Layer) -> None:
    raise_all(
        problem
        for key, value in content.items()
        for problem in problems_of(merge_option, node, key, value, section, f"{prefix}{key}", layer)
    )


def merge_option(node: DictConfig, key: str, value: Any, section: type, name: str, layer: Layer) -> None:
    hint = type_hints(section).get(key)
    if hint is None and key.partition(".")[0] in type_hints(section):  # learner.optimizer.lr: 1e-6
        first, _, rest = key.partition(".")
        merge_option(node, first, nested(rest, value), section, name.removesuffix(f".{rest}"), layer)
        return
    if hint is None and name in list_groups():
        raise layer.error(f"{name}: {HOW_TO_CHOOSE.format(name, value)}")
    if hint is None:
        raise layer.error(unknown_option(first_leaf(name, value)))
    if is_section(hint):
        if value is None and layer.source is None:  # in a file, it may be a section whose options are commented out
            raise layer.error(f"{name}: a section can't be null; set its options, or leave it out")
        merge_section(node[key], as_section(value, name, layer), hint, f"{name}.", layer)
    elif (element := element_section(hint)) is not None:
        if value is None:
            node[key] = {}
        for child, child_value in as_section(value, name, layer).items():
            if child_value is None:
                node[key].pop(child, None)
                continue
            if child not in node[key]:
                node[key][child] = element
            child_content = as_section(child_value, f"{name}.{child}", layer)
            merge_section(node[key][child], child_content, element, f"{name}.{child}.", layer)
    else:
        set_option(node, key, value, hint, name, layer)


def as_section(value: Any, name: str, layer: Layer) -> Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    inside = [option.name for option in options() if fnmatchcase(name, option.pattern.rpartition(".")[0])]
    example = f"{name}.name" if f"{name}.name" in inside else next(iter(inside), f"{name}.<name>")
    message = f"{name}: must be a section with options such as {example}, not {value!r:.200}"
    if name in list_groups():
        message += f"; {HOW_TO_CHOOSE.format(name, value)}"
    raise layer.error(message)


def set_option(node: DictConfig, key: str, value: Any, hint: Any, name: str, layer: Layer) -> None:
    if layer.typed is not None and hint in (str, str | None):
        value = layer.typed
    value = native(value)
    if hint in TEXTS:
        check_texts(value, name, layer)
    try:
        value = expand_home(value)
        OmegaConf.update(node, key, value, merge=True, force_add=True)
    except GrammarParseError as error:
        raise layer.error(f"{name}: can't read the interpolation: {first_line(error)}; {PLAIN_TEXT}") from error
    except (OmegaConfBaseException, OverflowError) as error:
        shown = "null" if value is None else f"{value!r:.200}"
        raise layer.error(f"{name}: {shown} is not {describe_type(hint)}") from error


def check_texts(value: Any, name: str, layer: Layer) -> None:
    """Raise an error for a number or boolean where a text is due, because its spelling is lost: no, 0123, 1e5."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, bool | int | float):
            kind = "a boolean" if isinstance(text, bool) else "a number"
            raise layer.error(f"{name}: takes a text, and {text!r:.200} is {kind}; write it in quotes")


def expand_home(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def first_leaf(name: str, value: Any) -> str:
    """Return the dotted name of the first option in a section that does not exist, as other libraries nest theirs."""
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def unknown_option(name: str) -> str:
    nearest = foreign_name(name) or nearest_name(name)
    hint = "see rlpipe config --docs" if not nearest else nearest if " " in nearest else f"did you mean {nearest}?"
    return f"{name or repr(name):.200}: no such option; {hint}"


@cache
def group_layers(folder: Path, choices: tuple[str, ...]) -> list[Layer]:
    """Return the YAML files of the config groups that a run uses, in Hydra's order."""
    try:
        with hydra_loader(folder) as loader:
            defaults = loader.compute_defaults_list(PRIMARY, list(choices), RunMode.RUN)
    except MissingConfigException as error:
        raise ConfigError(unknown_choice(str(error.missing_cfg_file))) from error
    except HydraException as error:
        raise ConfigError(first_line(error)) from error
    return [
        read_group_file(folder, default)
        for default in defaults.defaults
        if default.config_path is not None and not default.config_path.startswith("hydra/")
    ]


@contextmanager
def hydra_loader(folder: Path) -> Iterator[ConfigLoader]:
    """Open Hydra's config loader on a folder; restore the state of a surrounding Hydra application afterwards."""
    around = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        restore_gh_from_backup(around)


def read_group_file(folder: Path, default: ResultDefault) -> Layer:
    path = folder / f"{default.config_path}.yaml"
    content = read_yaml(path)
    content.pop("defaults", None)
    return Layer(content=nested(default.package, content) if default.package else content, source=str(path))


def group_choice(override: Override) -> str:
    """Return the override in Hydra's syntax; null leaves the group out."""
    group, choice = override.key_or_group, override.value()
    if choice is None or override.is_delete():
        return f"~{group}"
    names = [str(name) for name in choice] if isinstance(choice, list) else [str(choice)]
    for name in names:
        check_choice(group, name)
    return f"{group}=[{','.join(names)}]" if isinstance(choice, list) else f"{group}={choice}"


def check_choice(group: str, choice: str) -> None:
    if group not in list_groups() or choice not in list_groups()[group]:
        raise ConfigError(unknown_choice(f"{group}/{choice}"))


def unknown_choice(path: str) -> str:
    group, _, choice = path.removesuffix(".yaml").partition("/")
    if group not in list_groups():
        return f"{group}: no such config group; the groups are {', '.join(list_groups())}"
    choices = list_groups()[group]
    hint = did_you_mean(choice, choices, cutoff=0.5)
    if group in HAVE_PATHS and ("/" in choice or "." in choice):
        hint = f"; a path or hub id is {group}.path={choice}"
    return f"{group}={choice}: no such choice; {group} is one of {', '.join(choices)}{hint}"


def read_file(path: Path) -> tuple[Mapping[str, Any], list[tuple[str, str]]]:
    """Read a user's file; return its options, and the group choices of its ``defaults`` list as (group, override)."""
    content = read_yaml(path)
    defaults = content.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults must be a list such as [experiment: quickstart], not {defaults!r:.200}")
    choices = [read_choice(path, entry) for entry in defaults if entry != "_self_"]
    return content, choices


def read_choice(path: Path, entry: Any) -> tuple[str, str]:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ConfigError(f"{path}: an entry of defaults must be `group: choice`, not {entry!r:.200}")
    key, choice = next(iter(entry.items()))
    group = str(key).removeprefix("override ").strip().removeprefix("/")
    try:
        return group, group_choice(parse_override(f"{group}={'null' if choice is None else choice}"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_override(text: str) -> Override:
    key, _, value = text.partition("=")
    if key == text and key.isidentifier():
        group = next((group for group, names in list_groups().items() if key in names), None)
        raise ConfigError(f"{key}: write key=value" + (f", such as {group}={key}" if group else ""))
    try:
        # Hydra's grammar requires quotes around a tilde, which nobody expects for a path.
        override = OverridesParser.create().parse_override(f"{key}={expand_home(value)}" if value else text)
    except (HydraException, OverrideParseException, ValueError, RecursionError) as error:
        raise ConfigError(
            f"can't read the override {text!r:.200}: {first_line(error)}; write key=value, and quote special "
            "characters inside the value, as in 'key=\"value\"'"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: an option has one value; write a list as [a,b], and quote a string that contains commas"
        )
    if override.package is not None:
        raise ConfigError(f"{text}: packages can't be changed; write {override.key_or_group}=...")
    return override


def chooses_group(override: Override, groups: Mapping[str, list[str]]) -> bool:
    return override.key_or_group in groups and not isinstance(override.value(), dict)


def nested(name: str, value: Any) -> Any:
    """Return the tree in which the option with the dotted name has the value."""
    for section in reversed(name.split(".")):
        value = {section: value}
    return value


def apply_override(tree: DictConfig, override: Override) -> None:
    key = override.key_or_group
    if override.is_delete():
        delete_entry(tree, key)
        return
    value = override.value()
    typed = override.get_value_string().strip() if isinstance(value, bool | int | float) else None
    merge(tree, Layer(content=nested(key, value), typed=typed))


def delete_entry(tree: DictConfig, key: str) -> None:
    parent, _, entry = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if not isinstance(node, DictConfig) or entry not in node:
        raise ConfigError(f"~{key}: there is no such entry to remove")
    section: Any = OmegaConf.get_type(node)
    if not is_section(section):
        del node[entry]
    elif element_section(type_hints(section)[entry]) is not None:
        node[entry] = {}
    else:
        raise ConfigError(f"~{key}: an option can't be removed; set it instead")
