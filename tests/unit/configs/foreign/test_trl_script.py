"""Python scripts of TRL are read without losing arguments, adapters and changes of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpipe.configs.foreign.foreign_file import read_foreign
from rlpipe.configs.translation import Translation, translate
from rlpipe.errors import ConfigError

ROWS = 'rows = load_dataset("me/rows", split="train")\n'
TRAINER = 'SFTTrainer("tiny", args=SFTConfig(output_dir="out"), train_dataset={})\n'
PART = "parts['train']"
UNSLOTH = (
    'model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/tiny", max_seq_length=2048, dtype=None)\n'
    'model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing="unsloth")\n'
    f'{ROWS}SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(output_dir="out"))\n'
)


def translated(text: str, folder: Path) -> Translation:
    path = folder / "train.py"
    path.write_text(text)
    return translate(read_foreign(path))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            f'{ROWS}a = TrainingArguments(output_dir="out", max_steps=7)\nSFTTrainer("tiny", args=a)\n',
            {"output": "out", "algorithm.num_steps": 7, "learner.optimizer.lr": 5e-5},
        ),
        (
            UNSLOTH,
            {
                "model.path": "unsloth/tiny",
                "model.adapter.r": 8,
                "model.adapter.alpha": 16,
                "model.gradient_checkpointing": True,
            },
        ),
        (
            f'{ROWS}GRPOTrainer("tiny", ["my.score"], GRPOConfig("out", beta=0.1), rows)\n',
            {"scoring.rewards.score.path": "my:score", "output": "out", "algorithm.loss.beta": 0.1},
        ),
        (
            'rows = load_dataset("json", data_files={"train": "x.jsonl"}, split="train")\n' + TRAINER.format("rows"),
            {"data.path": "x.jsonl"},
        ),
        (
            f'args = SFTConfig(eval_strategy="steps")\n{ROWS}SFTTrainer("tiny", args=args, '
            "train_dataset=rows, eval_dataset=rows)\n",
            {"data.held_out.split": None},
        ),
    ],
)
def test_the_arguments_of_a_script_are_read(text: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = translated(text, tmp_path).options
    assert {name: made.get(name) for name in options} == options


def test_an_adapter_of_unsloth_is_trained_on_a_base_in_4_bit(tmp_path: Path) -> None:
    assert translated(UNSLOTH, tmp_path).choices["model"] == "qlora"
    in_16_bit = UNSLOTH.replace("dtype=None", "load_in_4bit=False")
    assert translated(in_16_bit, tmp_path).choices["model"] == "lora"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (ROWS + TRAINER.format("rows"), []),
        ('rows = load_dataset("me/rows")\n' + TRAINER.format('rows["train"]'), []),
        (f"{ROWS}rows = rows.map(fmt).filter(long)\n{TRAINER.format('rows')}", ["rows.map(fmt)", ".filter(long)"]),
        (ROWS + TRAINER.format("rows.select(range(1000))"), ["rows.select(range(1000))"]),
        (f"{ROWS}parts = rows.train_test_split(0.1)\n{TRAINER.format(PART)}", ["rows.train_test_split(0.1)"]),
        (
            f"{ROWS}more = rows.map(fmt)\n{TRAINER.format('concatenate_datasets([rows, more])')}",
            ["concatenate_datasets([rows, more])", "rows.map(fmt)"],
        ),
        ('rows = load_dataset("me/rows")\n' + TRAINER.format('rows["half"]'), ["rows['half']"]),
    ],
)
def test_changes_of_the_rows_are_reported(text: str, changes: list[str], tmp_path: Path) -> None:
    notes = translated(text, tmp_path).notes
    told = [setting for setting, reason in notes if "to the rows that it loads" in reason]
    assert all(any(change in setting for setting in told) for change in changes)
    assert bool(told) == bool(changes)
    [reason] = [reason for setting, reason in notes if setting.startswith("train_dataset: ")]
    assert reason.startswith("the script changes its rows" if changes else "it is read where")


def test_arguments_that_no_name_is_known_for_are_reported(tmp_path: Path) -> None:
    notes = translated(f'{ROWS}KTOTrainer("tiny", other, KTOConfig("out", 7), rows)\n', tmp_path).notes
    told = {setting for setting, reason in notes if reason.startswith("an argument without a name")}
    assert told == {"KTOTrainer: other", "KTOTrainer: KTOConfig('out', 7)", "KTOTrainer: rows", "KTOConfig: 7"}


def test_rows_of_an_evaluation_are_reported(tmp_path: Path) -> None:
    notes = translated(ROWS + 'SFTTrainer("tiny", train_dataset=rows, eval_dataset=rows)\n', tmp_path).notes
    assert ("eval_dataset: rows", "set data.held_out.size or data.held_out.split") in notes


def test_asynchronous_grpo_of_trl_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="async_grpo"):
        translated(f'{ROWS}AsyncGRPOTrainer("tiny", args=AsyncGRPOConfig(), train_dataset=rows)\n', tmp_path)


OWN_ARGUMENTS = """
args = parser.parse_args()
rows: Dataset = load_dataset(path="me/rows", split="train", revision="refs/convert", trust_remote_code=True)
epsilon: float = 0.1
training_args: GRPOConfig = GRPOConfig(learning_rate=args.lr, num_generations=args.n, beta=0.1, epsilon=epsilon)
training_args.beta *= 2
GRPOTrainer(model=args.model, reward_funcs=score, args=training_args, train_dataset=rows)
"""


def test_values_of_the_scripts_own_command_line_are_told_and_take_no_default(tmp_path: Path) -> None:
    translation = translated(OWN_ARGUMENTS, tmp_path)
    told = dict(translation.notes)
    for setting, option in (
        ("learning_rate: args.lr", "learner.optimizer.lr"),
        ("num_generations: args.n", "algorithm.group_size"),
        ("model: args.model", "model.path"),
        ("beta: training_args.beta * 2", "algorithm.loss.beta"),
    ):
        assert told[setting] == f"the file computes it: set {option} yourself"
    assert not {"learner.optimizer.lr", "algorithm.group_size"} & translation.options.keys()
    assert translation.options["algorithm.loss.clip_low"] == 0.1, "an annotated variable"


def test_arguments_of_a_data_set_are_not_those_of_the_model(tmp_path: Path) -> None:
    translation = translated(OWN_ARGUMENTS, tmp_path)
    assert translation.options["data.path"] == "me/rows"
    assert not {"model.revision", "model.trust_remote_code"} & translation.options.keys()
    told = {setting for setting, reason in translation.notes if reason.startswith("it is of the data set")}
    assert told == {"load_dataset: revision='refs/convert'", "load_dataset: trust_remote_code=True"}
