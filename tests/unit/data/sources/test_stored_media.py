"""Tests that images of data sets reach the row as the stored bytes, and other values as the library reads them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Audio, ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Pillow

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.images import take_images
from rlpipe.data.render.messages import chat_messages
from rlpipe.data.row import Row, UnusableRow
from rlpipe.data.sources.open_rows import open_rows, open_stream
from rlpipe.data.sources.stored_media import StoredImage, reads_rows, with_stored_media


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 12, 3), np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


PICTURES = [jpeg(seed) for seed in range(3)]
PART = {"type": Value("string"), "text": Value("string"), "image": Image()}
FEATURES = Features(
    {
        "one": Image(),
        "images": List(Image()),
        "messages": List({"role": Value("string"), "content": List(PART)}),
        "level": ClassLabel(names=["low", "high"]),
        "matrix": datasets.Array2D((2, 2), "int64"),
    }
)
ROW = {
    "one": {"bytes": PICTURES[0]},
    "images": [{"bytes": PICTURES[1]}, {"bytes": PICTURES[2]}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image", "text": None, "image": {"bytes": PICTURES[0]}},
                {"type": "text", "text": "a", "image": None},
            ],
        }
    ],
    "level": "high",
    "matrix": [[1, 2], [3, 4]],
}


@pytest.fixture(params=["saved", "parquet"])
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    dataset = Dataset.from_list([ROW, {**ROW, "one": None, "images": []}], features=FEATURES)
    folder = tmp_path / "rows"
    if request.param == "saved":
        dataset.save_to_disk(str(folder))
    else:
        folder.mkdir()
        dataset.to_parquet(str(folder / "train.parquet"))
    return DataConfig(source="datasets", path=str(folder))


def images(row: Row, column: str) -> list[bytes]:
    return take_images(chat_messages([{"role": "user", "content": "a"}]), row[column], Path())[1]


def rows_of(data: DataConfig) -> list[Row]:
    rows: Any = open_stream(data) if data.streaming else open_rows(data, seed=0)
    return [rows[0], rows[1]]


@pytest.mark.parametrize("streaming", [False, True])
def test_images_keep_the_bytes_that_were_stored(data: DataConfig, streaming: bool) -> None:
    first, second = rows_of(replace(data, streaming=streaming))
    assert images(first, "one") == PICTURES[:1]
    assert images(first, "images") == PICTURES[1:]
    assert take_images(chat_messages(first["messages"]), None, Path())[1] == PICTURES[:1]
    assert images(second, "one") == images(second, "images") == []


@pytest.mark.parametrize("streaming", [False, True])
def test_all_else_is_as_the_library_reads_it(data: DataConfig, streaming: bool) -> None:
    (row, _), dataset = rows_of(replace(data, streaming=streaming)), Dataset.from_list([ROW], features=FEATURES)
    for name in ("level", "matrix"):
        assert row[name] == dataset[0][name]
    assert row.keys() == FEATURES.keys()


def test_rows_of_a_data_set_that_was_saved_with_a_format_are_plain(tmp_path: Path) -> None:
    dataset = Dataset.from_list([ROW], features=FEATURES).with_format("numpy", columns=["level"])
    dataset.save_to_disk(str(tmp_path / "rows"))
    row = open_rows(DataConfig(source="datasets", path=str(tmp_path / "rows")), seed=0)[0]
    assert images(row, "one") == PICTURES[:1]
    assert type(row["level"]) is int


def test_a_stream_that_threads_decode_ahead_keeps_the_bytes() -> None:
    stream = Dataset.from_list([ROW], features=FEATURES).to_iterable_dataset().decode(num_threads=2)
    assert images(next(iter(with_stored_media(stream))), "images") == PICTURES[1:]


def test_images_of_a_folder_are_read_from_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    for number, picture in enumerate(PICTURES):
        (tmp_path / "rows" / f"{number}.jpg").write_bytes(picture)
    rows = open_rows(DataConfig(source="datasets", path=str(tmp_path / "rows")), seed=0)
    assert [images(rows[index], "image") for index in range(3)] == [[picture] for picture in PICTURES]


def test_an_image_that_is_elsewhere_is_fetched(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.writestr("a.jpg", PICTURES[0])
    value = {"bytes": None, "path": f"zip://a.jpg::{tmp_path}/rows.zip"}
    assert StoredImage().decode_example(value).size == (12, 8)
    local = {"bytes": None, "path": "a.jpg"}
    assert StoredImage().decode_example(local) == local


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("https://127.0.0.1:9/a.png", "is a URL: download the images"),
        ("zip://a.jpg::nowhere.zip", "the data set can't decode it"),
    ],
)
def test_an_image_that_can_not_be_had_makes_its_row_unusable(path: str, problem: str) -> None:
    rows = [{"image": {"bytes": None, "path": path}}]
    read = reads_rows(Dataset.from_list(rows, features=Features({"image": Image()})))
    with pytest.raises(UnusableRow, match=problem):
        images(read(0), "image")


def test_sounds_are_not_decoded() -> None:
    features, sound = Features({"sound": Audio()}), {"bytes": b"RIFF", "path": None}
    table = pa.Table.from_pylist([{"sound": sound}], schema=features.arrow_schema)
    assert reads_rows(Dataset(table))(0) == {"sound": sound}
