"""Checks and completions of a config before any process of a run starts."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_cases import largest_file

import rlpipe
from rlpipe import quickstart
from rlpipe.algorithms.plugins import record_code
from rlpipe.common import atomic_io, run_files
from rlpipe.common.atomic_io import begin_folder, file_digest, whole_folder
from rlpipe.configs.compose import load_config
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_prompts
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.errors import ConfigError, DataError, InputError, RewardImportError
from rlpipe.learner.checkpoint_files import complete_checkpoint
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.replay.ledger.query import find_ledger, ledger_path
from rlpipe.replay.ledger.restore import open_ledger
from rlpipe.run.pipeline import train
from rlpipe.run.precision import resolve_serving
from rlpipe.run.prepare import (
    ResumePoint,
    check_adapter_targets,
    check_base,
    check_context,
    check_reward_columns,
    ended_summary,
    open_output,
    prepare_run,
    read_resume_point,
    run_start,
    set_others_aside,
)


class Judge(rlpipe.RewardActor):
    def score(self, group: rlpipe.RolloutGroup) -> list[float | None]:
        return [0.0] * len(group)


def right(completions: list[Any], answer: list[str]) -> list[float]:
    return [0.0] * len(completions)


def bare(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    policy = make_tiny_policy(tmp_path / "policy", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "solution": "2"}) + "\n")
    return [f"model.path={policy}", "data=jsonl", f"data.path={rows}", f"output={tmp_path / 'run'}"]


def reward(name: str, **settings: Any) -> str:
    entry = ", ".join([f"path: '{__file__}:{name}'", *(f"{key}: {value}" for key, value in settings.items())])
    return f"+scoring.rewards.{name}={{{entry}}}"


def test_classes_and_rewards_with_gpus_get_processes_of_their_own(options: list[str]) -> None:
    config = load_config([*options, reward("bare"), reward("Judge"), reward("right", num_gpus=0.5)])
    run = prepare_run(config)
    assert {name: entry.num_processes for name, entry in run.rewards.items()} == {"bare": None, "Judge": 1, "right": 1}


def test_number_of_processes_of_the_config_stays(options: list[str]) -> None:
    run = prepare_run(load_config([*options, reward("Judge", num_processes=3)]), [bare])
    assert {name: entry.num_processes for name, entry in run.rewards.items()} == {"Judge": 3, "bare": None}


def test_functions_have_a_memory_limit_and_classes_none(options: list[str]) -> None:
    own = [reward("right", num_processes=2, memory_gb=1), reward("bare", isolation="sandbox", memory_gb=2)]
    run = prepare_run(load_config([*options, *own, reward("Judge")]), [lambda completions: []])
    assert {name: entry.memory_gb for name, entry in run.rewards.items()} == {
        "right": 1, "bare": 2, "Judge": None, "<lambda>": 4
    }  # fmt: skip
    assert prepare_run(load_config([*options, reward("Judge", memory_gb=9)])).rewards["Judge"].memory_gb == 9


def test_classes_cannot_be_sandboxed(options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"scoring.rewards.Judge.isolation: .* state of a RewardActor .* set process"):
        prepare_run(load_config([*options, reward("Judge", isolation="sandbox")]))


@pytest.mark.parametrize("task", ["countdown", "mix"])
def test_graders_that_evaluate_completions_need_a_sandbox(options: list[str], task: str) -> None:
    mix = "+data.sources={a: {source: reasoning_gym, task: puzzle24}, b: {source: reasoning_gym, task: chain_sum}}"
    source = ["data.source=mix", mix] if task == "mix" else ["data=reasoning_gym", f"data.task={task}"]
    data = [*source, "data.path=null"]
    accuracy = "path: 'rlpipe.scoring.toolbox:reasoning_gym'"
    with pytest.raises(ConfigError, match=r"rewards.accuracy.isolation: .* runs code .* set it to sandbox"):
        prepare_run(load_config([*options, *data, f"+scoring.rewards.accuracy={{{accuracy}}}"]))
    sandboxed = f"+scoring.rewards.accuracy={{{accuracy}, isolation: sandbox}}"
    assert "accuracy" in prepare_run(load_config([*options, *data, sandboxed])).rewards


def test_graders_that_evaluate_completions_need_a_sandbox_for_rows_of_files_too(options: list[str]) -> None:
    accuracy = "path: 'rlpipe.scoring.toolbox:reasoning_gym'"
    row = {"prompt": "?", "answer": "2", "entry": {"answer": "2"}, "reasoning_gym_task": "countdown"}
    path = next(option for option in options if option.startswith("data.path=")).removeprefix("data.path=")
    Path(path).write_text(json.dumps(row) + "\n")
    run = prepare_run(load_config([*options, f"+scoring.rewards.accuracy={{{accuracy}}}"]))
    prompts, _ = open_prompts(run.config.data, load_tokenizer(run.model), seed=0)
    with pytest.raises(ConfigError, match=r"rewards.accuracy.isolation: .* runs code .* set it to sandbox"):
        check_reward_columns(run, [prompts.next()])


def test_memory_of_one_reward_in_a_shared_process_is_refused(options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"scoring.rewards.bare.memory_gb: its process is shared .* num_processes"):
        prepare_run(load_config([*options, reward("bare", memory_gb=1)]))


def test_column_that_a_reward_needs_is_missed_before_the_start(options: list[str]) -> None:
    run = prepare_run(load_config([*options, reward("right")]))
    prompts, _ = open_prompts(run.config.data, load_tokenizer(run.model), seed=0)
    with pytest.raises(DataError, match=r"reward 'right' needs the column answer; existing columns: solution"):
        check_reward_columns(run, [prompts.next()])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.max_prompt_tokens=1000", "rollout.sampling.max_tokens=25"], r"max_tokens=25 are together more than"),
        (["data.max_prompt_tokens=8", "rollout.max_model_len=2000"], r"rollout.max_model_len=2000 is more than"),
    ],
)
def test_more_tokens_than_positions_are_refused(options: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message + " the 1024 positions of model.path="):
        check_context(prepare_run(load_config([*options, *overrides, reward("bare")])))


@pytest.mark.parametrize(
    ("described", "overrides", "is_refused"),
    [
        ({"num_local_experts": 4}, [], False),
        ({"num_local_experts": 4}, ["weights.serve=adapter"], True),
        ({"text_config": {"n_routed_experts": 4}}, ["model.adapter.kind=qlora"], True),
        ({"num_local_experts": 4}, ["model.adapter.merge=true"], False),
        ({"num_local_experts": 4}, ["model.adapter.use_dora=true"], False),
        ({"num_local_experts": 4}, ["model.adapter.target_modules=[q_proj]"], False),
        ({"num_local_experts": 4}, ["model=full"], False),
        ({"num_local_experts": 1}, [], False),
        ({}, [], False),
    ],
)
def test_adapted_experts_are_refused_where_engines_serve_the_adapter(
    options: list[str], described: dict[str, object], overrides: list[str], is_refused: bool, tmp_path: Path
) -> None:
    model = tmp_path / "mixture"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(described))
    run = prepare_run(load_config([*options, *overrides, f"model.path={model}", reward("bare")]))
    expected = r"target_modules: all-linear includes the router and the 4 experts .* set model.adapter.merge=true, or"
    with pytest.raises(ConfigError, match=expected) if is_refused else nullcontext():
        check_adapter_targets(run)


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (["model=full"], True),
        (["model=full", "algorithm=sft"], True),
        (["algorithm=reward_model"], True),
        (["model.adapter.merge=true"], True),
        (["model.adapter.merge=true", "algorithm=sft"], True),
        (["algorithm=sft"], False),
        ([], False),
    ],
)
def test_quantized_models_are_refused_where_they_are_trained_as_a_whole(
    options: list[str], overrides: list[str], is_refused: bool
) -> None:
    config = load_config([*options, *overrides, *([] if "algorithm=" in str(overrides) else [reward("bare")])])
    run = prepare_run(config)
    check_base(run)
    file = Path(run.model.path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    expected = "its weights are quantized, and can't be trained"
    with pytest.raises(ConfigError, match=expected) if is_refused else nullcontext():
        check_base(run)


@pytest.mark.parametrize(
    ("overrides", "serve", "line"),
    [
        (
            ["model.adapter.use_dora=true"],
            "merged",
            "(weights.serve=merged): they can't apply use_dora on top of the base",
        ),
        (["replay.max_staleness=1"], "adapter", "(weights.serve=adapter): running sequences keep their version"),
        (["model.adapter.merge=true"], "auto", "engines are sent whole models: model.adapter.merge=true"),
        (["weights.serve=merged"], "merged", None),
        (["model=full"], "auto", None),
    ],
)
def test_what_engines_serve_is_settled_and_said(
    options: list[str], overrides: list[str], serve: str, line: str | None
) -> None:
    run, lines = resolve_serving(prepare_run(load_config([*options, *overrides, reward("bare")])))
    assert run.config.weights.serve == serve
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]


def test_as_many_tokens_as_positions_are_fine(options: list[str]) -> None:
    limits = ["data.max_prompt_tokens=1000", "rollout.sampling.max_tokens=24"]
    check_context(prepare_run(load_config([*options, *limits, reward("bare")])))


def test_nothing_is_written_before_the_run_is_known_to_be_new(options: list[str]) -> None:
    run = prepare_run(load_config([*options, reward("bare")]))
    assert not run.output.exists(), "an evaluation would leave a config that no run had"
    with open_output(run, ResumePoint()):
        assert load_config(file=run.output / "config.yaml") == run.config


def test_a_ledger_in_a_relative_folder_is_found_from_any_folder(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    run = prepare_run(
        load_config([*options, reward("bare"), "name=sums", "ledger.folder=local", "output=outputs/sums"])
    )
    with open_output(run, ResumePoint()):
        ledger = ledger_path(run.output, "sums", "local").absolute()
    ledger.parent.mkdir(parents=True)
    ledger.touch()
    monkeypatch.chdir("/")
    assert find_ledger(tmp_path / "project" / "outputs" / "sums") == ledger
    moved = (tmp_path / "project").rename(tmp_path / "moved")
    assert find_ledger(moved / "outputs" / "sums") == moved / "local" / "sums" / run_files.LEDGER
    monkeypatch.chdir(moved)
    renamed = (moved / "outputs" / "sums").rename(moved / "kept")
    assert find_ledger(renamed) == moved / "local" / "sums" / run_files.LEDGER


def test_two_runs_do_not_write_to_one_folder(options: list[str]) -> None:
    run = prepare_run(load_config([*options, reward("bare")]))
    refusal = pytest.raises(ConfigError, match=r"another run writes to output=.*: wait until it ends")
    with open_output(run, ResumePoint()), refusal, open_output(run, ResumePoint()):
        pass
    with open_output(run, ResumePoint()):
        assert (run.output / "config.yaml").exists()


def test_a_second_run_moves_no_checkpoints_of_the_first(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.run.prepare._read_checkpoint", lambda config, folder: ResumePoint())
    config = load_config([*options, reward("bare")])
    checkpoints = Path(config.output) / "checkpoints"
    (checkpoints / "step_000001").mkdir(parents=True)
    (checkpoints / "step_000001" / "learner.json").write_text("damaged")
    before = sorted(path.name for path in checkpoints.iterdir())
    refusal = pytest.raises(ConfigError, match="another run writes to output=")
    with open_output(prepare_run(config), ResumePoint()), refusal:
        train(config)
    assert sorted(path.name for path in checkpoints.iterdir()) == before
    start = read_resume_point(config)
    assert sorted(path.name for path in checkpoints.iterdir()) == before, "the run may still be refused"
    set_others_aside(Path(config.output), start)
    assert sorted(path.name for path in checkpoints.iterdir()) != before


def write_checkpoint(folder: Path, step: int, config: Config) -> None:
    extra = {"resume": {"num_rows": 1}, "config": to_tree(config)}
    record = {"step": step, "num_bad_steps": 0, "bad_steps_in_row": 0, "extra": extra}
    target = folder / f"step_{step:06d}"
    complete_checkpoint(begin_folder(target), target, record, {})


def test_a_checkpoint_that_another_run_writes_before_it_ends_is_continued_from(options: list[str]) -> None:
    config = load_config([*options, "algorithm=sft"])
    checkpoints = Path(config.output) / "checkpoints"
    write_checkpoint(checkpoints, 1, config)
    start = read_resume_point(config)
    with open_output(prepare_run(config), start) as renewed:
        assert renewed is start
    write_checkpoint(checkpoints, 2, config)  # after it was asked to stop, while this run began
    with open_output(prepare_run(config), start) as renewed:
        pass
    assert (start.step, renewed.step) == (1, 2)
    assert set_others_aside(Path(config.output), renewed).messages == [
        f"resuming from {checkpoints}/step_000002, after step 2"
    ]


@pytest.mark.parametrize(
    ("asked", "stop_loss", "asked_before", "ended"),
    [(4, "null", 4, True), (8, "null", 4, False), (8, "0.5", 8, True), (8, "0.5", 4, False)],
)
def test_a_run_has_ended_if_it_has_done_what_is_asked_now(
    options: list[str], asked: int, stop_loss: str, asked_before: int, ended: bool
) -> None:
    sft = ["algorithm=sft", f"algorithm.num_steps={asked}", f"algorithm.stop_loss={stop_loss}"]
    config = load_config([*options, *sft])
    (Path(config.output) / "policy").mkdir(parents=True)
    (Path(config.output) / "summary.json").write_text('{"steps": 4}')
    found = ended_summary(config, ResumePoint(step=4, num_steps=asked_before))
    assert (found == {"steps": 4}) == ended


def used_folder(config: Config) -> None:
    checkpoint = Path(config.output) / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "learner.json").write_text(json.dumps({"step": 1, "extra": {}, "files": {}}))


def test_never_resume_refuses_a_folder_with_checkpoints(options: list[str]) -> None:
    config = load_config([*options, "resume=never", reward("bare")])
    assert read_resume_point(config).checkpoint is None
    used_folder(config)
    with pytest.raises(ConfigError, match=r"resume=never, but .* holds an earlier run: choose another output"):
        read_resume_point(config)


def test_a_folder_whose_checkpoints_are_all_damaged_is_left_alone(options: list[str]) -> None:
    config = load_config([*options, reward("bare")])
    used_folder(config)
    checkpoint = Path(config.output) / "checkpoints" / "step_000001"
    (checkpoint / "learner.json").write_text('{"step": 1')
    with pytest.raises(
        ConfigError, match=r"is complete \(step_000001: it has no complete learner.json\): put one back"
    ):
        read_resume_point(config)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        read_resume_point(load_config([*options, "resume=never", reward("bare")]))
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step_000001"]


def test_an_output_that_cannot_be_written_is_refused_at_once(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = load_config([*options, f"output={tmp_path}/file/run", reward("bare")])
    with pytest.raises(ConfigError, match=r"output=\S+/file/run can't be written \(\S+/file is not a folder\): fix"):
        read_resume_point(config)


def test_a_disk_without_room_for_the_config_leaves_the_old_one(options: list[str]) -> None:
    run = prepare_run(load_config([*options, reward("bare")]))
    with open_output(run, ResumePoint()):
        before = (run.output / "config.yaml").read_text()
    refusal = pytest.raises(ConfigError, match=r"can't be written \(.*too large.*\): fix that, or")
    with largest_file(100), refusal, open_output(run, ResumePoint()):
        pass
    assert (run.output / "config.yaml").read_text() == before


def test_accuracy_is_that_of_a_reward_of_the_run(options: list[str]) -> None:
    prepare_run(load_config([*options, "data.held_out.correct_by=right", reward("right")]))
    with pytest.raises(ConfigError, match=r"data\.held_out\.correct_by: no reward is called 'rigth'; there are right"):
        prepare_run(load_config([*options, "data.held_out.correct_by=rigth", reward("right")]))


def test_a_reward_cannot_have_the_name_of_one_of_ebft(options: list[str]) -> None:
    taken = reward("right").replace("rewards.right", "rewards.diversity")
    with pytest.raises(ConfigError, match=r"diversity is a name of EBFT's rewards: rename yours"):
        prepare_run(load_config([*options, "algorithm=ebft", taken]))


def test_wrong_reward_is_found_before_the_policy_is_made(options: list[str]) -> None:
    made = Path(options[0].partition("=")[2]).with_name("made")
    overrides = [f"model.path={made}", "model.prepare=rlpipe.quickstart:make_policy"]
    config = load_config([*options, *overrides, "+scoring.rewards.wrong={path: 'rlpipe.quickstart:no_such'}"])
    with pytest.raises(RewardImportError):
        prepare_run(config)
    assert not made.exists()
    prepare_run(load_config([*options, *overrides, reward("bare")]))
    assert (made / "config.json").exists()


def test_runs_that_begin_at_one_time_make_their_policy_once(
    options: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(atomic_io, "WAIT_S", 0.02)
    made = Path(options[0].partition("=")[2]).with_name("made")
    begun, goes_on, num_made = threading.Event(), threading.Event(), []

    def make(config: Config) -> None:
        num_made.append(1)
        with whole_folder(made) as folder:
            begun.set()
            goes_on.wait(5)
            (folder / "weights").write_text("whole")

    monkeypatch.setattr(quickstart, "make_policy", make)
    prepare = "model.prepare=rlpipe.quickstart:make_policy"
    config = load_config([*options, f"model.path={made}", prepare, reward("bare")])
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(prepare_run, config)
        assert begun.wait(5)
        second = threads.submit(prepare_run, config)
        wait([second], timeout=0.1)
        assert not second.done()
        goes_on.set()
        first.result(5)
        second.result(5)
    assert (len(num_made), (made / "weights").read_text()) == (1, "whole")
    assert f"another process is creating {made}; waiting for it" in caplog.messages


def test_the_code_of_own_functions_is_in_the_runs_files(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(inputs):\n    return -inputs.logprobs\n")
    config = load_config([*options, f"algorithm.loss.path={file}:loss", reward("bare")])
    config = replace(config, algorithm=record_code(config.algorithm))
    digest = file_digest(file)
    with open_output(prepare_run(config), ResumePoint()):
        assert f"digest: {digest}" in (tmp_path / "run" / "config.yaml").read_text()
    again = load_config(file=tmp_path / "run" / "config.yaml")
    assert record_code(again.algorithm) == config.algorithm
    path = tmp_path / "ledger.sqlite"
    ledger, _ = open_ledger(path, run_start(config, ResumePoint()), keep_steps=1)
    assert ledger.get("config")["algorithm"]["loss"]["digest"] == digest
    ledger.close()
    file.write_text("def loss(inputs):\n    return -2 * inputs.logprobs\n")
    changed = replace(config, algorithm=replace(config.algorithm, loss=replace(config.algorithm.loss, digest="0" * 64)))
    with pytest.raises(InputError, match=rf"algorithm\.loss\.digest: \"{digest}\" -> \"0"):
        open_ledger(path, run_start(changed, ResumePoint()), keep_steps=1)
