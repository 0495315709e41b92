"""Groups of gloo ranks that several tests share, because starting ranks takes longer than the tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import cache
from multiprocessing.sharedctypes import Synchronized

import torch
import torch.distributed as dist

from rlpipe.hardware import calibration

IMPORTS = [
    "rlpipe.learner.checkpoints",
    "rlpipe.learner.strategies.fsdp2",
    "rlpipe.learner.publish",
    "rlpipe.learner.step",
    "rlpipe.learner.strategies.zero3",
]
"""Modules that take seconds to import, which one server process imports before it forks the ranks."""


class Ranks:
    """Processes that have joined torch's default process group."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self._pool = ProcessPoolExecutor(
            num_ranks, mp_context=context, initializer=_join, initargs=(address, context.Value("i", 0), num_ranks)
        )

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on all ranks; it has to synchronize them, so that each rank takes one call."""
        for result in [self._pool.submit(function, *arguments) for _ in range(self.num_ranks)]:
            result.result()

    def end(self) -> None:
        self._pool.shutdown()


def _join(address: str, num_joined: Synchronized, num_ranks: int) -> None:
    torch.set_num_threads(1)
    with num_joined.get_lock():
        rank = num_joined.value
        num_joined.value += 1
    os.environ["LOCAL_RANK"] = str(rank)  # set as by torchrun and Ray Train; DeepSpeed reads it
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
    )
    # A run measures its ranks' link once; here dozens of learners are made by the same ranks, in seconds each.
    calibration.measure_link = cache(calibration.measure_link)
