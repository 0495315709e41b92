"""What a node of the cluster computes in: asked there, by a task that takes none of its resources."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlpipe.hardware.dtype_speed import Products, cpu_types
from rlpipe.hardware.dtypes import AUTO, NARROW, DeviceTypes, gpu_types
from rlpipe.hardware.profile_store import load_usable, own_name

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

UNKNOWN_GPU = DeviceTypes(
    device="a GPU that NVIDIA's library knows nothing of", narrow=frozenset({"bfloat16", "float16"})
)
"""Taken to be no older than 2020: one of another maker, or in a container without that library."""


def ask_nodes(node_ids: Sequence[str], *, dtype: str, products: Products | None) -> list[ObjectRef]:
    """The answers of ``node_types`` on each of the nodes."""
    import ray  # which `rlpipe generate` does without
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(node_types)
    return [
        remote.options(
            num_cpus=0, enable_task_events=False, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)
        ).remote(dtype, products)
        for node in node_ids
    ]


def node_types(dtype: str, products: Products | None) -> list[DeviceTypes]:
    """Of this machine's processors, with the rates of the products that they make, or of its GPUs without products.

    ``dtype`` is the type that was asked for. A GPU that is slow in it has rates where it was measured before.
    """
    if products is not None:
        return [cpu_types(products, NARROW if dtype == AUTO else dtype)]
    return [
        _with_stored_rates(entry) if dtype != AUTO and entry.is_slow(dtype) else entry for entry in gpus_of_machine()
    ]


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


def _with_stored_rates(types: DeviceTypes) -> DeviceTypes:
    stored = load_usable(own_name("cuda"))
    is_same = stored is not None and types.device.startswith(stored.hardware or "?")
    return replace(types, rates=stored.matmul_flops) if stored is not None and is_same else types
