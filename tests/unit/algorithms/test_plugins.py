"""Advantages and losses of the user's own: what they get, what they may return, and their errors in one line."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.algorithms.advantages import AdvantageInputs, estimate_advantages, own_advantages
from rlpipe.algorithms.losses import LossInputs, LossOutput, policy_loss
from rlpipe.algorithms.plugins import record_code
from rlpipe.algorithms.preferences import PairInputs, pair_loss
from rlpipe.configs.options import changed_options, to_tree, to_yaml
from rlpipe.configs.schema.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    LossConfig,
    ReplayPolicyConfig,
)
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, RunError

LOSSES = """
import torch
from rlpipe.algorithms.surrogates import SurrogateOutput, register_surrogate

def plain(inputs):
    return -inputs.advantages * inputs.logprobs

def scaled(inputs, *, factor, power=1):
    per_token = -factor * inputs.advantages**power * inputs.logprobs
    ones = torch.ones_like(per_token)
    return SurrogateOutput(per_token=per_token, clipped_high=inputs.advantages > 1, metrics={"mine/one": ones})

def summed(inputs):
    return plain(inputs).sum()

def bare(inputs):
    return 3.0

def detached(inputs):
    return plain(inputs).detach()

def undefined(inputs):
    return plain(inputs) / (inputs.advantages - 1)

def raising(inputs):
    values = plain(inputs)
    raise IndexError("no such token\\nand more")

def misshapen(inputs):
    return SurrogateOutput(per_token=plain(inputs), metrics={"mine/total": plain(inputs).sum()})

def shares(inputs):
    return SurrogateOutput(per_token=plain(inputs), clipped_low=inputs.advantages.abs())

NUMBER = 3
"""
ADVANTAGES = """
import numpy as np
import torch

def centered(rewards, inputs, *, factor=1.0):
    return [factor * (group - np.nanmean(group)) for group in rewards]

def by_token(rewards, inputs):
    return [[np.full(count, reward) for reward, count in zip(group, counts)]
            for group, counts in zip(rewards, inputs.num_tokens)]

def above_greedy(rewards, inputs):
    return [group - baseline for group, baseline in zip(rewards, inputs.baselines)]

def too_few(rewards, inputs):
    return [group[:-1] for group in rewards]

def one_group(rewards, inputs):
    return rewards[:1]

def texts(rewards, inputs):
    return [["a"] * len(group) for group in rewards]

def nothing(rewards, inputs):
    pass

def undefined(rewards, inputs):
    return [group / 0 for group in rewards]

def raising(rewards, inputs):
    return 1 / 0

def with_gradient(rewards, inputs):
    return [torch.tensor(group, requires_grad=True) for group in rewards]
"""
CORRECTIONS = """
import torch
from rlpipe.algorithms.corrections import CorrectionOutput

def squared(inputs, *, power=2.0):
    return (power * inputs.log_ratios).exp()

def gains(inputs):
    ones = torch.ones_like(inputs.log_ratios)
    return CorrectionOutput(weights=ones, kept=inputs.advantages < 2)

def by_sequence(inputs):
    assert inputs.sequence_ids.shape == inputs.mask.shape
    return squared(inputs).sum()

def nothing(inputs):
    pass

def listed(inputs):
    return CorrectionOutput(weights=[1.0])

def counted(inputs):
    return CorrectionOutput(weights=squared(inputs), kept=inputs.advantages)

def undefined(inputs):
    return squared(inputs) / 0

def raising(inputs):
    raise KeyError("w")
"""
PREFERENCES = """
from rlpipe.algorithms.preferences import PairScores

def squared(scores, *, target=1.0):
    assert isinstance(scores, PairScores) and scores.lengths.shape == scores.sums.shape
    return (scores.config.beta * scores.mean_difference - target) ** 2

def summed(scores):
    return squared(scores).sum()

def nothing(scores):
    pass

def detached(scores):
    return squared(scores).detach()

def undefined(scores):
    return squared(scores) / 0

