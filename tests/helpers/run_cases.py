"""Small configs for whole runs, readers of their output, and ports for their clusters."""

from __future__ import annotations

import json
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft.utils import load_peft_weights

import rlpipe
from rlpipe.configs.schema.root_config import Config
from rlpipe.doctor.diagnosis import diagnose

REWARDS_FILE = Path(__file__).with_name("reward_cases.py")
HOLDS_LOGP_TO = 1e-4
"""The largest allowed difference between the log-probs of engine and learner in fp32."""
SIX_STEPS = (
    "algorithm.num_steps=6",
    "checkpoint.every_steps=2",
    "checkpoint.keep=3",
    f"scoring.rewards.digits.path={REWARDS_FILE}:slow_digits",
)
"""Overrides of a run that can be stopped between two of its checkpoints."""


def run_options(policy: Path, prompts: Path, output: Path, *overrides: str) -> list[str]:
    """Return the options of three steps of four groups of four short completions, with LoRA and one thread each."""
    return [
        f"model.path={policy}",
        "model.dtype=float32",
        "model.adapter.r=4",
        "data.source=jsonl",
        f"data.path={prompts}",
        "data.max_prompt_tokens=32",
        "algorithm.num_steps=3",
        "algorithm.groups_per_step=4",
        "algorithm.group_size=4",
        "rollout.engine=hf",
        "rollout.num_threads=1",
        "rollout.sampling.max_tokens=8",
        f"scoring.rewards.digits.path={REWARDS_FILE}:digits",
        "learner.num_threads=1",
        "learner.optimizer.lr=1e-2",
        "tracking.tensorboard=false",
        "tracking.ray_metrics=false",
        "tracking.progress=plain",
        "cluster.dashboard=false",
        "cluster.schedule_timeout_s=300",
        f"output={output}",
        *overrides,
    ]


def supervised_options(policy: Path, rows: Path, output: Path, *overrides: str) -> list[str]:
    """Write ``rows``, and return the options of sixty short steps of supervised fine-tuning on them."""
    pairs = ((f"{number}+1=", str(number + 1)) for number in range(40))
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    return [
        "algorithm=sft",
        "algorithm.num_steps=60",
        "algorithm.groups_per_step=12",
        f"model.path={policy}",
        "model.dtype=float32",
        "data.source=jsonl",
        f"data.path={rows}",
        "learner.num_threads=1",
        "learner.optimizer.lr=1e-2",
        "checkpoint.every_steps=8",
        "tracking=quiet",
        f"output={output}",
        *overrides,
    ]


def make_config(policy: Path, prompts: Path, output: Path, *overrides: str) -> Config:
    return rlpipe.load_config(run_options(policy, prompts, output, *overrides))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_steps(output: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` that report a trained step, without evaluations."""
    return [row for row in read_jsonl(output / "metrics.jsonl") if "loss" in row]


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_peft_weights(str(folder), device="cpu")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def free_ports(count: int) -> list[int]:
    """Return free ports above those of Ray's workers, and below the ephemeral ports that other tests may use."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with suppress(OSError), socket.socket() as entry:
            entry.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no ports are free")


def diagnosed(output: Path) -> str:
    """Return what `rlpipe doctor RUN` says about how a run ended, and what to do about it."""
    (end,) = [found for found in diagnose(output) if found.subject == "ending"]
    return f"{end.status}: {end.text}; {end.fix}"
