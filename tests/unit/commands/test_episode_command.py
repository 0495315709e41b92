"""Tests of ``rlpipe episode``, with a tiny policy: what it prints, and what it says to wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_cases import run_options

from rlpipe import cli
from rlpipe.models.tiny_model import make_tiny_policy

FILE = Path(__file__).parents[2] / "helpers" / "environment_cases.py"
ENVIRONMENT = ("environment.isolation=thread", "data.max_prompt_tokens=60")
Episode = Callable[..., tuple[int, str, str]]
TALK = (*ENVIRONMENT, f"environment.path={FILE}:Talk")

TOOLS = (*ENVIRONMENT, f"environment.tools=[{FILE}:look]", f"environment.parser={FILE}:call_often")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a policy and rows, of which the third is too long."""
    folder = tmp_path_factory.mktemp("episode")
    prompts = ["1+1=", "2+2=", "3" * 99]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    sizes: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    return make_tiny_policy(folder / "policy", **sizes), folder / "rows.jsonl"


@pytest.fixture
def episode(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Episode:
    """Return a function that runs the command, and returns its exit code, its output and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["episode", *run_options(*files, tmp_path), *arguments])
        except SystemExit as error:
            code = int(str(error.code))
        return code, *capsys.readouterr()

    return run


def num_between_brackets(text: str) -> int:
    """Return the number of tokens between brackets: characters and special tokens."""
    return sum(len(re.sub(r"<\|\w+\|>", "x", marked)) for marked in re.findall("⟦(.*?)⟧", text))


def test_an_environments_turns_are_marked_and_counted(episode: Episode) -> None:
    code, text, _ = episode(*TALK, "--row", "1", "--seed", "5")
    assert code == 0
    first, blank, title, shown = text.splitlines()
    assert (first, blank) == ("trained tokens are between ⟦ and ⟧", "")
    found = re.fullmatch(
        r"row 1, sequence 0: end: done; rewards of the turns: (.*), (.*), (.*); (\d+) of \d+ tokens trained", title
    )
    assert found
    assert all(0 <= float(reward) <= 1 for reward in found.groups()[:3])
    assert num_between_brackets(shown) == int(found[4])
    assert shown.startswith("<|user|>2+2=<|end|><|assistant|>⟦")
    assert len(re.findall(r"⟧(?:<\|end\|>)?<\|user\|>\d+<\|end\|><\|assistant\|>⟦", shown)) == 2
    assert episode(*TALK, "--row", "1", "--seed", "5")[1] == text, "a seed repeats its episode"
    assert episode(*TALK, "--row", "1", "--seed", "6")[1] != text


def test_greedy_episodes_are_the_same_with_any_seed(episode: Episode) -> None:
    greedy = [episode(*TALK, "--temperature", "0", "--seed", seed)[1] for seed in "12"]
    assert greedy[0] == greedy[1]


def test_results_of_tools_are_shown_and_not_trained(episode: Episode) -> None:
    code, text, _ = episode(*TOOLS, "environment.max_turns=2", "rollout.max_model_len=200")
    assert code == 0
    assert re.search(r"⟧(<\|end\|>)?<\|tool\|>\d+ <\|user\|> things<\|end\|>", text)
    assert "sequence 0: end: max_turns; rewards of the turns: 0, 0; " in text


def test_each_sequence_of_an_agent_is_shown(episode: Episode) -> None:
    code, text, _ = episode(*ENVIRONMENT, f"environment.agent={FILE}:rewrite")
    assert code == 0
    assert [line.split(":")[0] for line in text.splitlines() if line.startswith("row")] == [
        f"row 0, sequence {number}" for number in range(3)
    ]
    assert text.count("end: done; rewards of the turns: ") == 1, "the first one has what the episode has"
    assert text.count("<|user|>1+1=<|end|>") == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the config plays no episodes: set environment.path, environment.tools or environment.agent"),
        ([*TALK, "--row", "3"], "--row 3: the data has fewer rows"),
        ([*TOOLS, "--row", "2"], "--row 2 is skipped: "),
        ([*TALK, "--row", "-1"], "--row"),
        ([*TALK, "--temperature", "-1"], "--temperature"),
        ([*TALK, "--seed", "one"], "--seed"),
        (["environment.path=nowhere.py:Talk"], "environment.path"),
        ([f"environment.path={FILE}:Talker"], "environment.path"),
        ([*TALK, "environment.kwargs.speed=3"], "environment.path"),
    ],
)
def test_wrong_input_gets_one_clear_line(episode: Episode, arguments: list[str], says: str) -> None:
    code, text, errors = episode(*arguments)
    assert (code, text) == (2, "")
    assert errors.startswith("rlpipe: error: ")
    assert errors.count("\n") == 1
    assert says in errors


def test_an_environment_that_fails_is_named(episode: Episode) -> None:
    code, text, errors = episode(*ENVIRONMENT, f"environment.path={FILE}:Broken")
    assert (code, text) == (1, "")
    assert errors.count("\n") == 1
    assert "the board is gone" in errors
