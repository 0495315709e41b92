"""Optimizers: how they are made, their state in 8 bit, and the updates that a strategy runs.

bitsandbytes' 8-bit moments are codes with a scale for each block of 256 (arXiv:2110.02861). A round trip preserves the
codes, and the scales up to the rounding of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlpipe.configs.schema.learner_config import OptimizerConfig, ScheduleConfig
from rlpipe.weights.dcp import MOMENTS, STEPS, Read, moment_key, weight_key


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make an AdamW optimizer; only matrices decay, because decay has no meaning for norms and biases."""
    trained = list(parameters)
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    undecayed = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.peak_lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    filled = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(filled, **options, fused=True)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    optimizer: torch.optim.Optimizer = (AdamW8bit if config.name == "adamw_8bit" else PagedAdamW8bit)(filled, **options)
    return optimizer


def learning_rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Return the fraction of the peak learning rate for all updates of ``step``, counted from 0, of ``num_steps``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[config.name]
    return config.min_ratio + (1 - config.min_ratio) * shape


def clipping_scale(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of global norm ``norm`` to at most ``max_norm`` (as torch clips)."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


MOMENT_NUMBERS = dict(zip(MOMENTS, ("1", "2"), strict=True))
"""Numbers that bitsandbytes gives AdamW's moments."""
BLOCK = 256


def read_moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the moments and step count from an optimizer's state of one parameter; empty if it has had no update."""
    if "state1" not in state:
        return dict(state)
    moments = {name: _decode(state, number) for name, number in MOMENT_NUMBERS.items()}
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
    for name, number in MOMENT_NUMBERS.items():
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


class TorchUpdates:
    """Updates of parameters by torch's optimizers, whole ones or FSDP2's shards."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        local: Callable[[Tensor], Tensor],
        begin_backward: Callable[[bool], None] | None = None,
    ) -> None:
        """Make the optimizer; ``begin_backward`` is called before each backward pass, with True if it is the last."""
        self._parameters, self._local, self._begin_backward = parameters, local, begin_backward
        # bitsandbytes does not support DTensors: it gets plain parameters that share the memory of their local shards.
        self._updated = {
            name: parameter if config.name == "adamw" else as_plain(parameter, local(parameter))
            for name, parameter in parameters.items()
        }
        self.optimizer = make_optimizer(self._updated.values(), config)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if self._begin_backward is not None:
            self._begin_backward(last)
        loss.backward()

    def squared_norm(self) -> Tensor:
        norms = torch._foreach_norm(self._gradients(), dtype=torch.float32)
        return torch.stack(list(norms)).square().sum()

    def apply(self, scale: float) -> None:
        if scale != 1:
            torch._foreach_mul_(self._gradients(), scale)
        for name, parameter in self._parameters.items():
            updated = self._updated[name]
            # A shard may be empty, as of a head of few rows, and bitsandbytes' kernels take none.
            if updated is not parameter and parameter.grad is not None and updated.numel():
                updated.grad = self._local(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.drop()

    def drop(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [self._local(p.grad) for p in self._parameters.values() if p.grad is not None]

    def state(self) -> dict[str, Tensor]:
        weights = {weight_key(name): parameter.detach() for name, parameter in self._parameters.items()}
        return weights | {
            moment_key(name, key): self._spread(moment, name)
            for name, updated in self._updated.items()
            for key, moment in read_moments(self.optimizer.state.get(updated, {})).items()
        }

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        self.optimizer.state.clear()
        moments: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            keys = [key for key in MOMENTS if moment_key(name, key) in stored]
            if keys:
                empty = {key: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False) for key in keys}
                moments[name] = empty | {STEPS: torch.zeros(())}
        weights = {weight_key(name): parameter.detach() for name, parameter in self._parameters.items()}
        read(weights | {moment_key(name, key): m for name, by_key in moments.items() for key, m in by_key.items()})
        for name, parameter_moments in moments.items():
            updated = self._updated[name]
            is_plain = updated is not self._parameters[name]
            write_moments(
                self.optimizer,
                updated,
                {k: self._local(m) for k, m in parameter_moments.items()} if is_plain else parameter_moments,
            )

    def _spread(self, moment: Tensor, name: str) -> Tensor:
        """Return the moment as a DTensor like its parameter, if the optimizer has only the local shard."""
        parameter = self._parameters[name]
        if (
            self._updated[name] is parameter
            or moment.shape != self._updated[name].shape
            or not isinstance(parameter, DTensor)
        ):
            return moment
        return DTensor.from_local(
            moment, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )


def as_plain(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
    return parameter if local is parameter else nn.Parameter(local.detach())
