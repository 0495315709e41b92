"""DPO beside TRL's ``DPOTrainer``: seconds per step, held-out accuracy, and the peak memory of the process that trains.

Both sides train a LoRA on the same random policy of 3.2M parameters with the same pairs in the same order, in float32,
on all cores, one after the other. A pair is a list of numbers to sort, its sorted form, and one with two numbers
exchanged; so the prompt takes half of a sequence's tokens, as in common data sets. rlpipe runs as a user starts it, and
its seconds are those of a step, packing included. Run: ``python -m benchmarks.preference``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import find_processes, status_bytes
from benchmarks.vs_trl import step_seconds, warm_part
from rlpipe.common import run_files

FOLDER = Path("outputs/benchmarks/preference").absolute()
PAIRS_PER_STEP, NUM_HELD_OUT = 16, 200
RANK, ALPHA, LEARNING_RATE, BETA = 32, 64, 1e-3, 0.1
NUM_CORES = os.cpu_count() or 1
MB = 1e6
POLL_S = 0.2


def make_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs on lists of 6 to 24 numbers, whose prompts have 15 to 70 characters."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        numbers = [draw.randrange(10, 100) for _ in range(draw.randrange(6, 25))]
        ordered = sorted(numbers)
        spoiled = list(ordered)
        while spoiled == ordered:
            one, other = draw.sample(range(len(spoiled)), 2)
            spoiled[one], spoiled[other] = spoiled[other], spoiled[one]
        texts = [" ".join(map(str, some)) for some in (numbers, ordered, spoiled)]
        rows.append({"prompt": f"sort {texts[0]}", "chosen": texts[1], "rejected": texts[2]})
    return rows


def run_rlpipe(num_steps: int) -> dict[str, Any]:
    """Return the seconds of every step, the held-out accuracy, and the peak of the learner's process in MB."""
    output = FOLDER / "rlpipe"
    shutil.rmtree(output, ignore_errors=True)
    overrides = [
        *("algorithm=dpo", f"algorithm.num_steps={num_steps}", f"algorithm.groups_per_step={PAIRS_PER_STEP}"),
        *("data=jsonl", f"data.path={FOLDER}/train.jsonl", f"data.held_out.path={FOLDER}/held_out.jsonl"),
        *("data.shuffle=false", "data.held_out.every_steps=0", "data.max_prompt_tokens=128", f"output={output}"),
        *(f"model.path={FOLDER}/policy", "model.dtype=float32", f"model.adapter={{r: {RANK}, alpha: {ALPHA}}}"),
        *(f"learner.num_threads={NUM_CORES}", f"learner.optimizer.lr={LEARNING_RATE}", "checkpoint=end"),
        *(f"algorithm.preference.beta={BETA}", "learner.schedule.name=constant", "tracking=quiet", "resume=never"),
    ]
    command = [sys.executable, "-m", "rlpipe", "train", *overrides]
    with (FOLDER / "rlpipe.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        peak_mb = 0.0
        while process.poll() is None:
            peak_mb = max([peak_mb, *(status_bytes("VmHWM", pid) / MB for pid in find_processes("learner"))])
            time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"rlpipe failed: {(FOLDER / 'rlpipe.log').read_text()[-2000:]}")
    lines = (output / run_files.METRICS).read_text().splitlines()
    held_out = [row for row in map(json.loads, lines) if "eval/rewards/accuracies" in row]
    return {"seconds": step_seconds(lines), "accuracy": held_out[-1]["eval/rewards/accuracies"], "peak_mb": peak_mb}


def run_trl(num_steps: int) -> dict[str, Any]:
    """Return what ``run_rlpipe`` does, of TRL in a process of its own."""
    result = FOLDER / "trl.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.preference", "--trl", str(result), "--steps", str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"TRL failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def train_with_trl(result: Path, num_steps: int) -> None:
    """Train with TRL's trainer, and write the figures."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from benchmarks.trl_side import StepTimes

    torch.set_num_threads(NUM_CORES)
    times = StepTimes()
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(FOLDER / "policy", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(FOLDER / "policy"),
        args=DPOConfig(
            output_dir=str(FOLDER / "trl"),
            max_steps=num_steps,
            per_device_train_batch_size=PAIRS_PER_STEP,
            per_device_eval_batch_size=PAIRS_PER_STEP,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=BETA,
            max_length=None,
            bf16=False,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            disable_tqdm=True,
            logging_steps=num_steps,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=Dataset.from_list([*map(in_chat, read("train"))]),
        eval_dataset=Dataset.from_list([*map(in_chat, read("held_out"))]),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[times],
    )
    trainer.train()
    peak_mb = status_bytes("VmHWM") / MB
    accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    result.write_text(json.dumps({"seconds": times.seconds, "accuracy": accuracy, "peak_mb": peak_mb}))


def in_chat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair as messages, as which rlpipe renders texts."""
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def prepare(num_steps: int) -> None:
    """Write the rows and a random policy."""
    from rlpipe.models.tiny_model import make_tiny_policy

    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", num_steps * PAIRS_PER_STEP, 0), ("held_out", NUM_HELD_OUT, 1)):
        rows = make_pairs(count, seed)
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(FOLDER / "policy", ignore_errors=True)
    make_tiny_policy(FOLDER / "policy", seed=0)


def median_step(runs: Sequence[dict[str, Any]]) -> float:
    return statistics.median(statistics.median(warm_part(run["seconds"])) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl is not None:
        train_with_trl(arguments.trl, arguments.steps)
        return
    prepare(arguments.steps)
    own, theirs = [], []
    for _ in range(arguments.repetitions):
        for name, runs, run in (("rlpipe", own, run_rlpipe), ("TRL", theirs, run_trl)):
            runs.append(run(arguments.steps))
            last = runs[-1]
            print(
                f"{name}: {median_step([last]):.3f} s a step, accuracy {last['accuracy']:.3f}, "
                f"peak {last['peak_mb']:.0f} MB",
                flush=True,
            )
    print(
        json.dumps(
            {
                "ratio_dpo": round(median_step(theirs) / median_step(own), 3),
                "accuracy": round(statistics.mean(run["accuracy"] for run in own), 4),
                "accuracy_trl": round(statistics.mean(run["accuracy"] for run in theirs), 4),
                "peak_mb": round(statistics.median(run["peak_mb"] for run in own)),
                "peak_mb_trl": round(statistics.median(run["peak_mb"] for run in theirs)),
                "step_s": round(median_step(own), 4),
                "step_s_trl": round(median_step(theirs), 4),
                "cores": psutil.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
