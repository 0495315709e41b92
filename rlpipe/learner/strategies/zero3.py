"""Sharding of the policy with DeepSpeed's ZeRO-3, with optimizer and parameters optionally on the CPU.

DeepSpeed keeps each rank's parts of all trained parameters concatenated in flat float32 tensors, which the optimizer
updates; the parameters themselves are empty except while a module runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig, Zero3Config
from rlpipe.learner.adapter_layers import FusedLora
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.strategies.operator_builds import free_abandoned_builds
from rlpipe.learner.strategies.optimizer import make_optimizer, read_moments, write_moments
from rlpipe.learner.strategies.sharding import RankGroup, Updates
from rlpipe.weights.dcp import MOMENTS, STEPS, Read, moment_key, weight_key


class Zero3(RankGroup):
    """A group of ranks that holds models sharded by ZeRO-3; needs torch's default process group."""

    def __init__(self, config: Zero3Config, device: torch.device) -> None:
        super().__init__(device)
        self._config = config
        self._trained: LogprobModel | None = None
        self._engines: list[Any] = []
        free_abandoned_builds()
        deepspeed.init_distributed(dist_init_required=False)

    def shard(self, module: LogprobModel, *, trained: bool) -> None:
        """Shard a model that is not trained; ``make_updates`` shards the trained one once it has an optimizer."""
        if trained:
            self._trained = module
        else:
            # A copy that moves is float32, and autocast narrows it: bfloat16 would round small moves away.
            settings = self._settings(is_narrow=next(module.parameters()).dtype is torch.bfloat16)
            # Small parameters, too, are gathered from their parts for each use, because ``move`` may change the parts.
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            self._spread(module, settings)
            self._engines += deepspeed.initialize(model=module, config=settings)[:1]

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        assert self._trained is not None, "shard() comes first"
        optimizer = make_optimizer(parameters.values(), config)  # it looks at shapes, which sharded parameters lack
        is_narrow = self._trained.compute_dtype is torch.bfloat16
        for parameter in self._trained.parameters() if is_narrow else ():
            parameter.data = parameter.data.to(torch.bfloat16)
        settings = self._settings(is_narrow=is_narrow)
        self._spread(self._trained, settings)
        engine, *_ = deepspeed.initialize(model=self._trained, optimizer=optimizer, config=settings)
        return Zero3Updates(engine, parameters, self)

    def _spread(self, module: LogprobModel, settings: dict[str, Any]) -> None:
        """Shard a model one parameter at a time; DeepSpeed's engine would first move all of them to the device."""
        deepspeed.zero.Init(module=module, config_dict_or_path=settings, mem_efficient_linear=False)
        for layer in module.modules():
            if isinstance(layer, FusedLora):  # it reads the weights of its parts without calling them
                for parameter in layer.parameters():
                    deepspeed.zero.register_external_parameter(layer, parameter)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.device)

    def _settings(self, *, is_narrow: bool) -> dict[str, Any]:
        offload = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        stage: dict[str, Any] = {"stage": 3, "overlap_comm": self.device.type == "cuda"}
        if self._config.offload_optimizer:
            stage["offload_optimizer"] = offload
        if self._config.offload_parameters:
            stage["offload_param"] = offload
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 2**31,
            "gradient_clipping": 0.0,  # the learner clips; DeepSpeed would clip again, to 1
            "bf16": {"enabled": is_narrow},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": stage,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        tensors = {}
        for index, (name, parameter) in enumerate(parameters.items()):
            tensor = self.full(parameter)
            if index % self.num_ranks == self.rank:
                tensors[name] = tensor.cpu()
        return tensors

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        for name, parameter in parameters.items():
            tensor = torch.empty(_shape(parameter), dtype=parameter.dtype)
            read({name: tensor})
            self.local(parameter).copy_(_shard_of(tensor, parameter, self.rank, self.num_ranks))

    def end_inference(self, module: LogprobModel) -> None:
        pass

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        current = self.local(parameter)
        policy = safe_get_local_fp32_param(towards) if towards.requires_grad else self.local(towards)
        current.lerp_(policy.to(current), by)

    def shape(self, tensor: Tensor) -> torch.Size:
        return torch.Size(getattr(tensor, "ds_shape", tensor.shape))

    def local(self, tensor: Tensor) -> Tensor:
        return cast(Tensor, getattr(tensor, "ds_tensor", tensor))

    def full(self, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "ds_id"):
            return tensor
        if tensor.requires_grad:
            return cast(Tensor, safe_get_full_fp32_param(tensor))
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()


