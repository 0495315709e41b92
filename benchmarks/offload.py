"""Training with chunked offload, compared with the machine's limits and the offload of FSDP2 and DeepSpeed.

One GPU with 128 GiB of host memory is enough, without Ray or vLLM; weights are random. Each side of each case runs in a
process of its own. Without a GPU a tiny model shows that it runs. Run: ``python -m benchmarks.offload``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload_cases import CASES, ON_CPU
from benchmarks.offload_report import HEADER, line_of, summarize, write_report

FOLDER = Path("outputs/benchmarks/offload")
BASELINES = ("zero3", "fsdp2")
CPU_SCALE = 0.1
"""Scale of the measurement of a machine without a GPU, whose rates mean little here."""


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = run_side("machine", {"scale": 1.0 if torch.cuda.is_available() else CPU_SCALE}, arguments.minutes)
    if "error" in machine:
        raise SystemExit(f"the machine can't be measured: {machine['error']}")
    print(describe(machine), flush=True)
    print("\n".join(HEADER), flush=True)
    cases: dict[str, dict[str, Any]] = {}
    for name in arguments.cases:
        cases[name] = run_case(name, machine, arguments)
        print(line_of(name, cases[name]), flush=True)
        if arguments.out is not None:  # after each case, in case the run is interrupted
            write_report(arguments.out, machine, cases)
    for name, sides in cases.items():
        for side, reason in reasons(sides).items():
            print(f"{name}, {side}: {reason}")
    print(json.dumps(summarize(machine, cases)))
    sys.exit(any("error" in sides["rlpipe"] for sides in cases.values()))


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; on an error, exit with code 2 and one line that says what is wrong."""
    on_gpu = torch.cuda.is_available()
    default = [name for name in CASES if (name in ON_CPU) != on_gpu]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=default, metavar="CASE", help=f"cases to run: {', '.join(CASES)}"
    )
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=BASELINES, help="no value: rlpipe alone")
    parser.add_argument("--warmup", type=int, default=2, help="updates before the timed ones")
    parser.add_argument("--updates", type=int, default=5, help="timed updates in each process")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which a process is stopped")
    parser.add_argument("--out", type=Path, help="folder for offload.json and offload.md")
    arguments = parser.parse_args(given)
    for name, least in {"warmup": 1, "updates": 1, "minutes": 0.1}.items():
        value = getattr(arguments, name)
        if not value >= least:
            parser.error(f"--{name} is {value}, and must be at least {least}")
    if arguments.out is not None:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {arguments.out} can't be created as a folder: {error.strerror}")
    arguments.cases = list(dict.fromkeys(arguments.cases))
    return arguments


def run_case(name: str, machine: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of each side, or the reason why it has none."""
    case = CASES[name]
    setup = {"warmup": arguments.warmup, "updates": arguments.updates, "case": asdict(case), "machine": machine}
    sides = ["rlpipe", *(arguments.baselines if case.compared else ())]
    found: dict[str, Any] = {"tokens": case.update_tokens}
    for side in sides:
        begin = time.perf_counter()
        found[side] = run_side(side, setup, arguments.minutes, name)
        found[side]["process_s"] = round(time.perf_counter() - begin, 1)  # includes loading
    return found


def run_side(side: str, setup: Mapping[str, Any], minutes: float, case: str = "") -> dict[str, Any]:
    """Run a side and return its result, or an ``error`` that says why there is none; its output goes to a log."""
    stem = FOLDER / "-".join(filter(None, [case, side]))
    files = [stem.with_name(f"{stem.name}.{kind}.json") for kind in ("setup", "result")]
    setup_file, result_file = files
    setup_file.write_text(json.dumps({"side": side, **setup}))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.offload_side", *map(str, files)]
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        # Threads that spin while they wait take cores away from other threads.
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "passive"}
    with stem.with_name(f"{stem.name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=log, env=environment, timeout=60 * minutes, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {minutes:g} minutes; see {log.name}"}
    if result_file.exists():
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result
    return {"error": f"it ended with exit code {code} (-9: usually out of host memory); see {log.name}"}


def reasons(sides: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons of the sides that have no figures."""
    return {
        side: found.get("error") or found["does_not_fit"]
        for side, found in sides.items()
        if isinstance(found, dict) and "seconds" not in found
    }


def giga_by_name(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items())


def describe(machine: Mapping[str, Any]) -> str:
    tflops = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in machine["matmul_flops"].items())
    return (
        f"{machine['hardware']}: to the device {machine['host_to_device'] / 1e9:.1f} GB/s, to the host "
        f"{machine['device_to_host'] / 1e9:.1f}, both at once {machine['both'] / 1e9:.1f} each way; Adam on the host "
        f"({giga_by_name(machine['host_adam'])}) G elements/s, on the device ({giga_by_name(machine['device_adam'])}); "
        f"adding on the host ({giga_by_name(machine['host_adding'])}); TFLOP/s {tflops}"
    )


if __name__ == "__main__":
    main()
