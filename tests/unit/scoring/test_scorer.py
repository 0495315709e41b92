"""Tests of calling rewards on groups, checking their results, and writing these into the rollouts."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import isolation_cases
import numpy as np
import pytest
import torch
from reasoning_gym import create_dataset
from scorer_cases import CharacterTokenizer, make_group
from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import RewardFailed
from rlpipe.scoring.processes import list_processes
from rlpipe.scoring.rewards import Reward, RewardActor
from rlpipe.scoring.sandbox.sandbox import Sandbox
from rlpipe.scoring.scorer import GroupScores, Scorer, apply_scores
from rlpipe.scoring.validation import check_scores
from rlpipe.types import RolloutGroup, RolloutStatus

CHAT = [{"role": "user", "content": "2 + 2 = ?"}]


def score(group: RolloutGroup, reward: Reward, **kwargs: Any) -> GroupScores:
    scorer = Scorer({"mine": RewardConfig(kwargs=kwargs)}, CharacterTokenizer(), {"mine": reward}, num_steps=100)
    result = scorer.score([group])[0]
    scorer.close()
    assert set(result.scores) ^ set(result.failures) == {"mine"}
    assert result.seconds["mine"] >= 0
    return result


def values(group: RolloutGroup, reward: Reward, **kwargs: Any) -> list[float | None]:
    result = score(group, reward, **kwargs)
    assert not result.failures, result.failures
    return result.scores["mine"]


def reason(group: RolloutGroup, reward: Reward, **kwargs: Any) -> str:
    return score(group, reward, **kwargs).failures["mine"]


# What functions receive


def test_function_with_trls_signature_gets_everything_that_trl_gives() -> None:
    seen: dict[str, Any] = {}

    def record(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        seen.update(columns, completions=completions, answer=answer)
        return [1.0, 0.5]

    assert values(make_group("4", "5", answer="4", level=2), record) == [1.0, 0.5]
    assert seen["completions"] == ["4", "5"]
    assert seen["answer"] == ["4", "4"]
    assert seen["level"] == [2, 2]
    assert seen["prompts"] == ["2 + 2 = ?"] * 2
    assert seen["completion_ids"] == [[ord("4"), 0], [ord("5"), 0]]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (3, 100)
    assert set(seen) == {
        "completions", "answer", "level", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"
    }  # fmt: skip


def test_a_program_that_ends_its_sandbox_costs_no_sibling() -> None:
    config = RewardConfig(path="rlpipe.scoring.code_execution:passes_tests", isolation="sandbox", timeout_s=60)
    right = "def f(x): return x + 1"
    killer = "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(30)\nos.kill(os.getppid(), 9)"
    wrong = "import gc\ndef f(x): return x"
    scorer = Scorer({"tests": config}, CharacterTokenizer())
    (scores,) = scorer.score([make_group(right, killer, wrong, right, tests=["assert f(1) == 2"])])
    scorer.close()
    assert scores.scores == {"tests": [1.0, 0.0, 0.0, 1.0]}
    assert scores.metrics["tests/crashed"] in (0, 0.25)
    assert scores.metrics["programs/suspicious"] in (0.5, pytest.approx(1 / 3))


def test_a_completion_whose_call_crashes_scores_0_alone() -> None:
    config = RewardConfig(path=f"{isolation_cases.__file__}:each", isolation="sandbox", timeout_s=20)
    scorer = Scorer({"each": config}, CharacterTokenizer())
    scores, failed = scorer.score([make_group("a", "die", "a"), make_group("a", "raise")])
    scorer.close()
    assert scores.scores == {"each": [1.0, 0.0, 1.0]}
    assert scores.metrics == {"each/crashed": pytest.approx(1 / 3)}
    assert failed.failures["each"].startswith("ValueError: wrong")


def test_a_call_that_hangs_takes_no_time_of_the_next() -> None:
    config = RewardConfig(path=f"{isolation_cases.__file__}:each", isolation="sandbox", timeout_s=4)
    scorer = Scorer({"each": config}, CharacterTokenizer())
    (scores,) = scorer.score([make_group("hang", "a")])
    scorer.close()
    assert scores.scores == {"each": [0.0, 1.0]}


def test_calls_after_one_that_took_longer_than_its_share_have_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    took, limits, now = [12.0, *[1.0] * 15], list[float](), [0.0]

    def call(sandbox: Sandbox, name: str, arguments: Any, num_values: int, timeout_s: float) -> Any:
        limits.append(timeout_s)
        now[0] += took[len(limits) - 1]
        return SimpleNamespace(values=[1.0], logged=[])

    config = RewardConfig(path=f"{isolation_cases.__file__}:each", isolation="sandbox", timeout_s=60)
    scorer = Scorer({"each": config}, CharacterTokenizer())
    monkeypatch.setattr(Sandbox, "call", call)
    monkeypatch.setattr("rlpipe.scoring.scorer.time.monotonic", lambda: now[0])
    scorer.score([make_group(*["a"] * 16)])
    monkeypatch.undo()
    scorer.close()
    assert limits[:3] == pytest.approx([3.75, 48 / 15, 47 / 14])
    assert min(limits) > 3


def test_shares_that_are_smaller_than_the_time_of_a_test_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    path = "rlpipe.scoring.code_execution:passes_tests"
    scorer = Scorer({"tests": RewardConfig(path=path, isolation="sandbox", timeout_s=9)}, CharacterTokenizer())
    group = make_group("x = 1", "x = 2", tests=["assert x == 1"])
    (scores,) = scorer.score([group])
    assert scores.scores == {"tests": [1.0, 0.0]}
    scorer.score([group])
    scorer.close()
    (message,) = (message for message in caplog.messages if "timeout_s=" in message)
    assert "each of 2 completions has 4.5 seconds, less than its kwargs.timeout_s=5," in message
    assert message.endswith("set its timeout_s to 10 or more")


def test_graders_of_reasoning_gym_evaluate_completions_in_a_sandbox_each() -> None:
    path = "rlpipe.scoring.toolbox:reasoning_gym"
    entry = create_dataset("countdown", size=1, seed=1)[0]
    scorer = Scorer({"gym": RewardConfig(path=path, isolation="sandbox", timeout_s=12)}, CharacterTokenizer())
    columns = {"entry": entry, "reasoning_gym_task": "countdown"}
    (scores,) = scorer.score([make_group("9**9**9**9", entry["answer"], **columns)])
    scorer.close()
    assert scores.scores == {"gym": [0.0, 1.0]}


def test_graders_that_evaluate_are_refused_outside_a_sandbox() -> None:
    scorer = Scorer({"gym": RewardConfig(path="rlpipe.scoring.toolbox:reasoning_gym")}, CharacterTokenizer())
    entry = create_dataset("countdown", size=1, seed=1)[0]
    (scores,) = scorer.score([make_group("1", entry=entry, reasoning_gym_task="countdown")])
    assert scores.failures["gym"].endswith("it runs code that the model wrote; set its isolation to sandbox")


def test_graders_that_evaluate_nothing_grade_a_group_in_one_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RewardConfig(path="rlpipe.scoring.toolbox:reasoning_gym", isolation="sandbox", timeout_s=12)
    scorer, counts, call = Scorer({"gym": config}, CharacterTokenizer()), list[int](), Sandbox.call

    def counted(sandbox: Sandbox, name: str, arguments: Any, num_values: int, timeout_s: float | None) -> Any:
        counts.append(num_values)
        return call(sandbox, name, arguments, num_values, timeout_s)

    monkeypatch.setattr(Sandbox, "call", counted)
    entry = create_dataset("chain_sum", size=1, seed=1)[0]
    (scores,) = scorer.score([make_group("x", entry["answer"], entry=entry, reasoning_gym_task="chain_sum")])
    scorer.close()
    assert counts == [2]
    assert scores.scores["gym"][1] == 1.0


def test_chat_prompts_give_chat_completions() -> None:
    def record(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert prompts == [CHAT]
        assert completions == [[{"role": "assistant", "content": "4"}]]
        return [1.0]

    assert values(make_group("4", prompt=CHAT), record) == [1.0]


def test_rollouts_come_on_request() -> None:
    assert values(make_group("4", "55"), lambda rollouts: [r.num_loss_tokens for r in rollouts]) == [2.0, 3.0]


def test_kwargs_come_from_the_config_and_win_over_columns() -> None:
    def scaled(completions: list[str], scale: float) -> list[float]:
        return [scale] * len(completions)

    assert values(make_group("4", scale=3), scaled, scale=0.5) == [0.5]


def test_missing_column_is_named_with_those_that_exist() -> None:
    text = reason(make_group("4", question="?", level=1), lambda completions, answer: [1.0])
    assert "needs answer" in text
    assert "level, question" in text


def test_a_metric_that_is_no_number_leaves_the_other_rewards_alone() -> None:
    def patient(completions: list[str], log_metric: Callable) -> list[float]:
        with suppress(TypeError):
            log_metric("score", None)
        return [0.5] * len(completions)

    def hasty(completions: list[str], log_metric: Callable) -> list[float]:
        log_metric("score", None)
        return [1.0] * len(completions)

    rewards = {"patient": RewardConfig(), "hasty": RewardConfig()}
    scorer = Scorer(rewards, CharacterTokenizer(), {"patient": patient, "hasty": hasty})
    (found,) = scorer.score([make_group("4", "555")])
    assert found.scores.keys() == {"patient"}
    assert "TypeError" in found.failures["hasty"]
    assert not found.metrics


def test_finite_values_of_log_metric_are_averaged_and_log_extra_accepted() -> None:
    def noted(completions: list[str], log_metric: Callable, log_extra: Callable) -> list[float]:
        for text in completions:
            log_metric("length", len(text))
            log_metric("length", math.nan)
            log_metric("none", math.inf)
        log_extra("text", completions)
        return [0.0] * len(completions)

    assert score(make_group("4", "555"), noted).metrics == {"length": 2.0}


def test_completions_are_decoded_once_for_all_rewards() -> None:
    tokenizer = CharacterTokenizer()
    rewards = {name: RewardConfig() for name in "abc"}
    scorer = Scorer(rewards, tokenizer, dict.fromkeys(rewards, lambda completions: [1.0] * len(completions)))
    scorer.score([make_group("4", "5"), make_group("6")])
    assert tokenizer.num_calls == 2


# TRL's own functions


THINK = ["<think>2+2</think>\nIt is $\\boxed{4}$", "It is $\\boxed{5}$"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (think_format_reward, [1.0, 0.0]),
        (accuracy_reward, [1.0, 0.0]),
        (reasoning_accuracy_reward, [1.0, 0.0]),
        (get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=4), [-1.0, -0.5]),
    ],
)
def test_trls_functions_run_unchanged(function: Callable[..., Any], expected: list[float]) -> None:
    if function in (accuracy_reward, reasoning_accuracy_reward):
        pytest.importorskip("math_verify")
    assert values(make_group(*THINK, prompt=CHAT, solution="$4$"), function) == expected


def test_trls_callable_objects_run_unchanged() -> None:
    group = make_group("\\boxed{4}", "\\boxed{5}", prompt=CHAT, solution="$4$")
    first, second = values(group, get_cosine_scaled_reward(max_len=100))
    assert first is not None
    assert second is not None
    assert first > 0.9
    assert second < -0.9
    assert values(make_group("aaaaaaa", "abcdefg"), get_repetition_penalty_reward()) == [pytest.approx(-2 / 3), 0.0]


def test_unparsable_gold_leaves_the_reward_out() -> None:
    pytest.importorskip("math_verify")
    assert values(make_group("\\boxed{4}", prompt=CHAT, solution=""), accuracy_reward) == [None]


# What functions may return


@pytest.mark.parametrize(
    "returned",
    [[1, 0], (1.0, 0.0), [True, False], np.array([1.0, 0.0]), [np.float32(1), np.int64(0)], torch.tensor([1.0, 0.0]),
     [torch.tensor(1.0), np.array(0.0)], iter([1.0, 0.0]), (value for value in (1.0, 0.0)), np.array([1, 0]),
     torch.tensor([1.0, 0.0], dtype=torch.bfloat16, requires_grad=True)],
)  # fmt: skip
def test_numbers_of_all_kinds_become_floats(returned: Any) -> None:
    checked = check_scores(returned, 2)
    assert checked == [1.0, 0.0]
    assert all(type(value) is float for value in checked)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], "1 values for 2 completions"),
        ([1.0, 0.0, 0.0], "3 values for 2 completions"),
        ([1.0, float("nan")], "value 1 is nan"),
        ([float("inf"), 0.0], "value 0 is inf"),
        (["1.0", 0.0], "'1.0', not a number"),
        ([[1.0], 0.0], "not a number"),
        (torch.zeros(2, 1), "not a number"),
        (1.0, "returned a float"),
        (torch.tensor(1.0), "returned a Tensor"),
        (None, "returned a NoneType"),
        ("10", "returned a str"),
        ({"a": 1.0, "b": 0.0}, "returned a dict"),
        ({1.0, 0.0}, "returned a set"),
        (b"10", "returned a bytes"),
        (bytearray(b"10"), "returned a bytearray"),
        ([1.0, {"score": 1.0}], "value 1 is {'score': 1.0}, not a number"),
        ([1.0, 1j], "value 1 is 1j, not a number"),
        ([1.0, 10**400], "value 1 is a number of 1329 bits; return one that fits in a float"),
        (np.array(["1", "0"]), "not a number"),
        (np.zeros((2, 2)), "not a number"),
        (np.array([1.0, np.nan]), "value 1 is nan"),
        (itertools.count(), "3 values for 2 completions"),
    ],
)
def test_anything_else_is_a_failure(returned: Any, words: str) -> None:
    assert words in reason(make_group("4", "5"), lambda completions: returned)


def test_none_leaves_completions_out() -> None:
    assert check_scores([None, 1], 2) == [None, 1.0]
    assert check_scores((None, None), 2) == [None, None]


def test_exception_is_a_failure_with_the_line_in_the_users_code() -> None:
    def broken(completions: list[str]) -> list[float]:
        return [1 / len(text) for text in ("", *completions)]

    line = broken.__code__.co_firstlineno + 1
    assert reason(make_group("4"), broken) == f"ZeroDivisionError: division by zero (test_scorer.py:{line})"


def test_long_messages_are_cut() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise RuntimeError("many\nlines " * 1000)

    text = reason(make_group("4"), broken)
    assert len(text) < 400
    assert "\n" not in text


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (SystemExit(3), "SystemExit: 3 (test_scorer.py:"),
        (SystemExit, "SystemExit (test_scorer.py:"),
        (GeneratorExit, "GeneratorExit (test_scorer.py:"),
        (asyncio.CancelledError, "CancelledError (test_scorer.py:"),
        (MemoryError, "MemoryError (test_scorer.py:"),
        (Unprintable, "Unprintable (test_scorer.py:"),
    ],
)
def test_whatever_is_raised_is_a_failure(raised: Any, words: str) -> None:
    def broken(completions: list[str]) -> list[float]:
        raise raised

    async def broken_later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        raise raised

    assert reason(make_group("4"), broken).startswith(words)
    assert reason(make_group("4"), broken_later).startswith(words)


def test_an_interrupt_ends_the_scoring() -> None:
    def interrupted(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(make_group("4"), interrupted)


# What functions may leave behind


def ring(number: int, frame: Any) -> None:
    raise TimeoutError("the alarm rang")


def test_alarms_work_and_end_with_their_call() -> None:
    def sleeps(completions: list[str]) -> list[float]:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(60)
        return [1.0]

    def leaves_it(completions: list[str]) -> list[float]:
        signal.signal(signal.SIGALRM, ring)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        return [1.0]

    async def leaves_it_later(completions: list[str]) -> list[float]:
        return leaves_it(completions)

    signals = (signal.SIGALRM, signal.SIGCHLD)
    handlers = [signal.getsignal(number) for number in signals]
    assert reason(make_group("4"), sleeps).startswith("TimeoutError: the alarm rang")
    for leaves in (leaves_it, leaves_it_later):
        assert values(make_group("4"), leaves) == [1.0]
        time.sleep(0.2)
        assert [signal.getsignal(number) for number in signals] == handlers
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_alarm_that_rings_at_the_very_end_hits_nobody_else() -> None:
    def leaves_it(completions: list[str], microseconds: int) -> list[float]:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
        return [1.0]

    for microseconds in range(1, 200):
        result = score(make_group("4"), leaves_it, microseconds=microseconds)
        assert not result.failures or "the alarm rang" in result.failures["mine"]


def test_an_alarm_around_the_scoring_stays() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert values(make_group("4"), lambda completions: [1.0]) == [1.0]
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_the_working_directory_is_that_of_before(tmp_path: Path) -> None:
    def moves(completions: list[str]) -> list[float]:
        os.chdir(tmp_path)
        return [1.0]

    folder = Path.cwd()
    assert values(make_group("4"), moves) == [1.0]
    assert Path.cwd() == folder


def test_a_failed_call_takes_its_processes_along() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def starts(completions: list[str], fails: bool) -> list[float]:
        started.append(subprocess.Popen(["sleep", "3600"], start_new_session=True))
        return [] if fails else [1.0]

    assert values(make_group("4"), starts, fails=False) == [1.0]
    time.sleep(0.1)
    assert "0 values" in reason(make_group("4"), starts, fails=True)
    assert started[0].pid in list_processes(), "only what the failed call itself has started ends"
    assert started[1].pid not in list_processes()
    started[0].kill()
    started[0].wait()


def test_sandboxed_rewards_score_alongside_others(tmp_path: Path) -> None:
    rewards = {
        "boxed": RewardConfig(path=f"{isolation_cases.__file__}:behave", isolation="sandbox"),
        "waits": RewardConfig(path=f"{isolation_cases.__file__}:waits", isolation="sandbox"),
        "free": RewardConfig(),
    }
    scorer = Scorer(rewards, CharacterTokenizer(), {"free": lambda completions: [0.0]})
    groups = [make_group("4", how=how, argument=None) for how in ("well", "sys_exit", "look_around")]
    results = scorer.score(groups)
    scorer.close()
    assert [result.scores.get("boxed") for result in results] == [[1.0], None, [1.0]]
    assert results[1].failures["boxed"].startswith("SystemExit: enough (isolation_cases.py:")
    assert [result.scores["waits"] for result in results] == [[0.5]] * 3
    assert [result.scores["free"] for result in results] == [[0.0]] * 3
    assert results[0].metrics == {"size": 1.0}


def test_one_failing_reward_leaves_the_others_alone() -> None:
    functions = {"good": lambda completions: [1.0], "bad": lambda completions: []}
    result = Scorer({name: RewardConfig() for name in functions}, CharacterTokenizer(), functions).score(
        [make_group("4")]
    )[0]
    assert result.scores == {"good": [1.0]}
    assert set(result.failures) == {"bad"}


# Async functions


def test_async_functions_run_concurrently() -> None:
    both_there = asyncio.Event()
    arrived: list[str] = []

    async def meet(name: str) -> None:
        arrived.append(name)
        if len(arrived) == 2:
            both_there.set()
        async with asyncio.timeout(5):
            await both_there.wait()

    async def first(completions: list[str]) -> list[float]:
        await meet("first")
        return [1.0]

    class Second:
        async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            await meet("second")
            return [0.5]

    functions = {"first": first, "second": Second()}
    scorer = Scorer({name: RewardConfig() for name in functions}, CharacterTokenizer(), functions)
    assert scorer.score([make_group("4")])[0].scores == {"first": [1.0], "second": [0.5]}
    scorer.close()


def test_async_functions_keep_their_event_loop() -> None:
    loops = set()

    async def record(completions: list[str]) -> list[float]:
        loops.add(asyncio.get_running_loop())
        return [1.0]

    scorer = Scorer({"mine": RewardConfig()}, CharacterTokenizer(), {"mine": record})
    scorer.score([make_group("4")])
    scorer.score([make_group("4")])
    scorer.close()
    assert len(loops) == 1


def test_async_failure_has_its_reason_and_place() -> None:
    async def broken(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        raise ValueError("no judge")

    line = broken.__code__.co_firstlineno + 2
    assert reason(make_group("4"), broken) == f"ValueError: no judge (test_scorer.py:{line})"


def test_seconds_are_those_of_each_reward() -> None:
    async def waits(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.05)
        return [1.0]

    def returns(completions: list[str]) -> list[float]:
        return [1.0]

    functions = {"waits": waits, "returns": returns}
    scorer = Scorer({name: RewardConfig() for name in functions}, CharacterTokenizer(), functions)
    seconds = scorer.score([make_group("4")])[0].seconds
    scorer.close()
    assert seconds["waits"] >= 0.05 > seconds["returns"]


# RewardActor


class LengthJudge(RewardActor):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def setup(self) -> None:
        self.ready = True

    def score(self, group: RolloutGroup) -> list[float | None]:
        assert self.ready
        return [float(len(text) <= self.limit) for text in self.texts(group)]


class BrokenJudge(RewardActor):
    def setup(self) -> None:
        raise OSError("no weights at /judge")

    def score(self, group: RolloutGroup) -> list[float | None]:
        return []


class Together(RewardActor):
    """A reward that scores lengths, unless a group of the same call contains the word ``bad``."""

    def score(self, group: RolloutGroup) -> list[float | None]:
        return self.score_groups([group])[0]

    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        CALLS.append(len(groups))
        if any("bad" in self.texts(group) for group in groups):
            raise ValueError("a bad one")
        return [[float(len(text)) for text in self.texts(group)] for group in groups]


CALLS: list[int] = []


def score_together(*groups: RolloutGroup) -> list[GroupScores]:
    CALLS.clear()
    rewards = {"together": RewardConfig(), "alone": RewardConfig()}

    def alone(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    return Scorer(rewards, CharacterTokenizer(), {"together": Together, "alone": alone}).score(list(groups))


def test_a_reward_actor_may_score_several_groups_at_one_time() -> None:
    first, second = score_together(make_group("a", "bb"), make_group("ccc"))
    assert CALLS == [2]
    assert first.scores == {"together": [1, 2], "alone": [1, 1]}
    assert second.scores == {"together": [3], "alone": [1]}
    assert first.seconds["together"] == second.seconds["together"]


def test_where_that_fails_each_group_is_scored_alone() -> None:
    first, bad, last = score_together(make_group("a"), make_group("bad"), make_group("ccc"))
    assert CALLS == [3, 1, 1, 1]
    assert (first.scores["together"], last.scores["together"]) == ([1], [3])
    assert "a bad one" in bad.failures["together"]
    assert bad.scores == {"alone": [1]}


def test_one_group_is_scored_alone() -> None:
    (only,) = score_together(make_group("a"))
    assert only.scores["together"] == [1]
    assert CALLS == [1]


def test_reward_actor_is_made_set_up_and_sees_texts() -> None:
    assert values(make_group("4", "four"), LengthJudge, limit=2) == [1.0, 0.0]


def test_reward_actor_that_cannot_be_set_up_stops_the_start() -> None:
    with pytest.raises(RewardFailed, match=r"'judge'.*no weights at /judge"):
        Scorer({"judge": RewardConfig()}, CharacterTokenizer(), {"judge": BrokenJudge})


def test_rewards_are_loaded_by_path(tmp_path: Path) -> None:
    file = tmp_path / "path_rewards.py"
    file.write_text("def upper(completions):\n    return [text.isupper() for text in completions]\n")
    scorer = Scorer({"upper": RewardConfig(path=f"{file}:upper")}, CharacterTokenizer())
    assert scorer.score([make_group("A", "b")])[0].scores == {"upper": [1.0, 0.0]}


# Combination


def config(**fields: Any) -> RewardConfig:
    return RewardConfig(path="unused:unused", **fields)


def test_weighted_sum_leaves_out_none() -> None:
    group = make_group("a", "b", "c")
    first = GroupScores(group_id=5, scores={"x": [1.0, None, None]}, seconds={"x": 0.5})
    second = GroupScores(group_id=5, scores={"y": [2.0, 2.0, None]}, seconds={"y": 0.25})
    apply_scores(group, [first, second], {"x": config(weight=0.5), "y": config(weight=-1.0)})
    assert [rollout.reward for rollout in group] == [-1.5, -2.0, None]
    assert group.rollouts[1].rewards == {"x": None, "y": 2.0}
    assert group.failure is None
    assert group.score_s == pytest.approx(0.75)


def test_an_episode_that_failed_has_no_reward_for_what_it_said() -> None:
    group = make_group("a", "b")
    group.rollouts[0].status = RolloutStatus.FAILED
    apply_scores(group, [GroupScores(group_id=5, scores={"x": [1.0, 1.0]})], {"x": config(weight=0.5)})
    assert [rollout.reward for rollout in group] == [0.0, 0.5]


def test_reward_functions_do_not_see_episodes_that_failed() -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    groups = [make_group("a", "bb", "ccc"), make_group("a"), make_group("a")]
    groups[0].rollouts[1].status = groups[1].rollouts[0].status = RolloutStatus.FAILED
    found = Scorer({"length": RewardConfig()}, CharacterTokenizer(), {"length": length}).score(groups)
    assert [own.scores for own in found] == [{"length": [1.0, None, 3.0]}, {"length": [None]}, {"length": [1.0]}]
    assert not any(own.failures for own in found)


@pytest.fixture
def failing() -> tuple[RolloutGroup, list[GroupScores]]:
    return make_group("a", "b"), [GroupScores(group_id=5, scores={"x": [1.0, 0.0]}, failures={"y": "Oops: broken"})]


def test_failure_skips_the_group_with_its_reason(failing: tuple[RolloutGroup, list[GroupScores]]) -> None:
    group, scores = failing
    apply_scores(group, scores, {"x": config(), "y": config(fail="skip_group")})
    assert group.failure == "reward 'y' failed: Oops: broken"
    assert [rollout.reward for rollout in group] == [None, None]
    assert group.rollouts[0].rewards == {"x": 1.0, "y": None}


def test_failure_counts_as_zero(failing: tuple[RolloutGroup, list[GroupScores]]) -> None:
    group, scores = failing
    apply_scores(group, scores, {"x": config(), "y": config(fail="zero")})
    assert group.failure is None
    assert [rollout.rewards for rollout in group] == [{"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 0.0}]
    assert [rollout.reward for rollout in group] == [1.0, 0.0]


def test_failure_stops_the_run(failing: tuple[RolloutGroup, list[GroupScores]]) -> None:
    group, scores = failing
    with pytest.raises(RewardFailed, match=r"group 5 \(row 17\): reward 'y' failed: Oops: broken"):
        apply_scores(group, scores, {"x": config(), "y": config(fail="raise")})


def test_reward_that_nobody_scored_is_a_failure() -> None:
    group = make_group("a")
    apply_scores(group, [GroupScores(group_id=5, scores={"x": [1.0]})], {"x": config(), "y": config()})
    assert group.failure == "reward 'y' failed: it was not scored"
