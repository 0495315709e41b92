from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.configs.compose import load_config
from rlpipe.configs.yaml_file import read_yaml
from rlpipe.errors import ConfigError

BASE = ("model.path=org/policy", "data=reasoning_gym", "data.task=basic_arithmetic")
LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 9)}]\n" for n in range(8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"data: {task_args: &a {b: *a}}", "line 1: *a is inside &a"),
        (b"a: " + b"[" * 300, "line 1: nested more than 40 levels deep"),
        (LAUGHS.encode(), "more than 100000 values"),
        (b"name: a\nname: b", "line 2: found duplicate key name"),
        (b"\tname: a", "use spaces instead of tabs"),
        (b"name: !!python/object:os.system a", "line 1: the tag !!python/object:os.system is not supported"),
        (b"ok: 1\nname: \xff", "line 2 is not UTF-8"),
        (b"seed: " + b"9" * 5000, "write a shorter number"),
        (b"name: \x00", "line 1: the character '\\x00' is not allowed"),
    ],
)
def test_files_that_are_no_config_are_named_with_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; name a YAML file"):
        read_yaml(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("scoring: {rewards: {1: {path: 'm:f'}}}", "scoring.rewards: YAML reads its key 1 as a int"),
        ("scoring: {rewards: {a/b: {path: 'm:f'}}}", "scoring.rewards: 'a/b' is not a name"),
        ("scoring: {rewards: {" + "a" * 300 + ": {path: 'm:f'}}}", "is not a name"),
        ("name: ..", "name: '..' is not a name"),
        ('name: "a\\0"', "is not a name"),
        ("output: ''", "output: '' is not a non-empty line of text"),
        ("rollout: {engine_args: '${data}'}", "rollout.engine_args: "),
        ("rollout: {sampling: {stop: ['']}}", "rollout.sampling.stop[0]: '' is not a non-empty string"),
        ("rollout: {sampling: {stop: '${seed}'}}", "rollout.sampling.stop: 0 is not a list of strings"),
        ("rollout: {num_engines: 1000000000}", "rollout.num_engines: 1000000000 is out of range"),
        ("rollout: {resources: {a: -1}}", "rollout.resources.a: -1.0 is out of range"),
        ("learner: {optimizer: {lr: 1e30}}", "learner.optimizer.lr: 1e+30 is out of range"),
        ("data: {task_args: {a: [.nan]}}", "data.task_args.a[0]: nan is not a finite number"),
        ("data: {task_args: {a: 18446744073709551616}}", "data.task_args.a: a number of 65 bits is out of range"),
        ("seed: 18446744073709551616", "seed: a number of 65 bits is out of range"),
        ("weights: {timeout_s: 1e300}", "weights.timeout_s: 1e+300 is out of range"),
    ],
)
def test_values_that_no_run_can_use_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, file=file)
    assert message in str(caught.value)
