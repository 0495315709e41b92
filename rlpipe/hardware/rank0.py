"""What the first rank finds, for all of them; also where it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rlpipe.common.imports import describe_error
from rlpipe.errors import RlpipeError, RunError

T = TypeVar("T")


def num_ranks() -> int:
    """Of torch's default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ask_first(find: Callable[[], T]) -> T:
    """Calls ``find`` on rank 0 alone; all ranks of the default process group must call this, and get the result.

    What ``find`` raises is raised on rank 0; the others raise it, too, if it is an ``RlpipeError``, and else a
    ``RunError`` that describes it.
    """
    if num_ranks() == 1:
        return find()
    found: list[tuple[T] | RlpipeError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [(find(),)]
        except Exception as error:
            own = isinstance(error, RlpipeError)
            dist.broadcast_object_list([error if own else RunError(f"rank 0 failed: {describe_error(error)}")], src=0)
            raise
    dist.broadcast_object_list(found, src=0)
    (answer,) = found
    assert answer is not None
    if isinstance(answer, RlpipeError):
        raise answer
    return answer[0]
