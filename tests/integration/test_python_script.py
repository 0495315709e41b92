"""A script for TRL's GRPO trainer, with its own reward and rows, which runs with rlpipe after the call is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_cases import read_jsonl, trained_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCRIPT = """
import re
import sys

from datasets import Dataset
{imports}

policy, output = sys.argv[1:]
rows = [
    {{
        "prompt": [
            {{"role": "system", "content": "Answer with a number."}},
            {{"role": "user", "content": f"{{first}}+{{second}}="}},
        ],
        "answer": first + second,
    }}
    for first in range(4)
    for second in range(4)
]
dataset = Dataset.from_list(rows)


def correct(prompts, completions, answer, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if str(right) in content else 0.0 for content, right in zip(contents, answer)]


def digits(completions, **kwargs):
    return [len(re.findall("[0-9]", completion[0]["content"])) / 10 for completion in completions]


if __name__ == "__main__":
{call}
"""

TRL_IMPORTS = "from trl import GRPOConfig, GRPOTrainer"
TRL_CALL = """
    args = GRPOConfig(
        output_dir=output, max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8,
        use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
    )
    trainer = GRPOTrainer(model=policy, reward_funcs=[correct, digits], args=args, train_dataset=dataset)
    trainer.train()
"""
RLPIPE_IMPORTS = "import rlpipe"
RLPIPE_CALL = """
    options = {
        "output": output, "algorithm.num_steps": 2, "algorithm.group_size": 4, "algorithm.groups_per_step": 2,
        "rollout.sampling.max_tokens": 8, "data.max_prompt_tokens": 256, "rollout.engine": "hf",
        "model.dtype": "float32",
    }
    summary = rlpipe.train(options, [correct, digits], model=policy, dataset=dataset)
    assert summary["steps"] == 2
"""


def run(script: Path, code: str, *arguments: Path) -> None:
    script.write_text(code)
    ended = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_script_for_trl_runs_after_its_import_and_its_call_are_changed(tiny_policy: Path, tmp_path: Path) -> None:
    run(tmp_path / "with_trl.py", SCRIPT.format(imports=TRL_IMPORTS, call=TRL_CALL), tiny_policy, tmp_path / "trl")
    run(tmp_path / "own.py", SCRIPT.format(imports=RLPIPE_IMPORTS, call=RLPIPE_CALL), tiny_policy, tmp_path / "own")
    steps = trained_steps(tmp_path / "own")
    assert [step["step"] for step in steps] == [1, 2]
    assert {"rewards/correct/mean", "rewards/digits/mean"} <= steps[0].keys()
    first = read_jsonl(tmp_path / "own" / "completions.jsonl")[0]
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert set(first["rewards"]) == {"correct", "digits"}