def raising(scores):
    return scores.rewards
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "corrections.py").write_text(CORRECTIONS)
    (tmp_path / "preferences.py").write_text(PREFERENCES)
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "advantages.py").write_text(ADVANTAGES)
    return tmp_path


def make_inputs() -> LossInputs:
    return LossInputs(
        logprobs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        sampling_logprobs=torch.tensor([-1.0, -2.0, -3.0]),
        advantages=torch.tensor([2.0, 1.0, 5.0]),
        loss_mask=torch.tensor([True, True, False]),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        num_loss_tokens=2,
        num_sequences=1,
        max_completion_tokens=3,
    )


def own_loss(files: Path, name: str, **kwargs: Any) -> LossOutput:
    return policy_loss(make_inputs(), LossConfig(path=f"{files}/losses.py:{name}", kwargs=kwargs))


def own(files: Path, name: str, rewards: list[list[float]], **kwargs: Any) -> list[Any]:
    config = AdvantageConfig(path=f"{files}/advantages.py:{name}", kwargs=kwargs)
    groups = [np.array(group, np.float32) for group in rewards]
    counts = [np.arange(2, 2 + len(group), dtype=np.int32) for group in groups]
    return own_advantages(groups, AdvantageInputs(config=config, num_tokens=counts))


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_own_loss_returns_what_each_token_adds(files: Path) -> None:
    output = own_loss(files, "plain")
    assert output.loss.item() == (2 * 1 + 1 * 2) / 2
    assert output.metrics.values()["loss"] == 2.0
    assert "clip_ratio/low_mean" not in output.metrics.values()


def test_an_own_loss_has_arguments_and_metrics(files: Path) -> None:
    output = own_loss(files, "scaled", factor=3.0, power=2)
    assert output.loss.item() == 3 * (4 * 1 + 1 * 2) / 2
    values = output.metrics.values()
    assert values["mine/one"] == 1.0
    assert (values["clip_ratio/low_mean"], values["clip_ratio/high_mean"]) == (0, 0.5)


def test_an_own_loss_is_corrected_as_the_built_in_ones(files: Path) -> None:
    for mode in ("none", "token_truncate"):
        inputs = make_inputs()
        inputs.sampling_logprobs = torch.tensor([-1.5, -2.0, 0.0])
        correction = CorrectionConfig(mode=mode)
        losses = [
            policy_loss(inputs, config, correction).loss.item()
            for config in (LossConfig(path=f"{files}/losses.py:plain"), LossConfig(name="reinforce"))
        ]
        assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("summed", "returned per_token of shape [], not a tensor of shape [3], one value for each token"),
        ("bare", "returned float, not a tensor [N] or a SurrogateOutput"),
        ("detached", "returned a loss without a gradient; compute it from inputs.logprobs"),
        ("undefined", "returned NaN or infinity for 1 of 2 loss tokens, in the shape [3]"),
        ("raising", "raised IndexError: no such token (losses.py, line 27), given the shape [3]"),
        ("shares", "returned clipped_low of type torch.float32, not torch.bool"),
        ("misshapen", "returned mine/total of shape [], not a tensor of shape [3], one value for each token"),
    ],
)
def test_problems_of_an_own_loss_are_one_line(files: Path, name: str, problem: str) -> None:
    with pytest.raises(RunError) as error:
        own_loss(files, name)
    fix = "; fix the function, or set algorithm.loss.path=null"
    assert message(error) == f"algorithm.loss.path: {files}/losses.py:{name} {problem}{fix}"


def test_an_own_loss_is_not_blamed_for_log_probs_that_are_not_finite(files: Path) -> None:
    inputs = make_inputs()
    inputs.logprobs = torch.tensor([float("nan"), -2.0, -3.0], requires_grad=True)
    assert policy_loss(inputs, LossConfig(path=f"{files}/losses.py:plain")).loss.isnan()


