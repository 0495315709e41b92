"""Updates with torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.optimizer import make_optimizer
from rlpipe.learner.strategies.optimizer_state import MOMENTS, STEPS, read_moments, write_moments
from rlpipe.weights.dcp import Read, moment_key, weight_key


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
            if updated is not parameter and parameter.grad is not None:
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
                room = {key: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False) for key in keys}
                moments[name] = room | {STEPS: torch.zeros(())}
        weights = {weight_key(name): parameter.detach() for name, parameter in self._parameters.items()}
        read(weights | {moment_key(name, key): m for name, own in moments.items() for key, m in own.items()})
        for name, own in moments.items():
            updated = self._updated[name]
            plain = updated is not self._parameters[name]
            write_moments(self.optimizer, updated, {k: self._local(m) for k, m in own.items()} if plain else own)

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
