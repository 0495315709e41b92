"""Tokens per second that a whole run samples, over those of bare vLLM on the same prompts, lengths and threads.

The run is synchronous, so that engine and learner take turns on the cores. Its time is that of its steps without the
learner's: requests, sampling with log-probabilities, scoring, packing, ledger, the publication of each version, and its
loading. Bare vLLM generates with the model's own weights, as it packs them for the CPU, without an adapter and without
log-probabilities, and is measured before and after the run. Answers have a fixed length. Run: ``python -m
benchmarks.rollout``; the last line is JSON.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rlpipe
from benchmarks.cpu_engine import GROUP_SIZE, NUM_PROMPTS, POLICIES, Policy, make
from rlpipe.common import run_files
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_prompts
from rlpipe.data.render.processor import load_tokenizer

FOLDER = Path("outputs/benchmarks/rollout").absolute()
NUM_CORES = os.cpu_count() or 1
TOKENS_PER_STEP = NUM_PROMPTS * GROUP_SIZE
COLD_STEPS = 2
"""Steps at the start that the medians leave out."""
LORA = "model.adapter={r: 16, alpha: 32}"
FULL = "model.adapter.kind=none"


@dataclass(kw_only=True, frozen=True)
class Case:
    """A policy, the length of its answers, and the overrides that say what is trained."""

    name: str
    policy: Policy
    answer_tokens: int
    trained: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.name


SMALL, MIDDLE, _ = POLICIES
CASES = {
    case.name: case
    for case in (
        Case(name="short", policy=SMALL, answer_tokens=SMALL.answer_tokens, trained=LORA),
        Case(name="long", policy=SMALL, answer_tokens=200, trained=LORA),
        Case(name="60M_lora", policy=MIDDLE, answer_tokens=MIDDLE.answer_tokens, trained=LORA),
        Case(name="60M_full", policy=MIDDLE, answer_tokens=MIDDLE.answer_tokens, trained=FULL),
    )
}


def share_of_digits(completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward digits, so that the answers of a group differ in it."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def write_prompts(case: Case, num_steps: int) -> Path:
    """Write prompts of the policy's typical length, as texts of which each character is a token."""
    generator = random.Random(0)
    rows = [
        {"prompt": "".join(generator.choices("0123456789+=", k=case.policy.prompt_tokens))}
        for _ in range(num_steps * NUM_PROMPTS)
    ]
    case.folder.mkdir(parents=True, exist_ok=True)
    path = case.folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_overrides(case: Case, prompts: Path, num_steps: int) -> list[str]:
    return [
        "data=jsonl",
        f"data.path={prompts}",
        "data.chat=false",
        f"data.max_prompt_tokens={case.policy.prompt_tokens}",
        f"output={case.folder}/run",
        "tracking=quiet",
        "tracking.log_completions=0",
        "resume=never",
        f"model.path={case.policy.path}",
        "model.dtype=float32",
        case.trained,
        f"algorithm.num_steps={num_steps}",
        f"algorithm.groups_per_step={NUM_PROMPTS}",
        f"algorithm.group_size={GROUP_SIZE}",
        f"rollout.sampling.max_tokens={case.answer_tokens}",
        "rollout.sampling.extra={ignore_eos: true}",
        f"rollout.num_threads={NUM_CORES}",
        f"learner.num_threads={NUM_CORES}",
        "replay.max_staleness=0",
        "checkpoint=end",
        "scoring.rewards.reward.path=benchmarks.rollout:share_of_digits",
    ]


def run_whole(overrides: Sequence[str], case: Case) -> float:
    """Return the tokens per second of the steps of ``rlpipe train``, without the learner's time."""
    output = Path(rlpipe.load_config(list(overrides)).output)
    shutil.rmtree(output, ignore_errors=True)
    run_command(["rlpipe", "train", *overrides])
    rows = [json.loads(line) for line in (output / run_files.METRICS).read_text().splitlines()]
    seconds = [row["time/step"] - row["time/train"] for row in rows if "time/step" in row]
    return TOKENS_PER_STEP * case.answer_tokens / statistics.median(seconds[COLD_STEPS:])


def run_command(module: Sequence[str]) -> str:
    """Run ``python -m`` with these arguments and return its last line; raise ``RuntimeError`` if it fails."""
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module[0]} failed:\n{done.stdout}\n{done.stderr}")
    return (done.stdout.splitlines() or [""])[-1]


def measure_bare(config: Config, case: Case) -> float:
    """Return the tokens per second of vLLM's own ``LLM`` in this process, with rlpipe's settings of the engine."""
    import torch

    from rlpipe.configs.schema.model_config import AdapterConfig
    from rlpipe.rollout.vllm.vllm_options import engine_args  # before vLLM, which reads its environment

    model = replace(config.model, adapter=AdapterConfig(kind="none"))
    args = engine_args(model, config.rollout, config.weights, case.policy.prompt_tokens)
    del args["worker_extension_cls"], args["logprobs_mode"]
    from vllm import LLM, SamplingParams

    torch.set_num_threads(NUM_CORES)
    llm = LLM(**args)
    prompts, _ = open_prompts(config.data, load_tokenizer(model), seed=config.seed)
    sampling = SamplingParams(
        n=GROUP_SIZE, temperature=1.0, max_tokens=case.answer_tokens, ignore_eos=True, detokenize=False
    )
    seconds = []
    for _ in range(config.algorithm.num_steps):
        batch: list[Any] = [{"prompt_token_ids": prompt.token_ids.tolist()} for prompt in prompts.take(NUM_PROMPTS)]
        begin = time.perf_counter()
        llm.generate(batch, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return TOKENS_PER_STEP * case.answer_tokens / statistics.median(seconds[COLD_STEPS:])


def compare(case: Case, num_steps: int) -> dict[str, float]:
    """Measure bare vLLM, the run, and bare vLLM again."""
    make(case.policy)
    overrides = run_overrides(case, write_prompts(case, num_steps), num_steps)
    bare = ["benchmarks.rollout", "--bare", case.name, "--steps", str(num_steps)]
    before = float(run_command(bare))
    whole = run_whole(overrides, case)
    after = float(run_command(bare))
    print(f"{case.name}: bare {before:,.0f} and {after:,.0f} tokens/s, whole path {whole:,.0f}", flush=True)
    return {"ratio": round(2 * whole / (before + after), 3), "tokens_per_second": round(whole, 1)}


def summarize(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    return {"worst_ratio": min(case["ratio"] for case in found.values()), "cases": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bare", choices=tuple(CASES), help="only bare vLLM, in this process")
    arguments = parser.parse_args()
    if arguments.bare:
        case = CASES[arguments.bare]
        overrides = run_overrides(case, case.folder / "prompts.jsonl", arguments.steps)
        print(measure_bare(rlpipe.load_config(overrides), case))
        return
    print(json.dumps(summarize({name: compare(CASES[name], arguments.steps) for name in arguments.cases})))


if __name__ == "__main__":
    main()
