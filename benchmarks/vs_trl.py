"""Seconds per step, seconds of the whole command, and final accuracy against TRL's ``GRPOTrainer``, on three workloads.

``short`` and ``long`` are answers of a small policy that is warmed up first; the policy of ``real`` is a language
model, SmolLM2-135M-Instruct, with sums as chat. Both sides train a LoRA on the same policy with the same prompts in the
same order, rewards, group size, steps, completion limit, loss (token mean), optimizer and learning rate, in float32, on
all cores, one after the other. TRL generates with transformers, its engine for CPUs. rlpipe runs as a user starts it:
Ray, vLLM, the adapter through the object store, and asynchronously, with a staleness of at most one version; the
figures of synchronous runs are printed, too. Accuracy is greedy, on held-out prompts. A whole command imports, starts,
evaluates and saves. With several ``--seeds`` seconds are medians, and accuracies means. Run: ``python -m
benchmarks.vs_trl``.

The policies are made by the first run and kept in ``outputs/benchmarks/vs_trl``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlpipe
from benchmarks import counting_task
from rlpipe.common import run_files
from rlpipe.data.prompts import open_prompts
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.quickstart import fetch_smollm2
from rlpipe.types import Prompt

FOLDER = Path("outputs/benchmarks/vs_trl").absolute()
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
RANK, ALPHA = 32, 64
NUM_HELD_OUT = 1000
"""With 1,000 prompts, the standard error of an accuracy of 0.5 is 0.016."""
COLD_SHARE = 0.25
"""Share of the steps, at the start, that the medians leave out."""
NUM_CORES = os.cpu_count() or 1


@dataclass(kw_only=True, frozen=True)
class Workload:
    """A task, and its training settings."""

    name: str
    data: Sequence[str]
    """Overrides that choose the training and the held-out rows."""
    reward: str
    max_tokens: int
    num_steps: int
    learning_rate: float
    warmup: Sequence[str] | None
    """Overrides of the quickstart's supervised warm-up, which stops while there is something left to learn.

    None: the policy is the language model as it is.
    """
    lr_warmup_steps: int = 10

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def policy(self) -> Path:
        return self.folder / "warmup" / "policy"


SHORT_ROWS = ["data=addition", f"data.held_out.size={NUM_HELD_OUT}"]
SHORT = Workload(
    name="short",
    data=SHORT_ROWS,
    reward="rlpipe.scoring.toolbox:exact_match",
    max_tokens=6,
    num_steps=400,
    learning_rate=6e-4,
    warmup=SHORT_ROWS,
)
LONG_ROWS = [
    "data=jsonl",
    f"data.path={FOLDER}/long/train.jsonl",
    f"data.held_out.path={FOLDER}/long/held_out.jsonl",
    "data.max_prompt_tokens=32",
]
LONG = Workload(
    name="long",
    data=LONG_ROWS,
    reward="benchmarks.counting_task:counted",
    max_tokens=counting_task.MAX_TOKENS,
    num_steps=60,
    learning_rate=1.5e-4,
    warmup=[*LONG_ROWS, "algorithm.num_steps=140", "algorithm.stop_loss=null", "algorithm.groups_per_step=32"],
)
REAL = Workload(
    name="real",
    data=[
        "data=reasoning_gym",
        "data.task=chain_sum",
        "data.task_args={size: 20000, min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}",
        "data.max_prompt_tokens=64",
        "data.held_out.size=200",  # each takes the engine a tenth of a second
    ],
    reward="rlpipe.scoring.toolbox:numeric_match",
    max_tokens=32,
    num_steps=12,
    learning_rate=5e-4,
    warmup=None,
    lr_warmup_steps=2,
)
WORKLOADS = {workload.name: workload for workload in (SHORT, LONG, REAL)}


def warm_up(workload: Workload) -> None:
    """Make the workload's policy unless it exists already; a small one by supervised fine-tuning."""
    if workload.policy.exists():
        return
    if workload.warmup is None:
        fetch_smollm2(rlpipe.load_config(["experiment=smollm2", f"model.path={workload.policy}"]))
        return
    print(f"{workload.name}: warming the policy up by supervised fine-tuning", flush=True)
    started = time.perf_counter()
    shutil.rmtree(workload.policy.parent, ignore_errors=True)  # left by an interrupted call
    rlpipe.train(rlpipe.load_config(warm_up_overrides(workload)))
    print(f"{workload.name}: took {time.perf_counter() - started:.0f} s", flush=True)


