"""Kernels, compared with the bare work that all of them must do (the roof) and with other libraries, in one run.

Each side takes turns with the roof; on a GPU all sides of a case do. On the CPU, where memory is measured per process,
each side runs in a process of its own. A side that is not installed or fails is named, and its figures are null.
Without a GPU, small shapes show memory and errors only. Run: ``python -m benchmarks.kernels``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels_features, kernels_head, kernels_lora, kernels_rows
from benchmarks.kernels_report import GROUPS, HEADER, NO_GPU, features_lines, lines_of, merge, products_share, summarize

FOLDER = Path("outputs/benchmarks/kernels")
COMPARED = {"head": kernels_head, "rows": kernels_rows, "lora": kernels_lora}
ROOFS = {"head": "gemms", "rows": "copy", "lora": "gemms"}
RANK = 16
MAX_REASON = 300
"""Most characters kept of a process's last line."""
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "tokens": 8192,
        "vocabulary": 151936,
        "hidden": [2048, 4096],
        "chunk_tokens": 1024,
        "roof_chunk_tokens": 4096,
        "dtype": "bfloat16",
        "layer": 4096,
        "sequence": 512,
        "micro_batch_tokens": 16384,
        "turns": 5,
    },
    "cpu": {
        "tokens": 1024,
        "vocabulary": 32768,
        "hidden": [256],
        "chunk_tokens": 256,
        "roof_chunk_tokens": 512,
        "dtype": "float32",
        "layer": 512,
        "sequence": 64,
        "micro_batch_tokens": 4096,
        "turns": 3,
    },
}


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = run_process("machine", {"group": "machine"}, arguments.minutes)
    if "error" in machine:
        raise SystemExit(f"the machine can't be measured: {machine['error']}")
    print(describe(machine), flush=True)
    on_gpu = machine["kind"] == "cuda"
    if not on_gpu:
        print(f"Seconds are {NO_GPU}.", flush=True)
    groups: dict[str, Any] = {}
    for group in arguments.cases:
        groups[group] = run_group(group, arguments, machine)
    print(json.dumps(summarize(machine, groups)))
    ours = [sides.get("rlpipe", {}) for group in COMPARED for sides in groups.get(group, {}).values()]
    sys.exit(any("error" in found for found in ours))


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; on an error, exit with code 2 and one line that says what is wrong."""
    shape = SHAPES["cuda" if torch.cuda.is_available() else "cpu"]
    known = list(dict.fromkeys(name for module in COMPARED.values() for name in module.SIDES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=GROUPS, default=[*GROUPS], help="groups to measure")
    parser.add_argument("--sides", nargs="+", choices=known, default=known, help="sides to compare with the roofs")
    parser.add_argument("--tokens", type=int, default=shape["tokens"])
    parser.add_argument("--vocabulary", type=int, default=shape["vocabulary"])
    parser.add_argument("--hidden", type=int, nargs="+", default=shape["hidden"], help="hidden sizes of the lm_head")
    parser.add_argument("--chunk-tokens", type=int, default=shape["chunk_tokens"], help="learner.logprob_chunk_tokens")
    parser.add_argument("--layer", type=int, default=shape["layer"], help="inputs and outputs of the LoRA layer")
    parser.add_argument("--sequence", type=int, default=shape["sequence"], help="tokens that become one feature vector")
    parser.add_argument("--turns", type=int, default=shape["turns"])
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which a process is stopped")
    arguments = parser.parse_args(given)
    for name in ("tokens", "vocabulary", "chunk_tokens", "layer", "sequence", "turns"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, and must be at least 1")
    arguments.cases = list(dict.fromkeys(arguments.cases))
    arguments.shape = shape
    return arguments


def cases_of(group: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the setup of each case of a group, by name."""
    shape = arguments.shape
    sizes = {"tokens": arguments.tokens, "dtype": shape["dtype"]}
    if group == "head":
        chunks = {"chunk_tokens": arguments.chunk_tokens, "roof_chunk_tokens": shape["roof_chunk_tokens"]}
        return {
            f"{name}-{hidden}": asdict(
                kernels_head.HeadCase(**sizes, **chunks, **options, vocabulary=arguments.vocabulary, hidden=hidden)
            )
            for hidden in arguments.hidden
            for name, options in kernels_head.VARIANTS.items()
        }
    if group == "rows":
        return {
            name: asdict(kernels_rows.RowsCase(**sizes, **options, vocabulary=arguments.vocabulary))
            for name, options in kernels_rows.VARIANTS.items()
        }
    if group == "lora":
        layer = {"inputs": arguments.layer, "outputs": arguments.layer, "rank": RANK}
        return {
            name: asdict(kernels_lora.LoraCase(**sizes, **layer, **options))
            for name, options in kernels_lora.VARIANTS.items()
        }
    if group == "features":
        return kernels_features.make_cases(arguments.sequence, FOLDER / "model", shape["micro_batch_tokens"])
    return {"mask": {}}


