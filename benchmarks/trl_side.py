"""TRL's side of ``benchmarks.vs_trl`` in a process of its own: trains as a JSON file says, and writes the times.

Run: ``python -m benchmarks.trl_side setup.json result.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlpipe.common.imports import import_object
from rlpipe.errors import ConfigError

EVALUATION_BATCH = 50


class StepTimes(TrainerCallback):
    """A record of when each step ended; each step includes the generation that it trains on."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Seconds of every step."""
        return [end - start for start, end in zip(self.ended, self.ended[1:], strict=False)]


def load_reward(path: str) -> Callable[..., Sequence[float]]:
    """Return the reward function, without the arguments that TRL passes beyond the columns that it reads."""
    function = import_object(path, what="reward", error=ConfigError)

    def reward(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> Sequence[float]:
        return function(completions=completions, answer=answer)

    return reward


def make_config(setup: dict[str, Any], output: Path) -> GRPOConfig:
    """Return the settings of rlpipe's run, without anything else that takes time."""
    return GRPOConfig(
        output_dir=str(output),
        max_steps=setup["num_steps"],
        per_device_train_batch_size=setup["groups_per_step"] * setup["group_size"],
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=setup["group_size"],
        max_completion_length=setup["max_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=setup["learning_rate"],
        lr_scheduler_type="linear",
        warmup_steps=setup["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_tqdm=True,
        logging_steps=setup["num_steps"],
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=setup["seed"],
    )


def make_trainer(setup: dict[str, Any], output: Path) -> tuple[GRPOTrainer, StepTimes]:
    times = StepTimes()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(setup["policy"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(setup["policy"], padding_side="left"),
        reward_funcs=load_reward(setup["reward"]),
        args=make_config(setup, output),
        train_dataset=Dataset.from_list(setup["train"]),
        peft_config=LoraConfig(
            r=setup["rank"], lora_alpha=setup["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[times],
    )
    return trainer, times


def greedy_accuracy(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., Sequence[float]],
    max_tokens: int,
) -> float:
    """Return the share of the rows whose answer gets the full reward."""
    model.eval()
    correct = 0
    for start in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[start : start + EVALUATION_BATCH]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        correct += sum(score >= 1 for score in reward(completions=completions, answer=[row["answer"] for row in batch]))
    return correct / len(rows)


def main() -> None:
    setup_file, result_file = map(Path, sys.argv[1:])
    setup = json.loads(setup_file.read_text())
    torch.set_num_threads(setup["num_threads"])
    trainer, times = make_trainer(setup, result_file.parent / "trl")
    trainer.train()
    accuracy = greedy_accuracy(
        trainer.model, trainer.processing_class, setup["held_out"], trainer.reward_funcs[0], setup["max_tokens"]
    )
    result_file.write_text(json.dumps({"seconds": times.seconds, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