def warm_up_overrides(workload: Workload) -> list[str]:
    """Return the overrides that warm up a policy of 3.2M parameters."""
    return [
        "experiment=quickstart_warmup",
        "tracking=quiet",
        f"output={workload.policy.parent}",
        "model.prepare=rlpipe.quickstart:make_policy",
        "model.dtype=float32",
        "algorithm.num_steps=900",
        "learner.optimizer.lr=1e-3",
        *(workload.warmup or ()),
    ]


def run_overrides(workload: Workload, *, max_staleness: int, num_steps: int, seed: int = 0) -> list[str]:
    """Return rlpipe's overrides; engine and learner share the cores if asynchronous, and take turns otherwise."""
    threads = NUM_CORES if max_staleness == 0 else max(1, NUM_CORES // 2)
    return [
        *workload.data,
        f"output={workload.folder}/staleness-{max_staleness}",
        "tracking=quiet",
        "resume=never",
        f"seed={seed}",
        f"model.path={workload.policy}",
        "model.dtype=float32",
        f"model.adapter={{r: {RANK}, alpha: {ALPHA}}}",
        f"algorithm.num_steps={num_steps}",
        f"algorithm.groups_per_step={GROUPS_PER_STEP}",
        f"algorithm.group_size={GROUP_SIZE}",
        "algorithm.loss.aggregate=token",
        f"rollout.sampling.max_tokens={workload.max_tokens}",
        f"rollout.num_threads={threads}",
        f"learner.num_threads={threads}",
        f"learner.optimizer.lr={workload.learning_rate}",
        "learner.schedule.name=linear",
        f"learner.schedule.warmup_steps={workload.lr_warmup_steps}",
        f"replay.max_staleness={max_staleness}",
        "checkpoint=end",
        "tracking.log_completions=0",
        f"scoring.rewards.reward.path={workload.reward}",
    ]


def run_rlpipe(workload: Workload, *, max_staleness: int, seed: int = 0) -> dict[str, Any]:
    """Return the seconds of every step and of the whole command, and the accuracy at the start and the end."""
    overrides = run_overrides(workload, max_staleness=max_staleness, num_steps=workload.num_steps, seed=seed)
    output = Path(rlpipe.load_config(overrides).output)
    shutil.rmtree(output, ignore_errors=True)
    command_seconds = run_command("rlpipe", ["rlpipe", "train", *overrides])
    summary = json.loads((output / run_files.SUMMARY).read_text())
    return {
        "command_seconds": command_seconds,
        "seconds": step_seconds((output / run_files.METRICS).read_text().splitlines()),
        "accuracy_start": summary["eval_accuracy_start"],
        "accuracy": summary["eval_accuracy_end"],
    }


def step_seconds(lines: Sequence[str]) -> list[float]:
    """Return the wall time of every step, from the lines of ``metrics.jsonl``."""
    rows = [json.loads(line) for line in lines]
    return [row["time/step"] for row in rows if "time/step" in row]


def run_command(side: str, module: Sequence[str]) -> float:
    """Run ``python -m`` with these arguments and return its seconds; raise ``RuntimeError`` if it fails."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - started


def run_trl(workload: Workload, *, seed: int = 0) -> dict[str, Any]:
    """Return TRL's seconds of every step and of the whole command, and its accuracy at the end."""
    train, held_out = rows_of(workload, seed)
    setup = {
        "policy": str(workload.policy),
        "train": train,
        "held_out": held_out,
        "reward": workload.reward,
        "num_steps": workload.num_steps,
        "groups_per_step": GROUPS_PER_STEP,
        "group_size": GROUP_SIZE,
        "max_tokens": workload.max_tokens,
        "learning_rate": workload.learning_rate,
        "warmup_steps": workload.lr_warmup_steps,
        "rank": RANK,
        "alpha": ALPHA,
        "seed": seed,
        "num_threads": NUM_CORES,
    }
    setup_file, result_file = workload.folder / "trl_setup.json", workload.folder / "trl_result.json"
    setup_file.write_text(json.dumps(setup))
    result_file.unlink(missing_ok=True)
    command_seconds = run_command("TRL", ["benchmarks.trl_side", str(setup_file), str(result_file)])
    result: dict[str, Any] = json.loads(result_file.read_text())
    return {**result, "command_seconds": command_seconds}


def rows_of(workload: Workload, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the prompts that rlpipe trains on, in its order, and the held-out ones."""
    config = rlpipe.load_config(run_overrides(workload, max_staleness=0, num_steps=workload.num_steps, seed=seed))
    prompts, held_out = open_prompts(config.data, load_tokenizer(config.model), seed=config.seed)
    train = prompts.take(workload.num_steps * GROUPS_PER_STEP)
    return [trl_row(prompt) for prompt in train], [trl_row(prompt) for prompt in held_out]


def trl_row(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt.prompt, "answer": prompt.task["answer"]}


def warm_median(seconds: Sequence[float]) -> float:
    return statistics.median(warm_part(seconds))


def warm_part(seconds: Sequence[float]) -> Sequence[float]:
    """Return all but the first quarter."""
    return seconds[int(len(seconds) * COLD_SHARE) :]


SIDES: Mapping[str, Callable[[Workload, int], dict[str, Any]]] = {
    "trl": lambda workload, seed: run_trl(workload, seed=seed),
    "async": lambda workload, seed: run_rlpipe(workload, max_staleness=1, seed=seed),
    "sync": lambda workload, seed: run_rlpipe(workload, max_staleness=0, seed=seed),
}


def compare(workload: Workload, seeds: Sequence[int]) -> dict[str, float]:
    """Run all sides with each seed, and return the workload's part of the last line."""
    warm_up(workload)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for seed in seeds:
        for name, run in SIDES.items():
            load = os.getloadavg()[0]
            results[name].append(run(workload, seed))
            describe(f"{workload.name}, seed {seed}: {name}", results[name][-1], load)
    return summarize(workload.name, results)


def describe(name: str, result: Mapping[str, Any], load: float) -> None:
    warm = warm_part(result["seconds"])
    print(
        f"{name}: median {statistics.median(warm):.3f} s a step, mean {statistics.mean(warm):.3f}, "
        f"whole command {result['command_seconds']:.0f} s, "
        f"accuracy {result['accuracy']:.3f}, load average at its start {load:.1f}",
        flush=True,
    )


def summarize(name: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return one workload's keys of the last line; ratios are TRL's seconds over rlpipe's.

    Those of medians leave out steps that take long now and then. If an asynchronous run trains steps in bursts, between
    which it waits, only the ratios of means count the waiting.
    """
    means = {
        side: statistics.median(statistics.fmean(warm_part(run["seconds"])) for run in runs)
        for side, runs in results.items()
    }
    seconds = {side: statistics.median(warm_median(run["seconds"]) for run in runs) for side, runs in results.items()}
    whole = {side: statistics.median(run["command_seconds"] for run in runs) for side, runs in results.items()}

    def mean(side: str, key: str = "accuracy") -> float:
        return round(statistics.mean(run[key] for run in results[side]), 4)

    return {
        f"{name}_ratio": round(seconds["trl"] / seconds["async"], 3),
        f"{name}_ratio_sync": round(seconds["trl"] / seconds["sync"], 3),
        f"{name}_mean_ratio": round(means["trl"] / means["async"], 3),
        f"{name}_mean_ratio_sync": round(means["trl"] / means["sync"], 3),
        f"{name}_wall_ratio": round(whole["trl"] / whole["async"], 3),
        f"{name}_wall_ratio_sync": round(whole["trl"] / whole["sync"], 3),
        f"{name}_accuracy_start": mean("async", "accuracy_start"),
        f"{name}_accuracy": mean("async"),
        f"{name}_accuracy_sync": mean("sync"),
        f"{name}_accuracy_trl": mean("trl"),
        f"{name}_seconds": round(seconds["async"], 4),
        f"{name}_seconds_sync": round(seconds["sync"], 4),
        f"{name}_seconds_trl": round(seconds["trl"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=("short", "long"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows, held_out = counting_task.make_rows(20_000, NUM_HELD_OUT)
    counting_task.write_rows(LONG.folder / "train.jsonl", rows)
    counting_task.write_rows(LONG.folder / "held_out.jsonl", held_out)
    result: dict[str, Any] = {"max_staleness": 1}
    for name, workload in WORKLOADS.items():
        if name in arguments.workloads:
            result |= compare(workload, arguments.seeds)
    print(f"everything took {time.perf_counter() - started:.0f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
