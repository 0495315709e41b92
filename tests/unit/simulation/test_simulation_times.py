"""The times of a simulation, from written distributions and from a run's ledger."""

import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from numpy.random import SeedSequence

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import DataError, InputError
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.simulation.setup import (
    Distribution,
    Draws,
    GivenTimes,
    groups_at_once,
    parse_distribution,
    read_setup,
    read_times,
    work_seconds,
)
from rlpipe.simulation.simulated_actors import Clock, EngineLevels, Level, SimulatedEngine, SimulatedGroup
from rlpipe.simulation.simulator import PROMPT

START = 1.8e9
GENERATE, SCORE, TRAIN, SYNC = [2.0, 3.5, 1.25], [0.5, 0.25, 0.125], [4.0, 5.0], [0.75, 1.5]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of three trained groups, one that has failed, and one in flight."""
    Ledger(tmp_path / "ledger.sqlite").close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        insert = "INSERT INTO groups (group_id, state, engine, generate_s, score_s, generated_at) VALUES (?,?,?,?,?,?)"
        for group_id, (generate_s, score_s) in enumerate(zip(GENERATE, SCORE, strict=True)):
            row = (group_id, "TRAINED", f"rollout-{group_id % 2}", generate_s, score_s, START + generate_s)
            ledger.execute(insert, row)
        ledger.execute(insert, (3, "DISCARDED", None, None, None, None))
        ledger.execute(insert, (4, "ADMITTED", None, None, None, None))
        for step, (train_s, sync_s) in enumerate(zip(TRAIN, SYNC, strict=True)):
            metrics = json.dumps({"time/train": train_s, "loss": 0.5})
            with (tmp_path / "metrics.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "time/train": train_s, "time/sync": sync_s}) + "\n")
            ledger.execute("INSERT INTO steps VALUES (?, ?, ?, 1, 0)", (step, metrics, START + step))
        ledger.execute("INSERT INTO steps VALUES (2, '{\"loss\": 0.5}', ?, 1, 0)", (START + 9,))
    ledger.close()
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"time/sync": "soon"}\n{"time/sync": NaN}\n[1]\n{"time/sy')  # the last line is being written
    return tmp_path


def times_of(config: Config, **given: object) -> dict[str, list[float]]:
    """Return the distinct seconds in each part's distribution."""
    times = read_times(config, GivenTimes(**given), slowdown=1.0)  # type: ignore[arg-type]
    parts = {"generate": times.generate, "train": times.train, "sync": times.sync, **times.score}
    return {name: values(distribution) for name, distribution in parts.items()}


def values(distribution: Distribution) -> list[float]:
    draws = Draws(distribution, SeedSequence(0))
    return sorted({round(draws[number], 5) for number in range(200)})


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("constant:1.5", 1.5, 0.0),
        ("uniform:1,3", 2.0, 2 / 12**0.5),
        ("exponential:0.5", 0.5, 0.5),
        ("lognormal:2.0,0.5", 2.0, 2.0 * (np.exp(0.25) - 1) ** 0.5),
    ],
)
def test_a_distribution_has_its_mean_and_deviation(text: str, mean: float, deviation: float) -> None:
    distribution = parse_distribution(text, "--generate").scaled(2).scaled(0.5)
    draws = Draws(distribution, SeedSequence(0))
    drawn = np.array([draws[number] for number in range(100_000)])
    assert distribution.mean == pytest.approx(mean)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() == pytest.approx(deviation, rel=0.05, abs=1e-9)


def test_an_empirical_distribution_draws_the_numbers_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "seconds.txt"
    file.write_text("1.5\n2\n\n0.25\n")
    distribution = parse_distribution(f"empirical:{file}", "--train")
    assert values(distribution) == [0.25, 1.5, 2.0]
    assert distribution.mean == pytest.approx(1.25)


def test_draws_do_not_depend_on_their_order() -> None:
    distribution = parse_distribution("exponential:1", "--score")
    forward, backward = (Draws(distribution, SeedSequence(3)) for _ in range(2))
    numbers = range(0, 5000, 7)
    assert [forward[number] for number in numbers] == [backward[number] for number in reversed(numbers)][::-1]


