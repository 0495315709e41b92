"""Tests that Triton compiles the kernels for absent GPUs, because the other tests' interpreter accepts more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills_and_wait_for_memory_alone(capability: int) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels_compiled", "--capability", str(capability)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["kernels"]
    kinds = {(row["kernel"], row["logits"], row["changed"]) for row in rows}
    assert kinds == set(product(("statistics", "gradient"), ("bf16", "fp16", "fp32"), (False, True)))
    for row in rows:
        assert row["spilled_bytes"] == 0, row
        # Only the fused lm_head changes logits, which are in float32; other logits are used as they are.
        if row["logits"] == "fp32" or not row["changed"]:
            assert row["issue_over_memory"] < 1, row
