"""Storage of named tensors, or shards of them, in a folder, with torch's distributed checkpoint.

A folder may come from elsewhere, and nothing in it is executed: torch loads the tensors with ``weights_only``, and the
index, which torch unpickles without any limit, is read here.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlpipe.common.atomic_io import file_digest
from rlpipe.common.imports import describe_error
from rlpipe.errors import ConfigError

Read = Callable[[dict[str, Tensor]], None]
"""Function that fills tensors with a checkpoint's values under their names."""
STEPS, MOMENTS = "step", ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state of a parameter: the number of its updates, and its moments."""


def weight_key(name: str) -> str:
    """Return the name of a trained parameter in a checkpoint."""
    return f"policy.{name}"


def moment_key(name: str, moment: str) -> str:
    """Return the name of a parameter's optimizer state in a checkpoint."""
    return f"optimizer.{name}.{moment}"


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, num_ranks: int) -> dict[str, str]:
    """Write the tensors of all ranks, those that several hold once; raise ``OSError`` if they can't be written.

    All ranks must call it. Returns the digests of all files with tensors, by name, on rank 0, and none on other ranks.
    """
    writer = _DigestingWriter(folder)
    try:
        with _without_process_warning():
            dcp.save(tensors, storage_writer=writer, no_dist=num_ranks == 1)
    except CheckpointException as error:
        raise OSError(f"{folder} can't be written: {_causes(error)}") from error
    return writer.digests


class StoredTensors:
    """The tensors in a folder; raises ``ConfigError`` if its index is damaged or describes anything but tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._metadata = folder, _read_metadata(folder)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of all tensors, by name."""
        entries = self._metadata.state_dict_metadata.items()
        return {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def read(self, tensors: Mapping[str, Tensor], *, prefix: str = "") -> None:
        """Fill this rank's tensors, where ``prefix`` precedes their names; raise ``ConfigError`` for a damaged file."""
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        try:
            with _without_process_warning():
                dcp.load(named, storage_reader=_MetadataReader(self._folder, self._metadata), no_dist=True)
        except CheckpointException as error:
            raise ConfigError(_unreadable(self._folder, _causes(error))) from None


class _DigestingWriter(FileSystemWriter):
    """Writer that has each rank compute the digests of its files while they are in the page cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.digests: dict[str, str] = {}

    def write_data(self, *args: Any, **kwargs: Any) -> Future[list[WriteResult]]:
        written = super().write_data(*args, **kwargs)
        infos = [result.storage_data for result in written.wait()]
        digests = {name: file_digest(self.path / name) for name in {info.relative_path for info in infos}}
        for info in infos:
            info.digest = digests[info.relative_path]  # rank 0 gets it with the other fields
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for info in (result.storage_data for rank_results in results for result in rank_results):
            self.digests[info.relative_path] = vars(info).pop("digest")
        super().finish(metadata, results)


class _MetadataReader(FileSystemReader):
    """Reader that is given the folder's metadata."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


PARTS = (
    metadata.Metadata,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    metadata.MetadataIndex,
    filesystem._StorageInfo,
)
ADMITTED: dict[tuple[str, str], Any] = {
    **{(part.__module__, part.__name__): part for part in PARTS},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): vars(torch.serialization)["_get_layout"],
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""Names that the metadata of tensors refers to.

``BytesStorageMetadata`` is not among them: torch unpickles such entries without any limit, and rlpipe writes none.
"""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no part of a checkpoint")
        return ADMITTED[module, name]


def _read_metadata(folder: Path) -> Metadata:
    try:
        with (folder / filesystem._metadata_fn).open("rb") as file:
            checkpoint_metadata = _Unpickler(file).load()
        _check(checkpoint_metadata, {path.name: path.stat().st_size for path in folder.iterdir()})
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise any
        raise ConfigError(_unreadable(folder, f"{filesystem._metadata_fn}: {describe_error(error)}")) from None
    return checkpoint_metadata  # type: ignore[no-any-return]


def _check(checkpoint_metadata: Any, sizes: Mapping[str, int]) -> None:
    """Raise ``ValueError`` unless the metadata describe whole tensors, in files of the given names and sizes."""
    if not isinstance(checkpoint_metadata, Metadata):
        raise ValueError("it does not describe a checkpoint")
    for name, entry in checkpoint_metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        for chunk in entry.chunks:
            bounds = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if not all(0 <= offset <= offset + size <= length for offset, size, length in bounds):
                raise ValueError(f"a part of {name} lies outside of it")
            stored = checkpoint_metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if not 0 <= stored.offset <= stored.offset + stored.length <= sizes.get(stored.relative_path, -1):
                raise ValueError(f"{stored.relative_path} does not hold {name}")
            if stored.transform_descriptors:
                raise ValueError(f"{name} is encoded")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"the parts of {name} are not the whole")


def _unreadable(folder: Path, reason: str) -> str:
    return f"{folder} can't be read as a checkpoint ({reason}): use an earlier one"


def _causes(error: CheckpointException) -> str:
    return "; ".join(dict.fromkeys(describe_error(cause) for cause, _ in error.failures.values()))


@contextmanager
def _without_process_warning() -> Iterator[None]:
    """Suppress torch's warning at every checkpoint of a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
