"""Examples in the form of those of axolotl, TRL, verl and OpenRLHF become configs, without losing a setting."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from covering import one_in

from rlpipe.cli import main
from rlpipe.commands.importing import METHODS
from rlpipe.configs.compose import load_config
from rlpipe.configs.foreign.foreign_file import read_foreign
from rlpipe.configs.foreign.foreign_run import ForeignRun, Setting
from rlpipe.configs.foreign.foreign_values import ForeignValues
from rlpipe.configs.foreign.setting_names import COLUMNS, table_of
from rlpipe.configs.foreign.setting_rules import Rule, UsedBy
from rlpipe.configs.foreign.system_defaults import DEFAULTS, NO_LIMIT
from rlpipe.configs.options import all_names
from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.translation import translate, translate_setting, write

FOLDER = Path(__file__).with_name("foreign") / "examples"
RUNS = {f"{path.parent.name}/{path.name}": path for path in sorted(FOLDER.glob("*/*.*"))}
CALLS = ("Config", "Trainer", "load_dataset", "from_pretrained")
EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "axolotl/sft_lora.yml": {
        "algorithm.kind": "sft",
        "algorithm.groups_per_step": 15,
        "algorithm.num_steps": 60,
        "model.path": "models/tiny",
        "model.adapter.kind": "lora",  # a base in 8 bit is none in NF4
        "model.adapter.r": 24,
        "model.adapter.alpha": 12,
        "model.adapter.dropout": 0.1,
        "model.adapter.target_modules": "all-linear",
        "model.dtype": "auto",
        "model.attention": "flash_attention_2",
        "model.gradient_checkpointing": True,
        "model.reentrant_checkpointing": False,
        "data.source": "jsonl",
        "data.path": "rows/talks.jsonl",
        "data.messages_column": "talk",
        "data.held_out.size": 0,
        "learner.optimizer.name": "adamw_8bit",
        "learner.optimizer.lr": 3e-4,
        "learner.optimizer.weight_decay": 0.02,
        "learner.schedule.name": "cosine",
        "learner.schedule.warmup_steps": 3,
        "output": "./out/sft-lora",
    },
    "axolotl/dpo_lora.yml": {
        "algorithm.kind": "preference",
        "algorithm.preference.loss": "hinge",
        "algorithm.preference.beta": 0.2,
        "algorithm.groups_per_step": 8,
        "data.source": "mix",
        "data.sources": {
            "set_1": {
                "source": "jsonl",
                "path": "rows/pairs_a.jsonl",
                "messages_column": "talk",
                "chosen_column": "good",
                "rejected_column": "bad",
            },
            "set_2": {
                "source": "parquet",
                "path": "rows/pairs_b.parquet",
                "messages_column": "talk",
                "chosen_column": "good",
                "rejected_column": "bad",
            },
        },
    },
    "axolotl/grpo_vllm.yaml": {
        # Six batches of four rows are four groups of six, trained in one update, twice: 100 updates are 50 steps.
        "algorithm.groups_per_step": 4,
        "algorithm.group_size": 6,
        "algorithm.num_minibatches": 1,
        "algorithm.num_epochs_per_step": 2,
        "algorithm.num_steps": 50,
        "algorithm.loss.name": "clip",
        "algorithm.loss.aggregate": "constant",
        "algorithm.loss.beta": 0.002,
        "algorithm.loss.clip_low": 0.15,
        "algorithm.loss.clip_high": 0.3,
        "algorithm.loss.mask_truncated": True,
        "algorithm.advantage.scale": "none",
        "algorithm.reference.sync_steps": 0,  # the base of an adapter does not change
        "checkpoint.every_steps": 10,
        "learner.schedule.warmup_steps": 6,
        "learner.schedule.name": "constant",
        "rollout.sampling.max_tokens": 96,
        "rollout.tensor_parallel_size": 2,
        "rollout.engine_args": {"gpu_memory_utilization": 0.8},
        "scoring.rewards.accurate.path": "my_rewards:accurate",
        "scoring.rewards.tidy.weight": 0.25,
        "data.path": "openai/gsm8k",
        "data.name": "main",
    },
    "axolotl/ebft_strided.yaml": {
        "algorithm.kind": "ebft_strided",
        "algorithm.group_size": 3,
        "algorithm.groups_per_step": 2,
        "algorithm.ebft.strided.generate_tokens": 5,
        "algorithm.ebft.features.whitening": "none",
        "algorithm.ebft.ce_coef": 0.1,
    },
    "axolotl/simpo.yml": {
        "algorithm.preference.loss": "simpo",
        "algorithm.preference.beta": 2.5,
        "algorithm.preference.margin": 1.4,
        "algorithm.preference.cross_entropy_coef": 0.0,
        "learner.optimizer.name": "adamw",
        "learner.schedule.name": "constant",
    },
    "trl/sft_command.sh": {
        "algorithm.groups_per_step": 16,  # 4 rows, twice, on two processes
        "data.name": "small",
        "data.held_out.split": "test",
        "data.held_out.every_steps": 25,
        "data.loss_mask": "roles",
        "model.adapter.kind": "none",
        "model.attention": "sdpa",
        "learner.schedule.name": "cosine",
        "learner.schedule.min_ratio": 0.2,
        "tracking.wandb": True,
    },
    "trl/sft_code.py": {
        "model.path": "models/tiny",
        "model.adapter.kind": "qlora",
        "model.adapter.r": 4,
        "model.adapter.target_modules": ("q_proj", "v_proj"),
        "model.dtype": "bfloat16",
        "learner.optimizer.lr": 5e-4,
        "learner.schedule.name": "constant",
        "learner.schedule.warmup_steps": 0,  # transformers ignores warm-up with this schedule
        "data.source": "jsonl",
        "data.path": "rows/pairs.jsonl",
    },
    "trl/grpo_code.py": {
        # Eight batches of six rows are 16 groups of three, in two updates of four batches, twice: 80 updates, 20 steps.
        "algorithm.groups_per_step": 16,
        "algorithm.group_size": 3,
        "algorithm.num_minibatches": 2,
        "algorithm.num_epochs_per_step": 2,
        "algorithm.num_steps": 20,
        "checkpoint.every_steps": 4,
        "algorithm.loss.name": "cispo",
        "algorithm.loss.aggregate": "token",
        "algorithm.loss.clip_high": 4.0,  # TRL's bound is on the weight, ours on its distance from 1
        "algorithm.advantage.scale": "batch",
        "algorithm.correction.mode": "token_mask",
        "algorithm.correction.cap": 4.0,
        "algorithm.correction.floor": 0.0,
        "rollout.sampling.temperature": 0.8,
        "rollout.sampling.min_p": 0.02,
        "data.source": "parquet",
        "data.path": "rows/prompts.parquet",
        "data.chat_template_kwargs": {"enable_thinking": False},
        "learner.optimizer.lr": 1e-6,  # float("2e-6") is not run, and the default is that of training in full
        "learner.schedule.name": "linear",
    },
    "trl/gspo.py": {
        "algorithm.groups_per_step": 16,  # two rows, eight times, on four processes, in groups of four
        "algorithm.num_minibatches": 4,
        "algorithm.loss.level": "sequence",
        "algorithm.loss.aggregate": "sequence",
        "algorithm.loss.clip_low": 3e-4,
        "algorithm.loss.clip_high": 4e-4,
        "model.adapter.r": 16,
        "model.adapter.alpha": 32.0,
        "model.adapter.target_modules": ("q_proj", "v_proj"),
        "model.dtype": "bfloat16",
        "data.path": "me/sums",
        "data.split": "train[:5%]",
    },
    "trl/rloo_code.py": {
        "algorithm.reward_kl.coef": 0.05,
        "algorithm.advantage.name": "rloo",
        "algorithm.loss.level": "sequence_product",
        "algorithm.loss.beta": 0.0,  # TRL's is in the rewards
        "algorithm.group_size": 2,
        "algorithm.groups_per_step": 32,
        "algorithm.correction.mode": "sequence_mask",
        "algorithm.correction.cap": 3.0,
        "model.adapter.r": 8,
    },
    "trl/online_dpo.py": {
        "algorithm.loss.name": "dpo",
        "algorithm.groups_per_step": 16,
        "algorithm.group_size": 2,
        "rollout.sampling.temperature": 0.9,
        "rollout.sampling.max_tokens": 53,
    },
    "trl/cpo_simpo.sh": {
        "algorithm.preference.loss": "simpo",
        "algorithm.preference.beta": 0.1,
        "algorithm.preference.margin": 0.8,
        "algorithm.preference.cross_entropy_coef": 0.5,
        "learner.optimizer.lr": 8e-6,
    },
    "trl/two_trainers.py": {
        "algorithm.kind": "rl",
        "algorithm.loss.beta": 0.2,
        "learner.optimizer.lr": 1e-5,
        "data.path": "me/rows",
        "model.path": "models/tiny",
        "output": "b",
    },
    "trl/adaptive_entropy.py": {
        "algorithm.advantage.scale": "batch",
        "algorithm.group_size": 8,
        "algorithm.groups_per_step": 1,
        "algorithm.loss.entropy_target": 0.2,
        "algorithm.loss.entropy_step": 0.002,
        "algorithm.loss.entropy_coef_max": 0.05,
    },
    "verl/grpo_lora.sh": {
        "algorithm.groups_per_step": 64,
        "algorithm.group_size": 5,
        "algorithm.num_minibatches": 4,
        "algorithm.loss.beta": 0.002,
        "algorithm.loss.aggregate": "token",
        "algorithm.loss.clip_delta": 3.0,
        "algorithm.loss.entropy_coef": 0.01,
        "algorithm.correction.mode": "none",
        "model.adapter.kind": "lora",
        "model.adapter.r": 8,
        "rollout.tensor_parallel_size": 2,
        "rollout.num_gpus": 2.0,
        "data.path": "home/rows/train.parquet",
        "data.held_out.path": "home/rows/test.parquet",
        "data.held_out.every_steps": 5,
        "data.prompt_column": "messages",
        "data.shuffle": False,
        "learner.optimizer.lr": 3e-6,
        "learner.optimizer.weight_decay": 0.01,
        "tracking.wandb": True,
        "tracking.project": "tiny_grpo",
        "name": "lora",
    },
    "verl/grpo_arrays.sh": {
        "algorithm.combine": "normalize_then_sum",
        "algorithm.advantage.scale": "batch",
        "learner.max_tokens_per_microbatch": 4096,
        "data.held_out.path": "home/rows/test.parquet",
        "output": "out/arrays",
    },
    "verl/sft_peft.sh": {"data.prompt_column": "prompt", "model.adapter.r": 32, "algorithm.groups_per_step": 256},
    "axolotl/gdpo.yaml": {
        "algorithm.combine": "normalize_then_sum",
        "algorithm.advantage.scale": "batch",
        "algorithm.groups_per_step": 4,
        "scoring.rewards.right.weight": 2.0,
        "scoring.rewards.format.path": "short:format",
    },
    "verl/grpo_strings.sh": {
        "data.max_prompt_tokens": 256,
        "learner.max_tokens_per_microbatch": 5120,
        "name": "strings-megatron",
        "output": "home/results",
        "algorithm.loss.beta": 0.0,
    },
    "verl/dppo_case.sh": {
        "algorithm.loss.name": "dppo_kl",
        "algorithm.loss.clip_low": 0.05,
        "algorithm.loss.aggregate": "constant",
        "algorithm.advantage.scale": "none",
    },
    "verl/cispo.sh": {"algorithm.loss.cispo_floor": 0.25, "algorithm.loss.clip_high": 0.3, "rollout.engine": "vllm"},
    "verl/rloo.sh": {
        "algorithm.reward_kl.coef": 0.001,
        "algorithm.reward_kl.target": 0.2,
        "algorithm.advantage.name": "rloo",
        "algorithm.loss.level": "token",  # verl's other losses are those of PPO
        "algorithm.loss.aggregate": "token",
        "algorithm.loss.beta": 0.0,
        "resume": "never",
        "checkpoint.every_steps": 0,
    },
    "verl/dapo.sh": {
        "algorithm.correction.mode": "sequence_truncate",
        "algorithm.correction.cap": 2.5,
        "algorithm.correction.rejection": "geometric",
        "algorithm.correction.rejection_floor": 1 / 1.01,  # verl's bounds are of 1 / w
        "algorithm.correction.rejection_cap": 1 / 0.99,
        "algorithm.num_minibatches": 16,
        "algorithm.loss.clip_high": 0.28,
        "algorithm.loss.clip_delta": 10.0,
        "replay.refill_attempts": 9,
        "learner.max_tokens_per_microbatch": 22528,
        "output": "home/verl/ckpts/DAPO/DAPO-tiny",
        "checkpoint.keep": 3,
    },
    "verl/sft_engine.sh": {
        "algorithm.groups_per_step": 32,
        "algorithm.num_steps": 200,
        "learner.schedule.warmup_steps": 40,
        "learner.schedule.min_ratio": 0.1,
        "learner.optimizer.betas": (0.9, 0.98),
        "learner.max_grad_norm": 2.0,
        "data.messages_column": "talk",
    },
    "openrlhf/grpo.sh": {
        "algorithm.groups_per_step": 32,
        "algorithm.group_size": 8,
        "algorithm.num_minibatches": 4,  # 256 completions in updates of 64
        "algorithm.num_epochs_per_step": 2,
        "algorithm.advantage.name": "grpo",
        "algorithm.loss.beta": 0.001,
        "algorithm.loss.kl": "k2",
        "algorithm.loss.aggregate": "token",
        "data.chat": True,
        "data.prompt_column": "question",
        "learner.optimizer.betas": (0.9, 0.95),
        "learner.schedule.name": "cosine",
        "learner.schedule.min_ratio": 0.1,
        "rollout.num_engines": 2,
    },
    "openrlhf/dapo.sh": {
        "algorithm.advantage.name": "reinforce_baseline",
        "algorithm.correction.mode": "token_mask",
        "algorithm.correction.floor": 0.5,
        "algorithm.correction.cap": 5.0,
        "data.held_out.path": "rows/held_out.jsonl",
        "learner.max_tokens_per_microbatch": 3000,
    },
    "openrlhf/dpo_dotted.sh": {
        "algorithm.groups_per_step": 48,
        "algorithm.preference.beta": 0.1,
        "data.chosen_column": "good",
        "model.attention": "flash_attention_2",
        "learner.optimizer.lr": 5e-7,
    },
    "openrlhf/rm.sh": {
        "algorithm.kind": "reward_model",
        "data.sources": {
            "set_1": {"source": "jsonl", "path": "rows/pairs.jsonl", "weight": 0.7},
            "set_2": {"source": "datasets", "path": "me/pairs", "weight": 0.1},
            "set_3": {"source": "parquet", "path": "rows/more.parquet", "weight": 0.2},
        },
    },
    "openrlhf/ppo_dotted.sh": {
        "algorithm.advantage.name": "gae",
        "algorithm.advantage.lam": 0.95,
        "algorithm.critic.value_clip": 0.25,
        "algorithm.reward_kl.coef": 0.01,
        "algorithm.reward_kl.target": 0.4,
        "algorithm.reward_kl.horizon": 5000,
        "data.max_prompt_tokens": 48,
        "rollout.max_model_len": 96,
        "rollout.sampling.max_tokens": 48,
        "algorithm.loss.beta": 0.0,
    },
    "openrlhf/sft_lora.sh": {
        "model.adapter.kind": "qlora",
        "model.adapter.target_modules": ("q_proj", "k_proj"),
        "data.messages_column": "talk",
        "learner.optimizer.betas": (0.9, 0.99),
        "learner.optimizer.weight_decay": 0.05,
        "learner.max_grad_norm": 0.8,
        "name": "lora",
    },
    "openrlhf/slurm.sh": {"algorithm.advantage.name": "rloo", "data.chat": False, "data.prompt_column": "input"},
}
COMMENTS = {
    "axolotl/sft_full.yml": {"micro_batch_size: 2": "a packed sequence", "num_epochs: 2": "counted in steps"},
    "axolotl/dpo_fsdp.yaml": {"dataset_prepared_path: ./cache": "given again"},
    "axolotl/sft_lora.yml": {"load_in_8bit: True": "no base in 8 bit", "val_set_size: 0.1": "a share of the rows"},
    "trl/sft_docstring.py": {
        "per_device_train_batch_size: 2": "packed",
        "sft: --model_name_or_path": "another command",
    },
    "trl/online_dpo.py": {"AutoModelForSequenceClassification": "another model", "warmup_ratio: 0.1": "warmup_steps"},
    "trl/sft_code.py": {"load_dataset('me/chats', split='test')": "another data set"},
    "trl/two_trainers.py": {
        "SFTConfig(": "another run",
        "load_dataset('me/warm'": "another data",
        "beta: 0.1": "again",
    },
    "verl/rloo.sh": {"algorithm.gamma: 0.99": "only algorithm.advantage.name=gae"},
    "verl/sft_peft.sh": {"trainer.default_local_dir: $2": "set output yourself", "data.prompt_key": "an entry of a"},
    "axolotl/gdpo.yaml": {"trl.scale_rewards: True": "by that of the batch"},
    "verl/grpo_arrays.sh": {"unused_setting=7": "does not use", "reward.custom_reward_function.path: $(cd": "rewards"},
    "verl/cispo.sh": {"trainer.device: npu": "no equivalent is known"},
    "openrlhf/ipo.sh": {"ipo: True": "sums log-probs"},
    "openrlhf/slurm.sh": {"init_kl_coef: 0.01": "after the baseline"},
    "openrlhf/iterative_dpo.sh": {"python -m openrlhf.cli.batch_inference": "does not train"},
}
"""Settings that must be comments, with words of the reasons."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": "home", "PWD": "here", "OUTPUT_DIR": "out"}.items():
        monkeypatch.setenv(name, value)


