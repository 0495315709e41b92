"""One side of ``benchmarks.offload`` in a process of its own, so that its memory is separate and it may fail alone.

Run: ``python -m benchmarks.offload_side setup.json result.json``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload_baselines import run_fsdp2, run_zero3
from benchmarks.offload_cases import Case
from benchmarks.offload_chunked import run_chunked
from rlpipe.hardware.calibration import measure
from rlpipe.hardware.device import Device
from rlpipe.offload.planner.search import DoesNotFit

BASELINES = {"zero3": run_zero3, "fsdp2": run_fsdp2}


def run_side(setup: dict[str, Any]) -> dict[str, Any]:
    """Run a side: ``machine``, which measures the machine, ``rlpipe``, or one of ``BASELINES``."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if setup["side"] == "machine":
        return asdict(measure(device, name="benchmark", scale=setup["scale"]))
    case, counts = Case.of(setup["case"]), {"warmup": setup["warmup"], "updates": setup["updates"]}
    if setup["side"] != "rlpipe":
        return asdict(BASELINES[setup["side"]](case, device, **counts))
    try:
        return run_chunked(case, Device(**setup["machine"]), device, **counts)
    except DoesNotFit as error:
        return {"does_not_fit": str(error)}


def main() -> None:
    setup_file, result_file = map(Path, sys.argv[1:])
    try:
        result = run_side(json.loads(setup_file.read_text()))
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        result_file.write_text(json.dumps({"error": f"{type(error).__name__}: {first}"}))
        raise
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
