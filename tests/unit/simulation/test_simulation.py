"""Simulated runs against closed forms: durations, waits, and the staleness of groups."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import InputError
from rlpipe.simulation.setup import Setup, Times, parse_distribution
from rlpipe.simulation.simulator import TRAIN, WAITS, simulate
from rlpipe.simulation.study import Figures, advise, measure, study

SETUP = {
    "num_engines": 4,
    "groups_per_engine": 2,
    "slowdown": 1.0,
    "holds": False,
    "pools": {"scorer": 8},
    "num_ranks": 1,
    "groups_per_step": 8,
    "group_size": 4,
    "max_tokens": 10,
    "max_staleness": 0,
    "num_steps": 60,
}


def make_setup(
    generate: str, score: str = "constant:0", train: str = "constant:0", sync: str = "constant:0", **changes: object
) -> Setup:
    values: dict = SETUP | changes
    times = Times(
        generate=parse_distribution(generate, "--generate"),
        score=dict.fromkeys(values["pools"], parse_distribution(score, "--score")),
        train=parse_distribution(train, "--train"),
        sync=parse_distribution(sync, "--sync"),
    )
    return Setup(**values, times=times)


def figures_of(setup: Setup, seed: int = 0) -> Figures:
    return measure(simulate(setup, seed=seed, limit_s=math.inf))


def best_change(setup: Setup) -> str:
    return advise(simulate(setup, seed=0, limit_s=math.inf), seed=0)[0].change


@pytest.mark.parametrize(
    ("generate", "score", "train", "sync"), [(2.0, 0.5, 1.0, 0.25), (0.0, 0.1, 3.0, 0.0), (5.0, 0.0, 0.0, 1.0)]
)
def test_a_synchronous_step_takes_all_its_parts_one_after_the_other(
    generate: float, score: float, train: float, sync: float
) -> None:
    setup = make_setup(*(f"constant:{seconds}" for seconds in (generate, score, train, sync)))
    history = simulate(setup, seed=0, limit_s=math.inf)
    step = generate + score + train + sync
    assert [mark.at_s for mark in history.marks] == pytest.approx([step * n for n in range(setup.num_steps + 1)])
    learner = measure(history).learner
    assert learner == pytest.approx(
        {TRAIN: train / step, "weights": sync / step, "slot": 0.0, "generate": generate / step, "score": score / step}
    )


def test_groups_beyond_the_slots_of_the_engines_wait() -> None:
    figures = figures_of(make_setup("constant:1", num_engines=1, groups_per_engine=2, train="constant:2"))
    assert 1 / figures.steps_per_second == pytest.approx(4 * 1 + 2)
    assert figures.learner["slot"] == pytest.approx(3 / 6)
    assert figures.engines_busy == figures.slots_in_use == pytest.approx(4 / 6)


def test_calls_beyond_the_processes_of_a_pool_wait() -> None:
    figures = figures_of(make_setup("constant:1", "constant:0.5", groups_per_engine=8, pools={"a": 1, "b": 8}))
    assert 1 / figures.steps_per_second == pytest.approx(1 + 8 * 0.5)
    assert figures.scorers_busy == pytest.approx({"a": 4 / 5, "b": 4 / 5 / 8})


@pytest.mark.parametrize(
    ("generate", "score", "train", "sync", "step"),
    [
        (2.0, 0.1, 0.5, 0.01, 2.0),  # the engines take 2 s for the 8 groups of a step
        (0.5, 0.1, 2.0, 0.01, 2.0),  # the learner
        (0.5, 2.5, 0.5, 0.01, 2.5),  # the scorers
        (0.1, 0.1, 0.5, 3.0, 3.0),  # the engines take one version after the other
    ],
)
def test_an_asynchronous_step_takes_its_slowest_part(
    generate: float, score: float, train: float, sync: float, step: float
) -> None:
    parts = (f"constant:{seconds}" for seconds in (generate, score, train, sync))
    figures = figures_of(make_setup(*parts, max_staleness=3, num_steps=400, groups_per_engine=2))
    assert 1 / figures.steps_per_second == pytest.approx(step, rel=0.02)


def test_shares_follow_from_the_throughput() -> None:
    setup = make_setup("exponential:2", "exponential:0.5", "exponential:1", "constant:0.2", max_staleness=2)
    setup = replace(setup, num_steps=3000)
    figures = figures_of(setup)
    rate = figures.groups_per_second
    assert sum(figures.learner.values()) == pytest.approx(1)
    assert figures.learner[TRAIN] == pytest.approx(figures.steps_per_second * 1, rel=0.05)
    assert figures.slots_in_use == pytest.approx(rate * 2 / (4 * 2), rel=0.05)
    assert figures.scorers_busy["scorer"] == pytest.approx(rate * 0.5 / 8, rel=0.05)
    assert figures.rollouts_per_second == rate * setup.group_size


SECONDS = st.sampled_from(["constant:0", "constant:1", "uniform:0,2", "exponential:1", "lognormal:1,1.5"])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    SECONDS,
    SECONDS,
    SECONDS,
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 5),
)
def test_staleness_never_passes_its_bound(
    seed: int,
    generate: str,
    train: str,
    sync: str,
    max_staleness: int,
    groups_per_step: int,
    engines: int,
    holds: bool,
    publish_every: int,
) -> None:
    setup = make_setup(
        generate,
        "exponential:0.1",
        train,
        sync,
        max_staleness=max_staleness,
        groups_per_step=groups_per_step,
        num_engines=engines,
        slowdown=2.0,
        holds=holds,
        num_steps=12,
        publish_every=min(publish_every, max_staleness + 1),
    )
    history = simulate(setup, seed=seed, limit_s=math.inf)
    assert history.num_steps == 12, "the run got stuck"
    assert 0 <= history.max_staleness <= max_staleness
    last = history.marks[-1]
    assert sum(last.learner[part] for part in (TRAIN, *WAITS)) == pytest.approx(last.at_s)


def test_an_engine_is_slower_the_fuller_it_is() -> None:
    alone = make_setup("constant:1", num_engines=1, groups_per_step=1, groups_per_engine=4, slowdown=4.0)
    assert 1 / figures_of(alone).steps_per_second == pytest.approx(1)
    assert 1 / figures_of(replace(alone, groups_per_step=3)).steps_per_second == pytest.approx(3)
    assert 1 / figures_of(replace(alone, groups_per_step=4)).steps_per_second == pytest.approx(4)
    assert 1 / figures_of(replace(alone, groups_per_step=5)).steps_per_second == pytest.approx(4 + 1)


def test_an_engine_that_holds_starts_nothing_until_its_groups_have_ended() -> None:
    # A step takes one of the engine's two groups; its slot stays free until the slower group has ended too.
    free = make_setup("uniform:1,3", sync="constant:0.1", num_engines=1, groups_per_step=1, max_staleness=1)
    holding = replace(free, holds=True)
    assert figures_of(holding).slots_in_use < 0.8 * figures_of(free).slots_in_use
    synchronous = replace(free, max_staleness=0)
    assert figures_of(synchronous) == figures_of(replace(synchronous, holds=True))


def test_a_simulation_ends_after_the_time_that_was_given() -> None:
    setup = make_setup("constant:1", train="constant:1")
    history = simulate(setup, seed=0, limit_s=9.0)
    assert (history.num_steps, history.ended_s) == (4, 9.0)
    whole = simulate(setup, seed=0, limit_s=1000.0)
    assert (whole.num_steps, whole.ended_s) == (60, 120.0)


def test_the_same_seed_gives_the_same_study() -> None:
    setup = make_setup("lognormal:2,0.5", "exponential:0.1", "uniform:1,2", max_staleness=1)
    first, again, other = (study(setup, seed=seed, minutes=10) for seed in (1, 1, 2))
    assert first.to_json() == again.to_json()
    assert first.to_text() == again.to_text()
    assert first.figures != other.figures


@pytest.mark.parametrize(
    ("setup", "change"),
    [
        (make_setup("constant:4", "constant:0.1", "constant:1", max_staleness=3), "one more engine"),
        (
            make_setup(
                "constant:1", "constant:1", "constant:1", pools={"scorer": 9, "reward-judge": 2}, max_staleness=3
            ),
            "one more process of reward-judge",
        ),
        (make_setup("constant:1", "constant:0.1", "constant:3", max_staleness=3), "one more learner rank"),
        (make_setup("constant:2", "constant:0", "constant:2", max_staleness=0), "one more version of staleness"),
        (make_setup("constant:0.1", "constant:0", "constant:1", "constant:9", groups_per_step=2), "half the sync time"),
    ],
)
def test_the_advice_names_the_bottleneck(setup: Setup, change: str) -> None:
    assert best_change(setup) == change


def test_a_gain_is_that_of_the_formula() -> None:
    setup = make_setup("constant:1", "constant:0", "constant:3", max_staleness=2, num_ranks=2, num_steps=200)
    best = advise(simulate(setup, seed=0, limit_s=math.inf), seed=0, add=2)[0]
    assert best.change == "2 more learner ranks"
    assert best.gain == pytest.approx(1.0, abs=0.03)  # 1.5 s per step instead of 3


def test_a_study_is_printed_and_is_json() -> None:
    done = study(make_setup("constant:4", "constant:0.1", "constant:1", max_staleness=3), seed=0, minutes=100)
    text = done.to_text()
    assert "the bound 3 was never exceeded" in text
    assert "the largest gain is from one more engine" in text
    found = json.loads(done.to_json())
    assert found["steps_per_second"] == done.figures.steps_per_second
    assert found["setup"]["num_engines"] == 4
    assert found["advice"][0]["change"] == "one more engine"


def test_too_little_time_for_a_step_is_an_error() -> None:
    with pytest.raises(InputError, match="no step ends within 1 minutes"):
        study(make_setup("constant:100"), seed=0, minutes=1)
