"""Images, audio and videos of ``datasets`` in stored form, which that library would decode by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datasets import Audio, Dataset, Image, IterableDataset, LargeList, List, Video

from rlpipe.common.imports import describe_error
from rlpipe.data.row import Row, UnusableRow


class StoredImage(Image):
    """An image as a dict of its bytes and its path; an image in an archive or on the hub is fetched and decoded."""

    def decode_example(self, value: dict[str, Any], token_per_repo_id: Any = None) -> Any:
        scheme, separator, _ = str(value["path"]).partition("://")
        is_elsewhere = value["bytes"] is None and separator and scheme not in ("http", "https", "file")
        return super().decode_example(value, token_per_repo_id) if is_elsewhere else value


def reads_rows(dataset: Dataset) -> Callable[[int], Row]:
    """Return a function that reads a row as the data set does, but with stored media.

    That function raises ``UnusableRow`` if the row can't be decoded.
    """
    stored, features = dataset.with_format("arrow"), _stored(dataset.features)

    def read(index: int) -> Row:
        try:
            row: Row = features.decode_example(stored[index].to_pylist()[0])
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise UnusableRow(f"the data set can't decode it ({describe_error(error)})") from error
        return row

    return read


def with_stored_media(dataset: IterableDataset) -> IterableDataset:
    """Return the data set with stored media, or unchanged if its columns are unknown before it is read."""
    if not dataset.features:
        return dataset
    not_ahead = dataset.decode(num_threads=0)  # otherwise the library's threads decode ahead
    return not_ahead.cast(_stored(dataset.features))


def _stored(feature: Any) -> Any:
    """Return a feature, or a dict of all columns, with its media in stored form."""
    if isinstance(feature, dict):
        return type(feature)({name: _stored(inner) for name, inner in feature.items()})
    if isinstance(feature, List | LargeList):
        return replace(feature, feature=_stored(feature.feature))
    if isinstance(feature, Audio | Video):
        return replace(feature, decode=False)
    return StoredImage() if isinstance(feature, Image) and feature.decode else feature
