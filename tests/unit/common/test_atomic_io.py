"""Tests that folders and files appear whole or not at all."""

import os
import shutil
from pathlib import Path

import pytest
from disk_cases import largest_file

import rlpipe
from rlpipe.common.atomic_io import check_room, python_files, whole_folder, why_not_writable, write_whole


def test_a_folder_replaces_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "new" / "policy"
    for name in ("first", "second"):
        with whole_folder(target) as folder:
            (folder / name).write_text(name)
    assert [path.name for path in target.iterdir()] == ["second"]
    assert [path.name for path in target.parent.iterdir()] == ["policy"]


def write_half(target: Path) -> None:
    with whole_folder(target) as folder:
        (folder / "weights").write_text("new")
        raise OSError("the disk is full")


def test_a_failure_leaves_the_folder_before(tmp_path: Path) -> None:
    target = tmp_path / "policy"
    with whole_folder(target) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(OSError, match="full"):
        write_half(target)
    assert (target / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "old")
    with largest_file(100), pytest.raises(OSError, match="too large"):
        write_whole(path, "new" * 1000)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_two_processes_may_write_one_file_at_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.json"
    replace = Path.replace

    def replace_late(self: Path, target: Path) -> Path:
        monkeypatch.undo()
        write_whole(path, "the other's")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_late)
    write_whole(path, "this one's")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("this one's", [path])


def test_what_a_killed_process_has_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    for name in ("old", "new"):
        (tmp_path / f".rates.json.{name}.writing").write_text("half")
    os.utime(tmp_path / ".rates.json.old.writing", (0, 0))
    write_whole(path, "whole")
    assert sorted(found.name for found in tmp_path.iterdir()) == [".rates.json.new.writing", "rates.json"]


def test_what_keeps_a_folder_from_being_made_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert why_not_writable(tmp_path / "new" / "run") is None
    assert why_not_writable(file / "new" / "run") == f"{file} is not a folder"
    assert why_not_writable(link / "run") == f"{link} is not a folder"
    assert why_not_writable(Path("/proc/self/run")) == "/proc/self can't be written to"


def test_a_large_file_must_leave_room_for_the_others(tmp_path: Path) -> None:
    check_room(tmp_path, 1000)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(
        OSError, match=r"\[Errno 28\] the disk has .* MiB left, but needs .*, plus 16 MiB for the ledger"
    ):
        check_room(tmp_path, free + 2**30)


def test_python_files_are_found_through_links(tmp_path: Path) -> None:
    for name in ("package/own.py", "package/deep/own.py", "package/data.json", "beside/linked.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "package" / "link").symlink_to("../beside")
    assert python_files(tmp_path / "package") == ["deep/own.py", "link/linked.py", "own.py"]
    assert "configs/data_sources.py" in python_files(Path(rlpipe.__file__).parent)
