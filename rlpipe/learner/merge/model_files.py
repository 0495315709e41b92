"""A model's safetensors files: which tensor lies in which, and how they are read and written one at a time."""

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
"""transformers refuses a file without it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a folder, in order, each with the names of the tensors in it."""

    folder: Path
    by_file: Mapping[str, tuple[str, ...]]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors, each in memory of its own."""
        wanted, found = frozenset(names), dict[str, Tensor]()
        for file, inside in self.by_file.items():
            here = [name for name in inside if name in wanted]
            if here:
                with safe_open(self.folder / file, "pt", backend="pread") as tensors:
                    found |= {name: tensors.get_tensor(name) for name in here}
        return found

    def outlines(self) -> dict[str, Tensor]:
        """All tensors without their values, and in float32."""
        found = {}
        for file, names in self.by_file.items():
            with safe_open(self.folder / file, "pt") as tensors:
                for name in names:
                    found[name] = torch.empty(tensors.get_slice(name).get_shape(), device="meta")
        return found


def open_files(folder: Path) -> ModelFiles:
    """Reads the index, or the one file; raises ``ModelError`` if neither is there, or a file is missing or broken."""
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
    """Writes a file that has its name once it is whole."""
    temporary = writing_path(path)
    save_file(dict(tensors), temporary, metadata=METADATA)
    temporary.replace(path)


def data_bytes(path: Path) -> int:
    """Bytes of all tensors in a file."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