@cache
def imported(name: str) -> str:
    run = read_foreign(RUNS[name])
    return write(translate(run), f"{run.system}'s {name}")


def loaded(text: str, folder: Path) -> Config:
    """Return the config of an imported file, with what it asks for filled in."""
    path = folder / "imported.yaml"
    path.write_text(text.replace("path: ???", "path: models/given"))
    return load_config(file=path, need_files=False)


def value_of(config: Config, option: str) -> Any:
    found: Any = config
    for part in option.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return (
        {key: dict(value) if isinstance(value, Mapping) else value for key, value in found.items()}
        if isinstance(found, Mapping)
        else found
    )


def names_in(path: Path) -> Iterator[str]:
    """Yield the names of the settings in a file, found in the simplest way that there is for each form."""
    text = path.read_text()
    if path.suffix in (".yml", ".yaml"):
        yield from leaves(yaml.safe_load(text))
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if path.parent.name == "verl" and path.suffix == ".sh":
        yield from re.findall(r"(?<![\w./$])([a-z_]\w*(?:\.\w+)+)=", "\n".join(lines))
    elif path.suffix == ".sh":
        yield from re.findall(r"(?:^|[\s\"])--([a-z][\w.]*)", "\n".join(lines))
    elif path.suffix == ".py":
        module = ast.parse(text)
        yield from re.findall(r"(?:^|\s)--([a-z]\w*)", ast.get_docstring(module) or "")
        for call in ast.walk(module):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(CALLS):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
                if "Tokenizer" not in ast.unparse(call.func):
                    yield from (
                        name for name, value in given.items() if not re.fullmatch(r"\w*args[.\w]*|model", value)
                    )


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        yield from leaves(dict(enumerate(tree)), prefix)
    else:
        yield prefix


