"""Storage of named tensors, or shards of them, in a folder, with torch's distributed checkpoint."""

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
"""Function that fills tensors with a checkpoint's values under their names."""


def weight_key(name: str) -> str:
    """Return the name of a trained parameter in a checkpoint."""
    return f"policy.{name}"


def moment_key(name: str, moment: str) -> str:
    """Return the name of a parameter's optimizer state in a checkpoint."""
    return f"optimizer.{name}.{moment}"


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, num_ranks: int) -> None:
    """Write the tensors of all ranks, those that several hold once; raise ``OSError`` if they can't be written.

    All ranks must call it.
    """
    try:
        with _single_process_is_meant():
            dcp.save(tensors, checkpoint_id=folder, no_dist=num_ranks == 1)
    except CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise OSError(f"{folder} can't be written: {causes}") from error


def read_tensors(folder: Path, tensors: dict[str, Tensor], *, prefix: str = "") -> None:
    """Fill this rank's tensors from the folder, where ``prefix`` precedes their names."""
    with _single_process_is_meant():
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        dcp.load(named, checkpoint_id=folder, no_dist=True)


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of all tensors in the folder, by name."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Suppress torch's warning at every checkpoint of a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
