"""Settings of a Python script of TRL, read from its calls and its docstring without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.configs.foreign.foreign_run import Computed, ForeignRun, Setting, flatten
from rlpipe.configs.foreign.launch_command import Found, as_run, find_program, show, trl_method
from rlpipe.configs.foreign.shell_script import Script
from rlpipe.errors import ConfigError

ADAPTERS = ("LoraConfig", "BitsAndBytesConfig")
ARGUMENTS, ADAPT = "TrainingArguments", "get_peft_model"
"""The config of transformers, which TRL's trainers take in place of their own, and the maker of Unsloth's adapters."""
ROWS_OF_TRAINER = ("train_dataset", "eval_dataset")
POSITIONAL = {
    **dict.fromkeys(("rl", "rloo"), ("model", "reward_funcs", "args", *ROWS_OF_TRAINER)),
    **dict.fromkeys(("sft", "reward_model"), ("model", "args", "data_collator", *ROWS_OF_TRAINER)),
    "dpo": ("model", "ref_model", "args", "data_collator", *ROWS_OF_TRAINER),
}
"""Names of the arguments that trainers take without one, by method; for others the first is known."""
PASSED_ON = re.compile(r"\w*(?:args|config)(?:\.\w+)*|None")
"""Values that come from the command line; if that is in the docstring, its arguments are read there."""
HOLDER = re.compile(r"\w*(?:args|config)")
DATA, MODEL = "load_dataset", "from_pretrained"
WIRED = (
    *("args", "train_dataset", "eval_dataset", "peft_config", "quantization_config"),
    *("processing_class", "tokenizer"),
)
"""Arguments by which a script passes on what it has made elsewhere."""
OF_DATA = ("revision", "trust_remote_code", "token", "cache_dir")
"""Arguments of ``load_dataset`` whose names are also those of models' options."""
DATA_AS_IT_IS = "it is of the data set, of which the newest version is loaded, without code of its own"
OTHER_DATA = "another data set: the one that the trainer receives, or the first one, is taken"
OTHER_MODEL = "another model: the one that the trainer receives is taken"
OTHER_TRAINER = "another run: the script's last trainer is taken"
OTHER_COMMAND = "another command of the docstring: it is not the one that is translated"
UNNAMED = "an argument without a name, which is not read"
CHANGED = "the script does this to the rows that it loads: see data.transform and data.split"
NOT_LOADED = "no load_dataset is seen from which it is made: set data.path to its rows"
FROM_CHANGED = "the script changes its rows, as other comments say: see data.transform"
MAX_TEXT = 200


