"""Paths of data: the JSONL or Parquet files of a path, and the folder of prepared rows."""

from __future__ import annotations

from glob import glob, has_magic
from pathlib import Path

from rlpipe.errors import ConfigError, DataError

SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",)}
"""Suffixes of the files that are read from a folder, by source."""


def data_files(path: str | None, source: str, option: str) -> list[Path]:
    """Return the sorted files of a path, which is a file, a pattern such as ``rows/*.jsonl``, or a folder.

    In a folder, all files with the source's suffixes are taken, at any depth. Raises ``DataError``, which names the
    option, if there is no file.
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
    """Return the folder of ``data.cache``, which need not exist; raise ``ConfigError`` if it can't be created."""
    folder = Path(path).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"data.cache: {there} is a file; name a folder")
    return folder
