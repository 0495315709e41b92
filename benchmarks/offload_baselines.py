"""Baselines of ``benchmarks.offload``: FSDP2's and DeepSpeed's own offload, with the same model and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.offload_cases import COMPUTE, Case, Values, compute_buffers, loss_of, make_module, make_row
from benchmarks.update_times import Measured, measure_updates
from rlpipe.learner.forward import LogprobModel, find_layers

MAX_NORM = 1.0
LEARNING_RATE = 1e-5
SUB_GROUP_ELEMENTS = 10**8
"""Elements that DeepSpeed's optimizer updates at one time; with fewer, copies and arithmetic overlap better."""
BUCKET_ELEMENTS = 2 * 10**8


def run_fsdp2(case: Case, device: torch.device, *, warmup: int, updates: int) -> Measured:
    """Measure ``fully_shard`` of every block with ``CPUOffloadPolicy``, checkpointing, and fused AdamW on the host."""
    begin_group(device)
    module = make_filled(case, torch.float32)
    module.causal_model.gradient_checkpointing_enable({"use_reentrant": False})
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=COMPUTE, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for block in find_layers(module.causal_model):
        fully_shard(block, **options)
    fully_shard(module, reshard_after_forward=False, **options)
    compute_buffers(module, device)
    optimizer = HostAdam(module)

    def update(number: int) -> None:
        run_micro_batches(module, case, number, device, lambda loss, last: loss.backward())
        optimizer.step()

    measured = measure_updates(update, device, warmup=warmup, updates=updates)
    dist.destroy_process_group()
    return measured


class HostAdam:
    """AdamW on the host shards of FSDP2; the single rank has each parameter whole."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._parts: list[nn.Parameter] = []

    def step(self) -> None:
        if not self._parts:  # the first pass moves them to page-locked memory
            self._parts = [nn.Parameter(parameter.detach().to_local()) for parameter in self._parameters]  # type: ignore[attr-defined]
            self._adam = torch.optim.AdamW(self._parts, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        for part, parameter in zip(self._parts, self._parameters, strict=True):
            assert parameter.grad is not None
            part.grad = parameter.grad.to_local()  # type: ignore[attr-defined]
            parameter.grad = None
        nn.utils.clip_grad_norm_(self._parts, MAX_NORM)
        self._adam.step()
        self._adam.zero_grad()


def run_zero3(case: Case, device: torch.device, *, warmup: int, updates: int) -> Measured:
    """Measure ZeRO-3 with parameters and optimizer on the host; raise ``ImportError`` without DeepSpeed."""
    import deepspeed

    begin_group(device)
    deepspeed.init_distributed(dist_init_required=False)
    module = make_filled(case, COMPUTE)
    compute_buffers(module, device)
    # DeepSpeed's module hooks see recomputation only in torch's reentrant form.
    module.causal_model.gradient_checkpointing_enable({"use_reentrant": True})
    optimizer, settings = make_zero3_adam(module, device), zero3_settings(device)
    deepspeed.zero.Init(module=module, config_dict_or_path=settings, mem_efficient_linear=False)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def backward(loss: Tensor, last: bool) -> None:
        engine.optimizer.clear_backward_seen_flag()
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss, scale_wrt_gas=False)

    def update(number: int) -> None:
        run_micro_batches(module, case, number, device, backward)
        engine.step()

    measured = measure_updates(update, device, warmup=warmup, updates=updates)
    dist.destroy_process_group()
    return measured


def make_zero3_adam(module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Make DeepSpeed's optimizer if it builds, which is not tried on the CPU; otherwise torch's."""
    if device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        try:
            made: torch.optim.Optimizer = DeepSpeedCPUAdam(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
            print("the optimizer is DeepSpeedCPUAdam", flush=True)
            return made
        except (RuntimeError, ImportError, OSError, AttributeError, AssertionError) as error:
            print(f"the optimizer is torch's, because DeepSpeedCPUAdam does not build: {error}", flush=True)
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def zero3_settings(device: torch.device) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "steps_per_print": 2**31,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "overlap_comm": device.type == "cuda",
            "contiguous_gradients": True,
            "sub_group_size": SUB_GROUP_ELEMENTS,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def make_filled(case: Case, dtype: torch.dtype) -> LogprobModel:
    """Make the model with all its weights on the host."""
    module = make_module(case, dtype).to_empty(device="cpu")
    module.causal_model.tie_weights()
    values = Values()
    for name, parameter in module.named_parameters():
        values(name, parameter.detach())
    return module


def run_micro_batches(
    module: LogprobModel, case: Case, number: int, device: torch.device, backward: Callable[[Tensor, bool], object]
) -> None:
    """Run the micro batches of one update; ``backward`` gets each loss, and whether it is the last."""
    for index in range(case.micro_batches):
        row = make_row(case, number * case.micro_batches + index, device)
        backward(loss_of(module, case, row), index + 1 == case.micro_batches)


def begin_group(device: torch.device) -> None:
    """Start a process group of one rank."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # read by DeepSpeed
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
