"""Tests of loading rewards by name, and of refusing those that can't work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpipe.errors import RewardImportError
from rlpipe.scoring.rewards import RewardActor, check_reward, load_reward, missing_columns, read_signature
from rlpipe.types import RolloutGroup

USER_FILE = """
from rlpipe.scoring.rewards import RewardActor

LIMIT = 3

def short(completions, limit=LIMIT, **columns):
    return [float(len(text) <= limit) for text in completions]

class Judge(RewardActor):
    def __init__(self, strictness=1.0):
        self.strictness = strictness
    def score(self, group):
        return [self.strictness] * len(group)
"""


class Judge(RewardActor):
    def __init__(self, strictness: float = 1.0) -> None:
        self.strictness = strictness

    def score(self, group: RolloutGroup) -> list[float | None]:
        return [self.strictness] * len(group)


class NoScore(RewardActor):
    pass


class NotAnActor:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)


def test_loads_function_and_class_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(USER_FILE)
    function = load_reward(f"{file}:short", {"limit": 5})
    assert function(completions=["abcd", "abcdef"], limit=5) == [1.0, 0.0]
    kind = load_reward(f"{file}:Judge", {"strictness": 0.5})
    assert isinstance(kind, type)
    assert issubclass(kind, RewardActor)


def test_loads_function_from_a_module() -> None:
    assert load_reward("rlpipe.scoring.toolbox:exact_match").__name__ == "exact_match"


def test_loads_relative_file_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_rewards.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    assert callable(load_reward("here_rewards.py:short"))
    assert callable(load_reward("here_rewards:short"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rlpipe.scoring.toolbox", "module"),
        ("no_such_package.rewards:f", "no_such_package"),
        ("no_such_file.py:f", "no_such_file.py"),
        ("rlpipe.scoring.toolbox:exact_mach", "exact_mach"),
        ("rlpipe.scoring.toolbox:NUMBER", "not a function"),
    ],
)
def test_import_problems_name_the_path_in_one_line(path: str, words: str) -> None:
    with pytest.raises(RewardImportError) as caught:
        load_reward(path)
    message = str(caught.value)
    assert path in message
    assert words in message
    assert "\n" not in message


def test_error_inside_a_user_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "broken_rewards.py"
    file.write_text("import no_such_dependency\n")
    with pytest.raises(RewardImportError, match="no_such_dependency"):
        load_reward(f"{file}:f")


def positional_only(completions: list[str], /) -> list[float]:
    return []


def blind(answer: list[str]) -> list[float]:
    return []


def nothing() -> list[float]:
    return []


def plain(completions: list[str], answer: list[str], *, scale: float = 1.0) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("reward", "kwargs", "words"),
    [
        (positional_only, {}, "has the positional-only parameter"),
        (blind, {}, "add 'completions'"),
        (nothing, {}, "add 'completions'"),
        (plain, {"scael": 2.0}, "scael"),
        (plain, {"completions": []}, "remove it from kwargs"),
        (NotAnActor, {}, "not a RewardActor"),
        (NoScore, {}, "score"),
        (Judge, {"strictnes": 1.0}, "strictnes"),
        (3, {}, "int"),
    ],
)
def test_impossible_rewards_are_refused(reward: Any, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardImportError, match=words):
        check_reward(reward, kwargs, "mine")


@pytest.mark.parametrize("reward", [plain, functools.partial(plain, scale=2.0), NotAnActor(), lambda **columns: []])
def test_callables_of_all_kinds_are_accepted(reward: Callable[..., Any]) -> None:
    check_reward(reward, {}, "mine")


def test_function_gets_only_what_it_names() -> None:
    available = {"completions": 1, "answer": 2, "rollouts": 3, "trainer_state": 4}
    assert set(read_signature(plain, "plain").choose(available)) == {"completions", "answer"}
    assert set(read_signature(lambda completions, **columns: [], "x").choose(available)) == set(available) - {
        "rollouts"
    }
    assert "rollouts" in read_signature(lambda rollouts, **columns: [], "x").choose(available)


def test_missing_columns_are_known_before_the_run() -> None:
    assert missing_columns(plain, {}, ["question"]) == ["answer"]
    assert missing_columns(plain, {}, ["answer"]) == []
    assert missing_columns(plain, {"answer": ["42"]}, []) == []
    assert missing_columns(Judge, {}, []) == []
    hidden: Any = lambda completion, completions: []  # noqa: E731
    assert missing_columns(hidden, {}, ["completion"]) == ["completion"], "TRL's own rewards never get such a column"