def corrected(files: Path, name: str, **options: Any) -> LossOutput:
    inputs = make_inputs()
    inputs.sampling_logprobs = torch.tensor([-1.5, -2.0, 0.0])
    correction = CorrectionConfig(path=f"{files}/corrections.py:{name}", **options)
    return policy_loss(inputs, LossConfig(name="reinforce"), correction)


def test_an_own_correction_returns_the_factor_of_each_token(files: Path) -> None:
    output = corrected(files, "squared", kwargs={"power": 2.0})
    assert output.loss.item() == pytest.approx((2 * math.exp(2 * 0.5) * 1 + 1 * 2) / 2)
    values = output.metrics.values()
    assert values["sampling/dropped_ratio"] == 0
    assert values["sampling/importance_ratio/max"] == pytest.approx(math.exp(0.5))


def test_an_own_correction_may_drop_tokens(files: Path) -> None:
    output = corrected(files, "gains")
    assert output.loss.item() == 1 * 2 / 2
    assert output.metrics.values()["sampling/dropped_ratio"] == 0.5


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("by_sequence", "returned weights of shape [], not a tensor of shape [3], one value for each token"),
        ("nothing", "returned NoneType, not a tensor [N] or a CorrectionOutput"),
        ("listed", "returned weights of type list, not a tensor of shape [3], one value for each token"),
        ("counted", "returned kept of type torch.float32, not torch.bool"),
        ("undefined", "returned NaN or infinity for 2 of 2 loss tokens, in the shape [3]"),
        ("raising", "raised KeyError: 'w' (corrections.py, line 29), given the shape [3]"),
    ],
)
def test_problems_of_an_own_correction_are_one_line(files: Path, name: str, problem: str) -> None:
    with pytest.raises(RunError) as error:
        corrected(files, name)
    fix = "; fix the function, or set algorithm.correction.path=null"
    assert message(error) == f"algorithm.correction.path: {files}/corrections.py:{name} {problem}{fix}"


def compared(files: Path, name: str, **options: Any) -> LossOutput:
    inputs = PairInputs(
        logprobs=torch.tensor([[-2.0, -6.0], [-9.0, -3.0]], requires_grad=True),
        ref_logprobs=torch.tensor([[-4.0, -4.0], [-9.0, -6.0]]),
        lengths=torch.tensor([[2, 4], [3, 3]]),
        num_pairs=2,
        num_chosen_tokens=5,
    )
    return pair_loss(inputs, PreferenceConfig(path=f"{files}/preferences.py:{name}", **options))


def test_an_own_preference_loss_gets_log_ratios_and_the_built_in_metrics(files: Path) -> None:
    output = compared(files, "squared", kwargs={"target": 0.5}, beta=2.0)
    differences = [2 * (2 / 2 + 2 / 4) - 0.5, 2 * (0 - 3 / 3) - 0.5]
    assert output.loss.item() == pytest.approx(sum(value**2 for value in differences) / 2)
    output.loss.backward()
    values = output.metrics.values()
    assert (values["rewards/chosen"], values["rewards/accuracies"]) == (2.0, 0.5)
    plain, penalized = compared(files, "squared"), compared(files, "squared", cross_entropy_coef=0.5)
    assert penalized.loss.item() == pytest.approx(plain.loss.item() + 0.5 * 11 / 5)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("summed", "returned losses of shape [], not a tensor of shape [2], one value for each pair"),
        ("nothing", "returned losses of type NoneType, not a tensor of shape [2], one value for each pair"),
        ("detached", "returned a loss without a gradient; compute it from scores.sums"),
        ("undefined", "returned NaN or infinity for 2 of 2 pairs, in the shape [2]"),
        (
            "raising",
            "raised AttributeError: 'PairScores' object has no attribute 'rewards' (preferences.py, line 21), given "
            "the shape [2, 2]",
        ),
    ],
)
def test_problems_of_an_own_preference_loss_are_one_line(files: Path, name: str, problem: str) -> None:
    with pytest.raises(RunError) as error:
        compared(files, name)
    fix = "; fix the function, or set algorithm.preference.path=null"
    assert message(error) == f"algorithm.preference.path: {files}/preferences.py:{name} {problem}{fix}"


