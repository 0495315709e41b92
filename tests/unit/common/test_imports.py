"""Tests that an object named by path in a config is imported, or refused with a helpful message."""

import sys
from pathlib import Path

import pytest

from rlpipe.common.imports import import_object
from rlpipe.errors import DataError, InputError


def test_module_path_gives_the_object() -> None:
    assert import_object("json.decoder:JSONDecoder.decode").__name__ == "decode"


def test_file_path_is_run_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("marker = object()")
    assert import_object(f"{file}:marker") is import_object(f"{file}:marker")


def test_working_directory_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlpipe_cwd_module.py").write_text("value = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nonexistent")  # restores sys.path afterwards
    assert import_object("rlpipe_cwd_module:value") == 7


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("json", "form package.module:name"),
        ("json:", "form package.module:name"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("json:JSONDecodr", "did you mean JSONDecoder"),
        ("missing/file.py:x", "there is no file"),
    ],
)
def test_wrong_paths_are_named(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_object(path, what="reward")


def test_a_file_may_import_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_run.py").write_text("value = 7")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own.py").write_text("from beside_the_run import value")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert import_object("code/own.py:value") == 7


@pytest.mark.parametrize("code", ["def broken(:", "import no_such_module", "1 / 0", "undefined_name", "exit(0)"])
def test_broken_files_raise_the_error_asked_for(tmp_path: Path, code: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code)
    with pytest.raises(DataError, match="can't be imported") as caught:
        import_object(f"{file}:x", error=DataError)
    assert "\n" not in str(caught.value)
