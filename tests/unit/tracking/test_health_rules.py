"""Health rules on metrics of runs that are made up: each illness trips its rule and no other."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from health_cases import metrics_read_by

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.health_config import HEALTH_RULES, HealthLimits
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.tracking.health import RECOVERY_STEPS, HealthFinding, HealthWatch
from rlpipe.tracking.health_rules import RULES, HealthRule

Row = Mapping[str, float | None]
Change = Callable[[int], Row]
BY_NAME = {rule.name: rule for rule in RULES}
NUM_STEPS = 80


def make_config(**changes: Any) -> Config:
    config = Config(**changes)
    config.replay.max_staleness = 4
    config.rollout.num_gpus = config.learner.num_gpus = 1
    return config


def well(step: int) -> Row:
    """Return the metrics of a step of a run that learns."""
    return {
        "loss": 0.01,
        "reward": 0.1 + step * 0.005 + 0.02 * (step % 3),
        "reward_std": 0.3,
        "frac_reward_zero_std": 0.3,
        "entropy": 0.6 - step * 0.004,
        "grad_norm": 0.5,
        "bad_steps": 1.0 if step > 40 else 0.0,
        "clip_ratio/region_mean": 0.05,
        "kl": 0.1,
        "sampling/logp_difference/mean": 0.02,
        "sampling/effective_ratio": 0.97,
        "sampling/missing_ratio": 0.0,
        "sampling/importance_ratio/mean": 1.002 - 0.004 * (step % 2),
        "sampling/importance_ratio/min": 0.05 if step % 5 == 3 else 0.4,
        "completions/clipped_ratio": 0.1,
        "completions/mean_length": 100.0 + step % 7,
        "groups/failed": step // 20,
        "staleness/mean": 3.9,
        "time/step": 10.0,
        "time/wait": 1.0,
        "time/train": 6.0,
        "rewards/accuracies": 0.6,
        "ebft/alignment": 0.4,
        "ebft/diversity": 0.05,
        "ebft/cfm_loss": 4.0,
    }


def found_in(config: Config, rows: Iterable[Row]) -> list[tuple[int, HealthFinding]]:
    watch = HealthWatch(config)
    return [(number, finding) for number, row in enumerate(rows) for finding in watch.update(row)]


def run_with(change: Change, *, ill_from: int = 0) -> list[Row]:
    return [{**well(step), **(change(step) if step >= ill_from else {})} for step in range(NUM_STEPS)]


def function_values(mean: float, name: str = "accuracy", scale: float = 1.0) -> Row:
    """Return the metrics of a reward function that gives ``scale`` to a share of the completions, and else 0."""
    return {f"rewards/{name}/mean": scale * mean, f"rewards/{name}/std": scale * math.sqrt(mean * (1 - mean))}


ILLNESSES: dict[str, Change] = {
    "equal_rewards": lambda step: {"frac_reward_zero_std": 1.0},
    "no_reward": lambda step: {"reward": 0.0, "reward_std": 0.0},
    "low_reward": lambda step: function_values(0.03 + 0.01 * (step % 2)),
    "reward_falls": lambda step: {"reward": 0.1 + 0.01 * min(step, 100 - 2 * step)},
    "entropy_low": lambda step: {"entropy": 0.004},
    "entropy_high": lambda step: {"entropy": 0.6 + step * 0.05},
    "gradient_norm": lambda step: {"grad_norm": 25.0},
    "skipped_updates": lambda step: {"bad_steps": step // 3},
    "not_finite": lambda step: {"entropy": math.nan},
    "clipping": lambda step: {"clip_ratio/region_mean": 0.45},
    "kl": lambda step: {"kl": step * 0.1},
    "logprob_difference": lambda step: {"sampling/logp_difference/mean": 0.8},
    "importance_mean": lambda step: {"sampling/importance_ratio/mean": 0.7},
    "importance_min": lambda step: {"sampling/importance_ratio/min": 1e-4},
    "effective_samples": lambda step: {"sampling/effective_ratio": 0.1},
    "missing_logprobs": lambda step: {"sampling/missing_ratio": 0.2},
    "truncated": lambda step: {"completions/clipped_ratio": 0.95},
    "length_drift": lambda step: {"completions/mean_length": 100.0 + 5 * step, "reward": 0.1 + 0.005 * step},
    "wrong_preferences": lambda step: {"rewards/accuracies": 0.4},
    "failed_groups": lambda step: {"groups/failed": 4 * step},
    "staleness": lambda step: {"time/wait": 0.0},
    "learner_waits": lambda step: {"time/wait": 9.0},
    "engines_wait": lambda step: {"time/train": 9.5},
    "ebft_alignment": lambda step: {"ebft/alignment": 0.02},
    "ebft_diversity": lambda step: {"ebft/diversity": 1.3},
    "ebft_cfm": lambda step: {"ebft/cfm_loss": 300.0},
}


@pytest.mark.parametrize("name", ILLNESSES)
def test_an_illness_trips_its_rule_alone_and_once(name: str) -> None:
    config = make_config()
    if name == "wrong_preferences":
        config.algorithm.kind = "preference"
    found = found_in(config, run_with(ILLNESSES[name]))
    assert [finding.rule for _, finding in found] == [name]
    message = found[0][1].message
    assert message.startswith(f"warning ({name}): ")
    assert "Likely: " in message
    assert "Try: " in message
    assert "nan" not in message


def test_a_run_that_learns_trips_nothing() -> None:
    assert found_in(make_config(), run_with(lambda step: {})) == []


@pytest.mark.parametrize("num_steps", [5, 50])
def test_a_penalty_that_is_gone_is_no_lack_of_rewards(num_steps: int) -> None:
    ended = [{**well(step), "reward": min(step / num_steps - 1, 0.0), "reward_std": 0.0} for step in range(NUM_STEPS)]
    assert "no_reward" not in {finding.rule for _, finding in found_in(make_config(), ended)}


def test_rewards_that_only_vary_do_not_fall_where_each_prompt_has_one_answer() -> None:
    """Without siblings there is no spread in groups to measure noise by."""
    config, rng = make_config(algorithm=AlgorithmConfig(group_size=1)), random.Random(0)
    for collapses in (False, True):
        found = []
        for _ in range(20):
            means = [0.3 + (0.6 if collapses and 30 < step < 50 else 0.0) for step in range(100)]
            rows = [{"loss": 0.1, "reward": rng.gauss(mean, 0.1), "reward_std": 0.0} for mean in means]
            found.append("reward_falls" in [finding.rule for _, finding in found_in(config, rows)])
        assert sum(found) == 20 if collapses else sum(found) <= 2


def rewards_around(means: Iterable[float], rng: random.Random) -> list[Row]:
    """Return steps with the noise and the spread of ``examples/online_dpo`` around these mean rewards."""
    return [{"loss": 0.1, "reward": rng.gauss(mean, 0.043), "reward_std": 0.36} for mean in means]


@pytest.mark.parametrize("seed", range(10))
def test_rewards_that_rise_slowly_may_fall_for_a_while(seed: int) -> None:
    """In a run from 0.26 to 0.49, seventy steps lost two thirds of the gain of the first 165."""
    means = [0.26 + 0.23 * step / 800 - (0.04 if 175 <= step < 245 else 0.0) for step in range(800)]
    means[155:165] = [0.384] * 10
    assert found_in(make_config(), rewards_around(means, random.Random(seed))) == []


@pytest.mark.parametrize(("best", "then"), [(0.38, 0.05), (0.52, 0.26)], ids=["below the start", "to the start"])
def test_rewards_that_collapse_are_reported_within_ten_steps(best: float, then: float) -> None:
    for seed in range(10):
        means = [0.26 + (best - 0.26) * min(step / 190, 1.0) if step < 200 else then for step in range(240)]
        found = found_in(make_config(), rewards_around(means, random.Random(seed)))
        assert [finding.rule for _, finding in found] == ["reward_falls"]
        assert 200 < found[0][0] <= 210


QUIET_FUNCTIONS: dict[str, Change] = {
    "it rises": lambda step: function_values(0.02 + 0.0005 * step + 0.01 * (step % 2)),
    "it rises from zero": lambda step: function_values(0.0 if step < 40 else 0.05 + 0.01 * (step % 2)),
    "it is small": lambda step: function_values(0.8 + 0.1 * (step % 2), scale=0.1),
    "its values vary": lambda step: {"rewards/accuracy/mean": 0.1, "rewards/accuracy/std": 0.08},
    "it was high": lambda step: function_values(0.5 if step < 15 else 0.05),
    "it punishes": lambda step: function_values(0.03 + 0.01 * (step % 2), scale=-1.0),
    "it found nothing to punish": lambda step: function_values(0.0),
    "its values are around zero": lambda step: {"rewards/accuracy/mean": 0.01 * (step % 3), "rewards/accuracy/std": 1},
    "its weight is negative": lambda step: function_values(0.03 + 0.01 * (step % 2), name="malus"),
    "it is only measured": lambda step: function_values(0.03 + 0.01 * (step % 2), name="measured"),
}


@pytest.mark.parametrize("name", QUIET_FUNCTIONS)
def test_a_reward_function_may_be_low_where(name: str) -> None:
    config = make_config()
    weights = {"malus": -1.0, "measured": 0.0}
    config.scoring.rewards = {own: RewardConfig(path="a:b", weight=weight) for own, weight in weights.items()}
    assert found_in(config, run_with(QUIET_FUNCTIONS[name])) == []


def test_each_low_reward_function_is_named_and_recovers_alone() -> None:
    def values(step: int) -> Row:
        better = 0.5 if step > 60 else 0.05
        return {**function_values(better, "format"), **function_values(0.04), **function_values(0.6, "brevity")}

    found = [finding for _, finding in found_in(make_config(), run_with(values))]
    assert [(finding.rule, finding.subject) for finding in found] == [
        *(("low_reward", "format"), ("low_reward", "accuracy"), ("low_reward", "format"))
    ]
    assert "only 5% of the completions earn the reward format" in found[0].message
    assert "only 4% of the completions earn the reward accuracy" in found[1].message
    assert found[2].message == "low_reward of format has recovered: 0.253 (warns from 0.15)"
    watch = HealthWatch(make_config(), run_with(values))
    assert watch.tripped == [("low_reward", "accuracy")]


def test_preferences_are_not_judged_during_the_warm_up() -> None:
    config = make_config(algorithm=AlgorithmConfig(kind="preference"))
    config.learner.schedule.warmup_steps = 40
    ((step, _),) = found_in(config, run_with(ILLNESSES["wrong_preferences"]))
    assert step == 59


def test_metrics_that_are_missing_trip_nothing() -> None:
    assert found_in(make_config(), [{"loss": 0.0} for _ in range(40)]) == []


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_metric_that_stays_not_finite_is_no_healthy_one(value: float | None) -> None:
    """A log has null for such values; the rules on the metric see the steps before."""
    name = "sampling/effective_ratio"
    ill = {step: {name: 0.1 if step < 50 else value} for step in range(40, NUM_STEPS)}
    rows = [{**well(step), **ill.get(step, {})} for step in range(NUM_STEPS + 20)]
    found = [(step, finding.rule, finding.message) for step, finding in found_in(make_config(), rows)]
    (low, *_), (broken, rule, message), *recoveries = found
    assert (low, broken, rule) == (42, 52, "not_finite"), "the last step of three"
    assert "sampling/effective_ratio was infinite or not a number in 3 of the last 10 steps" in message
    assert [name for _, name, _ in recoveries] == ["effective_samples", "not_finite"]
    assert all(step > NUM_STEPS for step, *_ in recoveries)
    once = [{**well(step), name: math.nan if step % 5 == 0 else 1.0} for step in range(NUM_STEPS)]
    assert found_in(make_config(), once) == []


def test_groups_with_equal_rewards_are_well_where_the_baseline_is_another() -> None:
    for name in ("gae", "remax", "reinforce", "reinforce_plus_plus"):
        config = make_config()
        config.algorithm.advantage.name = name
        assert found_in(config, run_with(ILLNESSES["equal_rewards"])) == []


def test_completions_that_are_cut_by_the_length_of_the_ground_truth_are_well() -> None:
    config = make_config()
    config.algorithm.ebft.reward = True
    assert found_in(config, run_with(ILLNESSES["truncated"])) == []
    config.algorithm.ebft.adaptive_max_tokens = False
    assert [finding.rule for _, finding in found_in(config, run_with(ILLNESSES["truncated"]))] == ["truncated"]


def test_a_penalty_in_the_reward_is_a_kl_too() -> None:
    rows = [{name: value for name, value in row.items() if name != "kl"} for row in run_with(lambda step: {})]
    ill = [{**row, "kl/in_reward": 0.1 * step} for step, row in enumerate(rows)]
    assert [finding.rule for _, finding in found_in(make_config(), ill)] == ["kl"]


def test_gradients_of_losses_of_whole_completions_are_larger() -> None:
    config = make_config()
    config.rollout.sampling.max_tokens = 500
    config.algorithm.loss.aggregate = "sequence_sum"
    assert BY_NAME["gradient_norm"].limit(config) == 5000
    assert BY_NAME["gradient_norm"].limit(load_config(["experiment=quickstart", "algorithm=online_dpo"])) == 100


def test_a_run_does_not_stop_before_it_warns() -> None:
    config = make_config(algorithm=AlgorithmConfig(kind="preference"))
    config.health = {"gradient_norm": HealthLimits(stop=50)}
    assert BY_NAME["gradient_norm"].limit(config) == 50
    config.health = {"gradient_norm": HealthLimits(stop=500)}
    assert BY_NAME["gradient_norm"].limit(config) == 100
    config.health = {"entropy_low": HealthLimits(stop=0.005)}
    assert BY_NAME["entropy_low"].limit(config) == 0.01


def test_a_rule_is_over_once_its_values_are_well_for_some_steps() -> None:
    rows = [*run_with(ILLNESSES["gradient_norm"], ill_from=20), *map(well, range(80, 110))]
    (start, _), (end, over), *others = found_in(make_config(), rows)
    assert not others
    assert start == 20 + 2, "the median of five steps"
    assert end == 80 + 2 + RECOVERY_STEPS - 1
    assert re.fullmatch(r"gradient_norm has recovered: \d\.\d+ \(warns from 10\)", over.message)


def evaluated(values: Iterable[float], name: str, change: Change = lambda step: {}) -> list[Row]:
    """Return the metrics of a run that is evaluated after every tenth step."""
    rows: list[Row] = []
    for number, value in enumerate(values):
        rows += [{**well(step), **change(step)} for step in range(10 * number, 10 * number + 10)]
        rows.append({name: value})
    return rows


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        ("held_out_falls", evaluated([0.3, 0.5, 0.52, 0.4, 0.38], "eval/accuracy")),
        ("held_out_falls", evaluated([1.3, 1.5, 1.52, 1.4, 1.38], "eval/reward")),
        ("overfitting", evaluated([2.0, 1.5, 1.4, 1.6], "eval/loss")),
    ],
)
def test_what_gets_worse_on_held_out_rows_alone_is_reported(rule: str, rows: list[Row]) -> None:
    assert [finding.rule for _, finding in found_in(make_config(), rows)] == [rule]


@pytest.mark.parametrize(
    "rows",
    [
        evaluated([0.3, 0.5, 0.42, 0.5, 0.53], "eval/accuracy"),
        evaluated([2.0, 1.5, 1.4, 1.45, 1.43], "eval/loss"),
        evaluated([0.5, 0.52, 0.3, 0.1], "eval/accuracy", lambda step: {"reward": 0.4 - 0.001 * step}),
    ],
    ids=["noise", "noise of a loss", "everything gets worse"],
)
def test_noise_on_held_out_rows_is_not(rows: list[Row]) -> None:
    assert found_in(make_config(), rows) == []


def in_evaluations(rows: Iterable[Row], **values: float) -> list[Row]:
    added = {f"eval/{name}": value for name, value in values.items()}
    return [{**row, **added} if "eval/accuracy" in row else row for row in rows]


@pytest.mark.parametrize("num_prompts", [40, 100])
def test_chance_on_few_held_out_prompts_is_no_fall(num_prompts: int) -> None:
    """Prompts differ in how often they are answered; the accuracy rises, and then stays."""
    rng = random.Random(num_prompts)
    for _ in range(20):
        easy = [rng.betavariate(0.5, 0.5) for _ in range(num_prompts)]
        lifts = [0.2 * min(number / 10, 1) for number in range(20)]
        means = [fmean(rng.random() < p + lift * (1 - p) for p in easy) for lift in lifts]
        rows = in_evaluations(evaluated(means, "eval/accuracy"), num_prompts=num_prompts)
        assert "held_out_falls" not in {finding.rule for _, finding in found_in(make_config(), rows)}


def test_a_fall_on_few_held_out_prompts_is_found_once_it_is_large() -> None:
    for fall, expected in ((0.1, []), (0.25, ["held_out_falls"])):
        rows = evaluated([0.3, 0.5, 0.52, 0.52 - fall, 0.5 - fall], "eval/accuracy")
        found = found_in(make_config(), in_evaluations(rows, num_prompts=100))
        assert [finding.rule for _, finding in found] == expected


def test_held_out_prompts_that_could_not_be_scored_are_no_fall() -> None:
    rows = evaluated([0.5, 0.55, 0.54, 0.22, 0.22], "eval/accuracy")
    assert found_in(make_config(), rows)
    rows[33:] = in_evaluations(rows[33:], num_failed=600.0)
    assert found_in(make_config(), rows) == []
    assert found_in(make_config(), in_evaluations(rows, num_prompts=1000.0)) == []


def test_a_reward_counts_where_no_answer_is_ever_correct() -> None:
    rewards = [-2.0, -1.7, -1.4, -1.8, -2.1]
    rows = evaluated(rewards, "eval/reward")
    found = found_in(make_config(), [{**row, "eval/accuracy": 0.0} if "eval/reward" in row else row for row in rows])
    assert [finding.rule for _, finding in found] == ["held_out_falls"]


def test_an_accuracy_of_all_that_could_be_scored_is_one_whatever_its_rounding() -> None:
    rows = evaluated([0.3, 9 / 11, 9 / 11, 9 / 11, 9 / 11], "eval/accuracy")
    assert not found_in(make_config(), in_evaluations(rows, num_prompts=11.0, num_failed=2.0))


def test_equal_rewards_of_a_solved_task_or_of_single_rollouts_are_well() -> None:
    rows = [{"eval/accuracy": 0.99}, *run_with(ILLNESSES["equal_rewards"])]
    assert found_in(make_config(), rows) == []
    config = make_config()
    config.algorithm.group_size = 1
    assert found_in(config, rows[1:]) == []


def test_a_rule_that_no_longer_applies_is_over() -> None:
    watch = HealthWatch(make_config(), run_with(ILLNESSES["equal_rewards"]))
    assert watch.tripped == [("equal_rewards", "")]
    watch.update({"eval/accuracy": 0.99})
    assert watch.tripped == [], "no step may follow the evaluation that shows that the task is solved"
    equal = {**well(NUM_STEPS), "frac_reward_zero_std": 1.0}
    found = [finding.message for _ in range(2 * RECOVERY_STEPS) for finding in watch.update(equal)]
    assert found == ["equal_rewards no longer applies"]
    watch.update({"eval/accuracy": 0.5})
    assert [finding.rule for finding in watch.update(equal)] == ["equal_rewards"]


def test_pairs_that_the_policy_samples_itself_are_new_to_it() -> None:
    assert found_in(make_config(), run_with(ILLNESSES["wrong_preferences"])) == []
    kto = AlgorithmConfig(kind="preference", preference=PreferenceConfig(loss="kto"))
    assert found_in(make_config(algorithm=kto), run_with(ILLNESSES["wrong_preferences"])) == []


def test_processes_that_share_cores_may_wait_for_each_other() -> None:
    config = make_config()
    config.rollout.num_gpus = config.learner.num_gpus = 0
    for name in ("staleness", "learner_waits", "engines_wait"):
        assert found_in(config, run_with(ILLNESSES[name])) == []
    config.rollout.resources, config.learner.resources = {"engine_host": 1.0}, {"learner_host": 1.0}
    for name in ("staleness", "learner_waits", "engines_wait"):
        assert found_in(config, run_with(ILLNESSES[name])) != []


def test_gradients_of_supervised_runs_may_be_larger() -> None:
    config = make_config()
    config.algorithm.kind = "sft"
    assert found_in(config, run_with(ILLNESSES["gradient_norm"])) == []
    assert found_in(config, run_with(lambda step: {"grad_norm": 200.0}))


def test_limits_of_the_config_count() -> None:
    ill = run_with(ILLNESSES["gradient_norm"])
    assert found_in(make_config(health={"gradient_norm": HealthLimits(warn=30.0)}), ill) == []
    assert found_in(make_config(health={"gradient_norm": HealthLimits(enabled=False)}), ill) == []
    assert found_in(make_config(health={"entropy_low": HealthLimits(warn=0.5)}), run_with(lambda step: {}))


def test_a_run_is_stopped_once_by_a_limit() -> None:
    config = make_config(health={"gradient_norm": HealthLimits(stop=20.0)})
    ((_, finding),) = found_in(config, run_with(ILLNESSES["gradient_norm"]))
    assert finding.stops
    assert "health.gradient_norm.stop is 20" in finding.message


def test_a_resumed_run_tells_nothing_twice_and_stops_again() -> None:
    ill = run_with(ILLNESSES["gradient_norm"], ill_from=40)
    assert HealthWatch(make_config(), ill).update(ill[-1]) == []
    watch = HealthWatch(make_config(health={"gradient_norm": HealthLimits(stop=20.0)}), ill)
    assert [finding.stops for finding in watch.update(ill[-1])] == [True]


def test_every_metric_that_a_rule_reads_is_found() -> None:
    read = {rule.name: metrics_read_by(rule) for rule in RULES}
    assert read["kl"] == {"kl"}
    assert read["low_reward"] == {"rewards/digits/mean", "rewards/digits/std"}
    counts = {"eval/num_prompts", "eval/num_failed"}
    assert read["held_out_falls"] == {"eval/accuracy", "eval/reward", "reward", "loss", *counts}
    assert read["staleness"] == {"time/wait", "time/step", "staleness/mean"}
    assert all(read.values())
    in_steps = {name for name in set().union(*read.values()) if not name.startswith(("eval/", "rewards/digits/"))}
    assert in_steps <= well(0).keys()


def test_rules_and_options_have_the_same_names() -> None:
    assert tuple(BY_NAME) == HEALTH_RULES
    assert {*ILLNESSES, "held_out_falls", "overfitting"} == BY_NAME.keys()


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"health\.entropie: no such rule; the rules are equal_rewards, .*ebft_cfm"):
        load_config(["experiment=quickstart", "health.entropie.warn=1"])
    config = load_config(["experiment=quickstart", "health.entropy_low.stop=0.005"])
    assert config.health == {"entropy_low": HealthLimits(stop=0.005)}


def test_a_version_that_is_evaluated_again_counts_once() -> None:
    falls = [0.3, 0.5, 0.52, 0.4]
    again = [{"step": step, "eval/accuracy": value} for step, value in [*enumerate(falls), (3, 0.4), (3, 0.4)]]
    well_rows = [well(step) for step in range(60)]
    watch = HealthWatch(make_config(), well_rows)
    for row in again:
        watch.update(row)
    assert watch.tripped == []
    watch.update({"step": 4, "eval/accuracy": 0.38})
    assert watch.tripped == [("held_out_falls", "")]


def _documented() -> dict[str, list[str]]:
    page = (Path(__file__).parents[3] / "docs" / "health.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_page_has_the_limit_of_each_rule(rule: HealthRule) -> None:
    limits = [float(text) for text in re.findall(r"\d+(?:\.\d+)?", _documented()[rule.name][1])]
    config, synchronous = make_config(), make_config()
    synchronous.replay = replace(synchronous.replay, max_staleness=0)
    supervised = make_config()
    supervised.algorithm.kind = "sft"
    assert {rule.limit(case) for case in (config, synchronous, supervised)} <= set(limits)


def test_the_page_has_every_rule_and_no_other() -> None:
    assert _documented().keys() == BY_NAME.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_page_has_a_healthy_range_and_the_first_thing_to_do_of_each_rule(rule: HealthRule) -> None:
    _, _, _, healthy, first = _documented()[rule.name]
    assert re.search(r"\d", healthy)
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", first)
    assert first
    assert all(option in rule.fix for option in named), (named, rule.fix)
