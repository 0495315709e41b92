"""Finds the files that a path of JSONL or Parquet stands for, and the folder of prepared rows."""

from __future__ import annotations

from glob import glob, has_magic
from pathlib import Path

from rlpipe.errors import ConfigError, DataError

SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",)}
"""What the names of a folder's files end with, by source."""


def data_files(path: str | None, source: str, option: str) -> list[Path]:
    """A file, all that match a pattern such as ``rows/*.jsonl``, or all of a folder with the source's suffix; sorted.

    Raises ``DataError``, naming the option, if there is none.
    """
    if path is None:
        raise DataError(f"{option} is not set; source {source} needs a file")
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.name.endswith(SUFFIXES[source]))
        if not files:
            raise DataError(
                f"{option}: no file in the folder {place.absolute()} ends with {' or '.join(SUFFIXES[source])}"
            )
        return files
    if not has_magic(str(place)):
        raise DataError(f"{option}: there is no file {place.absolute()}")
    files = sorted(file for file in map(Path, glob(str(place), recursive=True)) if file.is_file())
    if not files:
        raise DataError(f"{option}: no file matches {place.absolute()}")
    return files


def cache_folder(path: str) -> Path:
    """That of ``data.cache``, which need not exist; raises ``ConfigError`` if it can't."""
    folder = Path(path).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"data.cache: {there} is a file; name a folder")
    return folder