def test_there_are_examples_of_all_systems_and_forms() -> None:
    forms = [(name.partition("/")[0], path.suffix.replace("yml", "yaml")) for name, path in RUNS.items()]
    assert {form: forms.count(form) for form in forms if forms.count(form) > 1} == {
        ("axolotl", ".yaml"): 16,
        ("openrlhf", ".sh"): 16,
        ("trl", ".py"): 11,
        ("trl", ".sh"): 4,
        ("trl", ".yaml"): 2,
        ("verl", ".sh"): 12,
    }


READ_BELOW = [pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]


@pytest.mark.parametrize("name", [*one_in(2, [name for name in RUNS if name not in EXPECTED]), *READ_BELOW])
def test_each_example_becomes_a_config_that_validates(name: str, tmp_path: Path) -> None:
    config = loaded(imported(name), tmp_path)
    assert config.model.path in ("models/tiny", "models/given")


@pytest.mark.parametrize("name", RUNS)
def test_no_setting_is_lost(name: str) -> None:
    text = imported(name)
    names = set(names_in(RUNS[name]))
    assert len(names) > 3
    commented = "\n".join(line.partition("#")[2] for line in text.splitlines())
    assert not [own for own in names if not re.search(rf"(?<![\w.]){re.escape(own)}\b", commented)]


