"""Measurement of this machine's speeds (arithmetic, memory, transfers, exchange between ranks), and their storage.

A rate is the median of several repetitions, after a warm-up call.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.option import DTYPES
from rlpipe.errors import ConfigError, RlpipeError, RunError
from rlpipe.hardware.cgroup import host_memory_bytes, num_cores
from rlpipe.hardware.device import STATE_DTYPES, Curve, Device, Link, adding
from rlpipe.hardware.device_profiles import Transfers, load_usable, own_name, store
from rlpipe.hardware.dtype_speed import forget_rates, threads
from rlpipe.hardware.dtypes import cpu_name
from rlpipe.hardware.host_memory import HostBuffer, add_up

T = TypeVar("T")
TIMED_REPETITIONS = 5
TIMED_REPETITION_S = 0.05
"""Least seconds of one repetition, in consecutive calls, so that the overhead of starting the first hardly counts."""
MAX_TIMED_CALLS = 1000

Work = Callable[[], object]


def num_ranks() -> int:
    """Return the size of torch's default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank0(find: Callable[[], T]) -> T:
    """Call ``find`` on rank 0 alone and return its result on all ranks, which must all call this.

    An exception from ``find`` is raised on rank 0; the others raise it, too, if it is an ``RlpipeError``, and otherwise
    a ``RunError`` that describes it.
    """
    if num_ranks() == 1:
        return find()
    results: list[tuple[T] | RlpipeError | None] = [None]
    if dist.get_rank() == 0:
        try:
            results = [(find(),)]
        except Exception as error:
            is_rlpipe_error = isinstance(error, RlpipeError)
            dist.broadcast_object_list(
                [error if is_rlpipe_error else RunError(f"rank 0 failed: {describe_error(error)}")], src=0
            )
            raise
    dist.broadcast_object_list(results, src=0)
    (result,) = results
    assert result is not None
    if isinstance(result, RlpipeError):
        raise result
    return result[0]


SMALLEST_MATRIX, LARGEST_MATRIX = 256, 8192
MAX_PRODUCT_S = 0.1
ADAM_ELEMENTS = 2**26
"""Weights that are updated: with gradients and moments several times as large as the host's caches, up to 300 MiB."""
ADDED_ELEMENTS = 2**26


