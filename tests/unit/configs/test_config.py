from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from rlpipe.configs import compose
from rlpipe.configs.compose import (
    build_config,
    compose_tree,
    config_folder,
    describe_choice,
    list_groups,
    load_config,
    quoted,
)
from rlpipe.configs.data_sources import mixed_sources
from rlpipe.configs.options import FREE_ON_RESUME, changed_options, options, to_tree, to_yaml
from rlpipe.configs.schema.option import MISSING
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, DataError

BASE = ("model.path=org/policy", "data=reasoning_gym", "data.task=basic_arithmetic")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def error_of(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *overrides], file=file)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def own_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the config groups that a test may add files to."""
    folder = tmp_path / "groups"
    shutil.copytree(config_folder(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "experiment"))
    monkeypatch.setattr(compose, "config_folder", lambda: folder)
    return folder


def test_defaults_are_the_schema_and_the_default_groups() -> None:
    config = load_config(BASE)
    assert isinstance(config, Config)
    assert config.algorithm.group_size == Config().algorithm.group_size
    assert config.algorithm.loss.aggregate == "sequence"
    assert config.output == "outputs/run"


def test_groups_and_values_are_applied_in_order() -> None:
    config = load_config([*BASE, "algorithm.loss.clip_high=0.3", "algorithm=dapo", "learner=fsdp2"])
    assert config.algorithm.loss.clip_high == 0.3
    assert config.algorithm.loss.mask_truncated
    assert (config.learner.strategy, config.learner.num_ranks) == ("fsdp2", 2)


def test_every_choice_of_every_group_composes() -> None:
    choices = {group: names for group, names in list_groups().items() if group != "experiment"}
    for turn in range(max(map(len, choices.values()))):
        compose_tree([f"{group}={names[turn % len(names)]}" for group, names in choices.items()])


def test_every_choice_says_what_it_is_for() -> None:
    silent = [
        (group, name) for group, names in list_groups().items() for name in names if not describe_choice(group, name)
    ]
    assert silent == []


def test_override_grammar_reads_lists_dictionaries_null_and_quotes() -> None:
    config = load_config(
        [
            *BASE,
            "learner.optimizer.betas=[0.8,0.9]",
            "rollout.engine_args={enforce_eager:true}",
            "+rollout.engine_args.swap_space=2",
            "learner.max_grad_norm=null",
            'rollout.sampling.stop=["a, b","\\n"]',
            'rollout.sampling.guided_regex="[0-9]+"',
            "learner.optimizer.lr=1e-5",
        ]
    )
    assert config.learner.optimizer.betas == (0.8, 0.9)
    assert config.rollout.engine_args == {"enforce_eager": True, "swap_space": 2}
    assert config.learner.max_grad_norm is None
    assert config.rollout.sampling.stop[0] == "a, b"
    assert config.rollout.sampling.guided_regex == "[0-9]+"
    assert config.learner.optimizer.lr == 1e-5


@pytest.mark.parametrize("text", ["2024_11_30", "12e4567", "1.10", "007", "true"])
def test_an_option_that_takes_a_text_keeps_what_looks_like_a_number(text: str) -> None:
    config = load_config([*BASE, f"name={text}", f"model.revision= {text} "])
    assert (config.name, config.model.revision) == (text, text)


def test_rewards_are_made_entry_by_entry_and_removed() -> None:
    rewards = [
        "scoring.rewards.right.path=mine:right",
        "scoring.rewards.right.weight=2",
        "scoring.rewards.short.path=m:s",
    ]
    config = load_config([*BASE, *rewards])
    assert config.scoring.rewards["right"] == RewardConfig(path="mine:right", weight=2.0)
    assert list(load_config([*BASE, *rewards, "~scoring.rewards.right"]).scoring.rewards) == ["short"]


def test_config_is_frozen() -> None:
    config = load_config(BASE)
    with pytest.raises(AttributeError, match=r"frozen: LossConfig\.clip_high"):
        config.algorithm.loss.clip_high = 0.5


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "night")
    config = load_config([*BASE, "name=${oc.env:RUN_NAME}", "tracking.project=${name}-project"])
    assert (config.output, config.tracking.project) == ("outputs/night", "night-project")
    assert "'nope' not found" in error_of("name=${nope}")


def test_home_folder_is_expanded() -> None:
    assert load_config([*BASE, "output=~/runs"]).output == str(Path.home() / "runs")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss.clip_hi=1", "algorithm.loss.clip_hi: no such option; did you mean algorithm.loss.clip_high?"),
        ("algorithm.clip_high=1", "did you mean algorithm.loss.clip_high?"),
        ("algorithm.los.clip_low=1", "did you mean algorithm.loss"),
        ("learning_rate=1", "did you mean learner.optimizer.lr?"),
        ("algorithm.num_generations=4", "did you mean algorithm.group_size?"),
        ("scoring.rewards.a.weigth=1", "did you mean scoring.rewards.a.weight?"),
        ("scoring.rewards.a.timeuot_s=1", "did you mean scoring.rewards.a.timeout_s?"),
        ("qqqqqq=1", "qqqqqq: no such option; see rlpipe config --docs"),
        ("algorithm=dapoo", "algorithm=dapoo: no such choice; algorithm is one of cispo, clip_cov, cpo, dapo"),
        ("algorithm=dapoo", "did you mean dapo?"),
        ("algorithm.loss.clip_high=abc", "algorithm.loss.clip_high: 'abc' is not a number"),
        ("algorithm.num_steps=1.5", "algorithm.num_steps: 1.5 is not an integer"),
        ("algorithm.num_steps=null", "algorithm.num_steps: null is not an integer"),
        ("tracking.wandb=perhaps", "tracking.wandb: 'perhaps' is not true or false"),
        ("learner.optimizer.betas=0.9", "learner.optimizer.betas: 0.9 is not a list of numbers"),
        ("rollout.resources={node:big}", "rollout.resources: {'node': 'big'} is not a dictionary of numbers"),
        ("learner.max_grad_norm=big", "learner.max_grad_norm: 'big' is not a number, or null"),
        ("algorithm.loss=3", "algorithm.loss: must be a section with options such as algorithm.loss.name, not 3"),
        (
            "scoring.rewards.a=m:f",
            "scoring.rewards.a: must be a section with options such as scoring.rewards.<name>.path",
        ),
        ("scoring.rewards=m:f", "scoring.rewards: must be a section with options such as scoring.rewards.<name>"),
        ("scoring.rewards.a.weight=2", "scoring.rewards.a.path is required, and is not set: package.module:name"),
        ("model.path=???", "model.path is required, and is not set: A folder or a hub id"),
        ("a=1,2", "an option has one value"),
        ("no equals", "can't read the override 'no equals'"),
        ("quickstart", "quickstart: write key=value, such as experiment=quickstart"),
        ("verbose", "verbose: write key=value"),
        ("rollout.sampling.guided_regex=[0-9]+", "quote special characters"),
        ("algorithm@loss=dapo", "packages can't be changed"),
        ("~scoring.rewards.x", "there is no such entry to remove"),
        ("~model.path", "an option can't be removed; set it instead"),
    ],
)
def test_wrong_overrides_are_named_with_the_fix(override: str, message: str) -> None:
    assert message in error_of(override)


def test_file_selects_groups_and_sets_options(tmp_path: Path) -> None:
    file = write(
        tmp_path / "run.yaml",
        "defaults: [override /algorithm: gspo, learner: fsdp2, experiment: null, _self_]\n"
        "algorithm: {num_steps: 7, loss:}\n"
        "learner: {optimizer: {lr: 1e-5}}\n"
        "scoring: {rewards: {right: {path: 'mine:right'}}}\n"
        "learner.optimizer.weight_decay: 0.2\n"
        "scoring.rewards.right.weight: 3\n",
    )
    config = load_config(BASE, file=file)
    assert (config.learner.optimizer.weight_decay, config.scoring.rewards["right"].weight) == (0.2, 3)
    assert config.algorithm.loss.level == "sequence"
    assert (config.algorithm.num_steps, config.learner.num_ranks, config.learner.optimizer.lr) == (7, 2, 1e-5)
    assert config.scoring.rewards["right"].path == "mine:right"
    over = load_config([*BASE, "algorithm=dapo", "algorithm.num_steps=9"], file=file)
    assert (over.algorithm.loss.clip_high, over.algorithm.num_steps) == (0.28, 9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learner: {optimizer: {lrr: 1}}", "learner.optimizer.lrr: no such option; did you mean learner.optimizer.lr?"),
        ("learner: {optimizer: {lr: fast}}", "learner.optimizer.lr: 'fast' is not a number"),
        ("algorithm: dapo", "write `defaults: [algorithm: dapo]`"),
        ("experiment: quickstart", "write `defaults: [experiment: quickstart]`"),
        ("learner.optimizer.lrr: 1", "learner.optimizer.lrr: no such option; did you mean learner.optimizer.lr?"),
        ("learner.optimizer.lr: fast", "learner.optimizer.lr: 'fast' is not a number"),
        ("defaults: dapo", "defaults must be a list such as"),
        ("defaults: [dapo]", "must be `group: choice`"),
        ("defaults: [algoritm: dapo]", "algoritm"),
        ("defaults: [algorithm: dapoo]", "did you mean dapo?"),
        ("[1, 2]", "contains a list"),
        ("a: b: c", "not a YAML file"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    found = error_of(file=write(tmp_path / "run.yaml", content))
    assert found.startswith(f"{tmp_path}/run.yaml: ")
    assert message in found


def test_missing_file_is_reported_with_its_absolute_path() -> None:
    with pytest.raises(DataError, match=f"{os.getcwd()}/nowhere.yaml does not exist"):
        load_config(file="nowhere.yaml")


def test_experiment_overrides_groups_and_any_option(own_groups: Path) -> None:
    write(
        own_groups / "experiment" / "mine.yaml",
        "# @package _global_\ndefaults: [override /algorithm: dapo, _self_]\nname: mine\nlearner: {num_threads: 3}\n",
    )
    config = load_config([*BASE, "experiment=mine", "learner.num_threads=2"])
    assert (config.name, config.algorithm.loss.clip_high, config.learner.num_threads) == ("mine", 0.28, 2)
    assert load_config([*BASE, "experiment=mine", "algorithm=gspo"]).algorithm.loss.level == "sequence"
    assert load_config([*BASE, "experiment=null"]).name == "run"


def test_wrong_experiments_are_named(own_groups: Path) -> None:
    path = write(own_groups / "experiment" / "mine.yaml", "# @package _global_\nlearner: {nun_threads: 3}\n")
    assert error_of("experiment=mine").startswith(
        f"{path}: learner.nun_threads: no such option; did you mean learner.num"
    )
    write(path, "# @package _global_\ndefaults: [override /algorithm: dapoo]\n")
    compose.group_layers.cache_clear()
    assert "algorithm=dapoo: no such choice" in error_of("experiment=mine")
    assert "experiment=mined: no such choice; experiment is one of mine; did you mean mine?" in error_of(
        "experiment=mined"
    )


def test_composing_leaves_hydra_and_the_process_alone() -> None:
    folder = os.getcwd()
    for _ in range(2):
        compose.group_layers.cache_clear()
        load_config(BASE)
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(config_dir=str(config_folder()), version_base="1.3"):
        compose.group_layers.cache_clear()
        load_config(BASE)
        assert GlobalHydra.instance().is_initialized()
    assert os.getcwd() == folder


def test_yaml_reads_back_as_the_same_config(tmp_path: Path) -> None:
    texts = [r"costs \${name}", r"a\\\${name}", r"\${name", "$", "a\\"]
    config = load_config(
        [*BASE, "scoring.rewards.right.path=mine:right", "algorithm=dapo"],
        options=[{"rollout": {"sampling": {"stop": texts}}}],
    )
    assert list(config.rollout.sampling.stop) == ["costs ${name}", r"a\${name}", "${name", "$", "a\\"]
    file = write(tmp_path / "config.yaml", to_yaml(config))
    again = load_config(file=file)
    assert again == config


def test_incomplete_tree_shows_what_is_missing() -> None:
    tree = compose_tree(["data=parquet"])
    assert "path: ???" in compose.show_tree(tree)
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        build_config(tree)


def test_changes_that_matter_for_training_are_listed() -> None:
    old = load_config([*BASE, "scoring.rewards.right.path=mine:right"])
    same = ["rollout.num_engines=4", "tracking=quiet", "algorithm.num_steps=999", "scoring.rewards.right.timeout_s=1"]
    new = load_config([*BASE, "scoring.rewards.right.path=mine:right", *same, "name=other", "learner.resources={a:1}"])
    assert changed_options(to_tree(old), to_tree(new)) == []
    sharded = ["learner=zero3", "learner.zero3.offload_optimizer=true", "model.gradient_checkpointing=true"]
    elsewhere = load_config([*BASE, "scoring.rewards.right.path=mine:right", *sharded])
    assert changed_options(to_tree(old), to_tree(elsewhere)) == []
    isolated = ["scoring.memory_gb=1", "scoring.rewards.right.isolation=sandbox", "scoring.rewards.right.memory_gb=2"]
    other = load_config([*BASE, "scoring.rewards.right.path=mine:right", *isolated])
    assert changed_options(to_tree(old), to_tree(other)) == []
    served = ["scoring.rewards.right.serve.replicas=2", "algorithm.ebft.features.weights=learner"]
    other = load_config(
        [*BASE, "scoring.rewards.right.path=mine:right", *served, "scoring.on_rollouts_scored=mine:see"]
    )
    assert changed_options(to_tree(old), to_tree(other)) == []
    changed = load_config([*BASE, "algorithm.loss.clip_high=0.3", "learner.schedule.name=linear"])
    found = changed_options(to_tree(old), to_tree(changed))
    assert "algorithm.loss.clip_high: 0.2 -> 0.3" in found
    assert 'scoring.rewards.right.path: "mine:right" -> absent' in found


def test_a_run_may_continue_with_its_policy_on_the_host() -> None:
    old, offload = to_tree(load_config(BASE)), ["learner.offload=chunked", "learner.chunked.num_slots=3"]
    placed = [*BASE, *offload, "learner.chunked.host_memory_gib=9", "learner.chunked.chunk_mib=1"]
    assert changed_options(old, to_tree(load_config(placed))) == []
    del old["learner"]["chunked"]
    assert changed_options(old, to_tree(load_config(placed))) == []
    half = to_tree(load_config([*placed, "learner.chunked.state_dtype=bfloat16"]))
    dtype = 'learner.chunked.state_dtype: "float32" -> "bfloat16"'
    assert sorted(changed_options(old, half)) == [dtype, 'learner.offload: "none" -> "chunked"']
    assert changed_options(to_tree(load_config(placed)), half) == [dtype]
    back = sorted(changed_options(half, to_tree(load_config(BASE))))
    assert back == ['learner.chunked.state_dtype: "bfloat16" -> "float32"', 'learner.offload: "chunked" -> "none"']


def test_options_that_are_younger_than_a_run_had_their_defaults() -> None:
    old = to_tree(load_config(BASE))
    for name in ("sources", "shuffle", "train_on_eos"):
        del old["data"][name]
    assert changed_options(old, to_tree(load_config(BASE))) == []
    changed = to_tree(load_config([*BASE, "data.shuffle=false"]))
    assert changed_options(old, changed) == ["data.shuffle: true -> false"]


@pytest.mark.parametrize(("key", "kind"), [("1", "int"), ("1.5", "float"), ("on", "bool")])
def test_a_key_that_yaml_does_not_read_as_a_text_is_named(tmp_path: Path, key: str, kind: str) -> None:
    def load(name: str) -> Config:
        source = "{source: jsonl, path: a.jsonl}"
        (tmp_path / "run.yaml").write_text(f"defaults: [data: mix]\ndata:\n  sources:\n    {name}: {source}\n")
        return load_config(["algorithm=sft", "model.path=org/policy"], file=tmp_path / "run.yaml", need_files=False)

    with pytest.raises(ConfigError, match=rf"run\.yaml: data\.sources: .* key \S+ as a {kind}; write it in quotes$"):
        load(key)
    assert list(load(f"'{key}'").data.sources) == [key]


def test_sources_of_a_mix_are_added_and_changed_one_by_one() -> None:
    mix = ["model.path=org/policy", "data=mix", "data.sources.math={source: jsonl, path: a.jsonl}"]
    base = [*mix, "data.sources.code={source: jsonl, path: b.jsonl}", "data.sources.code.weight=3"]
    config = load_config(base, need_files=False)
    assert [(source.name, source.weight) for source in mixed_sources(config.data)] == [("code", 3.0), ("math", 1.0)]
    other = load_config([*base, "data.sources.code.weight=4"], need_files=False)
    assert changed_options(to_tree(config), to_tree(other)) == ["data.sources.code.weight: 3 -> 4"]


def test_length_of_a_run_matters_where_the_learning_rate_depends_on_it() -> None:
    linear = [*BASE, "learner.schedule.name=linear"]
    old, new = (to_tree(load_config([*linear, f"algorithm.num_steps={steps}"])) for steps in (50, 60))
    assert changed_options(old, new) == ["algorithm.num_steps: 50 -> 60"]
    constant = to_tree(load_config([*BASE, "algorithm.num_steps=60"]))
    assert changed_options(old, constant) == [
        "algorithm.num_steps: 50 -> 60",
        'learner.schedule.name: "linear" -> "constant"',
    ]


def test_every_option_is_documented() -> None:
    assert all(option.doc.endswith(".") for option in options())


def test_the_listed_defaults_are_those_of_a_config() -> None:
    tree = to_tree(Config())
    for option in options():
        if "<name>" not in option.name and option.default is not MISSING:
            assert reduce(getitem, option.name.split("."), tree) == option.default, option.name


def test_all_problems_of_a_config_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("bogus: 1\nlearner: {optimizer: {lr: abc, eps: q}, learning_rate: 1}\nseed: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, file=file)
    assert str(caught.value) == (
        f"4 problems: (1) {file}: bogus: no such option; see rlpipe config --docs; "
        f"(2) {file}: learner.optimizer.lr: 'abc' is not a number, or null; "
        f"(3) {file}: learner.optimizer.eps: 'q' is not a number; "
        f"(4) {file}: learner.learning_rate: no such option; did you mean learner.optimizer.lr?"
    )
    with pytest.raises(ConfigError, match=r"^2 problems: \(1\) seed: -1 is out .*; \(2\) learner\.optimizer\.lr: 9e"):
        load_config([*BASE, "seed=-1", "learner.optimizer.lr=9e30"])
    with pytest.raises(ConfigError, match=r"^2 problems: \(1\) lr: no such .*; \(2\) ~nothing: there is no"):
        load_config([*BASE, "lr=3", "~nothing"])
    with pytest.raises(ConfigError, match=r"^10 problems: .*\(8\) option7: .*; and 2 more$"):
        load_config([*BASE, *(f"option{number}=1" for number in range(10))])


@pytest.mark.parametrize(
    ("choices", "rate"),
    [
        (["model=full"], 1e-6),
        (["model=lora"], 1e-5),
        (["model=qlora"], 1e-5),
        (["model=full", "algorithm=sft"], 1e-5),
        (["model=lora", "algorithm=sft"], 1e-4),
        (["model=full", "algorithm=reward_model"], 1e-5),
        (["model=lora", "algorithm=process_reward_model"], 1e-4),
        (["model=full", "algorithm=dpo"], 1e-6),
        (["model=lora", "learner.optimizer.lr=1e-6"], 1e-6),
        (["model=full", "learner.optimizer.lr=0"], 0.0),
    ],
)
def test_the_learning_rate_fits_what_is_trained(choices: list[str], rate: float) -> None:
    rewards = [] if "algorithm" in str(choices) else ["scoring.rewards.right.path=m:f"]
    source = ["model.path=org/policy", "data=jsonl", "data.path=rows.jsonl", *rewards]
    config = load_config([*source, *choices], need_files=False)
    assert config.learner.optimizer.lr == config.learner.optimizer.peak_lr == rate
    assert to_tree(config)["learner"]["optimizer"]["lr"] == rate


def test_how_episodes_are_run_may_change_on_resume_and_their_rules_may_not() -> None:
    config = load_config(BASE)
    run = replace(config.environment, timeout_s=5, tool_timeout_s=1, isolation="thread", num_processes=2, port=8000)
    assert changed_options(to_tree(config), to_tree(replace(config, environment=run))) == []
    rules = replace(config.environment, max_turns=3)
    assert changed_options(to_tree(config), to_tree(replace(config, environment=rules))) == [
        "environment.max_turns: 8 -> 3"
    ]


def test_the_docs_list_what_may_change_on_resume() -> None:
    page = (
        (Path(__file__).parents[3] / "docs/config.md")
        .read_text()
        .partition("## What may change when a run is resumed")[2]
    )
    rows = [
        row.rpartition("| ")[2] for row in page.partition("| section | options |")[2].partition("\n\n")[0].splitlines()
    ]
    listed = {name.removesuffix(".*") for row in rows for name in re.findall("`([^`]+)`", row)}
    for name in FREE_ON_RESUME:
        section, _, word = name.rpartition(".")
        assert section == "rollout" or listed & {name, word}, f"docs/config.md does not say that {name} may change"
    of_rollout = {option.name for option in options() if option.name.startswith("rollout.")}
    kept = {name for name in of_rollout if not any(f"{name}.".startswith(f"{free}.") for free in FREE_ON_RESUME)}
    assert {name for name in kept if not name.startswith("rollout.sampling.")} == {"rollout.dtype"}


@pytest.mark.parametrize(
    "text", ["/a/lr=1e-3", '/a "q"/x', "/a\\", "/ü (1),&!#'x", 'a\\"b', "/x${y}z", "/x\\${y}", "/a:b{c}[d]"]
)
def test_a_quoted_path_is_read_back_as_it_is(text: str) -> None:
    assert load_config(["experiment=quickstart", f"output={quoted(text)}"], need_files=False).output == text


def test_null_removes_an_entry_or_all_of_a_dictionary_of_sections(tmp_path: Path) -> None:
    rewards = ("scoring.rewards.a.path=mine.py:f", "scoring.rewards.b.path=mine.py:g")
    file = write(tmp_path / "run.yaml", "scoring: {rewards: {a: {path: 'mine.py:f'}, b: null}}")
    assert [
        *compose_tree(["scoring.rewards.a=null"], options=[{"scoring.rewards": {"a": {"path": "x:y"}}}]).scoring.rewards
    ] == []
    assert [*compose_tree([*rewards, "scoring.rewards.a=null"]).scoring.rewards] == ["b"]
    assert [*compose_tree([*rewards, "scoring.rewards=null"]).scoring.rewards] == []
    assert [*compose_tree([*rewards, "~scoring.rewards"]).scoring.rewards] == []
    assert [*compose_tree([*rewards, "scoring.rewards={}"]).scoring.rewards] == ["a", "b"]
    assert [*compose_tree(file=file).scoring.rewards] == ["a"]


def test_a_section_is_not_null_but_may_be_empty_in_a_file(tmp_path: Path) -> None:
    assert "learner.optimizer: a section can't be null; set its options" in error_of("learner.optimizer=null")
    commented = write(tmp_path / "run.yaml", "health:\n  # stop: [loss]\n")
    assert compose_tree(file=commented) == compose_tree()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: {name: no}", "data.name: takes a text, and False is a boolean; write it in quotes"),
        ("model: {revision: 0123456}", "model.revision: takes a text, and 42798 is a number; write it in quotes"),
        ("rollout: {sampling: {stop: ['a', No]}}", "rollout.sampling.stop: takes a text, and False is a boolean"),
    ],
)
def test_what_yaml_does_not_read_as_a_text_is_refused_where_one_is_due(
    tmp_path: Path, content: str, message: str
) -> None:
    assert message in error_of(*BASE, file=write(tmp_path / "run.yaml", content))
    assert "1000.0 is a number; write it in quotes" in error_of(*BASE, "rollout.sampling.stop=[1e3]")


def test_values_of_numpy_are_taken_as_numbers() -> None:
    given = {"learner.optimizer.lr": np.float64(1e-5), "seed": np.int64(3)}
    nested = {"model.processor_kwargs": {"size": np.array([1, 2]), "scale": np.float32(0.5)}}
    tree = compose_tree(options=[given, nested])
    assert (tree.learner.optimizer.lr, tree.seed) == (1e-5, 3)
    assert tree.model.processor_kwargs == {"size": [1, 2], "scale": 0.5}


@pytest.mark.parametrize("text", [r"Use \${seed}", r"\${ }", r"\${x} and \${oc.env:GREETING}", r"Solve \${}^2$"])
def test_what_config_prints_is_read_back_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GREETING", "hello")
    file = write(tmp_path / "run.yaml", f"data: {{system_prompt: '{text}'}}")
    config = load_config(BASE, file=file)
    printed = write(tmp_path / "printed.yaml", compose.show_tree(compose_tree(BASE, file=file)))
    assert load_config(file=printed) == config


def test_a_text_with_a_plain_reference_and_one_to_the_environment_is_stored_as_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOK", "hello")
    content = "scoring: {rewards: {a: {path: 'judge:f', kwargs: {h: '\\${x} ${oc.env:TOK}'}}}}"
    config = load_config(BASE, file=write(tmp_path / "run.yaml", content), need_files=False)
    assert config.scoring.rewards["a"].kwargs["h"] == "${x} hello"
    stored = write(tmp_path / "stored.yaml", to_yaml(config))
    assert "oc.env:TOK" in stored.read_text()
    assert load_config(file=stored, need_files=False) == config


def test_a_source_of_a_mix_takes_texts_with_references(tmp_path: Path) -> None:
    source = "{source: reasoning_gym, task: basic_arithmetic, system_prompt: 'Use \\${}^2$ ok'}"
    file = write(tmp_path / "run.yaml", f"data: {{source: mix, sources: {{a: {source}}}}}")
    (mixed,) = mixed_sources(load_config(["model.path=org/policy", "scoring.rewards.a.path=m:f"], file=file).data)
    assert mixed.data.system_prompt == "Use ${}^2$ ok"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=Qwen/Qwen3-0.6B", "a path or hub id is model.path=Qwen/Qwen3-0.6B"),
        ("data=rows.jsonl", "a path or hub id is data.path=rows.jsonl"),
        ("model.path=${oc.env:NO_SUCH_VARIABLE}", "set the variable"),
        ("data.config=main", "did you mean data.name?"),
    ],
)
def test_usual_mistakes_are_told_the_option(override: str, message: str) -> None:
    assert message in error_of(override)
