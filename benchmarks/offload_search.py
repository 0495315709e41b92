"""Duration of the search for an offload schedule, at the size of a 14B model: 40 layers in 162 chunks.

No knob is fixed, and not everything fits. Needs no GPU, Ray or vLLM. Run: ``python -m benchmarks.offload_search``.
``seconds`` is the median of several runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from statistics import median

from rlpipe.common.formatting import GIB, MIB
from rlpipe.offload.decision import Capacity
from rlpipe.offload.planner.cost import ChunkProfile, Profile, Rates, StageProfile
from rlpipe.offload.planner.search import search

CHUNK_BYTES = 256 * MIB
BYTES_PER_ELEMENT = 2
STATE_BYTES_PER_ELEMENT = 16
"""Gradient, weight and two moments in float32."""
RATES = Rates(
    host_to_device=55e9,
    device_to_host=50e9,
    both=45e9,
    device_adam={"float32": 1e11},
    host_adam={"float32": 5.4e9},
    host_adding={"float32 to float32": 12.5e9},
    device_bandwidth=2.7e12,
    host_bandwidth=150e9,
)
CAPACITY = Capacity(device_bytes=70 * GIB, host_bytes=400 * GIB)


def make_profile(num_blocks: int, num_chunks: int) -> Profile:
    """Make a profile of identical blocks in identical chunks, with an embedding before and a head after them."""
    ends = [_stage(is_block=False), _stage(is_block=False)]
    stages = [ends[0], *(_stage(is_block=True) for _ in range(num_blocks)), ends[1]]
    edges = [index * len(stages) / num_chunks for index in range(num_chunks + 1)]
    return Profile(
        stages=stages,
        chunks=[_chunk(first, last) for first, last in itertools.pairwise(edges)],
        slot_bytes=CHUNK_BYTES,
        resident_bytes=GIB,
        shared_bytes=256 * MIB,
        num_micro_batches=2,
    )


def _stage(*, is_block: bool) -> StageProfile:
    return StageProfile(
        is_block=is_block,
        forward_s=0.02,
        backward_s=0.04,
        saved_bytes=2 * GIB,
        swapped_bytes=2 * GIB,
        input_bytes=80 * MIB,
        entering_bytes=80 * MIB,
        forward_peak=GIB // 2,
        backward_peak=GIB,
    )


def _chunk(first: float, last: float) -> ChunkProfile:
    shares = {s: min(last, s + 1) - max(first, s) for s in range(math.floor(first), math.ceil(last))}
    elements = CHUNK_BYTES // BYTES_PER_ELEMENT
    return ChunkProfile(
        stages=shares,
        num_bytes=CHUNK_BYTES,
        gathered_bytes=CHUNK_BYTES,
        gradient_bytes=CHUNK_BYTES,
        cast_bytes=6 * elements,
        staging_bytes=2 * CHUNK_BYTES,
        state_bytes=STATE_BYTES_PER_ELEMENT * elements,
        num_trained=elements,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=162)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(sys.argv[1:])
    profile = make_profile(arguments.blocks, arguments.chunks)
    seconds = []
    for _ in range(arguments.repeats):
        began = time.perf_counter()
        choice = search(profile, RATES, CAPACITY)
        seconds.append(time.perf_counter() - began)
    print(f"found: {choice.knobs}")
    print(json.dumps({"blocks": arguments.blocks, "chunks": arguments.chunks, "seconds": round(median(seconds), 4)}))


if __name__ == "__main__":
    main()