def read_python(text: str, path: Path) -> ForeignRun:
    """Read a script; where its docstring has a command, its arguments come first, and the script may change them."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: not a Python file: {error}") from None
    documented = list(_documented_runs(ast.get_docstring(module) or "", path))
    documented.sort(key=lambda run: (run.system != "trl", not run.settings))  # stable: the first command of TRL
    script = PythonScript(module, has_command=bool(documented))
    methods = script.trainers or [run.method for run in documented[:1]] or script.configs
    if not methods:
        raise ConfigError(f"{path}: no trainer of TRL and no command was found in it; name another file")
    first = documented[0] if documented else ForeignRun(system="trl", method="", settings=())
    notes = [(f"{run.method}: {_words(run)}", OTHER_COMMAND) for run in documented[1:]]
    return replace(
        first,
        system="trl",
        method=methods[-1],
        settings=[*first.settings, *script.settings],
        notes=[*first.notes, *script.notes, *notes],
    )


def _words(run: ForeignRun) -> str:
    return show([f"--{setting.name}={setting.value}" for setting in run.settings])


def _documented_runs(docstring: str, path: Path) -> Iterator[ForeignRun]:
    """Yield the commands in a docstring, whose other lines are prose with quotes that need not match."""
    lines, stem = docstring.splitlines(), path.stem
    while lines:
        line = lines.pop(0).strip()
        if not re.search(rf"\btrl |trl\.|/\w+\.py\b|\b{re.escape(stem)}\.py\b", line) and not line.endswith("\\"):
            continue
        # A line of arguments belongs to the command above it, even if a backslash is missing there.
        while lines and (line.endswith("\\") or lines[0].lstrip().startswith("--")):
            line = f"{line.removesuffix(chr(92))} {lines.pop(0).strip()}"
        try:
            commands = Script(line).commands
        except ConfigError:
            continue
        for command in commands:
            # The script's own name need not be one of TRL's; its trainer tells the method.
            script_name = None if trl_method(stem) else f"{stem}.py"
            program = find_program(["sft.py" if Path(word).name == script_name else word for word in command.words])
            if program is not None:
                yield as_run(program, [], path.parent)
            elif (names := [Path(word).name for word in command.words]).count(f"{stem}.py"):
                launcher = command.words[: names.index(f"{stem}.py")]
                yield as_run(Found(system="trl", method="sft", launcher=launcher, arguments=()), [], path.parent)


class PythonScript:
    """The trainers of a script, and the arguments of its configs, trainers, data sets and models.

    With ``has_command``, what the script takes from its command line is not computed by it.
    """

    def __init__(self, module: ast.Module, *, has_command: bool) -> None:
        self._has_command = has_command
        self.configs: list[str] = []
        """Methods of its configs."""
        self.settings: list[Setting] = []
        self.notes: list[tuple[str, str]] = []
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self._assigned: dict[str, list[ast.expr]] = {}
        self._has_data = False
        changes: list[tuple[str, ast.expr]] = []
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                changes += self._read_assignment(node.targets[0], node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                changes += self._read_assignment(node.target, node.value)
            elif isinstance(node, ast.AugAssign):  # such as ``training_args.beta *= 2``
                target = ast.parse(ast.unparse(node.target), mode="eval").body
                changes += self._read_assignment(node.target, ast.BinOp(target, node.op, node.value))
        trainers = [call for call in calls if _method_of(call, "Trainer") is not None]
        self.trainers = [str(_method_of(call, "Trainer")) for call in trainers]
        """Methods of its trainers."""
        self._models = self._sources_of(trainers[-1:], "model", MODEL)
        self._data = self._sources_of(trainers[-1:], "train_dataset", DATA)
        self._trainer_arguments = self._sources_of(trainers[-1:], "args", ARGUMENTS)
        rows = [node for call in trainers[-1:] for name, node in _arguments(call) if name == "train_dataset"]
        self._changes = self._changes_of(rows)
        for call in calls:
            self._read_call(called(call), call)
        for name, value in changes:
            self.settings += self._settings(name, value)
        self.notes += [(text, CHANGED) for text in self._changes]

    def _read_assignment(self, target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """Remember the value of a variable; yield a change of a config, such as ``training_args.beta = 0``."""
        if isinstance(target, ast.Name):
            self._assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            for name in target.elts:
                if isinstance(name, ast.Name):
                    self._assigned.setdefault(name.id, []).append(value)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self._assigned.setdefault(target.value.id, []).append(value)
        elif isinstance(target, ast.Attribute) and HOLDER.fullmatch(_text(target.value)):
            yield target.attr, value

    def _sources_of(self, trainers: Sequence[ast.Call], argument: str, source: str) -> set[int]:
        """Return the calls of a function from whose results an argument of the trainers is made."""
        return self._calls_within(
            [node for call in trainers for name, node in _arguments(call) if name == argument], source
        )

    def _calls_within(self, nodes: list[ast.expr], source: str) -> set[int]:
        """Return the calls of a function that expressions, or what is assigned to their names, contain."""
        calls: set[int] = set()
        visited: set[str] = set()
        while nodes:
            for node in ast.walk(nodes.pop()):
                if isinstance(node, ast.Call) and called(node) == source:
                    calls.add(id(node))
                elif isinstance(node, ast.Name) and node.id not in visited:
                    visited.add(node.id)
                    nodes += self._assigned.get(node.id, [])
        return calls

    def _changes_of(self, rows: list[ast.expr]) -> list[str]:
        """Return the calls and the selections that change these rows after ``load_dataset``."""
        changes: dict[str, None] = {}
        visited: set[str] = set()
        while rows:
            node = rows.pop()
            if isinstance(node, ast.Name) and node.id not in visited:
                visited.add(node.id)
                rows += self._assigned.get(node.id, [])
            elif isinstance(node, ast.Call) and called(node) != DATA:
                holder = node.func.value if isinstance(node.func, ast.Attribute) else None
                is_function = isinstance(holder, ast.Name) and holder.id not in self._assigned
                sources = node.args if is_function or holder is None else [holder]
                if loaded := [source for source in sources if self._calls_within([source], DATA)]:
                    changes[_text(node)] = None
                    rows += loaded
            elif isinstance(node, ast.Subscript):
                selects_rows = not (isinstance(node.slice, ast.Constant) and node.slice.value == "train")
                if selects_rows and PASSED_ON.fullmatch(_text(node.slice)) is None:
                    changes[_text(node)] = None
                rows.append(node.value)
            elif isinstance(node, ast.List | ast.Tuple):
                rows += node.elts
            elif isinstance(node, ast.IfExp):
                rows += [node.body, node.orelse]
        return list(changes)

    def _read_call(self, name: str, call: ast.Call) -> None:
        method, is_trainer = _method_of(call, "Config") or _method_of(call, "Trainer"), name.endswith("Trainer")
        is_other = method is not None and self.trainers and method != self.trainers[-1]
        if is_other or (name == ARGUMENTS and self._trainer_arguments and id(call) not in self._trainer_arguments):
            self.notes.append((_text(call), OTHER_TRAINER))
        elif method is not None and is_trainer:
            self._read_named(call, _positional(call))
        elif method is not None:
            self.configs.append(method)
            self._read_named(call, ["output_dir"])
        elif name in (ARGUMENTS, *ADAPTERS) or (name == ADAPT and "Model" in _text(call.func)):
            self.settings.append(Setting(name=name, value=True))
            self._read_named(call, {ARGUMENTS: ["output_dir"], ADAPT: ["model"]}.get(name, []))
        elif name == DATA:
            self._read_data(call)
        elif name == MODEL and "Model" in _text(call.func):
            self._read_model(call)

    def _read_named(self, call: ast.Call, names: Sequence[str]) -> None:
        """Read the arguments of a call; ``names`` are the names of its positional arguments."""
        for name, value in zip(names, call.args, strict=False):
            self.settings += self._settings(name, value)
        self.notes += [(f"{called(call)}: {_text(value)}", UNNAMED) for value in call.args[len(names) :]]
        self._read_keywords(call)

    def _read_keywords(self, call: ast.Call, prefix: str = "") -> None:
        for keyword in call.keywords:
            if keyword.arg is not None:
                self.settings += self._settings(f"{prefix}{keyword.arg}", keyword.value)
            elif not isinstance(keyword.value, ast.Name) or not self._spread(keyword.value.id):
                self.notes.append((f"**{_text(keyword.value)}", "arguments that the script computes"))

    def _spread(self, name: str) -> bool:
        """Read the entries of a dictionary that a call receives as ``**name``."""
        values = self._assigned.get(name, [])
        for value in values:
            if isinstance(value, ast.Call) and called(value) == "dict":
                self._read_keywords(value)
            elif isinstance(value, ast.Dict):
                self.settings += self._entries("", value)
            else:
                return False
        return bool(values)

    def _read_data(self, call: ast.Call) -> None:
        first = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "path")]
        path = self._value(first[0]) if first else None
        is_other = self._data and id(call) not in self._data
        if is_other or self._has_data:
            self.notes.append((_text(call), OTHER_DATA))
            return
        if isinstance(path, Computed) and self._is_passed_on(path):
            return
        self._has_data = True
        self.settings.append(Setting(name="dataset", value=path))
        self.settings += [setting for node in call.args[1:2] for setting in self._settings("dataset_config", node)]
        self.notes += [(f"{DATA}: {_text(node)}", UNNAMED) for node in call.args[2:]]
        for keyword in call.keywords:
            if keyword.arg in OF_DATA:
                self.notes.append((f"{DATA}: {keyword.arg}={_text(keyword.value)}", DATA_AS_IT_IS))
        named = [keyword for keyword in call.keywords if keyword.arg not in (*OF_DATA, "path")]
        self._read_keywords(ast.Call(func=call.func, args=[], keywords=named))

    def _read_model(self, call: ast.Call) -> None:
        if self._models and id(call) not in self._models:
            self.notes.append((_text(call), OTHER_MODEL))
            return
        self._read_named(call, ["model"])

    def _settings(self, name: str, node: ast.expr) -> Iterator[Setting]:
        """Yield the settings in an argument; none if it only passes on values of the command line."""
        if name == "train_dataset" and (self._changes or not self._data):
            self.notes.append((f"{name}: {_text(node)}", FROM_CHANGED if self._data else NOT_LOADED))
            return
        if name == "eval_dataset" and (_text(node) == "None" or "dataset_test_split" in _text(node)):
            return  # the split is a setting of its own
        if name in WIRED:
            yield Setting(name=name, value=Computed(text=_text(node)))
            return
        if isinstance(node, ast.Name) and any(map(_loads_model, self._assigned.get(node.id, []))):
            return
        if isinstance(node, ast.Dict) and node.keys:
            yield from self._entries(f"{name}.", node)
            return
        if isinstance(node, ast.Call) and called(node) == "dict" and not node.args:
            for keyword in node.keywords:
                yield from self._settings(f"{name}.{keyword.arg or '**'}", keyword.value)
            return
        value = self._value(node)
        if isinstance(value, Computed) and self._is_passed_on(value):
            return
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield Setting(name=name, value=value)

    def _is_passed_on(self, value: Computed) -> bool:
        """Return whether a value is given by the command in the docstring, or is none."""
        return PASSED_ON.fullmatch(value.text) is not None and (self._has_command or value.text == "None")

    def _entries(self, prefix: str, node: ast.Dict) -> Iterator[Setting]:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield from self._settings(f"{prefix}{key.value!s}", value)
            else:
                yield Setting(name=f"{prefix}**", value=Computed(text=_text(value)))

    def _value(self, node: ast.expr) -> Any:
        """Return a constant, also by the one name that it is assigned to, or what the script computes."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        values = self._assigned.get(node.id, []) if isinstance(node, ast.Name) else [node]
        if len(values) != 1:
            return Computed(text=_text(node))
        try:
            return ast.literal_eval(values[0])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Computed(text=_text(node))


def _method_of(call: ast.Call, kind: str) -> str | None:
    """Return the method of a config or a trainer that a call makes; None if it makes neither."""
    name = called(call)
    return trl_method(name.removesuffix(kind)) if name.endswith(kind) and name not in ADAPTERS else None


def _positional(call: ast.Call) -> Sequence[str]:
    return POSITIONAL.get(_method_of(call, "Trainer") or "", ("model",))


def _arguments(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a trainer with their names."""
    yield from zip(_positional(call), call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)


def _loads_model(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and called(node) in (MODEL, ADAPT)


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _text(node: ast.expr) -> str:
    try:
        return ast.unparse(node)[:MAX_TEXT]
    except RecursionError:
        return "..."
