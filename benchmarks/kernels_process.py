"""One group of ``benchmarks.kernels`` in a process of its own, so that its memory is separate and it may fail alone.

Run: ``python -m benchmarks.kernels_process setup.json result.json``. Results are written after each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak_memory import return_what_is_freed
from rlpipe.hardware.calibration import all_cores, hardware_name, matmul_flops, memory_bandwidth

CPU_SCALE = 0.2
"""Scale of the measurement of a machine without a GPU, whose rates mean little here."""
Found = dict[str, dict[str, Any]]


def run_machine(device: torch.device) -> dict[str, Any]:
    scale = 1.0 if device.type == "cuda" else CPU_SCALE
    return {
        "kind": device.type,
        "hardware": hardware_name(device),
        "torch": torch.__version__,
        "matmul_flops": matmul_flops(device, scale=scale),
        "memory_bandwidth": memory_bandwidth(device, scale=scale),
    }


def run_cases(setup: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Any]]:
    """Yield the name and the results of each case when it is done."""
    turns = setup["turns"]
    if setup["group"] == "features":
        from benchmarks import kernels_features

        yield from kernels_features.measure(setup["cases"], turns, device).items()
    elif setup["group"] == "mask":
        from benchmarks.kernels_mask import measure_mask

        yield "mask", measure_mask(device)
    else:
        yield from run_comparisons(setup, device)


def run_comparisons(setup: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Found]]:
    from benchmarks import kernels_head, kernels_lora, kernels_rows
    from benchmarks.kernels_turns import measure_in_turns

    for name, case in setup["cases"].items():
        if setup["group"] == "head":
            comparison = kernels_head.compare(kernels_head.HeadCase(**case), setup["sides"], device)
        elif setup["group"] == "rows":
            comparison = kernels_rows.compare(kernels_rows.RowsCase(**case), setup["sides"], device)
        else:
            comparison = kernels_lora.compare(kernels_lora.LoraCase(**case), setup["sides"], device)
        yield name, measure_in_turns(comparison, setup["turns"], device)
        del comparison
        torch.compiler.reset()  # because one function is compiled only a limited number of times
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    setup_file, result_file = map(Path, sys.argv[1:])
    setup = json.loads(setup_file.read_text())
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return_what_is_freed()
    found: dict[str, Any] = {}
    with all_cores():
        if setup["group"] == "machine":
            result_file.write_text(json.dumps(run_machine(device)))
            return
        for name, result in run_cases(setup, device):
            found[name] = result
            result_file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
