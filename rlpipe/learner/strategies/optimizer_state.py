"""An optimizer's state of a parameter, read and written in float32, so that any other optimizer can continue with it.

bitsandbytes' 8-bit moments are codes with a scale for each block of 256 (arXiv:2110.02861). A round trip preserves the
codes, and the scales up to the rounding of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

STEPS = "step"
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""AdamW's moments, with the numbers that bitsandbytes gives them."""
BLOCK = 256


def read_moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the moments and step count from an optimizer's state of one parameter; empty if it has had no update."""
    if "state1" not in state:
        return dict(state)
    moments = {name: _decode(state, number) for name, number in MOMENTS.items()}
    return moments | {STEPS: torch.tensor(float(state[STEPS]))}


def write_moments(optimizer: torch.optim.Optimizer, parameter: Tensor, moments: dict[str, Tensor]) -> None:
    """Set an optimizer's state of one of its parameters; torch's optimizers keep the given tensors themselves."""
    make_state = getattr(optimizer, "init_state", None)
    if make_state is None:
        # Fused kernels read the step count on the device, too.
        optimizer.state[parameter] = moments | {STEPS: moments[STEPS].to(parameter.device)}
        return
    make_state(optimizer.param_groups[0], parameter, 0, 0)  # the options that it looks up are equal in all groups
    state = optimizer.state[parameter]
    state[STEPS] = int(moments[STEPS])
    for name, number in MOMENTS.items():
        _encode(state, number, moments[name])


def _decode(state: Mapping[str, Any], number: str) -> Tensor:
    codes: Tensor = state[f"state{number}"]
    if codes.dtype is not torch.uint8:  # small parameters have moments in float32
        return codes
    from bitsandbytes.functional import dequantize_blockwise

    scales, code = state[f"absmax{number}"], state[f"qmap{number}"]
    if scales.is_cuda:  # paged codes are used by the GPU, though torch sees a CPU tensor
        torch.cuda.synchronize(scales.device)
    return cast(Tensor, dequantize_blockwise(codes.to(scales.device), absmax=scales, code=code, blocksize=BLOCK))


def _encode(state: dict[str, Any], number: str, moment: Tensor) -> None:
    codes: Tensor = state[f"state{number}"]
    if codes.dtype is not torch.uint8:
        codes.copy_(moment)
        return
    table: Tensor = state[f"qmap{number}"]  # ascending, up to 1
    flat = moment.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.amax(1)
    if table[0] < 0:  # its least is above -1: bitsandbytes' own scale would shrink blocks whose extreme is negative
        scales = torch.maximum(scales, blocks.amin(1) / table[0])
    middles = (table[1:] + table[:-1]) / 2
    nearest = torch.bucketize(blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)[:, None], middles)
    codes.copy_(nearest.flatten()[: len(flat)].view_as(codes))
    state[f"absmax{number}"].copy_(scales)