@pytest.mark.parametrize(
    "text",
    ["", "2", "constant", "constant:", "constant:-1", "constant:1,2", "constant:nan", "uniform:2,1", "normal:1,1",
     "lognormal:0,1", "lognormal:2", "exponential:inf", "empirical:"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--generate: .* is not a distribution of seconds; write constant:S, uniform"):
        parse_distribution(text, "--generate")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "can't be read"), ("", "has no numbers"), ("1\nx\n", "'x' is not a number")]
)
def test_a_file_without_seconds_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "seconds.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        parse_distribution(f"empirical:{file}", "--generate")


def test_measured_times_are_those_of_the_ledger(run: Path) -> None:
    assert times_of(Config(), run=run) == {
        "generate": sorted(GENERATE),
        "scorer": sorted(SCORE),
        "train": sorted(TRAIN),
        "sync": sorted(SYNC),
    }


def test_given_times_replace_measured_ones(run: Path) -> None:
    times = times_of(Config(), run=run, train="constant:9", score=["constant:8"])
    assert (times["train"], times["scorer"], times["generate"]) == ([9.0], [8.0], sorted(GENERATE))


def test_measured_times_are_carried_over_to_another_config(run: Path) -> None:
    """Check training times, by the rollouts of a rank, and scoring times, which the ledger sums over the pools."""
    (run / "config.yaml").write_text(
        "model: {path: org/policy}\ndata: {source: jsonl, path: nowhere.jsonl}\n"
        "learner: {strategy: fsdp2, num_ranks: 2}\n"
        "algorithm: {groups_per_step: 16, group_size: 4}\nreplay: {max_staleness: 1}\n"
        "scoring: {rewards: {a: {path: 'm:a'}, b: {path: 'm:b', num_processes: 2}}}\n"
    )
    config = Config()
    config.algorithm.groups_per_step, config.algorithm.group_size, config.learner.num_ranks = 32, 8, 4
    config.scoring.rewards = {"a": RewardConfig(path="m:a"), "c": RewardConfig(path="m:c", num_processes=3)}
    times = times_of(config, run=run)
    assert times["train"] == [2 * seconds for seconds in TRAIN]
    assert times["scorer"] == times["reward-c"] == sorted(seconds / 2 for seconds in SCORE)


def test_a_run_is_read_while_it_writes(run: Path) -> None:
    with sqlite3.connect(run / "ledger.sqlite") as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE groups SET score_s = 100")
        assert times_of(Config(), run=run)["scorer"] == sorted(SCORE)
    writer.close()


