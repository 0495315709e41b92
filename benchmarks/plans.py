"""Plans of a learner, compared with what it takes: memory of the device and seconds of a step.

Random models of real shapes are trained by the learner itself, on sequences of full length, each case in a process of
its own. Needs no Ray and no engine. Without a GPU a tiny model shows that it runs. Run: ``python -m benchmarks.plans``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed

from benchmarks.offload_cases import LLAMA_1B, TINY, Shape
from benchmarks.update_times import measure_updates
from rlpipe.common.formatting import MIB
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.packing import pack_step
from rlpipe.hardware.calibration import measured_device
from rlpipe.learner.policy import describe_policy, load_policy
from rlpipe.learner.step import Learner
from rlpipe.learner.workload import full_rollouts, read_workload
from rlpipe.models.loading import with_dtype
from rlpipe.plan.learner_estimate import LearnerEstimate, TraceCache
from rlpipe.plan.learner_memory import plain_memory

FOLDER = Path("outputs/benchmarks/plans")
QWEN_600M = Shape(
    hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128, vocabulary=151936, tied=True
)
QWEN_1700M = Shape(
    hidden=2048, intermediate=6144, layers=28, heads=16, kv_heads=8, head_dim=128, vocabulary=151936, tied=True
)
SHAPES = {"tiny": TINY, "0.6b": QWEN_600M, "1.7b": QWEN_1700M, "llama-1b": LLAMA_1B}


@dataclass(kw_only=True, frozen=True)
class Case:
    shape: str
    overrides: tuple[str, ...] = ()


CHECKPOINTING, FULL = "model.gradient_checkpointing=true", "model.adapter.kind=none"
LORA_8K = ("learner.max_tokens_per_microbatch=8192",)
CASES = {
    "tiny": Case(shape="tiny", overrides=("data.max_prompt_tokens=64", "rollout.sampling.max_tokens=64")),
    "0.6b-lora": Case(shape="0.6b", overrides=LORA_8K),
    "0.6b-full": Case(shape="0.6b", overrides=(*LORA_8K, FULL)),
    "0.6b-full-checkpointing": Case(shape="0.6b", overrides=(FULL, CHECKPOINTING)),
    "1.7b-lora": Case(shape="1.7b", overrides=LORA_8K),
    "1.7b-lora-checkpointing": Case(shape="1.7b", overrides=(CHECKPOINTING,)),
    "1.7b-full-checkpointing": Case(shape="1.7b", overrides=(FULL, CHECKPOINTING)),
    "1.7b-full-kl": Case(shape="1.7b", overrides=(FULL, CHECKPOINTING, "algorithm.loss.beta=0.01")),
    "1.7b-full-chunked": Case(
        shape="1.7b", overrides=(FULL, "learner.offload=chunked", "learner.chunked.device_memory_gib=16")
    ),
    "llama-1b-qlora": Case(shape="llama-1b", overrides=(CHECKPOINTING, "model.adapter.kind=qlora")),
}
COMMON = (
    "name=plans",
    "data.path=prompts.jsonl",
    "data.max_prompt_tokens=512",
    "rollout.sampling.max_tokens=512",
    "algorithm.groups_per_step=8",
    "algorithm.group_size=8",
    "learner.max_tokens_per_microbatch=16384",
)


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    if arguments.alone is not None:
        print(json.dumps(run_case(CASES[arguments.alone], arguments)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = measured_device(device)  # measured once, for all cases
    print(f"{'case':26} {'MiB':>9} {'predicted':>9} {'error':>6}   {'s':>8} {'predicted':>9} {'error':>6}", flush=True)
    found = {name: run_alone(name, arguments) for name in arguments.cases}
    measured = [entry for entry in found.values() if "error" not in entry]
    worst = {
        name: max((entry[name] for entry in measured), key=abs, default=None) for name in ("memory_error", "time_error")
    }
    print(json.dumps({"machine": machine.hardware, **worst, "cases": found}))
    sys.exit(len(measured) < len(found))


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    default = [name for name in CASES if (name == "tiny") != torch.cuda.is_available()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=default, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes after which a case is stopped")
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def run_alone(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own, print its line and return its figures, or the ``error`` that ended it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER / f"{name}.log"
    options = ["--alone", name, "--warmup", str(arguments.warmup), "--steps", str(arguments.steps)]
    command = [sys.executable, "-m", "benchmarks.plans", *options]
    try:
        with log.open("w") as errors:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=60 * arguments.minutes, check=False
            )
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {arguments.minutes:g} minutes; see {log}"}
    if done.returncode:
        last = next(iter(reversed(log.read_text().strip().splitlines())), "")
        print(f"{name:26} {last}", flush=True)
        return {"error": f"exit code {done.returncode}: {last}; see {log}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    memory, seconds = found["measured"]["peak_bytes"], found["measured"]["seconds"]
    print(
        f"{name:26} {memory / MIB:9.0f} {found['predicted_bytes'] / MIB:9.0f} {found['memory_error']:6.1%}   "
        f"{seconds:8.3f} {found['predicted_s']:9.3f} {found['time_error']:6.1%}",
        flush=True,
    )
    return found


def run_case(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = make_model(case.shape)
    return compare(config_of(case, folder, on_gpu=device.type == "cuda"), device, arguments)


def config_of(case: Case, folder: Path, *, on_gpu: bool) -> Config:
    learner = ["learner=single_gpu"] if on_gpu else []
    return load_config([*learner, *COMMON, f"model.path={folder}", *case.overrides], need_files=False)


def compare(config: Config, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan a learner and train it; return both figures, and the errors (predicted - measured) / measured."""
    config = replace(config, model=with_dtype(config.model, device))
    drafts = TraceCache(describe_policy(config.model), measured_device(device))
    plan = LearnerEstimate(config=config, drafts=drafts, engines=None)
    if plan.problem is not None:
        raise SystemExit(f"it does not fit: {plan.problem}")
    assert plan.memory is not None
    policy = load_policy(config.model, config.learner, device, workload=read_workload(config))
    learner = Learner(policy, config.learner, config.algorithm)
    limit, rollouts = config.learner.max_tokens_per_microbatch, [*full_rollouts(config)]

    def update(number: int) -> None:
        (batch,) = pack_step(rollouts, step=number, num_ranks=1, max_tokens=limit)
        learner.train_step(batch)

    measured = measure_updates(update, device, warmup=arguments.warmup, updates=arguments.steps)
    predicted, taken = memory_of_row(plan), measured.peak_bytes or measured.host_bytes
    return {
        "predicted_bytes": predicted,
        "planned": asdict(plan.memory.device),
        "predicted_s": plan.time.seconds,
        "predicted_parts_s": asdict(plan.time),
        "measured": {**asdict(measured), "peak_bytes": taken},
        "memory_error": predicted / taken - 1,
        "time_error": plan.time.seconds / measured.seconds - 1,
        "decision": plan.description,
    }


def memory_of_row(plan: LearnerEstimate) -> int:
    """Return the predicted device bytes for the rows that are run; a plan itself counts with no shared prompts."""
    if plan.decision is not None:  # its schedule is chosen for full rows
        assert plan.memory is not None
        return plan.memory.device.total
    trace = plan.drafts.trace(plan.config, plan.work.row)
    return plain_memory(plan.policy, trace.profiles(), trace.shared_bytes, plan.config, plan.copy).device.total


def make_model(name: str) -> Path:
    """Make a random model of the shape in a folder, unless it is there."""
    folder, shape = FOLDER / name, SHAPES[name]
    if not (folder / "config.json").exists():
        set_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