def test_an_own_correction_is_followed_by_the_off_policy_mask(files: Path) -> None:
    inputs = make_inputs()
    inputs.sampling_logprobs, inputs.advantages = torch.tensor([0.0, 0.0, 0.0]), -inputs.advantages
    correction = CorrectionConfig(path=f"{files}/corrections.py:gains", off_policy_threshold=1.0)
    output = policy_loss(inputs, LossConfig(name="reinforce"), correction)
    assert (output.loss.item(), output.metrics.values()["sampling/dropped_ratio"]) == (0, 1)


def test_all_own_functions_are_recorded(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    (files / "replays.py").write_text("def choose(kept, inputs, *, power=1):\n    return []\n")
    given = AlgorithmConfig(
        correction=CorrectionConfig(path="corrections.py:squared"),
        replay=ReplayPolicyConfig(path="replays.py:choose"),
        preference=PreferenceConfig(path="preferences.py:squared"),
    )
    recorded, text = record_code(given), to_yaml(Config(algorithm=record_code(given)))
    for section, name in (
        (recorded.correction, "corrections.py"),
        (recorded.replay, "replays.py"),
        (recorded.preference, "preferences.py"),
    ):
        assert section.path is not None
        assert section.path.startswith(f"{files}/{name}:")
        assert section.digest == hashlib.sha256((files / name).read_bytes()).hexdigest()
        assert section.digest in text
    for changed, option in (
        (
            AlgorithmConfig(replay=ReplayPolicyConfig(path="replays.py:choose", kwargs={"p": 1})),
            "algorithm.replay.kwargs",
        ),
        (AlgorithmConfig(correction=CorrectionConfig(path="corrections.py:wrong")), "algorithm.correction.path"),
    ):
        with pytest.raises(ConfigError, match=option):
            record_code(changed)


def test_own_advantages_are_one_for_each_rollout(files: Path) -> None:
    got = own(files, "centered", [[1.0, 3.0], [2.0, float("nan"), 0.0]], factor=2.0)
    assert [group.tolist() for group in got] == [[-2, 2], [2, 0, -2]]
    assert {group.dtype for group in got} == {np.dtype(np.float32)}


def test_a_group_without_a_greedy_reward_counts_as_not_scored(files: Path) -> None:
    config = AdvantageConfig(name="remax", path=f"{files}/advantages.py:above_greedy")
    inputs = AdvantageInputs(config=config, num_tokens=[np.ones(2, np.int32)] * 2, baselines=[0.5, float("nan")])
    got = estimate_advantages([np.array([1.0, 0.0], np.float32)] * 2, inputs)
    assert [np.asarray(group).tolist() for group in got] == [[0.5, -0.5], [0, 0]]


def test_own_advantages_may_be_one_for_each_loss_token(files: Path) -> None:
    got = own(files, "by_token", [[1.0, 3.0], [float("nan")]])
    assert [[values.tolist() for values in group] for group in got] == [[[1, 1], [3, 3, 3]], [[0, 0]]]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "too_few",
            "returned 1 advantages of shapes [[]] for group 0, not [2] numbers or one array for the loss tokens of "
            "each rollout, [[2], [3]]",
        ),
        ("one_group", "returned 1 groups for 2 groups of rewards"),
        (
            "texts",
            "returned list for group 0, which is not a list of numbers or arrays "
            "(could not convert string to float: 'a')",
        ),
        ("nothing", "returned NoneType for 2 groups of rewards"),
        (
            "with_gradient",
            "returned Tensor for group 0, which is not a list of numbers or arrays (Can't call numpy() on Tensor that "
            "requires grad. Use tensor.detach().numpy() instead.)",
        ),
        (
            "undefined",
            "returned NaN or infinity for group 0, in advantages of shapes [[], []] for rewards of shape [2], "
            "[1.0, 3.0]",
        ),
        ("raising", "raised ZeroDivisionError: division by zero (advantages.py, line 31), given the shape [2]"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_problems_of_own_advantages_are_one_line(files: Path, name: str, problem: str) -> None:
    with pytest.raises(RunError) as error:
        own(files, name, [[1.0, 3.0], [2.0, 0.0]])
    fix = "; fix the function, or set algorithm.advantage.path=null"
    assert message(error) == f"algorithm.advantage.path: {files}/advantages.py:{name} {problem}{fix}"


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_the_rewards_of_a_large_group_are_one_line(files: Path) -> None:
    with pytest.raises(RunError) as error:
        own(files, "undefined", [[0.25] * 15 + [1.5] * 17])
    assert "for rewards of shape [32], [0.25, 0.25, " in message(error)
    assert len(message(error)) < 500


def with_code(files: Path) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage=AdvantageConfig(path="advantages.py:centered"),
        loss=LossConfig(path="losses.py:scaled", kwargs={"factor": 2.0}),
    )


