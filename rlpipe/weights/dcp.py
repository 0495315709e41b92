"""Tensors in a folder, written and read by torch's distributed checkpoint: each by its name, or parts of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Read = Callable[[dict[str, Tensor]], None]
"""Fills tensors with what a checkpoint has under their names."""


def weight_key(name: str) -> str:
    """Of a trained parameter."""
    return f"policy.{name}"


def moment_key(name: str, moment: str) -> str:
    """Of what the optimizer keeps of it."""
    return f"optimizer.{name}.{moment}"


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, num_ranks: int) -> None:
    """All ranks must call it; what several have is written once. Raises ``OSError`` if it can't be written."""
    try:
        with _single_process_is_meant():
            dcp.save(tensors, checkpoint_id=folder, no_dist=num_ranks == 1)
    except CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise OSError(f"{folder} can't be written: {causes}") from error


def read_tensors(folder: Path, tensors: dict[str, Tensor], *, prefix: str = "") -> None:
    """Fills them, each rank its own; ``prefix`` stands before their names in the folder."""
    with _single_process_is_meant():
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        dcp.load(named, checkpoint_id=folder, no_dist=True)


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Of all tensors that were written, by name."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without torch's warning at every checkpoint of a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
