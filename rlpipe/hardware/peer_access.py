"""Direct transfers between the GPUs of a machine, which NCCL uses and not every driver has."""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist
from accelerate.utils import check_cuda_p2p_ib_support

SWITCH = "NCCL_P2P_DISABLE"


def gpus_reach_each_other() -> bool:
    """Return whether every GPU of this process can read every other one's memory.

    GeForce cards without NVLink can't. Older drivers of the RTX 40 series claim that they can, and then hang.
    """
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    try:
        reached = all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    except (AssertionError, RuntimeError):  # torch checks the numbers, CUDA the devices
        return False
    return reached and check_cuda_p2p_ib_support()


def settle_peer_access() -> str | None:
    """Let NCCL copy by the host's memory on all ranks unless the GPUs of each reach each other; return a note if so.

    All ranks must call it, before they exchange anything else: ranks with different switches crash. A switch in the
    environment of any rank holds for that rank as it is.
    """
    lacks_access = torch.tensor(int(not gpus_reach_each_other()))
    group = dist.new_group(backend="gloo")
    dist.all_reduce(lacks_access, dist.ReduceOp.MAX, group=group)
    dist.destroy_process_group(group)
    if not lacks_access or SWITCH in os.environ:
        return None
    os.environ[SWITCH] = "1"
    return f"GPUs of a machine can't read each other's memory: NCCL copies by the host's ({SWITCH}=1)"
