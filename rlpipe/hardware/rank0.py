"""A result, or an error, of rank 0 shared with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rlpipe.common.imports import describe_error
from rlpipe.errors import RlpipeError, RunError

T = TypeVar("T")


def num_ranks() -> int:
    """Return the size of torch's default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ask_first(find: Callable[[], T]) -> T:
    """Call ``find`` on rank 0 alone and return its result on all ranks, which must all call this.

    An exception from ``find`` is raised on rank 0; the others raise it, too, if it is an ``RlpipeError``, and otherwise
    a ``RunError`` that describes it.
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
