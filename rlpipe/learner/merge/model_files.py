"""A model's safetensors files: the tensors in each, read and written one file at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlpipe.common.atomic_io import writing_path
from rlpipe.errors import ModelError

METADATA = {"format": "pt"}
"""Metadata without which transformers refuses a file."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The safetensors files of a folder, in order of name, each with the names of its tensors."""

    folder: Path
    by_file: Mapping[str, tuple[str, ...]]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the named tensors, each into its own memory; names that no file has are skipped."""
        wanted, found = frozenset(names), dict[str, Tensor]()
        for file, inside in self.by_file.items():
            here = [name for name in inside if name in wanted]
            if here:
                with safe_open(self.folder / file, "pt", backend="pread") as tensors:
                    found |= {name: tensors.get_tensor(name) for name in here}
        return found

    def outlines(self) -> dict[str, Tensor]:
        """Return all tensors as float32 meta tensors: shapes without values."""
        found = {}
        for file, names in self.by_file.items():
            with safe_open(self.folder / file, "pt") as tensors:
                for name in names:
                    found[name] = torch.empty(tensors.get_slice(name).get_shape(), device="meta")
        return found


def open_files(folder: Path) -> ModelFiles:
    """Open a model's files by the index, or the single file; raise ``ModelError`` if one is missing or broken."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    try:
        if index.exists():
            files: dict[str, list[str]] = {}
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(file, []).append(name)
        elif (folder / SAFE_WEIGHTS_NAME).exists():
            files = {SAFE_WEIGHTS_NAME: []}
        else:
            raise ModelError(f"{folder} has neither {SAFE_WEIGHTS_INDEX_NAME} nor {SAFE_WEIGHTS_NAME}")
        for file, names in files.items():
            with safe_open(folder / file, "pt") as tensors:
                inside = tensors.keys()
            if missing := set(names) - set(inside):
                raise ModelError(f"{folder / file} lacks {min(missing)}, which {index} promises")
            files[file] = list(inside)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{folder} can't be read as a model's files: {error}") from None
    return ModelFiles(folder, {file: tuple(names) for file, names in sorted(files.items())})


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, which gets its name only once it is complete."""
    temporary = writing_path(path)
    save_file(dict(tensors), temporary, metadata=METADATA)
    temporary.replace(path)


def data_bytes(path: Path) -> int:
    """Return the bytes of all tensors in a safetensors file."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