@pytest.mark.parametrize("name", one_in(4, RUNS))
def test_each_comment_has_a_reason_and_the_import_is_stable(name: str) -> None:
    text = imported(name)
    assert imported.__wrapped__(name) == text
    below = text.partition("# Without an equivalent:\n")[2].splitlines()
    assert len(below) % 2 == 0
    for setting, reason in zip(below[::2], below[1::2], strict=True):
        assert re.match(r"# \S", setting), setting
        assert re.match(r"#     \w", reason), reason


@pytest.mark.parametrize("name", EXPECTED)
def test_the_options_are_those_that_mean_the_same(name: str, tmp_path: Path) -> None:
    config = loaded(imported(name), tmp_path)
    found = {option: value_of(config, option) for option in EXPECTED[name]}
    plain = {option: tuple(value) if isinstance(value, list) else value for option, value in found.items()}
    assert plain == EXPECTED[name]


@pytest.mark.parametrize("name", COMMENTS)
def test_what_has_no_equivalent_is_a_comment_with_the_reason(name: str) -> None:
    lines = imported(name).splitlines()
    for setting, reason in COMMENTS[name].items():
        after = [lines[index + 1] for index, line in enumerate(lines) if line.startswith(f"# {setting}")]
        assert after, setting
        assert any(reason in line for line in after), setting


PREFERENCES = """
base_model: models/tiny
rl: {rl}
datasets:
  - path: rows.jsonl
    type: {type}
"""


@pytest.mark.parametrize("kind", ["chatml.ultra", "chatml.icr", "llama3.argilla_chat", "zephyr.nectar", "chatml.mine"])
def test_rows_of_preferences_that_are_detected_need_no_transform(tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.yaml").write_text(PREFERENCES.format(rl="dpo", type=kind))
    text = write(translate(read_foreign(tmp_path / "run.yaml")), "axolotl's run.yaml")
    needs_transform = f"# datasets.0.type: {kind}\n#     its rows have another form: see data.transform" in text
    assert needs_transform == (kind in ("zephyr.nectar", "chatml.mine"))


def test_columns_of_a_type_of_the_users_own_are_options_of_the_data(tmp_path: Path) -> None:
    columns = "{field_prompt: ask, field_completion: said, field_label: good, prompt_format: '{prompt}'}"
    (tmp_path / "run.yaml").write_text(PREFERENCES.format(rl="kto", type=columns))
    text = write(translate(read_foreign(tmp_path / "run.yaml")), "axolotl's run.yaml")
    data = yaml.safe_load(text)["data"]
    assert data | {"prompt_column": "ask", "completion_column": "said", "label_column": "good"} == data
    assert "# datasets.0.type.prompt_format: " in text


@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ({"": "sequence", "_threshold": 3.0, "_threshold_lower": 0.5}, ("sequence", 0.5, 3.0)),
        ({"": "geometric", "_threshold": 1.25}, ("geometric", 0.8, 1.25)),
        ({"": "seq_sum_k1", "_threshold": "0.25_2.0"}, ("sequence", 0.5, 4.0)),
        ({"": "sequence", "_threshold": 0.5}, "between which 1 is"),
        ({"": "sequence"}, "between which 1 is"),
        ({"": "token_k3", "_threshold": 0.5}, "is one of none, sequence, geometric"),
    ],
)
def test_sequences_that_verl_rejects(settings: dict[str, Any], made: tuple[str, float, float] | str) -> None:
    name, option = "algorithm.rollout_correction.rollout_rs", "algorithm.correction.rejection"
    run = ForeignRun(
        system="verl", method="rl", settings=[Setting(name=name + key, value=value) for key, value in settings.items()]
    )
    found = translate_setting(ForeignValues(run), run.settings[0])
    if isinstance(made, str):
        assert isinstance(found, str)
        assert made in found
    else:
        assert found == dict(zip((option, f"{option}_floor", f"{option}_cap"), made, strict=True))


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.0, 0.5, 2.5, -0.1, 10**30, float("nan"), float("inf"), "", "x", "a.b", "1e-3"),
    *("${x}", "a,b", [], [1], ["a", "b"], [None], {}, {"a": 1}, [[1]]),
]


ROWS = "dataset_name: rows.jsonl\nmodel_name_or_path: tiny\n"
ON_VERL = "actor_rollout_ref.model.path: tiny\nactor_rollout_ref.rollout.n: 4\n"
ON_VERL_SFT = "model.partial_pretrain: tiny\ntrainer.total_epochs: 1\ntrainer.total_training_steps: 100\n"
ON_AXOLOTL = "base_model: tiny\nmax_steps: 200\ndatasets: [{path: rows.jsonl, type: chat_template}]\n"
ON_OPENRLHF = "pretrain: tiny\nprompt_data: rows.jsonl\nadvantage_estimator: group_norm\nuse_kl_loss: true\n"


