"""Mixes, streams and images in ``rlpipe data preview`` and ``stats``."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from data_cases import conversation, refused, write_run
from image_cases import IMAGE_FAMILIES, picture, render_rows, rows_with_files
from PIL import Image
from prepared_cases import config_of, open_run, write

from rlpipe import cli
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.row_view import split_row
from rlpipe.models.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()


def printed(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    assert cli.main(["data", command, *arguments]) == 0
    return capsys.readouterr().out


def stats(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(printed(capsys, "stats", "--json", *arguments))


def titles(text: str) -> list[str]:
    return re.findall(r"^row .*", text, re.MULTILINE)


def mix(folder: Path) -> list[str]:
    """Return the options of a mix of three rows of ``a`` per row of ``b``, which has four times as many valid rows."""
    arguments = write_run(folder, [], TOKENIZER, path=None)
    write(folder / "a.jsonl", [conversation("q", f"a{number}") for number in range(5)] + [{"messages": []}])
    write(folder / "b.jsonl", [conversation("qq", f"b{number:02}") for number in range(20)])
    return [
        *arguments,
        *("data.source=mix", f"data.sources.a={{source: jsonl, path: {folder / 'a.jsonl'}, weight: 3}}"),
        f"data.sources.b={{source: jsonl, path: {folder / 'b.jsonl'}}}",
    ]


def test_rows_of_a_mix_are_those_that_the_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = mix(tmp_path)
    text = printed(capsys, "preview", *arguments, "--num", "16")
    assert [re.findall(r" of (\w) ", title)[0] for title in titles(text)].count("a") == 12
    source, _ = open_run(config_of([*arguments[1:], *file_of(arguments)]))
    taken = [TOKENIZER.decode(item.token_ids[item.loss_mask])[:2] for item in source.take(14)]
    assert [answer[:2] for answer in re.findall("⟦(.*?)<", text)] == taken
    assert sum(": skipped, " in title for title in titles(text)) == 2
    third = printed(capsys, "preview", *arguments, "--row", "2")
    assert titles(third) == titles(text)[2:3]
    assert f"({tmp_path / 'b.jsonl'}, line" in text


def file_of(arguments: list[str]) -> list[str]:
    """Return the options in the file that ``write_run`` wrote."""
    run = json.loads(Path(arguments[0]).read_text())
    return ["algorithm=sft", *(f"model.{name}={value}" for name, value in run["model"].items())]


def test_a_mix_is_counted_in_all_and_by_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = mix(tmp_path)
    found = stats(capsys, *arguments)
    own = found["sources"]
    assert (found["num_rows"], own["a"]["num_rows"], own["b"]["num_rows"]) == (26, 6, 20)
    assert own["a"]["skipped"]["unrenderable"]["count"] == found["skipped"]["unrenderable"]["count"] == 1
    assert own["a"]["tokens"]["total"] + own["b"]["tokens"]["total"] == found["tokens"]["total"]
    assert (own["a"]["tokens"]["max"], own["b"]["tokens"]["max"]) == (1 + 2 + 4, 2 + 3 + 4)
    assert found["num_trained_tokens"] == 5 * 3 + 20 * 4
    assert found["micro_batches"] is None
    first = stats(capsys, *arguments, "--num", "8", "algorithm.groups_per_step=4")
    assert (first["sources"]["a"]["num_rows"], first["sources"]["b"]["num_rows"]) == (6, 2)
    assert first["micro_batches"]["count"] == 2
    text = printed(capsys, "stats", *arguments)
    assert "the mix of a, b: 26 rows, 25 used\n" in text
    assert f"\n\na, {tmp_path / 'a.jsonl'}: 6 rows, 5 used\n" in text


def test_streams_are_shown_and_counted_for_one_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [conversation("q", f"a{number}") for number in range(25)]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    stream = [*arguments, "data.streaming=true", "data.shuffle_rows=4"]
    assert printed(capsys, "preview", *stream, "--num", "9") == printed(capsys, "preview", *arguments, "--num", "9")
    assert printed(capsys, "preview", *stream, "--row", "24") == printed(capsys, "preview", *arguments, "--row", "24")
    assert "has fewer rows" in refused(capsys, "preview", *stream, "--row", "25")
    assert len(titles(printed(capsys, "preview", *stream, "--num", "99"))) == 25
    assert stats(capsys, *stream) == stats(capsys, *arguments)
    assert stats(capsys, *stream, "--num", "7") == stats(capsys, *arguments, "--num", "7")
    assert stats(capsys, *stream)["num_rows"] == 25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGE_FAMILIES["idefics3"].write(tmp_path_factory.mktemp("model"))


def images(folder: Path, model: Path) -> list[str]:
    write(folder / "rows.jsonl", rows_with_files(folder))
    return ["data=jsonl", f"data.path={folder / 'rows.jsonl'}", "algorithm=sft", f"model.path={model}"]


def test_an_image_is_one_piece_with_its_size(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "preview", *images(tmp_path, model), "--num", "5")
    rollouts = render_rows(ModelConfig(path=str(model)))
    placed = [image for rollout in rollouts for image in rollout.images]
    sizes = ["40x30", "20x20", "70x30", "30x90", "40x30", "16x16"]
    shown = [f"<image {size}> ×{image.num_tokens} " for size, image in zip(sizes, placed, strict=True)]
    assert re.findall(r"<image \d+x\d+> ×\d+ ", text) == shown
    assert "<row_1_col_1>" not in text
    assert ", 3 images\n" in text
    tokenizer = IMAGE_FAMILIES["idefics3"].tokenizer()
    for rollout in rollouts:
        pieces = split_row(rollout.token_ids, rollout.loss_mask, tokenizer, rollout.images)
        ids = [token for piece in pieces for token in piece.token_ids * (1 if piece.image else piece.repeats)]
        assert ids == rollout.token_ids.tolist()
        assert [piece.image for piece in pieces if piece.image] == [image.content for image in rollout.images]


def test_the_page_has_small_copies_of_images(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "rows.html"
    arguments = images(tmp_path, model)
    (tmp_path / "1.png").write_bytes(picture(700, 350, 1))
    (tmp_path / "3.png").write_bytes(b"<script>alert('x')</script>")
    printed(capsys, "preview", *arguments, "--num", "5", "--html", str(page))
    html = page.read_text()
    copies = re.findall(r'<img alt="" src="data:image/png;base64,([A-Za-z0-9+/=]+)">', html)
    assert len(copies) == html.count("<img") == html.count("src=") == 5
    assert Image.open(io.BytesIO(base64.b64decode(copies[0]))).size == (192, 96)
    assert "skipped, unrenderable" in html
    assert "<script" not in html


def test_images_are_counted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = images(tmp_path, model)
    placed = [image for rollout in render_rows(ModelConfig(path=str(model))) for image in rollout.images]
    num_tokens = sum(image.num_tokens for image in placed)
    found = stats(capsys, *arguments)
    assert found["images"] == {"num_rows": 4, "num_images": 6, "num_tokens": num_tokens}
    assert found["num_repeated"] == 0
    assert f"images         6 in 4 rows, {num_tokens} tokens in total\n" in printed(capsys, "stats", *arguments)


def test_rows_that_differ_in_their_images_are_no_repeats(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = images(tmp_path, model)
    _, row, *_ = rows_with_files(tmp_path)
    (tmp_path / "other.png").write_bytes(picture(40, 30, 9))
    write(tmp_path / "rows.jsonl", [row, {**row, "images": ["other.png"]}, row])
    assert stats(capsys, *arguments)["num_repeated"] == 1


def test_images_need_the_model_s_processor(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*images(tmp_path, model), "model.path=org/policy", f"model.tokenizer={model}"]
    assert "model.path=org/policy: its processor can't be loaded" in refused(capsys, "preview", *arguments)
