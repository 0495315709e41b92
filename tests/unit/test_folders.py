"""Folders appear whole or not at all."""

from pathlib import Path

import pytest

from rlpipe.folders import whole_folder


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
