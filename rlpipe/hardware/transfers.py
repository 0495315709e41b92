"""Measurements of bandwidth: within the device's memory, from the host, to the host, and both ways at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from rlpipe.hardware.host import HostBuffer
from rlpipe.hardware.timing import Work, rate

MEMORY_BYTES = {"cuda": 2**29, "cpu": 2**28}
"""Size of the tensor that is copied within memory; much larger than the caches."""
TRANSFER_BYTES = {"cuda": 2**28, "cpu": 2**27}
"""Bytes that are copied in one direction."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Transfers:
    """Transfer rates, in bytes per second."""

    host_to_device: float
    device_to_host: float
    both: float
    """Bytes per second in each direction while both are busy."""


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
        _side_by_side(device) as run_both,
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
def _side_by_side(device: torch.device) -> Iterator[Callable[[Work, Work], None]]:
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