def test_the_config_of_a_run_records_which_code_it_was(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    recorded = record_code(with_code(files))
    assert recorded.loss.path == f"{files}/losses.py:scaled"
    assert recorded.loss.digest == hashlib.sha256(LOSSES.encode()).hexdigest()
    assert recorded.advantage.digest == hashlib.sha256(ADVANTAGES.encode()).hexdigest()
    assert recorded.loss.digest in to_yaml(Config(algorithm=recorded))
    assert record_code(recorded) == recorded, "a resumed run"
    assert record_code(AlgorithmConfig()) == AlgorithmConfig()


def test_changed_code_is_noticed_when_a_run_is_resumed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    before = to_tree(Config(algorithm=record_code(with_code(files))))
    (files / "changed").mkdir()
    monkeypatch.chdir(files / "changed")
    for name, text in (("losses.py", LOSSES + "#"), ("advantages.py", ADVANTAGES)):
        (files / "changed" / name).write_text(text)
    after = to_tree(Config(algorithm=record_code(with_code(files))))
    before["algorithm"]["loss"]["path"] = after["algorithm"]["loss"]["path"]
    before["algorithm"]["advantage"]["path"] = after["algorithm"]["advantage"]["path"]
    (change,) = changed_options(before, after)
    assert change.startswith("algorithm.loss.digest")


def test_code_that_is_not_the_recorded_one_is_refused(files: Path) -> None:
    config = LossConfig(path=f"{files}/losses.py:plain", digest="0" * 64)
    for use in (lambda: record_code(AlgorithmConfig(loss=config)), lambda: policy_loss(make_inputs(), config)):
        with pytest.raises(ConfigError, match="its code has changed; put the file back, or remove") as error:
            use()
        assert "not 000000000000..." in message(error)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (LossConfig(path="losses.py:plian"), "did you mean plain"),
        (LossConfig(path="nowhere.py:plain"), "there is no file"),
        (LossConfig(path="losses.py:NUMBER"), "is no function, but of type int"),
        (LossConfig(path="losses.py:scaled"), "no keywords: missing a required argument: 'factor'; change kwargs"),
        (LossConfig(path="losses.py:plain", kwargs={"fact": 1}), "got an unexpected keyword argument 'fact'"),
    ],
)
def test_a_function_that_cant_be_called_is_named_before_the_run(
    files: Path, monkeypatch: pytest.MonkeyPatch, loss: LossConfig, problem: str
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(ConfigError) as error:
        record_code(AlgorithmConfig(loss=loss))
    assert problem in message(error)
    assert message(error).startswith("algorithm.loss.")


def test_a_function_of_a_module_is_found(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    (files / "my_own_losses.py").write_text(LOSSES)
    recorded = record_code(AlgorithmConfig(loss=LossConfig(path="my_own_losses:plain")))
    assert recorded.loss.path == "my_own_losses:plain"
    assert recorded.loss.digest == hashlib.sha256(LOSSES.encode()).hexdigest()
