"""Settings of vLLM on a CPU: block size, threads, and eager or compiled, for policies of 1.6M, 60M and 135M parameters.

Each setting is measured in a process of its own, which samples the same batches through rlpipe's engine: 8 prompts with
8 answers each, of a fixed length. Ratios are tokens per second over those of rlpipe's own settings, with one thread, in
the same run. Run: ``python -m benchmarks.cpu_engine``; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rlpipe
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig, SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.quickstart import fetch_smollm2
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.types import GroupRequest, Prompt

FOLDER = Path("outputs/benchmarks/cpu_engine").absolute()
NUM_PROMPTS, GROUP_SIZE = 8, 8
OWN = "own settings"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    OWN: {},
    "blocks of 64": {"engine_args": {"block_size": 64}},
    "blocks of 128": {"engine_args": {"block_size": 128}},
    "two threads": {"num_threads": 2},
    "compiled": {"engine_args": {"enforce_eager": False}},
}


@dataclass(kw_only=True, frozen=True)
class Policy:
    """A model, with typical lengths of its prompts and answers."""

    name: str
    prompt_tokens: int
    answer_tokens: int

    @property
    def path(self) -> Path:
        return FOLDER / self.name


POLICIES = [
    Policy(name="1.6M", prompt_tokens=12, answer_tokens=6),
    Policy(name="60M", prompt_tokens=64, answer_tokens=64),
    Policy(name="135M", prompt_tokens=45, answer_tokens=24),
]


def make(policy: Policy) -> None:
    """Make the model, unless it exists already."""
    if policy.path.exists():
        return
    if policy.name == "1.6M":
        make_tiny_policy(policy.path, num_layers=2)
    elif policy.name == "60M":
        make_tiny_policy(
            policy.path, hidden_size=640, num_layers=10, num_heads=10, num_kv_heads=5, intermediate_size=2560
        )
    else:
        fetch_smollm2(rlpipe.load_config(["experiment=smollm2", f"model.path={policy.path}"]))


def measure(policy: Policy, setting: str, num_batches: int) -> dict[str, float]:
    """Return the seconds of the start, and the tokens per second of the batches, measured in this process."""
    options = {"num_threads": 1, **SETTINGS[setting]}
    # Answers of a fixed length, so that the time does not depend on what the model writes.
    sampling = SamplingConfig(max_tokens=policy.answer_tokens, extra={"ignore_eos": True})
    rollout = RolloutConfig(engine="vllm", sampling=sampling, **options)
    model = ModelConfig(path=str(policy.path), dtype="float32")
    begin = time.perf_counter()
    engine = open_engine("engine", model, rollout, WeightsConfig(), max_prompt_tokens=policy.prompt_tokens)
    started = time.perf_counter()
    seconds = [_sample(engine, requests) for requests in _batches(policy, num_batches + 1)]
    engine.stop()
    tokens = NUM_PROMPTS * GROUP_SIZE * policy.answer_tokens
    return {"start_s": started - begin, "tokens_per_second": tokens / statistics.median(seconds[1:])}


def _batches(policy: Policy, count: int) -> Iterator[list[GroupRequest]]:
    random = np.random.default_rng(0)
    for batch in range(count):
        ids = [batch * NUM_PROMPTS + index for index in range(NUM_PROMPTS)]
        yield [
            _request(policy, random.integers(10, 100, policy.prompt_tokens, dtype=np.int32), number) for number in ids
        ]


def _request(policy: Policy, token_ids: np.ndarray, number: int) -> GroupRequest:
    prompt = Prompt(prompt_id=number, epoch=0, token_ids=token_ids, prompt="", task={})
    return GroupRequest(
        group_id=number,
        prompt=prompt,
        group_size=GROUP_SIZE,
        max_tokens=policy.answer_tokens,
        temperature=1.0,
        seed=number,
    )


def _sample(engine: Engine, requests: Sequence[GroupRequest]) -> float:
    begin = time.perf_counter()
    engine.submit(requests)
    while engine.has_work:
        for group in engine.step():
            assert group.failure is None, group.failure
    return time.perf_counter() - begin


def run_apart(policy: Policy, setting: str, num_batches: int) -> dict[str, float]:
    """Run ``measure`` in a process of its own, because an engine that ends takes others in its process with it."""
    command = [sys.executable, "-m", "benchmarks.cpu_engine", "--only", policy.name, setting]
    done = subprocess.run([*command, "--batches", str(num_batches)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{policy.name}, {setting} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(policy: Policy, num_batches: int) -> dict[str, float]:
    """Return the ratio of each setting."""
    make(policy)
    found = {}
    for setting in SETTINGS:
        found[setting] = run_apart(policy, setting, num_batches)
        print(
            f"{policy.name}, {setting}: {found[setting]['tokens_per_second']:,.0f} tokens/s, "
            f"start {found[setting]['start_s']:.1f} s",
            flush=True,
        )
    own = found[OWN]["tokens_per_second"]
    return {setting: round(each["tokens_per_second"] / own, 3) for setting, each in found.items() if setting != OWN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [policy.name for policy in POLICIES]
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--only", nargs=2, metavar=("POLICY", "SETTING"), help="only this measurement, in this process")
    arguments = parser.parse_args()
    by_name = {policy.name: policy for policy in POLICIES}
    if arguments.only:
        name, setting = arguments.only
        print(json.dumps(measure(by_name[name], setting, arguments.batches)))
        return
    ratios = {name: compare(by_name[name], arguments.batches) for name in arguments.policies}
    print(json.dumps({"ratios": ratios}))


if __name__ == "__main__":
    main()