class Zero3Updates:
    """Updates by DeepSpeed's engine, without its averaging over ranks, and with several backward passes per update."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], ranks: RankGroup) -> None:
        self._engine, self._parameters = engine, parameters
        self._rank, self._num_ranks, self._device = ranks.rank, ranks.num_ranks, ranks.device

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.optimizer.clear_backward_seen_flag()
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._num_ranks, scale_wrt_gas=False)

    def squared_norm(self) -> Tensor:
        norms = torch._foreach_norm(self._gradients(), dtype=torch.float32)
        return torch.stack(list(norms)).square().sum()

    def _gradients(self) -> list[Tensor]:
        return [safe_get_local_grad(parameter) for parameter in self._parameters.values()]

    def apply(self, scale: float) -> None:
        if scale != 1:
            for parameter in self._parameters.values():
                safe_set_local_grad(parameter, safe_get_local_grad(parameter) * scale)
        self._engine.step()

    def drop(self) -> None:
        self._engine.optimizer.zero_grad()
        self._engine.optimizer.reset_cpu_buffers()

    def state(self) -> dict[str, Tensor]:
        """Return whole tensors, those of each parameter on one rank, the ranks taking turns."""
        tensors = {}
        moments = {group: read_moments(state) for group, state in self._flat_states().items()}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            group, offset, size = self._position(parameter)
            flat_moments = moments.get(group, {})
            shards = {weight_key(name): safe_get_local_fp32_param(parameter)}
            shards |= {
                moment_key(name, key): flat_moments[key].narrow(0, offset, size)
                for key in MOMENTS
                if key in flat_moments
            }
            is_owner = index % self._num_ranks == self._rank
            for key, shard in shards.items():
                tensor = self._gather(shard, parameter)
                if is_owner:
                    tensors[key] = tensor.cpu()
            if is_owner and flat_moments:
                tensors[moment_key(name, STEPS)] = flat_moments[STEPS]
        return tensors

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        optimizer = self._engine.optimizer
        optimizer.state.clear()
        if persistent := optimizer.persistent_parameters:
            # They stay gathered between steps; the next use gathers the loaded values.
            persistent[0].partition(persistent)
        moments: dict[int, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            weight, steps = weight_key(name), moment_key(name, STEPS)
            keys = {key: moment_key(name, key) for key in MOMENTS if moment_key(name, key) in stored}
            tensors = {key: torch.zeros(stored[key]) for key in (weight, *keys.values(), *([steps] if keys else []))}
            read(tensors)
            shard = _shard_of(tensors[weight], parameter, self._rank, self._num_ranks)
            safe_set_local_fp32_param(parameter, shard)
            cast(Any, parameter).ds_tensor.data.copy_(shard)
            group, offset, size = self._position(parameter)
            flat = optimizer.fp32_partitioned_groups_flat[group]
            for key, moment in keys.items():
                group_moments = moments.setdefault(group, {STEPS: tensors[steps]})
                flat_moment = group_moments.setdefault(key, torch.zeros_like(flat, requires_grad=False))
                flat_moment.narrow(0, offset, size).copy_(
                    _shard_of(tensors[moment], parameter, self._rank, self._num_ranks)
                )
        for group, group_moments in moments.items():
            write_moments(optimizer.optimizer, optimizer.fp32_partitioned_groups_flat[group], group_moments)

    def _flat_states(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state of each flat tensor that has one, by index."""
        optimizer = self._engine.optimizer
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        return {group: optimizer.state[flat] for group, flat in flats if flat in optimizer.state}

    def _position(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Return the index of the flat tensor with this rank's shard of a parameter, its offset there, and its size."""
        optimizer = self._engine.optimizer
        return cast(tuple[int, int, int], optimizer.grad_position[optimizer.get_param_id(parameter)])

    def _gather(self, shard: Tensor, parameter: Any) -> Tensor:
        shard = shard.detach().to(self._device)  # offloaded shards are on the CPU, which NCCL does not support
        gathered = shard.new_empty(self._num_ranks * shard.numel())
        dist.all_gather_into_tensor(gathered, shard.contiguous())
        return gathered[: parameter.ds_numel].view(_shape(parameter))


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(parameter.ds_shape)


def _shard_of(tensor: Tensor, parameter: Any, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's shard of the flattened tensor, which is padded at the end for shards of equal size."""
    size: int = parameter.ds_tensor.numel()
    filled = nn.functional.pad(tensor.flatten(), (0, size * num_ranks - tensor.numel()))
    return filled[rank * size : (rank + 1) * size]
