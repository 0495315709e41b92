"""Milliseconds that ``passes_tests`` takes for a program that does nothing, in its sandbox.

Beside it: the start of a bare Python process, and a direct call. Run: ``python -m benchmarks.programs``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.scoring.code_execution import passes_tests
from rlpipe.scoring.sandbox.sandbox import Sandbox

PROGRAM, TEST = "def f(x): return x + 1", "assert f(1) == 2"
PATH = "rlpipe.scoring.code_execution:passes_tests"


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median duration of ``work``."""
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        durations.append(1000 * (time.perf_counter() - started))
    return median(durations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    sandbox = Sandbox({"tests": RewardConfig(path=PATH, isolation="sandbox", timeout_s=60, memory_gb=1)})

    def sandboxed() -> None:
        arguments = {"completions": [PROGRAM], "tests": [[TEST]]}
        assert sandbox.call("tests", arguments, 1).values == [1.0]

    sandboxed()
    result = {
        "python_ms": milliseconds(lambda: subprocess.run([sys.executable, "-I", "-c", ""], check=True), repeats),
        "direct_ms": milliseconds(lambda: passes_tests([PROGRAM], [[TEST]]), repeats),
        "sandbox_ms": milliseconds(sandboxed, repeats),
    }
    sandbox.close()
    result["overhead_ms"] = result["sandbox_ms"] - result["python_ms"]
    for name, value in result.items():
        print(f"{name:<12} {value:7.1f}")
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
