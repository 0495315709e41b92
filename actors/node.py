"""What a node of the cluster computes in: asked there, by a task that takes none of its resources."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlpipe.hardware.dtypes import AUTO, DeviceTypes, cpu_types, gpu_types

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

UNKNOWN_GPU = DeviceTypes(
    device="a GPU that NVIDIA's library knows nothing of", narrow=frozenset({"bfloat16", "float16"})
)
"""Taken to be no older than 2020: one of another maker, or in a container without that library."""


def ask_nodes(node_ids: Sequence[str], *, on_gpu: bool, dtype: str) -> list[ObjectRef]:
    """The answers of ``node_types`` on each of the nodes."""
    import ray  # which `rlpipe generate` does without
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(node_types)
    return [
        remote.options(
            num_cpus=0, enable_task_events=False, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)
        ).remote(on_gpu, dtype)
        for node in node_ids
    ]


def node_types(on_gpu: bool, dtype: str) -> list[DeviceTypes]:
    """Of this machine's GPUs, or of its processors; with the slowdown of ``dtype`` where they have none for it."""
    found = gpus_of_machine() if on_gpu else [cpu_types()]
    return [_measured(entry, "cuda" if on_gpu else "cpu", dtype) for entry in found]


def gpus_of_machine() -> list[DeviceTypes]:
    """Each kind once. The driver's library tells also where this process may use none, and takes no memory of them."""
    from ray._private.thirdparty import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [
            gpu_types(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            for handle in handles
        ]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        logger.info("the GPUs of this machine are unknown: %s", error)
        found = []
    return list(dict.fromkeys(found)) or [UNKNOWN_GPU]


def _measured(types: DeviceTypes, kind: str, dtype: str) -> DeviceTypes:
    if dtype == AUTO or not types.is_slow(dtype):
        return types
    from rlpipe.hardware.own import own_slowdown

    return replace(types, slowdown=own_slowdown(types, kind, dtype))
