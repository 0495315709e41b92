"""Triton's compilation of the rows kernels for a GPU that need not be present: registers, spills, and instructions.

Instructions per element bound the time from below, as bytes do: if issuing them takes less time than reading the
bytes, only memory limits the kernel. Needs Triton, but no GPU. Run: ``python -m benchmarks.kernels_compiled``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is loaded

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlpipe.kernels import primitives, softmax

POINTERS = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Dtypes of logits, and their bytes."""
KERNELS: dict[str, tuple[Any, dict[str, bool], int]] = {
    "statistics": (softmax._stats_kernel, {"WITH_ENTROPY": True}, 1),
    "gradient": (softmax._gradient_kernel, {"OF_LOGPROBS": True, "OF_ENTROPY": True}, 2),
}
"""Kernels by name, each with its options and the number of reads and writes per logit."""
NUMBERS = {"factor", "scale", "softcap"}
COUNTS = {"num_rows", "num_columns", "first_column", "row_stride", "out_stride"}
ALIGNED = {"num_columns", "row_stride", "out_stride"}
"""Arguments that are multiples of 16, as for most vocabularies."""
LOGITS = {"logits", "bias", "out"}
H100 = {"capability": 90, "lanes": 132 * 4 * 32, "hertz": 1.755e9, "bytes_per_s": 3.35e12}
"""Data sheet values of an H100 SXM: lanes that issue per cycle, boost clock, and memory bandwidth."""
LABEL, BRANCH = re.compile(r"^(\.L_x_\d+):"), re.compile(r"BRA `\((\.L_x_\d+)\)")


def compile_kernel(name: str, pointer: str, *, changed: bool, capability: int) -> Any:
    """Compile a kernel; ``changed`` logits have a bias, a cap, and a temperature per row."""
    kernel, options, _ = KERNELS[name]
    constants = {
        **dict.fromkeys(("BIASED", "CAPPED", "PER_ROW"), changed),
        "IGNORED": primitives.IGNORED,
        "BLOCK": primitives.BLOCK,
        **options,
    }
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in NUMBERS:
            signature[argument] = "fp32"
        elif argument in COUNTS:
            signature[argument] = "i32"
        else:
            signature[argument] = "*" + ({"targets": "i64"} | dict.fromkeys(LOGITS, pointer)).get(argument, "fp32")
        if signature[argument].startswith("*") or argument in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": primitives.NUM_WARPS})


def inspect(compiled: Any) -> dict[str, int]:
    """Return registers per thread, spilled bytes, and instructions: of the longest loop, or all if there is none."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        listing = _run(tools / "nvdisasm", "-c", file.name).splitlines()
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    lengths = [*_loops(listing)] or [sum(map(_is_instruction, listing))]
    return {"registers": int(found[1]), "spilled_bytes": int(found[2]), "instructions": max(lengths)}


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def _is_instruction(line: str) -> bool:
    return ";" in line and "NOP" not in line


def _loops(listing: list[str]) -> Iterator[int]:
    """Yield the number of instructions in each backward branch, except a program's final branch to itself."""
    labels: dict[str, int] = {}
    for index, line in enumerate(listing):
        if label := LABEL.match(line):
            labels[label[1]] = index
        elif (branch := BRANCH.search(line)) and branch[1] in labels:
            length = sum(map(_is_instruction, listing[labels[branch[1]] : index + 1]))
            if length > 1:
                yield length


def describe(name: str, pointer: str, *, changed: bool, capability: int) -> dict[str, Any]:
    """Describe a compiled kernel, with the ratio of its issue time per element to its memory time on an H100."""
    found = inspect(compile_kernel(name, pointer, changed=changed, capability=capability))
    elements = primitives.BLOCK // (32 * primitives.NUM_WARPS)
    per_element = found["instructions"] / elements
    num_bytes = KERNELS[name][2] * POINTERS[pointer]
    issued_s, moved_s = per_element / (H100["lanes"] * H100["hertz"]), num_bytes / H100["bytes_per_s"]
    return {
        "kernel": name,
        "logits": pointer,
        "changed": changed,
        "registers": found["registers"],
        "spilled_bytes": found["spilled_bytes"],
        "instructions_per_element": round(per_element, 1),
        "issue_over_memory": round(issued_s / moved_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=H100["capability"], help="compute capability; 90 means 9.0")
    arguments = parser.parse_args(sys.argv[1:])
    rows = [
        describe(name, pointer, changed=changed, capability=arguments.capability)
        for name in KERNELS
        for pointer in POINTERS
        for changed in (False, True)
    ]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print(json.dumps({"triton": triton.__version__, "capability": arguments.capability, "kernels": rows}))


if __name__ == "__main__":
    main()