def matmul_flops(device: torch.device, *, scale: float = 1.0) -> dict[str, float]:
    """Return the FLOP/s of dense products of square matrices, by dtype, without the dtypes that the device refuses."""
    flops = {}
    for name in DTYPES:
        try:
            flops[name] = product_flops(device, name, scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if name == DTYPES[0]:
                raise
    return flops


def product_flops(device: torch.device, dtype: str, scale: float) -> float:
    """Return the FLOP/s with the largest matrices that time allows; small ones do not reach the device's rate."""
    width = SMALLEST_MATRIX
    while True:
        multiply = _product(device, getattr(torch, dtype), width)
        multiply()
        next_s = 8 * time_calls(multiply, 1, device)
        if width == LARGEST_MATRIX or next_s > scale * MAX_PRODUCT_S:
            return rate(2 * width**3, multiply, device, scale=scale)
        width *= 2


def _product(device: torch.device, dtype: torch.dtype, width: int) -> Work:
    # Random numbers, because a GPU is faster with zeros; from a separate generator, so that the run's is not advanced.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(width, width, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def adam_elements(device: torch.device, *, scale: float = 1.0) -> dict[str, float]:
    """Return the elements per second of torch's fused AdamW, by the dtype of weights, gradients and moments."""
    return {name: _adam_elements(device, getattr(torch, name), scale) for name in STATE_DTYPES}


def _adam_elements(device: torch.device, dtype: torch.dtype, scale: float) -> float:
    num_elements = int(scale * ADAM_ELEMENTS)
    weights = nn.Parameter(torch.zeros(num_elements, dtype=dtype, device=device))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    return rate(num_elements, optimizer.step, device, scale=scale)


def added_elements(*, scale: float = 1.0) -> dict[str, float]:
    """Return the gradient elements per second that the host adds to a sum, with the sum of squares, by ``adding``."""
    return {
        adding(gradient, total): _added_elements(getattr(torch, gradient), getattr(torch, total), scale)
        for total in STATE_DTYPES
        for gradient in STATE_DTYPES
    }


def _added_elements(gradient_dtype: torch.dtype, total_dtype: torch.dtype, scale: float) -> float:
    gradient = torch.ones(int(scale * ADDED_ELEMENTS), dtype=gradient_dtype)
    total = torch.zeros(len(gradient), dtype=total_dtype)
    return rate(len(gradient), lambda: add_up(total, gradient), gradient.device, scale=scale)


TENSOR_BYTES = (2**16, 2**20, 2**23, 2**25, 2**27)
"""Sizes of the whole tensor that ranks gather or sum: from a small layer's weights to a chunk of the model."""
REPETITIONS = 3
REPETITION_BYTES = 2**23
"""Bytes per repetition, in consecutive calls; a larger tensor takes a single call."""
MAX_CALLS = 16

Collective = Callable[[Tensor, Tensor], object]
"""Function of the whole tensor, which all ranks have, and this rank's part of it."""


def measure_link(device: torch.device, *, scale: float = 1.0) -> Link:
    """Measure the time of each collective that chunks need, in float32, in the default process group.

    All of its ranks must call this together; all get the times of the slowest rank. ``scale`` scales the tensors.
    """
    return Link(
        all_gather=_measure_collective(lambda full, shard: dist.all_gather_single(full, shard), 1, device, scale),
        reduce_scatter=_measure_collective(
            lambda full, shard: dist.reduce_scatter_single(shard, full), 1, device, scale
        ),
        all_reduce=_measure_collective(lambda full, _: dist.all_reduce(full), 2, device, scale),
    )


def _measure_collective(collective: Collective, num_rounds: int, device: torch.device, scale: float) -> Curve:
    """Return the curve of a collective; ``num_rounds`` is how often every part goes around the ring."""
    sizes, times = [], []
    for tensor_bytes in TENSOR_BYTES:
        shard = torch.zeros(max(1, int(scale * tensor_bytes) // 4 // dist.get_world_size()), device=device)
        full = torch.zeros(len(shard) * dist.get_world_size(), device=device)
        sizes.append(num_rounds * (full.nbytes - shard.nbytes))
        times.append(_slowest(partial(collective, full, shard), tensor_bytes, device))
    return Curve(num_bytes=tuple(sizes), seconds=tuple(times))


def _slowest(call: Callable[[], object], tensor_bytes: int, device: torch.device) -> float:
    """Return the seconds of one call on the slowest rank, as the median of several repetitions."""
    call()  # opens the connections
    num_calls = max(1, min(MAX_CALLS, REPETITION_BYTES // tensor_bytes))
    seconds = median(time_calls(call, num_calls, device) for _ in range(REPETITIONS)) / num_calls
    slowest = torch.tensor(seconds, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


MEMORY_BYTES = {"cuda": 2**29, "cpu": 2**28}
"""Size of the tensor that is copied within memory; much larger than the caches."""
TRANSFER_BYTES = {"cuda": 2**28, "cpu": 2**27}
"""Bytes that are copied in one direction."""


def memory_bandwidth(device: torch.device, *, scale: float = 1.0) -> float:
    """Return the bytes per second that a copy reads and writes, both counted."""
    source = torch.ones(int(scale * MEMORY_BYTES[device.type]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rate(2 * source.nbytes, lambda: target.copy_(source), device, scale=scale)


def measure_transfers(device: torch.device, *, scale: float = 1.0) -> Transfers:
    """Measure copies between page-locked host memory and a GPU; on the CPU, between separate buffers."""
    num_bytes = int(scale * TRANSFER_BYTES[device.type])
    arriving, leaving = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    pin = device.type == "cuda"
    with (
        closing(HostBuffer(num_bytes, pin=pin)) as source,
        closing(HostBuffer(num_bytes, pin=pin)) as target,
        _concurrent_copies(device) as run_both,
    ):
        source.bytes.fill_(1)  # memory that was never written is not mapped yet, and reads too fast

        def copy_in() -> None:
            arriving.copy_(source.bytes, non_blocking=True)

        def copy_out() -> None:
            target.bytes.copy_(leaving, non_blocking=True)

        return Transfers(
            host_to_device=rate(num_bytes, copy_in, device, scale=scale),
            device_to_host=rate(num_bytes, copy_out, device, scale=scale),
            both=rate(num_bytes, lambda: run_both(copy_in, copy_out), device, scale=scale),
        )


@contextmanager
def _concurrent_copies(device: torch.device) -> Iterator[Callable[[Work, Work], None]]:
    """Yield a function that runs two copies at the same time: on two streams, or in two threads."""
    if device.type == "cuda":
        streams = [torch.cuda.Stream(device) for _ in range(2)]

        def run_on_streams(*works: Work) -> None:
            current = torch.cuda.current_stream(device)
            for stream, work in zip(streams, works, strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    work()
            for stream in streams:
                current.wait_stream(stream)

        yield run_on_streams
        return
    with ThreadPoolExecutor(max_workers=2) as threads:

        def run_in_threads(*works: Work) -> None:
            for running in [threads.submit(work) for work in works]:
                running.result()

        yield run_in_threads


CPU = torch.device("cpu")


def measure(device: torch.device, *, name: str, scale: float = 1.0) -> Device:
    """Measure the rates that the device reaches now; nothing else should run on it.

    Takes up to 3 GiB of the device's memory and 1 GiB of the host's. The host computes with all of its cores.
    ``link`` of the result is None, because measuring it takes several ranks (``measure_link``).

    Args:
        name: Name of the result.
        scale: Factor on buffer sizes and times; below 1 the measurement is rougher and faster.

    Raises:
        ConfigError: A rate, which the message names, is 0 or not finite.
        RuntimeError: From torch, if there is not enough memory.
    """
    try:
        with all_cores():
            return _measure(device, name, scale)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(device: torch.device, name: str, scale: float) -> Device:
    transfers = measure_transfers(device, scale=scale)
    bandwidth = memory_bandwidth(device, scale=scale)
    host_adam = adam_elements(CPU, scale=scale)
    return Device(
        name=name,
        kind="cuda" if device.type == "cuda" else "cpu",
        memory_bytes=_memory_bytes(device),
        matmul_flops=matmul_flops(device, scale=scale),
        memory_bandwidth=bandwidth,
        host_to_device=transfers.host_to_device,
        device_to_host=transfers.device_to_host,
        both=transfers.both,
        link=None,
        device_adam=adam_elements(device, scale=scale) if device.type == "cuda" else host_adam,
        host_adam=host_adam,
        host_adding=added_elements(scale=scale),
        host_bandwidth=memory_bandwidth(CPU, scale=scale) if device.type == "cuda" else bandwidth,
        host_memory_bytes=host_memory_bytes(),
        hardware=hardware_name(device),
        measured_at=date.today().isoformat(),
    )


def hardware_name(device: torch.device) -> str:
    """Return the driver's name of the GPU, or the machine's name of its processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()


logger = logging.getLogger(__name__)


def calibrate(device: torch.device) -> Device:
    """Measure this machine's device and store the result; also forget the stored rates of models' matrix products.

    Raises ``ConfigError`` if measuring or storing is impossible.
    """
    forget_rates()
    measured = measure(device, name=own_name(device.type))
    store(measured)
    return measured


def measured_device(device: torch.device, *, scale: float = 1.0) -> Device:
    """Return the stored measurement of this device; without one, measure it and try to store the result.

    In a process group of several ranks all of them must call this, and all get the same result: rank 0 loads or
    measures while the others wait (they get its error if it fails), then all measure the ``link`` together.
    ``scale`` is that of ``measure``.
    """
    if num_ranks() == 1:
        return _find_or_measure(device, scale)
    measured = on_rank0(lambda: _find_or_measure(device, scale))
    with_link = replace(measured, link=measure_link(device, scale=scale))
    if measured.link is None and dist.get_rank() == 0:
        _try_to_store(with_link)
    return with_link


def _find_or_measure(device: torch.device, scale: float) -> Device:
    name = own_name(device.type)
    stored = load_usable(name)
    if stored is not None and (stored.kind, stored.hardware) == (device.type, hardware_name(device)):
        # Jobs on one machine may be given different shares of its memory.
        return replace(stored, host_memory_bytes=host_memory_bytes())
    logger.info("measuring %s", hardware_name(device))
    measured = measure(device, name=name, scale=scale)
    _try_to_store(measured)
    return measured


def _try_to_store(measured: Device) -> None:
    """Store the measurement; log a warning if that fails, because a run does not need the file."""
    try:
        store(measured)
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)


def rate(amount: float, work: Work, device: torch.device, *, scale: float = 1.0) -> float:
    """Return the amount per second if each call of ``work`` does ``amount``; ``inf`` if no time passed.

    ``scale`` shortens the repetitions.
    """
    work()
    once_s = time_calls(work, 1, device)
    num_calls = min(MAX_TIMED_CALLS, math.ceil(scale * TIMED_REPETITION_S / once_s)) if once_s else MAX_TIMED_CALLS
    seconds = median(time_calls(work, num_calls, device) for _ in range(TIMED_REPETITIONS))
    return amount * num_calls / seconds if seconds else math.inf


def time_calls(work: Work, num_calls: int, device: torch.device) -> float:
    """Return the seconds of ``num_calls``; on a GPU, those between two events in its current stream."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(num_calls):
            work()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(num_calls):
            work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3


def all_cores() -> AbstractContextManager[None]:
    """Have torch compute with a thread per core: a rank may have fewer, but the rates are the machine's."""
    return threads(num_cores())