NO_WARMUP = {"learner.schedule.name": "constant", "learner.schedule.warmup_steps": None}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"{ON_VERL}algorithm.rollout_correction.rollout_is: null\n", {"algorithm.correction.mode": "none"}),
        (f"{ON_AXOLOTL}lr_scheduler:\n", {"learner.schedule.name": "cosine", "learner.schedule.warmup_steps": 6}),
        (f"{ON_AXOLOTL}warmup_steps: 4\n", {"learner.schedule.warmup_steps": 4}),
        (ON_AXOLOTL.replace("200", "10_000"), {"learner.schedule.warmup_steps": 100}),
        (
            f"{ON_VERL_SFT}optim.lr_warmup_steps: 7\noptim.warmup_style: constant\n",
            {"learner.schedule.name": "constant", "learner.schedule.warmup_steps": 7},
        ),
        (
            f"{ROWS}num_generations: 4\nuse_adaptive_entropy: true\nentropy_coef_min: 0.01\n",
            {"algorithm.loss.entropy_coef_min": 0.01},
        ),
        (f"{ON_AXOLOTL}gradient_checkpointing: offload\n", {"model.gradient_checkpointing": True}),
        (ON_OPENRLHF, {"algorithm.loss.kl": "k1"}),
        (f"{ON_OPENRLHF}use_kl_estimator_k3: true\n", {"algorithm.loss.kl": "k3"}),
        (
            ON_VERL_SFT,
            {
                "learner.schedule.name": "cosine",
                "learner.schedule.warmup_steps": 10,
                "learner.optimizer.lr": 1e-5,
                "model.adapter.alpha": None,
            },
        ),
        (ON_VERL_SFT.replace("partial_pretrain", "path"), {"learner.optimizer.lr": 1e-3}),
        (f"{ON_VERL}model.lora_rank: 8\n", {"model.adapter.r": 8, "model.adapter.alpha": 16}),
        (f"{ON_OPENRLHF}lora_rank: 8\n", {"model.adapter.r": 8, "model.adapter.alpha": 16}),
        (
            "pretrain: tiny\ndesirable_loss_weight: 2.0\n",
            {"algorithm.preference.beta": 0.01, "learner.optimizer.lr": 1e-5},
        ),
        (f"{ON_VERL}actor_rollout_ref.actor.policy_loss.loss_mode: vanilla\n", {"algorithm.loss.clip_delta": 3.0}),
        (f"{ON_VERL}actor_rollout_ref.actor.policy_loss.loss_mode: gspo\n", {"algorithm.loss.clip_delta": None}),
        (
            f"{ON_VERL_SFT}optim.lr_warmup_steps_ratio: 0.1\noptim.lr_warmup_steps: 20\n",
            {"learner.schedule.warmup_steps": 20},
        ),
        (f"{ROWS}packing: true\nmax_steps: 9\nwarmup_steps: 5\nlr_scheduler_type: constant\n", NO_WARMUP),
        (f"{ON_AXOLOTL}lr_scheduler: constant\n", NO_WARMUP),
        (f"{ON_AXOLOTL}lr_scheduler: constant\nwarmup_ratio: 0.1\n", NO_WARMUP),
        (
            f"{ON_AXOLOTL}rl: grpo\ntrl: {{use_vllm: true}}\n",
            {"algorithm.correction.mode": "sequence_mask", "algorithm.correction.cap": 3.0},
        ),
        (f"{ON_AXOLOTL}".replace("chat_template", "alpaca"), {"data.chat": False}),
        (
            "base_model: tiny\ndatasets: [{path: a.jsonl, type: alpaca}, {path: b.jsonl, type: chat_template}]\n",
            {
                "data.sources": {
                    "set_1": {"source": "jsonl", "path": "a.jsonl", "chat": False},
                    "set_2": {"source": "jsonl", "path": "b.jsonl"},
                },
                "data.chat": None,
            },
        ),
        (f"{ROWS}num_generations: 4\n", {"rollout.sampling.max_tokens": 512}),
        (
            f"{ON_VERL}actor_rollout_ref.actor.clip_ratio: 0.1\n",
            {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.2},
        ),
        (
            f"{ON_VERL}actor_rollout_ref.actor: {{clip_ratio: 0.1, clip_ratio_low: null, clip_ratio_high: null}}\n",
            {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.1},
        ),
        (
            f"{ON_VERL}actor_rollout_ref.actor: {{clip_ratio_high: 0.3, policy_loss: {{loss_mode: cispo}}}}\n",
            {"algorithm.loss.cispo_floor": 0.8, "algorithm.loss.clip_high": 0.3},
        ),
        (
            f"{ROWS}packing: true\nreport_to: [wandb, mlflow, trackio]\n",
            {"tracking.wandb": True, "tracking.mlflow": True, "tracking.trackio": True},
        ),
        (
            f"{ON_VERL}trainer.logger: [console, wandb, mlflow]\n",
            {"tracking.wandb": True, "tracking.mlflow": True, "tracking.trackio": None},
        ),
        (
            f"{ON_AXOLOTL}wandb_project: talks\nwandb_mode: disabled\n",
            {"tracking.wandb": None, "tracking.project": "talks", "tracking.wandb_mode": None},
        ),
        (
            f"{ON_AXOLOTL}wandb_project: talks\nwandb_mode: offline\n",
            {"tracking.wandb": True, "tracking.wandb_mode": "offline"},
        ),
        (
            f"{ON_AXOLOTL}use_mlflow: true\nmlflow_experiment_name: talks\n",
            {"tracking.mlflow": True, "tracking.project": "talks"},
        ),
        (f"{ON_AXOLOTL}max_grad_norm: 0\n", {"learner.max_grad_norm": None}),
        (f"{ON_AXOLOTL}max_grad_norm: 0.5\n", {"learner.max_grad_norm": 0.5}),
        (
            f"{ON_AXOLOTL}rl: dpo\ndpo_loss_type: [robust]\ndpo_label_smoothing: 0.1\n",
            {"algorithm.preference.loss": "robust", "algorithm.preference.label_smoothing": 0.1},
        ),
        (f"{ON_AXOLOTL}rl: dpo\ndpo_label_smoothing: 0.1\n", {"algorithm.preference.label_smoothing": None}),
        (
            f"{ON_AXOLOTL}test_datasets: [{{path: kept.jsonl, type: chat_template}}]\n",
            {"data.held_out.path": "kept.jsonl"},
        ),
        (
            f"{ON_AXOLOTL}test_datasets: [{{path: rows.jsonl, split: test}}]\n",
            {"data.held_out.split": None, "data.held_out.path": "rows.jsonl"},
        ),
        (
            f"{ON_AXOLOTL.replace('rows.jsonl', 'org/rows')}test_datasets: [{{path: org/rows, split: test}}]\n",
            {"data.held_out.split": "test", "data.held_out.path": None},
        ),
        (
            f"{ROWS}num_generations: 4\nreward_funcs: [one.score, two.score]\n",
            {"scoring.rewards.score.path": "one:score", "scoring.rewards.two_score.path": "two:score"},
        ),
        (f"{ROWS}packing: false\nnum_processes: 4\n", {"algorithm.groups_per_step": 32}),
        (f"{ROWS}packing: false\naccelerate_config: zero3\n", {"algorithm.groups_per_step": 64}),
        (f"{ROWS}packing: false\naccelerate_config: single_gpu\n", {"algorithm.groups_per_step": 8}),
        (
            f"{ROWS}packing: true\nlearning_rate: 1.0e-5\nlr_scheduler_type: cosine_with_min_lr\n"
            "lr_scheduler_kwargs: {min_lr: 1.0e-6}\n",
            {"learner.schedule.name": "cosine", "learner.schedule.min_ratio": pytest.approx(0.1)},
        ),
        (ON_OPENRLHF.replace("rows.jsonl", "json@rows/all"), {"data.path": "rows/all"}),
    ],
)
def test_what_a_file_leaves_out_is_its_systems_default(text: str, options: Mapping[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    made = translate(read_foreign(tmp_path / "run.yaml")).options
    assert {name: made.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("settings", "cap"),
    [
        ("vllm_importance_sampling_clip_max: null\nvllm_importance_sampling_clip_min: 0.5\n", None),
        ("vllm_importance_sampling_clip_max: 5.0\nvllm_importance_sampling_clip_min: 0.5\n", 5.0),
        ("vllm_importance_sampling_clip_min: 0.5\n", 3.0),
        (
            "vllm_importance_sampling_clip_max: null\nvllm_importance_sampling_cap: 4.0\n"
            "vllm_importance_sampling_clip_min: 0.5\n",
            4.0,  # TRL overwrites clip_max with the older name
        ),
    ],
)
def test_null_is_no_upper_bound_in_trl(settings: str, cap: float | None, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{ROWS}num_generations: 4\nuse_vllm: true\n{settings}")
    translation = translate(read_foreign(tmp_path / "run.yaml"))
    assert not [setting for setting, _ in translation.notes if "importance_sampling" in setting]
    correction = loaded(write(translation, "TRL's run.yaml"), tmp_path).algorithm.correction
    assert (correction.mode, correction.floor, correction.cap) == ("sequence_mask", 0.5, cap)


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [("", False), ("beta: 0.04\n", True), ("beta: 0.04\nuse_bias_correction_kl: false\n", False)],
)
def test_a_gradient_of_the_kl_that_only_trl_has_is_reported(settings: str, is_told: bool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{ROWS}num_generations: 4\n{settings}")
    translation = translate(read_foreign(tmp_path / "run.yaml"))
    assert "algorithm.correction.bias_corrected_kl" not in translation.options
    assert is_told == any("the policy's ratio, with its gradient" in reason for _, reason in translation.notes)


def test_what_is_off_there_is_not_called_different_here(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{ON_AXOLOTL}bf16: true\nfp16: false\n")
    translation = translate(read_foreign(tmp_path / "run.yaml"))
    assert translation.options["model.dtype"] == "bfloat16"
    assert not [reason for _, reason in translation.notes if "model.dtype is auto here" in reason]


def test_defaults_of_trl_are_those_of_its_configs() -> None:
    trl = pytest.importorskip("trl")
    for method, config in {
        "rl": trl.GRPOConfig,
        "rloo": trl.RLOOConfig,
        "sft": trl.SFTConfig,
        "dpo": trl.DPOConfig,
        "kto": trl.KTOConfig,
        "reward_model": trl.RewardConfig,
    }.items():
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for name, value in DEFAULTS["trl", method].items():
            if name in defaults and value != NO_LIMIT:
                assert str(defaults[name]) == str(value), (method, name)


def test_none_is_no_upper_bound_in_a_script_of_trl(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "config = GRPOConfig(use_vllm=True, num_generations=4, vllm_importance_sampling_clip_max=None)\n"
        "GRPOTrainer(model='tiny', args=config, train_dataset=load_dataset('rows'), reward_funcs=score).train()\n"
    )
    translation = translate(read_foreign(tmp_path / "run.py"))
    assert translation.options["algorithm.correction.cap"] is None
    assert "cap: null  # vllm_importance_sampling_clip_max" in write(translation, "TRL's run.py")


def test_null_is_the_default_in_axolotl_which_passes_only_what_is_set(tmp_path: Path) -> None:
    settings = "{use_vllm: true, vllm_importance_sampling_clip_max: null}"
    (tmp_path / "run.yaml").write_text(f"{ON_AXOLOTL}rl: grpo\ntrl: {settings}\n")
    translation = translate(read_foreign(tmp_path / "run.yaml"))
    assert translation.options["algorithm.correction.cap"] == 3.0
    assert ("trl.vllm_importance_sampling_clip_max", "it has no value") in translation.notes


def test_an_option_that_a_rule_sets_to_null_is_no_comment(tmp_path: Path) -> None:
    fixed = "algorithm.use_kl_in_reward: true\nalgorithm.kl_ctrl.type: fixed\n"
    (tmp_path / "run.yaml").write_text(f"{ON_VERL}{fixed}")
    translation = translate(read_foreign(tmp_path / "run.yaml"))
    assert "target: null  # algorithm.kl_ctrl.type: fixed" in write(translation, "verl's run.yaml")
    assert not [setting for setting, _ in translation.notes if "kl_ctrl" in setting]


def test_a_preference_loss_and_a_cross_entropy_are_one_sum(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{ROWS}beta: 0.2\nloss_type: [sigmoid, sft]\nloss_weights: [2.0, 0.5]\n")
    made = translate(read_foreign(tmp_path / "run.yaml")).options
    preference = "algorithm.preference"
    assert (made[f"{preference}.loss"], made[f"{preference}.cross_entropy_coef"]) == ("dpo", 0.25)


@pytest.mark.parametrize(
    ("mark", "algorithm"),
    [
        ("undesirable_weight: 1.5", "kto"),
        ("num_generations: 4\nnormalize_advantages: true", "rloo"),
        ("cpo_alpha: 0.5", "cpo"),
        ("center_rewards_coefficient: 0.01", "reward_model"),
        ("train_on_last_step_only: true", "process_reward_model"),
        ("loss_type: kto", "kto"),
        ("packing: true", "sft"),
        ("num_generations: 4\nloss_type: dapo", "grpo"),
        ("beta: 0.2", "dpo, a guess"),
        ("precompute_ref_log_probs: true", "dpo, a guess"),
        ("loss_type: sigmoid", "dpo, a guess"),
        ("num_generations: 4", "grpo, a guess"),
        ("max_length: 99", "sft, a guess"),
    ],
)
def test_the_method_of_a_file_of_trl_follows_from_its_settings(mark: str, algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{ROWS}{mark}\n")
    assert algorithm == method_of(tmp_path / "run.yaml")


def method_of(path: Path) -> str:
    made = translate(read_foreign(path))
    guesses = [setting for setting, reason in made.notes if reason.startswith("taken for ")]
    assert guesses in ([], [f"algorithm: {made.choices['algorithm']}"])
    return made.choices["algorithm"] + ", a guess" * len(guesses)


@pytest.mark.parametrize(
    ("mark", "algorithm"),
    [
        ("prompt_data: rows.jsonl", "grpo"),
        ("undesirable_loss_weight: 2.0", "kto"),
        ("margin_loss: true", "reward_model"),
        ("data.chosen_key: good\nbeta: 0.1", "dpo, a guess"),
        ("dataset: rows.jsonl", "sft, a guess"),
    ],
)
def test_the_method_of_a_file_of_openrlhf_follows_from_its_settings(mark: str, algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"pretrain: tiny\n{mark}\n")
    assert algorithm == method_of(tmp_path / "run.yaml")


def test_entries_of_other_mappings_are_taken(tmp_path: Path) -> None:
    data = "base: &base {learning_rate: 1.0, max_steps: 9}\nbase_model: tiny\n<<: *base\nlearning_rate: 0.5\n"
    (tmp_path / "run.yaml").write_text(data)
    made = translate(read_foreign(tmp_path / "run.yaml")).options
    assert (made["learner.optimizer.lr"], made["algorithm.num_steps"]) == (0.5, 9)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("pretrain: tiny\ndataset: a.jsonl,b.jsonl\n", True),
        ("pretrain: tiny\ndataset: a.jsonl,b.jsonl\ndataset_probs: 0.2,0.8\n", False),
        ("pretrain: tiny\ndataset: a.jsonl,b.jsonl\ndataset_probs: 0.2,$REST\n", True),
        (f"{ON_VERL}data.train_files: [a.parquet, b.parquet]\n", True),
        ("base_model: tiny\ndatasets: [{path: a.jsonl}, {path: b.jsonl}]\n", True),
        (ON_AXOLOTL, False),
    ],
)
def test_data_sets_that_are_concatenated_are_reported(text: str, is_told: bool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    notes = translate(read_foreign(tmp_path / "run.yaml")).notes
    assert any("there they are concatenated" in reason for _, reason in notes) == is_told


ONE_PROCESS, TRUNCATED = "counted for one process, .*: multiply it", "longer rows are truncated there"


@pytest.mark.parametrize(
    ("text", "setting", "reason"),
    [
        (f"{ROWS}packing: false\n", "algorithm.groups_per_step: 8", ONE_PROCESS),
        (f"{ON_AXOLOTL}micro_batch_size: 2\n", "algorithm.groups_per_step: 2", ONE_PROCESS),
        (
            f"{ROWS}num_generations: 8\ngeneration_batch_size: 64\n",
            "algorithm.num_minibatches: 8",
            "one process, .*: divide it",
        ),
        (f"{ROWS}packing: false\nnum_processes: 4\n", "num_processes: 4", r"set learner\.num_ranks"),
        (f"{ROWS}packing: false\n", "max_length: 1024 (default of TRL)", TRUNCATED),
        (f"{ROWS}beta: 0.2\nmax_length: 99\n", "max_length: 99", TRUNCATED),
        (f"{ROWS}packing: false\nmax_length: null\n", "max_length", "rows are as long as"),
        (f"{ROWS}num_generations: 8\nvllm_mode: server\n", "vllm_mode: server", "engines have GPUs of their own"),
        (f"{ROWS}num_generations: 8\nvllm_mode: colocate\n", "vllm_mode: colocate", "share a GPU"),
        (
            f"{ROWS}loss_type: apo_zero_unpaired\n",
            "loss_type: apo_zero_unpaired",
            r"of this method here; see algorithm\.preference\.loss",
        ),
        (f"{ON_OPENRLHF}normalize_reward: true\n", "normalize_reward: True", "normalized within groups$"),
        (
            "pretrain: tiny\nprompt_data: a.jsonl\nnormalize_reward: true\n",
            "normalize_reward: True",
            "as the functions return them$",
        ),
        (f"{ON_OPENRLHF}freezing_actor_steps: -1\n", "freezing_actor_steps: -1", "no critic, there as here, without"),
        (
            "pretrain: tiny\nprompt_data: a.jsonl\nfreezing_actor_steps: 9\n",
            "freezing_actor_steps: 9",
            "algorithm=gae has a critic",
        ),
        (ON_OPENRLHF.replace("rows.jsonl", "org/rows@part"), "data_files: part", "files of a repository can't be"),
    ],
)
def test_the_reason_of_a_comment_is_that_of_the_method(text: str, setting: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    reasons = [why for name, why in translate(read_foreign(tmp_path / "run.yaml")).notes if name == setting]
    assert len(reasons) == 1
    assert re.search(reason, reasons[0])


@pytest.mark.parametrize(
    ("launcher", "arguments", "groups"),
    [
        ("trl dpo", "--num_processes 4", 32),
        ("trl dpo", "--num_processes $GPUS", None),
        ("accelerate launch --num_processes 4 trl/scripts/dpo.py", "", 32),
        ("accelerate launch --config_file zero3.yaml trl/scripts/dpo.py", "", None),
        ("torchrun --nproc-per-node gpu --nnodes 2 trl/scripts/dpo.py", "", None),
        ("torchrun --nproc-per-node 4 --nnodes 2 trl/scripts/dpo.py", "", 64),
    ],
)
def test_a_batch_of_one_process_is_called_so(launcher: str, arguments: str, groups: int | None, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{launcher} --model_name_or_path tiny --dataset_name d {arguments}\n")
    made = translate(read_foreign(tmp_path / "run.sh"))
    assert made.options["algorithm.groups_per_step"] == (groups or 8)
    assert any(re.search(ONE_PROCESS, reason) for _, reason in made.notes) == (groups is None)


@pytest.mark.parametrize(("argument", "groups"), [("", 32), ("--num_processes 2", 16)])
def test_the_file_of_accelerate_beside_a_command_is_read(argument: str, groups: int, tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n"
        "mixed_precision: fp16\nnum_processes: 4\nown: 1\n"
    )
    command = f"accelerate launch --config_file=accelerate/zero3.yaml {argument} dpo.py --dataset_name d"
    (tmp_path / "run.sh").write_text(f"{command} --model_name_or_path tiny\n")
    (tmp_path / "dpo.py").write_text(f'"""{command} --model_name_or_path tiny"""\n')
    for name in ("run.sh", "dpo.py"):
        made = translate(read_foreign(tmp_path / name))
        assert made.options["algorithm.groups_per_step"] == groups
        assert made.options["model.dtype"] == "float16"
        notes = dict(made.notes)
        assert notes["distributed_type: DEEPSPEED"].startswith("write learner=zero3_gpu")
        assert "deepspeed_config.zero_stage: 3" in notes
        assert notes["own: 1"] == "no equivalent is known"


@pytest.mark.parametrize("text", ["0.8,0.95", "'(0.8, 0.95)'", "[0.8, 0.95]"])
def test_betas_written_as_text_are_read(text: str, tmp_path: Path) -> None:
    for line in (f"pretrain: tiny\ndataset: a.jsonl\nadam_betas: {text}\n", f"{ON_VERL}actor.optim.betas: {text}\n"):
        (tmp_path / "run.yaml").write_text(line)
        assert translate(read_foreign(tmp_path / "run.yaml")).options["learner.optimizer.betas"] == [0.8, 0.95]


def test_betas_that_are_not_known_are_not_replaced_by_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("pretrain: tiny\ndataset: a.jsonl\nadam_betas: 0.9,$BETA\n")
    assert "learner.optimizer.betas" not in translate(read_foreign(tmp_path / "run.yaml")).options


@pytest.mark.parametrize("limit", ["", "max_prompt_length: 99"])
def test_prompts_without_a_limit_are_reported(limit: str, tmp_path: Path) -> None:
    for text in (f"{ROWS}num_generations: 4\n{limit}\n", f"{ON_AXOLOTL}rl: grpo\ntrl: {{{limit}}}\n"):
        (tmp_path / "run.yaml").write_text(text)
        made = translate(read_foreign(tmp_path / "run.yaml"))
        assert any("are skipped here" in reason for _, reason in made.notes) == (not limit)
        assert made.options.get("data.max_prompt_tokens") == (99 if limit else None)


def test_a_part_of_a_file_that_is_left_out_is_reported(tmp_path: Path) -> None:
    for path, is_told in (("rows.jsonl", True), ("someone/rows", False)):
        (tmp_path / "run.yaml").write_text(f"base_model: tiny\ndatasets: [{{path: {path}, split: 'train[:9]'}}]\n")
        notes = translate(read_foreign(tmp_path / "run.yaml")).notes
        assert [setting for setting, reason in notes if "read whole" in reason] == ["split: train[:9]"] * is_told


@pytest.mark.parametrize(
    ("entry", "is_reported"),
    [
        ("{path: someone/rows, data_files: part.jsonl}", True),
        ("{path: someone/rows, data_files: [part.jsonl, more.jsonl]}", True),
        ("{path: json, data_files: [part.jsonl, more.jsonl]}", True),
        ("{path: [json], data_files: [part.jsonl]}", True),
        ("{path: json, data_files: part.jsonl}", False),
    ],
)
def test_files_that_cannot_be_chosen_are_reported(entry: str, is_reported: bool, tmp_path: Path) -> None:
    given = yaml.safe_load(entry)
    on_trl = {"model_name_or_path": "tiny", "dataset_name": given["path"], "data_files": given["data_files"]}
    for system, settings in (("axolotl", {"base_model": "tiny", "datasets": [given]}), ("trl", on_trl)):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        notes = translate(read_foreign(tmp_path / "run.yaml", system=system)).notes
        reasons = [reason for setting, reason in notes if setting.startswith("data_files: ")]
        assert len(reasons) == is_reported, notes
        assert all("set data.path to their folder or a pattern" in reason for reason in reasons)


def test_a_number_that_differs_from_the_batch_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{ON_AXOLOTL}rl: ebft\nebft: {{n_samples_per_prompt: 4}}\n")
    made = translate(read_foreign(tmp_path / "run.yaml"))
    assert made.options["algorithm.group_size"] == 8
    assert any("algorithm.group_size is set by the settings of the batch" in reason for _, reason in made.notes)


@pytest.mark.parametrize("system", COLUMNS)
def test_no_value_is_too_odd_for_a_rule(system: str) -> None:
    for method in ("rl", "rloo", "sft", "dpo", "cpo", "reward_model"):
        for name in [name.replace("*", "x") for name in table_of(system)[0]]:
            for value in ODD:
                run = ForeignRun(system=system, method=method, settings=[Setting(name=name, value=value)])
                made = translate_setting(ForeignValues(run), run.settings[0])
                assert isinstance(made, dict | str | UsedBy), (name, value)
                assert made, (name, value)


def test_no_secret_is_copied() -> None:
    for name in ("openrlhf/sft_lora.sh", "openrlhf/ppo_dotted.sh", "trl/sft_command.sh"):
        secret = re.search(r"[0-9a-f]{16,}", RUNS[name].read_text())
        assert secret is not None
        assert secret[0] not in imported(name)
        assert "(hidden)" in imported(name)
    for password in ("secret", "p@ss", "se/cret"):
        setting = Setting(name="mlflow_tracking_uri", value=f"http://me:{password}@host/x")
        assert str(setting) == "mlflow_tracking_uri: http://(hidden)@host/x"


def test_options_in_the_tables_exist() -> None:
    for system in COLUMNS:
        for rule in table_of(system)[0].values():
            option = rule.option if isinstance(rule, Rule) else rule
            if " " not in option:
                assert option in all_names() or option.startswith("rollout.engine_args."), option
            else:
                for word in re.findall(r"(?<![\w.:])(?:algorithm|data|learner|model|rollout)\.[\w.]+\w", option):
                    assert word in all_names(), option


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = str(RUNS["axolotl/orpo.yml"]), tmp_path / "run.yaml"
    assert main(["import", source]) == 0
    printed = capsys.readouterr().out
    assert main(["import", source, "-o", str(output)]) == 0
    assert output.read_text() == printed
    assert re.match(r"written to \S+run\.yaml: \d+ options, \d+ comments\n", capsys.readouterr().out)
    assert main(["import", source, "-o", str(output)]) == 2
    assert capsys.readouterr().err == f"rlpipe: error: {output} exists already; name another file, or delete it\n"


def test_the_example_of_the_docs_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "importing.md").read_text()
    script = page.split("For example, this script\n\n```bash\n")[1].partition("```")[0]
    (tmp_path / "train.sh").write_text(script)
    assert main(["import", str(tmp_path / "train.sh")]) == 0
    assert f"becomes\n\n```yaml\n{capsys.readouterr().out}```\n" in page


def test_the_system_of_a_file_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-3\n")
    assert main(["import", str(path)]) == 2
    assert capsys.readouterr().err.endswith("which system it is for; add --from axolotl|openrlhf|trl|verl\n")
    assert main(["import", str(path), "--from", "trl"]) == 0
    assert "lr: 0.001  # learning_rate: 0.001" in capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_the_method_of_a_file_can_be_named(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(f"{ROWS}beta: 0.2\n")
    assert main(["import", str(tmp_path / "run.yaml"), "--method", method]) == 0
    printed = capsys.readouterr().out
    assert f"- algorithm: {method}\n" in printed
    assert "taken for" not in printed
