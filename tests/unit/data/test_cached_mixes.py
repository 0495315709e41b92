"""Tests that each source of a mix is prepared separately, streams are not, and log messages reach the run's user."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_cases import conversation, refused
from image_cases import IMAGE_FAMILIES, picture, rows_with_files
from prepared_cases import config_of, prepare, story, write

import rlpipe
from rlpipe.data.render_rows import forward_logs
from rlpipe.models.tiny_model import make_tokenizer

CHATS = [conversation("q" * (number % 9 + 1), f"a{number}", "and?", "yes") for number in range(30)]
ROWS = [{"question": f"{number}?", "completion": f"{number}!", "level": number} for number in range(20)]
PROMPTS = [{"question": f"{number}?", "ground_truth": f"{number}!"} for number in range(20)]


def sources(folder: Path, **options: str) -> list[str]:
    """Return the options of a mix of files ``a`` and ``b``."""
    make_tokenizer().save_pretrained(folder / "tokenizer")
    named = [f"data.sources.{name}.{key}={value}" for name in "ab" for key, value in options.items()]
    return [
        *("model.path=org/policy", f"model.tokenizer={folder / 'tokenizer'}", "data.source=mix"),
        *("data.sources.a.source=jsonl", f"data.sources.a.path={folder / 'a.jsonl'}", "data.sources.a.weight=2"),
        *("data.sources.b.source=jsonl", f"data.sources.b.path={folder / 'b.jsonl'}"),
        *(f"data.cache={folder / 'cache'}", "seed=3", *named),
    ]


def sequences(folder: Path) -> list[str]:
    write(folder / "a.jsonl", CHATS)
    write(folder / "b.jsonl", [*ROWS, {"question": None, "completion": "a"}])
    return [*sources(folder), "algorithm=sft", "data.sources.b.prompt_column=question"]


def with_held_out(folder: Path) -> list[str]:
    return [*sequences(folder), "data.held_out.size=6"]


def with_held_out_file(folder: Path) -> list[str]:
    write(folder / "held_out.jsonl", CHATS[4:8])
    return [*sequences(folder), f"data.held_out.path={folder / 'held_out.jsonl'}"]


def prompts(folder: Path) -> list[str]:
    write(folder / "a.jsonl", [{"prompt": row["question"] * 2, "ground_truth": "x"} for row in PROMPTS])
    write(folder / "b.jsonl", [*PROMPTS, {"question": "own", "ground_truth": "x", "data_source": "gsm8k"}])
    return [*sources(folder), "algorithm=ebft", "data.sources.b.prompt_column=question"]


def num_found(options: list[str], caplog: pytest.LogCaptureFixture) -> int:
    """Return how many sources a run finds prepared."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        story(config_of(options))
    return len([line for line in caplog.messages if "prepared rows are read from" in line])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(sequences, 2, marks=pytest.mark.slow),
        pytest.param(with_held_out, 2, marks=pytest.mark.slow),
        (with_held_out_file, 3),
        (prompts, 2),
    ],
)
def test_a_mix_is_the_same_with_prepared_rows(
    case: Callable[[Path], list[str]], expected: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = case(tmp_path)
    rendered = story(config_of(options))
    prepare(options, workers=2)
    assert num_found(options, caplog) == expected
    assert story(config_of(options)) == rendered


def test_a_source_that_changes_is_rendered_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = sequences(tmp_path)
    prepare(options)
    assert num_found([*options, "data.sources.b.weight=7", "data.shuffle=false"], caplog) == 2
    assert num_found([*options, "data.sources.b.system_prompt=Hi."], caplog) == 1
    assert num_found([*options, "data.system_prompt=Hi."], caplog) == 0
    write(tmp_path / "b.jsonl", ROWS)
    assert num_found(options, caplog) == 1


def test_rows_of_a_mix_are_named_and_those_of_one_source_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = prompts(tmp_path)
    prepare(options)
    alone = [option for option in options if not option.startswith("data.so")]
    assert num_found([*alone, "data.source=jsonl", f"data.path={tmp_path / 'a.jsonl'}"], caplog) == 0


def test_files_of_a_pattern_are_all_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sequences(tmp_path)
    options = [option for option in sources(tmp_path) if not option.startswith("data.so")]
    options += ["algorithm=sft", "data.source=jsonl", f"data.path='{tmp_path}/[ac].jsonl'"]
    write(tmp_path / "c.jsonl", CHATS[:3])
    prepare(options)
    assert num_found(options, caplog) == 1
    write(tmp_path / "c.jsonl", CHATS[1:3])
    assert num_found(options, caplog) == 0


def test_streams_are_not_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = sequences(tmp_path)
    message = refused(capsys, "prepare", *options, "data.streaming=true")
    assert message == (
        "rlpipe: error: data.streaming: a stream is rendered as it is read, and not prepared; set it to false\n"
    )


@pytest.mark.slow
def test_streams_do_not_read_prepared_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = sequences(tmp_path)
    rendered = story(config_of([*options, "data.streaming=true"]))
    prepare(options)
    assert num_found([*options, "data.streaming=true"], caplog) == 0
    assert story(config_of([*options, "data.streaming=true"])) == rendered


def test_streams_of_a_mix_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [*sequences(tmp_path), "data.sources.a.streaming=true"]
    prepare(options)
    assert "data.sources.a is a stream" in caplog.text
    assert num_found(options, caplog) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGE_FAMILIES["idefics3"].write(tmp_path_factory.mktemp("model"))


def images(folder: Path, model: Path, algorithm: str = "sft") -> list[str]:
    folder.mkdir(exist_ok=True)
    absent: dict[str, Any] = {"messages": conversation("q", "a")["messages"], "images": ["absent.png"]}
    rows = [*rows_with_files(folder, as_prompts=algorithm != "sft"), *([absent] if algorithm == "sft" else [])]
    write(folder / "rows.jsonl", rows * 2)
    return [
        *(f"model.path={model}", "data=jsonl", f"data.path={folder / 'rows.jsonl'}", f"data.cache={folder / 'cache'}"),
        *(f"algorithm={algorithm}", "data.held_out.size=1"),
    ]


@pytest.mark.covering(0)
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_images_are_the_same_with_prepared_rows(
    algorithm: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = images(tmp_path, model, algorithm)
    rendered = story(config_of(options))
    assert repr(rendered).count("PlacedImage") > 20
    prepare(options, workers=2)
    assert num_found(options, caplog) == 1
    assert story(config_of(options)) == rendered


def change_picture(folder: Path, model: Path) -> list[str]:
    (folder / "1.png").write_bytes(picture(30, 60, 7))
    return []


def add_picture(folder: Path, model: Path) -> list[str]:
    (folder / "absent.png").write_bytes(picture(30, 60, 7))
    return []


def change_processor(folder: Path, model: Path) -> list[str]:
    other = folder / "model"
    other.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        is_processor = file.name == "processor_config.json"
        (other / file.name).write_bytes(content.replace(b'"longest_edge": 64', b'"longest_edge": 96'))
        assert not is_processor or content != (other / file.name).read_bytes()
    return [f"model.path={other}"]


CHANGES = [
    change_picture,
    *(
        pytest.param(change, marks=pytest.mark.slow)
        for change in (
            change_processor,
            add_picture,
            lambda folder, model: ["model.processor_kwargs.do_image_splitting=false"],
            lambda folder, model: [f"data.images_folder={folder}"],
        )
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_images_are_made_from_is_seen(
    change: Callable[[Path, Path], list[str]], model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = images(tmp_path, model)
    prepare(options)
    assert num_found(options, caplog) == 1
    options += change(tmp_path, model)
    assert num_found(options, caplog) == 0
    rendered = story(config_of(options))
    prepare(options)
    assert num_found(options, caplog) == 1
    assert story(config_of(options)) == rendered


def test_a_model_s_own_code_is_looked_at_where_it_is_trusted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = shutil.copytree(model, tmp_path / "model")
    (own / "processing_own.py").write_text("SIZE = 1\n")
    options = images(tmp_path, own)
    trusting = [*options, "model.trust_remote_code=true"]
    prepare(trusting)
    prepare(options)
    (own / "processing_own.py").write_text("SIZE = 2\n")
    assert num_found(trusting, caplog) == 0
    assert num_found(options, caplog) == 1


@pytest.mark.parametrize(
    "files",
    [("data/chat.py",), pytest.param(("types.py", "configs/data_sources.py", "data/chat.py"), marks=pytest.mark.slow)],
)
def test_all_of_rlpipe_s_code_is_looked_at(files: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(Path(rlpipe.__file__).parent, tmp_path / "rlpipe")
    command = [sys.executable, "-c", "from rlpipe.data.cached_rows import _code_digest; print(_code_digest())"]
    found = []
    for changed in (None, *files):
        if changed is not None:
            with (tmp_path / "rlpipe" / changed).open("a") as file:
                file.write("# another line\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        found.append(subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True).stdout)
    assert len(set(found)) == 1 + len(files)


def test_an_image_is_stored_once_with_its_row(model: Path, tmp_path: Path) -> None:
    options = images(tmp_path, model)
    write(tmp_path / "rows.jsonl", rows_with_files(tmp_path))
    prepare(options)
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    for number in (1, 2, 3):
        assert file.read_bytes().count((tmp_path / f"{number}.png").read_bytes()) == 1


def test_lines_for_users_and_warnings_are_handed_on_while_rows_are_read() -> None:
    heard: list[str] = []
    masks, rows = (logging.getLogger(f"rlpipe.data.{name}") for name in ("masks.resolve", "row_source"))
    with forward_logs(heard.append, warnings=True):
        masks.info("loss mask: %s", "built in")
        rows.info("a row is held out")
        rows.warning("a row is skipped")
        masks.warning("an odd template")
    masks.info("not any more")
    assert heard == ["loss mask: built in", "a row is skipped", "an odd template"]


def test_warnings_can_be_left_to_the_log() -> None:
    heard: list[str] = []
    with forward_logs(heard.append, warnings=False):
        logging.getLogger("rlpipe.data.cached_rows").info("rows.jsonl: 3 prepared rows are read")
        logging.getLogger("rlpipe.data.sources.row_source").warning("a row is skipped")
    assert heard == ["rows.jsonl: 3 prepared rows are read"]
