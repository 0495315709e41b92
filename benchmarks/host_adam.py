"""AdamW on the host: torch's fused kernel, which updates chunks, and DeepSpeed's, in elements per second.

Both clip the gradient of one flat tensor and update it, in turns, with all cores. DeepSpeed's kernel is compiled when
it is first used, which takes a minute or more; if that fails the reason is printed, and the ratio, DeepSpeed's over
torch's, is null. Needs no GPU, Ray or vLLM. Run: ``python -m benchmarks.host_adam``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from rlpipe.hardware.calibration import all_cores

NUM_WARM = 2
SCALE = 0.999
"""Factor by which gradients are clipped."""
STATE_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights, gradients and moments: those of ``learner.chunked.state_dtype``."""
Step = Callable[[], object]


def torch_step(weights: nn.Parameter, scale: float) -> Step:
    """Return a step whose kernel scales the gradients itself, through torch's GradScaler interface."""
    optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    optimizer.grad_scale = torch.tensor(1 / scale)
    return optimizer.step


def deepspeed_step(weights: nn.Parameter, scale: float) -> Step:
    """Return a step that scales the gradients before the kernel, which has no scaling of its own."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    wide = weights.dtype is torch.float32
    optimizer = DeepSpeedCPUAdam([weights], lr=1e-6, adamw_mode=True, fp32_optimizer_states=wide)

    def step() -> None:
        assert weights.grad is not None
        weights.grad.mul_(scale)
        optimizer.step()

    return step


SIDES = {"torch": torch_step, "deepspeed": deepspeed_step}


def measure(sides: Mapping[str, Step], num_steps: int) -> dict[str, float]:
    """Return each side's median seconds per step; the sides take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(NUM_WARM + num_steps):
        for name, step in sides.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(found[NUM_WARM:]) for name, found in seconds.items()}


def make_weights(num_elements: int, dtype: torch.dtype) -> nn.Parameter:
    weights = nn.Parameter(torch.zeros(num_elements, dtype=dtype))
    gradient: Tensor = torch.ones_like(weights)
    weights.grad = gradient
    return weights


def make_sides(names: Sequence[str], num_elements: int, dtype: torch.dtype) -> dict[str, Step]:
    """Return the sides of these names that are available."""
    found = {}
    for name in names:
        try:
            found[name] = SIDES[name](make_weights(num_elements, dtype), SCALE)
        except (RuntimeError, ImportError, OSError, AttributeError, AssertionError) as error:
            print(f"{name} is not available: {error}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**26)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    arguments = parser.parse_args(sys.argv[1:])
    line: dict[str, float | None] = {}
    with all_cores():
        for dtype in STATE_DTYPES:
            name = str(dtype).removeprefix("torch.")
            seconds = measure(make_sides(arguments.sides, arguments.elements, dtype), arguments.steps)
            rates = {side: arguments.elements / found / 1e9 for side, found in seconds.items()}
            print(f"{name}, billion elements/s: {rates}", flush=True)
            line |= {f"{side}_{name}": rates.get(side) for side in SIDES}
            both = len(rates) == len(SIDES)
            line[f"ratio_{name}"] = rates["deepspeed"] / rates["torch"] if both else None
    print(json.dumps({key: value if value is None else round(value, 3) for key, value in line.items()}))


if __name__ == "__main__":
    main()
