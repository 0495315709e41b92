"""Seconds a step and final accuracy against TRL's ``GRPOTrainer``, on short and on long-tailed answers.

Both train a LoRA on the same warmed-up policy with the same prompts in the same order, rewards, group size, steps,
completion limit, loss (token mean), optimizer and learning rate, in float32, on all cores, one after the other. TRL
generates with transformers, which is what it has on CPUs. rlpipe runs as ``rlpipe.train`` does: Ray, vLLM, the adapter
through the object store, and asynchronously, with rollouts of at most one version behind; the figures of synchronous
runs are printed too. Accuracy is greedy, on prompts that nobody trains on. Run: ``python -m benchmarks.vs_trl``.

The warmed-up policies are made by the first run and kept in ``outputs/benchmarks/vs_trl``.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlpipe
from benchmarks import counting
from rlpipe.data.prompts import open_prompts
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.types import Prompt

FOLDER = Path("outputs/benchmarks/vs_trl").absolute()
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
RANK, ALPHA, SEED, LR_WARMUP_STEPS = 32, 64, 0, 10
NUM_HELD_OUT = 1000
"""Of 1,000 prompts 0.5 are right to within 0.016, one standard error."""
COLD_SHARE = 0.25
"""Part of the steps at the start that the medians leave out."""
NUM_CORES = os.cpu_count() or 1


@dataclass(kw_only=True, frozen=True)
class Workload:
    """A task, and how long it is trained."""

    name: str
    data: Sequence[str]
    """Overrides that name the rows, with the held-out ones."""
    reward: str
    max_tokens: int
    num_steps: int
    learning_rate: float
    warmup: Sequence[str]
    """Overrides of the quickstart's supervised warm-up, which ends where there is something left to learn."""

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
    reward="benchmarks.counting:counted",
    max_tokens=counting.MAX_TOKENS,
    num_steps=60,
    learning_rate=1.5e-4,
    warmup=[
        *LONG_ROWS,
        "algorithm.num_steps=140",
        "algorithm.stop_loss=null",
        "algorithm.groups_per_step=32",
    ],
)


def warm_up(workload: Workload) -> None:
    """Makes the workload's policy by supervised fine-tuning, unless a run before has made it."""
    if workload.policy.exists():
        return
    print(f"{workload.name}: warming the policy up by supervised fine-tuning", flush=True)
    started = time.perf_counter()
    shutil.rmtree(workload.policy.parent, ignore_errors=True)  # what an interrupted call has left
    rlpipe.train(rlpipe.load_config(warm_up_overrides(workload)))
    print(f"{workload.name}: took {time.perf_counter() - started:.0f} s", flush=True)


def warm_up_overrides(workload: Workload) -> list[str]:
    """Of a policy of 3.2M parameters."""
    return [
        "experiment=quickstart_warmup",
        "tracking=quiet",
        f"output={workload.policy.parent}",
        "model.prepare=rlpipe.quickstart:make_policy",
        "model.dtype=float32",
        "algorithm.num_steps=900",
        "learner.optimizer.lr=1e-3",
        *workload.warmup,
    ]


def run_overrides(workload: Workload, *, max_staleness: int, num_steps: int) -> list[str]:
    """rlpipe's config. The engine and the learner work at the same time when asynchronous, in turns otherwise."""
    threads = NUM_CORES if max_staleness == 0 else max(1, NUM_CORES // 2)
    return [
        *workload.data,
        f"output={workload.folder}/staleness-{max_staleness}",
        "tracking=quiet",
        "resume=never",
        f"seed={SEED}",
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
        f"learner.schedule.warmup_steps={LR_WARMUP_STEPS}",
        f"replay.max_staleness={max_staleness}",
        "checkpoint=end",
        "tracking.log_completions=0",
        f"scoring.rewards.reward.path={workload.reward}",
    ]


def run_rlpipe(workload: Workload, *, max_staleness: int, num_steps: int) -> dict[str, Any]:
    """Seconds of every step, and the accuracy at the start and the end."""
    config = rlpipe.load_config(run_overrides(workload, max_staleness=max_staleness, num_steps=num_steps))
    shutil.rmtree(config.output, ignore_errors=True)
    summary = rlpipe.train(config)
    return {
        "seconds": step_seconds((Path(config.output) / "metrics.jsonl").read_text().splitlines()),
        "accuracy_start": summary["eval_accuracy_start"],
        "accuracy": summary["eval_accuracy_end"],
    }


def step_seconds(lines: Sequence[str]) -> list[float]:
    """The wall time of every step out of ``metrics.jsonl``."""
    rows = [json.loads(line) for line in lines]
    return [row["time/step"] for row in rows if "time/step" in row]


def run_trl(workload: Workload) -> dict[str, Any]:
    """The same from TRL, in a process of its own."""
    train, held_out = rows_of(workload)
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
        "warmup_steps": LR_WARMUP_STEPS,
        "rank": RANK,
        "alpha": ALPHA,
        "seed": SEED,
        "num_threads": NUM_CORES,
    }
    setup_file, result_file = workload.folder / "trl_setup.json", workload.folder / "trl_result.json"
    setup_file.write_text(json.dumps(setup))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.trl_side", str(setup_file), str(result_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result


