"""Damage to files: by failing disks and interrupted copies, and as someone might craft it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

HEADER = 8
"""Bytes at the start of a safetensors file that hold the length of its header."""
DEEP = "[" * 100_000 + "]" * 100_000
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2.5, 1e308, 10**6, 2**31, 10**9, 10**30, "", "x", "a\0b", "\ud800", "../x", [], {}, [[]],
    [1, "x"], {"x": None}, json.loads("[" * 300 + "]" * 300),
)  # fmt: skip
"""Values that replace others in JSON files."""
WHOLE = (b"", b"{}", b"[]", b"null", b"\0", b"\xff\xfe", b'{"a": NaN}', b"{", b'"x"', DEEP.encode())
"""Contents that replace whole files."""


def truncate(path: Path, rng: Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flip_bits(path: Path, rng: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 64])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def fill_with_zeros(path: Path, rng: Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice([4, 512, len(content)]))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def remove(path: Path, _: Random) -> None:
    path.unlink()


def replace_whole(path: Path, rng: Random) -> None:
    path.write_bytes(rng.choice(WHOLE))


def make_folder(path: Path, _: Random) -> None:
    path.unlink()
    path.mkdir()


def swap(path: Path, rng: Random) -> None:
    other = rng.choice(sorted(file for file in path.parent.iterdir() if file.is_file() and file != path))
    content = path.read_bytes()
    shutil.copyfile(other, path)
    other.write_bytes(content)


def change_json(path: Path, rng: Random) -> None:
    """Change one value of a JSON file, or of the header of a safetensors file."""
    content = path.read_bytes()
    start = HEADER if path.suffix == ".safetensors" else 0
    end = start + int.from_bytes(content[:HEADER], "little") if start else len(content)
    tree = json.loads(content[start:end])
    change_tree(tree, rng)
    header = json.dumps(tree).encode()
    path.write_bytes((len(header).to_bytes(HEADER, "little") if start else b"") + header + content[end:])


def change_tree(tree: Any, rng: Random) -> None:
    """Remove or replace one value; those of the upper levels are chosen more often than those below."""
    places: list[Any] = [*(tree if isinstance(tree, dict) else range(len(tree)))]
    inner = [place for place in places if isinstance(tree[place], dict | list) and tree[place]]
    if inner and rng.random() < 0.5:
        change_tree(tree[rng.choice(inner)], rng)
    elif rng.random() < 0.2:
        del tree[rng.choice(places)]
    else:
        tree[rng.choice(places)] = rng.choice(ODD)


Damage = Callable[[Path, Random], None]
DAMAGES: tuple[Damage, ...] = (
    *(truncate, flip_bits, flip_bits, flip_bits, flip_bits, fill_with_zeros, fill_with_zeros),
    *(remove, replace_whole, make_folder, swap),
)
"""Kinds of damage; those that only a digest shows are chosen more often."""


def damage_of(path: Path, rng: Random) -> Damage:
    """Choose a damage; files with JSON often get a changed value."""
    has_json = path.suffix in (".json", ".safetensors")
    return change_json if has_json and rng.random() < 0.4 else rng.choice(DAMAGES)