def run_group(group: str, arguments: argparse.Namespace, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Run and print a group; return its results by case, or an ``error`` that says why there are none."""
    cases = cases_of(group, arguments)
    setup = {"group": group, "cases": cases, "turns": arguments.turns}
    if group not in COMPARED:
        found = run_process(group, setup, arguments.minutes)
        lines = [f"{group}: {found['error']}"] if "error" in found else []
        if group == "features" and not lines:
            lines = features_lines(found)
        elif not lines:
            lines = [f"mask: {row}" for row in found["mask"]]
        print("\n".join(["", *lines]), flush=True)
        return found
    found = compare_sides(group, setup, arguments, together=machine["kind"] == "cuda")
    print("\n".join(["", *HEADER, *(line for name in found for line in lines_of(name, found[name]))]), flush=True)
    print_products(group, cases, found, machine)
    return found


def compare_sides(
    group: str, setup: Mapping[str, Any], arguments: argparse.Namespace, *, together: bool
) -> dict[str, Any]:
    """Run all sides in one process, then those without a result alone; or, if not ``together``, each alone."""
    roof = ROOFS[group]
    others = [name for name in COMPARED[group].SIDES if name in arguments.sides and name != roof]
    results = [run_process(group, {**setup, "sides": [roof, *others]}, arguments.minutes)] if together else []
    for name in others:
        missing = {
            case: told for case, told in setup["cases"].items() if name not in merge(results, [case], others)[case]
        }
        if not missing:
            continue
        result = run_process(f"{group}-{name}", {**setup, "cases": missing, "sides": [roof, name]}, arguments.minutes)
        reason = result.pop("error", None)
        if reason is not None:
            result = {case: result.get(case, {name: {"error": reason}}) for case in missing}
        results.append(result)
    return merge(results, setup["cases"], [roof, *others])


def run_process(name: str, setup: Mapping[str, Any], minutes: float) -> dict[str, Any]:
    """Run a process and return its results, with an ``error`` if it failed; its output goes to a log."""
    setup_file, result_file = (FOLDER / f"{name}.{kind}.json" for kind in ("setup", "result"))
    setup_file.write_text(json.dumps(setup))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.kernels_process", str(setup_file), str(result_file)]
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    reason = None
    with (FOLDER / f"{name}.log").open("w+") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=60 * minutes, check=False)
            if done.returncode:
                log.seek(0)
                last = next(reversed([line for line in log.read().splitlines() if line.strip()]), "")
                killed = " (usually out of host memory)" if done.returncode == -9 else ""
                reason = f"exit code {done.returncode}{killed}: {last[:MAX_REASON]}"
        except subprocess.TimeoutExpired:
            reason = f"it took more than {minutes:g} minutes"
    found: dict[str, Any] = json.loads(result_file.read_text()) if result_file.exists() else {}
    return found if reason is None else {**found, "error": f"{reason}; see {log.name}"}


def print_products(group: str, cases: Mapping[str, Any], found: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Print how near the roof itself comes to the machine's rates, and store the share of products."""
    for name, sides in found.items():
        seconds = sides.get(ROOFS[group], {}).get("seconds")
        if seconds is None:
            continue
        if group == "rows":
            case = kernels_rows.RowsCase(**cases[name])
            rate = kernels_rows.COPY_ACCESSES * case.logit_bytes / seconds
            share = rate / machine["memory_bandwidth"]
            print(f"{name}: the copy does {rate / 1e9:.4g} GB/s, {share:.0%} of the machine's rate")
            continue
        if group == "head":
            flops, dtype = kernels_head.product_flops(kernels_head.HeadCase(**cases[name])), cases[name]["dtype"]
        else:
            lora = kernels_lora.LoraCase(**cases[name])
            flops, dtype = kernels_lora.product_flops(lora), str(lora.compute_dtype).removeprefix("torch.")
        share = products_share(flops, seconds, machine["matmul_flops"][dtype])
        sides[ROOFS[group]]["matmul_share"] = share
        print(f"{name}: the bare products reach {share:.0%} of the machine's rate of large ones in {dtype}")


def describe(machine: Mapping[str, Any]) -> str:
    tflops = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in machine["matmul_flops"].items())
    bandwidth = machine["memory_bandwidth"] / 1e9
    return f"{machine['hardware']}, torch {machine['torch']}: TFLOP/s {tflops}; a copy does {bandwidth:.4g} GB/s"


if __name__ == "__main__":
    main()