def test_a_ledger_may_lie_elsewhere(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "ledgers" / "mine"
    elsewhere.mkdir(parents=True)
    shutil.move(run / "ledger.sqlite", elsewhere)
    (run / "config.yaml").write_text(
        "name: mine\nmodel: {path: org/policy}\ndata: {source: jsonl, path: nowhere.jsonl}\n"
        f"ledger: {{folder: {elsewhere.parent}}}\nscoring: {{rewards: {{a: {{path: 'm:a'}}}}}}\n"
    )
    assert times_of(Config(), run=run)["scorer"] == sorted(SCORE)


def test_a_folder_without_a_readable_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--from needs the folder of a run: .* has no ledger.sqlite"):
        times_of(Config(), run=tmp_path)
    (tmp_path / "ledger.sqlite").write_text("nothing of the kind" * 100)
    with pytest.raises(DataError, match=r"ledger.sqlite is damaged \(file is not a database\): use the copy"):
        times_of(Config(), run=tmp_path)


def test_what_a_run_has_not_measured_must_be_given(run: Path) -> None:
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        ledger.execute("DELETE FROM steps")
    ledger.close()
    with pytest.raises(DataError, match=r"--train: nothing is measured in .* yet; set --train"):
        times_of(Config(), run=run)
    assert times_of(Config(), run=run, train="constant:1", sync="constant:2")["sync"] == [2.0]


def test_sync_times_that_hold_a_wait_are_refused(run: Path) -> None:
    config = Config()
    config.model.adapter.kind, config.replay.max_staleness = "none", 1
    with pytest.raises(DataError, match="set --sync to the seconds of the transfer and the load alone"):
        times_of(config, run=run)
    assert times_of(config, run=run, sync="constant:2")["sync"] == [2.0]
    config.replay.max_staleness = 0
    assert times_of(config, run=run)["sync"] == sorted(SYNC)


def test_generation_and_training_must_be_given_without_a_run() -> None:
    with pytest.raises(InputError, match="--generate is required"):
        times_of(Config(), train="constant:1")
    with pytest.raises(InputError, match="--train is required"):
        times_of(Config(), generate="constant:1")
    with pytest.raises(InputError, match="so no time passes"):
        times_of(Config(), generate="constant:0", train="constant:0")
    assert times_of(Config(), generate="constant:1", train="constant:2") == {
        "generate": [1.0], "train": [2.0], "sync": [0.0], "scorer": [0.0]
    }  # fmt: skip


def test_pools_may_have_times_of_their_own(tmp_path: Path) -> None:
    config = Config()
    config.scoring.rewards = {"a": RewardConfig(path="m:a"), "judge": RewardConfig(path="m:b", num_processes=3)}
    given = {"generate": "constant:1", "train": "constant:1"}
    times = times_of(config, **given, score=["constant:0.5", "reward-judge=constant:4"])
    assert (times["scorer"], times["reward-judge"]) == ([0.5], [4.0])
    file = tmp_path / "a=b.txt"
    file.write_text("3")
    assert times_of(config, **given, score=[f"empirical:{file}"])["scorer"] == [3.0]
    with pytest.raises(InputError, match="there is no scoring pool judge; the pools are scorer, reward-judge"):
        times_of(config, **given, score=["judge=constant:4"])


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_what_groups_would_have_taken_alone_is_found_again(slowdown: float) -> None:
    """Check the times estimated from an engine's log, in which groups wait for and slow down each other."""
    clock = Clock()
    done: list[SimulatedGroup] = []
    levels = EngineLevels(running=Level(clock), busy=Level(clock))
    engine = SimulatedEngine(clock, levels, groups_at_once=3, slowdown=slowdown, finished=done.extend)
    generator = np.random.default_rng(0)
    for index, at_s in enumerate(np.cumsum(generator.exponential(0.5, 200))):
        work_s = float(generator.exponential(1.0))
        group = SimulatedGroup(group_id=index, prompt=PROMPT, rollouts=[], work_s=work_s, admitted_at=float(at_s))
        clock.call_at(float(at_s), engine.submit, [group])
    clock.run(float("inf"))
    done.sort(key=lambda group: group.group_id)
    assert any(group.started_at > group.admitted_at for group in done)
    spans = np.array([[group.admitted_at, group.generated_at] for group in done])
    found = work_seconds(spans, groups_at_once=3, slowdown=slowdown)
    assert found == pytest.approx([group.work_s for group in done], abs=1e-6)


def test_the_setup_is_that_of_the_config() -> None:
    config = Config()
    config.rollout.num_engines, config.rollout.engine_args = 3, {"max_num_seqs": 20}
    config.model.adapter.kind, config.replay.max_staleness = "none", 2
    config.scoring.num_processes = 5
    times = read_times(config, GivenTimes(generate="constant:1", train="constant:1"), slowdown=1.0)
    setup = read_setup(config, times, groups_per_engine=None, slowdown=1.0)
    assert (setup.num_engines, setup.groups_per_engine, setup.pools) == (3, 3, {"scorer": 5})
    assert (setup.max_staleness, setup.holds) == (2, True)
    assert read_setup(config, times, groups_per_engine=7, slowdown=1.0).groups_per_engine == 7
    config.algorithm.kind = "sft"
    with pytest.raises(InputError, match="nothing to simulate"):
        read_setup(config, times, groups_per_engine=None, slowdown=1.0)


def test_slots_follow_from_the_sequences_of_the_engine() -> None:
    rollout = Config().rollout
    assert groups_at_once(rollout, 8) == 256 // 8
    rollout.num_gpus = 1
    assert groups_at_once(rollout, 8) == 128 // 8
    rollout.engine, rollout.engine_args = "hf", {"max_batch_size": 20}
    assert groups_at_once(rollout, 8) == 2
    assert groups_at_once(rollout, 64) == 1
    rollout.engine_args = {}
    assert groups_at_once(rollout, 8) == 256 // 8
