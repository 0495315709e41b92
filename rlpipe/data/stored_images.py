"""Keeps images of ``datasets`` as they are stored, where that library would decode them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datasets import Dataset, Image, IterableDataset, LargeList, List

from rlpipe.data.rows import Row


class StoredImage(Image):
    """An image as the dict of its bytes and its path; only one that is elsewhere is fetched, and decoded."""

    def decode_example(self, value: dict[str, Any], token_per_repo_id: Any = None) -> Any:
        is_here = value["bytes"] is not None or "://" not in str(value["path"])
        return value if is_here else super().decode_example(value, token_per_repo_id)


def reads_rows(dataset: Dataset) -> Callable[[int], Row]:
    """What gives a row as the data set does, but for its images."""
    stored, features = dataset.with_format("arrow"), _stored(dataset.features)
    return lambda index: features.decode_example(stored[index].to_pylist()[0])


def with_stored_images(dataset: IterableDataset) -> IterableDataset:
    """The data set, whose images are stored ones; one whose columns are not known before they are read has none."""
    if not dataset.features:
        return dataset
    not_ahead = dataset.decode(num_threads=0)  # else the library's threads have decoded them already
    return not_ahead.cast(_stored(dataset.features))


def _stored(feature: Any) -> Any:
    """A feature, or all columns, in which images are stored ones."""
    if isinstance(feature, dict):
        return type(feature)({name: _stored(inner) for name, inner in feature.items()})
    if isinstance(feature, List | LargeList):
        return replace(feature, feature=_stored(feature.feature))
    return StoredImage() if isinstance(feature, Image) and feature.decode else feature
