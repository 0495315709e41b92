"""The safetensors files of a model's folder, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlpipe.common.imports import reading_files
from rlpipe.errors import ModelError
from rlpipe.models.loading import COMPLETE


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The safetensors files of a folder, in order of name, each with the names of its tensors."""

    folder: Path
    by_file: Mapping[str, tuple[str, ...]]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the named tensors, each into its own memory; names that no file has are skipped."""
        requested, values = frozenset(names), dict[str, Tensor]()
        for file, stored in self.by_file.items():
            present = [name for name in stored if name in requested]
            if present:
                with safe_open(self.folder / file, "pt", backend="pread") as tensors:
                    values |= {name: tensors.get_tensor(name) for name in present}
        return values

    def dtypes(self, names: Iterable[str]) -> dict[str, str]:
        """Return safetensors' names of the types that the named tensors are stored in."""
        requested, types = frozenset(names), dict[str, str]()
        for file, stored in self.by_file.items():
            if present := requested.intersection(stored):
                with safe_open(self.folder / file, "pt") as tensors:
                    types |= {name: tensors.get_slice(name).get_dtype() for name in present}
        return types

    def meta_tensors(self) -> dict[str, Tensor]:
        """Return all tensors as float32 meta tensors: shapes without values."""
        shapes = {}
        for file, names in self.by_file.items():
            with safe_open(self.folder / file, "pt") as tensors:
                for name in names:
                    shapes[name] = torch.empty(tensors.get_slice(name).get_shape(), device="meta")
        return shapes


def open_files(folder: Path) -> ModelFiles:
    """Open a model's files by the index, or the single file; raise ``ModelError`` if one is missing or broken."""
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    with reading_files(f"{folder} can't be read as a model's files", COMPLETE, error=ModelError):
        files: dict[str, list[str]] = {}
        if index.exists():
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(file, []).append(name)
            if outside := [file for file in files if Path(file).name != file]:
                raise ModelError(f"{index} names a file in another folder, {outside[0]}: {COMPLETE}")
        is_stale = not all((folder / file).exists() for file in files)  # an index that was left behind
        if single.exists() and (not files or is_stale):
            files = {SAFE_WEIGHTS_NAME: []}
        if not files:
            raise ModelError(f"{folder} has neither {SAFE_WEIGHTS_INDEX_NAME} nor {SAFE_WEIGHTS_NAME}")
        for file, names in files.items():
            with safe_open(folder / file, "pt") as tensors:
                inside = tensors.keys()
            if missing := set(names) - set(inside):
                raise ModelError(f"{folder / file} lacks {min(missing)}, which {index} lists")
            files[file] = list(inside)
    return ModelFiles(folder, {file: tuple(names) for file, names in sorted(files.items())})