def rows_of(workload: Workload) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prompts that rlpipe trains on, in its order, and the held-out ones."""
    config = rlpipe.load_config(run_overrides(workload, max_staleness=0, num_steps=workload.num_steps))
    prompts, held_out = open_prompts(config.data, load_tokenizer(config.model), seed=config.seed)
    train = prompts.take(workload.num_steps * GROUPS_PER_STEP)
    return [trl_row(prompt) for prompt in train], [trl_row(prompt) for prompt in held_out]


def trl_row(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt.prompt, "answer": prompt.task["answer"]}


def warm_median(seconds: Sequence[float]) -> float:
    return statistics.median(warm_part(seconds))


def warm_part(seconds: Sequence[float]) -> Sequence[float]:
    """All but the first quarter."""
    return seconds[int(len(seconds) * COLD_SHARE) :]


def compare(workload: Workload) -> dict[str, float]:
    """Runs both, and returns the workload's part of the last line."""
    warm_up(workload)
    results: dict[str, dict[str, Any]] = {}
    for name, run in (
        ("trl", lambda: run_trl(workload)),
        ("async", lambda: run_rlpipe(workload, max_staleness=1, num_steps=workload.num_steps)),
        ("sync", lambda: run_rlpipe(workload, max_staleness=0, num_steps=workload.num_steps)),
    ):
        load = os.getloadavg()[0]
        results[name] = run()
        describe(f"{workload.name}: {name}", results[name], load)
    return summarize(workload.name, results)


def describe(name: str, result: Mapping[str, Any], load: float) -> None:
    warm = warm_part(result["seconds"])
    print(
        f"{name}: median {statistics.median(warm):.3f} s a step, mean {statistics.mean(warm):.3f}, "
        f"accuracy {result['accuracy']:.3f}, load average at its start {load:.1f}",
        flush=True,
    )


def summarize(name: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """One workload's keys; the ratio is TRL's seconds over those of the asynchronous run."""
    seconds = {side: warm_median(result["seconds"]) for side, result in results.items()}
    return {
        f"{name}_ratio": round(seconds["trl"] / seconds["async"], 3),
        f"{name}_ratio_sync": round(seconds["trl"] / seconds["sync"], 3),
        f"{name}_accuracy_start": results["async"]["accuracy_start"],
        f"{name}_accuracy": results["async"]["accuracy"],
        f"{name}_accuracy_sync": results["sync"]["accuracy"],
        f"{name}_accuracy_trl": results["trl"]["accuracy"],
        f"{name}_seconds": round(seconds["async"], 4),
        f"{name}_seconds_sync": round(seconds["sync"], 4),
        f"{name}_seconds_trl": round(seconds["trl"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=("short", "long"), default=("short", "long"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows, held_out = counting.make_rows(20_000, NUM_HELD_OUT)
    counting.write_rows(LONG.folder / "train.jsonl", rows)
    counting.write_rows(LONG.folder / "held_out.jsonl", held_out)
    result: dict[str, Any] = {"max_staleness": 1}
    for workload in (SHORT, LONG):
        if workload.name in arguments.workloads:
            result |= compare(workload)
    print(f"all of it took {time.perf_counter() - started:.0f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
