"""Twenty configs whose plans are stored as files.

``python tests/helpers/golden_plans.py`` writes the files again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlpipe.configs.compose import load_config
from rlpipe.hardware.device_profiles import find_device
from rlpipe.plan.report import make_report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "unit" / "plan" / "golden"
NO_RECOMPUTE = "model.gradient_checkpointing=false"
PLANS: dict[str, tuple[str, list[str]]] = {
    "gsm8k": ("h100-80g", ["experiment=gsm8k"]),
    "gsm8k_one_gpu": ("a100-40g", ["experiment=gsm8k", "rollout.num_gpus=0.5", "learner.num_gpus=0.5"]),
    "gsm8k_8gpu": ("h100-80g", ["experiment=gsm8k_8gpu"]),
    "gsm8k_8gpu_zero3": ("a100-80g", ["experiment=gsm8k_8gpu", "learner=zero3_gpu", "learner.num_ranks=4"]),
    "gsm8k_qwen3_8b_lora": ("h100-80g", ["experiment=gsm8k_qwen3_8b_lora"]),
    "gsm8k_qwen3_8b_too_large": ("a100-40g", ["experiment=gsm8k_qwen3_8b_lora"]),
    "full": ("h100-80g", ["experiment=gsm8k", "model=full"]),
    "qlora": ("a100-40g", ["experiment=gsm8k_qwen3_8b_lora", "model=qlora", "model.path=Qwen/Qwen3-8B"]),
    "chunked": ("a100-40g", ["experiment=gsm8k", "model=full", "learner.offload=chunked", NO_RECOMPUTE]),
    "chunked_8b": ("h100-80g", ["experiment=gsm8k_qwen3_8b_lora", "learner.offload=chunked", NO_RECOMPUTE]),
    "tensor_parallel": (
        "a100-80g",
        ["experiment=gsm8k_qwen3_8b_lora", "rollout.tensor_parallel_size=2", "rollout.num_gpus=2"],
    ),
    "no_checkpointing": ("h100-80g", ["experiment=gsm8k", NO_RECOMPUTE]),
    "reference": ("h100-80g", ["experiment=gsm8k", "algorithm.loss.beta=0.05"]),
    "reward_model": ("h100-80g", ["experiment=reward_model"]),
    "judge": ("h100-80g", ["experiment=judge"]),
    "math": ("h100-80g", ["experiment=math"]),
    "code": ("h100-80g", ["experiment=code"]),
    "ebft": ("h100-80g", ["experiment=ebft"]),
    "ebft_strided": ("h100-80g", ["experiment=ebft_strided"]),
    "episodes": ("h100-80g", ["experiment=gsm8k", "environment.path=m:E", "rollout.max_model_len=4096"]),
    "small_gpu": ("rtx3090-24g", ["experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B"]),
}
"""The device and the overrides of each config."""


def make_plan(name: str) -> dict[str, Any]:
    """Return the plan as ``rlpipe plan --json`` prints it."""
    device, overrides = PLANS[name]
    plan: dict[str, Any] = json.loads(
        make_report(load_config(overrides, need_files=False), find_device(device)).to_json()
    )
    return plan


def golden_file(name: str) -> Path:
    return FOLDER / f"{name}.json"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PLANS:
        golden_file(name).write_text(json.dumps(make_plan(name), indent=1) + "\n")
