"""The dtypes that a cluster node computes in, found out on the node by a task that takes none of its resources."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlpipe.hardware.device_profiles import load_usable, own_name
from rlpipe.hardware.dtype_speed import Products, cpu_types
from rlpipe.hardware.dtypes import AUTO, NARROW, DeviceTypes, gpu_types

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

UNKNOWN_GPU = DeviceTypes(device="a GPU unknown to NVIDIA's library", narrow=frozenset({"bfloat16", "float16"}))
"""A GPU of another maker, or in a container without NVIDIA's library; assumed to be no older than 2020."""


def ask_nodes(node_ids: Sequence[str], *, dtype: str, products: Products | None) -> list[ObjectRef]:
    """Start ``node_types`` on each of the nodes, and return references to the results."""
    return start_on_nodes(node_ids, node_types, dtype, products)


def start_on_nodes(node_ids: Sequence[str], function: Callable[..., Any], *args: Any) -> list[ObjectRef]:
    """Start a function on each of the nodes, as a task without resources, and return references to the results."""
    import ray  # here, because `rlpipe generate` does without Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(function)
    return [
        remote.options(
            num_cpus=0, enable_task_events=False, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)
        ).remote(*args)
        for node in node_ids
    ]


def node_types(dtype: str, products: Products | None) -> list[DeviceTypes]:
    """Return the types of this machine's CPUs, with rates measured on ``products``, or of its GPUs if that is None.

    ``dtype`` is the type that the run asks for. A GPU that is slow in it has rates if it was measured before.
    """
    if products is not None:
        return [cpu_types(products, NARROW if dtype == AUTO else dtype)]
    return [
        _with_stored_rates(entry) if dtype != AUTO and entry.is_slow(dtype) else entry for entry in gpus_of_machine()
    ]


def gpus_of_machine() -> list[DeviceTypes]:
    """Return each kind of GPU in this machine once, or ``UNKNOWN_GPU`` if none is found."""
    from rlpipe.actors.ray_internals import nvml_gpus

    try:
        gpus = [gpu_types(name, capability) for name, capability in nvml_gpus()]
    except OSError as error:
        logger.info("the GPUs of this machine are unknown: %s", error)
        gpus = []
    return list(dict.fromkeys(gpus)) or [UNKNOWN_GPU]


def _with_stored_rates(types: DeviceTypes) -> DeviceTypes:
    stored = load_usable(own_name("cuda"))
    is_same = stored is not None and types.device.startswith(stored.hardware or "?")
    return replace(types, rates=stored.matmul_flops) if stored is not None and is_same else types
