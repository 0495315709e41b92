"""A thousand damaged configs: each is used, or refused with one line and exit code 2."""

from __future__ import annotations

import copy
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlpipe.cli import main
from rlpipe.configs.compose import list_groups, load_config
from rlpipe.configs.options import to_tree

EXPERIMENTS = list_groups()["experiment"]
NUM_CASES, PER_TEST = 1000, 50
LIMIT_S = 30
VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(10**40), 10**400, 0.5, -0.0, 1e-320, 1e30, 1e308,
    float("nan"), float("inf"), -float("inf"), "", " ", "0", "1e9", "null", "true", "nan", ".inf", "auto", "none",
    "..", "/", "~", "~/x", "a/b", "\0", "a\0b", "\n", "x" * 300, "x" * 100_000, "\u202e", "\ud800", "é", "日本", "💥",
    "${name}", "${", "\\${x}", "${oc.env:NOT_THERE}", "${oc.env:HOME}", "${oc.decode:'{'}", "${.}", "${..}",
    "${seed}", "${learner}", "${a.b.c}", "${oc.create:{a: 1}}", "${oc.select:seed}", "???", "%s", "{0}", "__class__",
    "file:///etc/passwd", "http://[::1", "os:system", "a.b:c", "x.py:f", ".:", ":", "9:9", "2001-01-01",
    [], [None], [[]], [1, "a"], ["a", "a"], [float("nan")], list(range(1000)), {}, {"": 1}, {"a": {}}, {"a.b": 1},
    {"/": {}}, {"\n": 1}, {1: 2}, {None: None}, {"x" * 300: 1}, {"name": {"name": {"name": 1}}},
]  # fmt: skip
"""Values that are wrong nearly everywhere."""
TEXTS = [
    "\t", "- ", ": ", "{", "}", "[", "]", "&a ", "*a ", "!!python/object:os.system ", "!!set {a}", "!!omap",
    "|\n", "> ", "'", '"', "#", "%", "@", "`", "? ", "<<: *a\n", "---\n", "...\n", "\r", "\x00", "\x1b[2J", "\ufeff",
    "\x85", "\u2028", "!!binary ", "0x", "1:30", "defaults: [", "defaults:\n- experiment: x\n",
]  # fmt: skip
"""Pieces of YAML, and characters that it treats in a special way."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise ``TimeoutError`` in this thread if the block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container below a node with each of its keys or indices."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in list(children):
        yield node, key
        yield from places(child)


def replace_value(tree: Any, draw: random.Random) -> None:
    node, key = draw.choice(list(places(tree)))
    node[key] = copy.deepcopy(draw.choice(VALUES))


def swap_values(tree: Any, draw: random.Random) -> None:
    (node, key), (other, other_key) = draw.sample(list(places(tree)), 2)
    node[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(node[key])


def scale_number(tree: Any, draw: random.Random) -> None:
    numbers = [place for place in places(tree) if type(place[0][place[1]]) in (int, float)]
    node, key = draw.choice(numbers)
    node[key] *= draw.choice([-1, 0, 0.5, 3, 10**6, 1e-9])


def remove_entry(tree: Any, draw: random.Random) -> None:
    node, key = draw.choice(list(places(tree)))
    del node[key]


def rename_key(tree: Any, draw: random.Random) -> None:
    node, key = draw.choice([place for place in places(tree) if isinstance(place[0], dict)])
    characters = list(key) or [""]
    draw.shuffle(characters)
    node[draw.choice(["".join(characters), f"{key}x", key.upper(), f"{key}.{key}", 1, None, ""])] = node.pop(key)


def nest_value(tree: Any, draw: random.Random) -> None:
    node, key = draw.choice(list(places(tree)))
    for _ in range(draw.choice([1, 2, 100])):
        node[key] = draw.choice([[node[key]], {"a": node[key]}, {key: node[key]}])


def damage_text(text: str, draw: random.Random) -> str:
    at, end = sorted((draw.randrange(len(text)), draw.randrange(len(text))))
    piece = draw.choice(TEXTS)
    return draw.choice(
        [
            text[:at],
            text[at:],
            text[:at] + piece + text[at:],
            text[:at] + piece + text[at + 1 :],
            text[:at] + text[end:],
            text[:at] + text[at:end][:200] * 2 + text[end:],
            text + text,
            text.replace("\n", draw.choice(["\r", "\n\n", "\n  "])),
        ]
    )


MUTATIONS: list[Callable[[Any, random.Random], None]] = [
    *[replace_value] * 6, swap_values, scale_number, scale_number, remove_entry, rename_key, nest_value,
]  # fmt: skip


def mutated(experiment: str, draw: random.Random) -> bytes:
    """Return the file of an experiment, with its options damaged in up to three places, or its text."""
    tree = copy.deepcopy(tree_of(experiment))
    if draw.random() < 0.5:  # a section alone, so that its problems are not hidden by those of other sections
        tree = {key: tree[key] for key in draw.sample(list(tree), 4)}
    for _ in range(draw.choice([1, 1, 2, 3])):
        draw.choice(MUTATIONS)(tree, draw)
    text = yaml.safe_dump(tree, allow_unicode=draw.random() < 0.5)
    if draw.random() < 0.25:
        text = damage_text(text, draw)
    data = text.encode(errors="surrogatepass")
    if draw.random() < 0.05:
        at = draw.randrange(len(data))
        data = data[:at] + draw.randbytes(4) + data[at:]
    return data


TREES: dict[str, Any] = {}


def tree_of(experiment: str) -> Any:
    if experiment not in TREES:
        config = load_config([f"experiment={experiment}"], need_files=False)
        TREES[experiment] = json.loads(json.dumps(to_tree(config)))
    return TREES[experiment]


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, NUM_CASES, PER_TEST))
def test_a_mutated_config_is_used_or_refused_in_one_line(
    start: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(start, start + PER_TEST):
        draw = random.Random(seed)
        experiment = draw.choice(EXPERIMENTS)
        file = tmp_path / f"{seed}.yaml"
        file.write_bytes(mutated(experiment, draw))
        check(["config", f"experiment={experiment}", str(file)], f"case {seed}", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, NUM_CASES // 5, PER_TEST))
def test_a_mutated_override_is_used_or_refused_in_one_line(start: int, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(start, start + PER_TEST):
        draw = random.Random(seed)
        experiment = draw.choice(EXPERIMENTS)
        config = load_config([f"experiment={experiment}"], need_files=False)
        name, value = draw.choice([(name, value) for name, value in flat(to_tree(config)) if "." in name])
        text = f"{name}={draw.choice(['', *map(str, VALUES), *TEXTS, json.dumps(value)])}"
        if draw.random() < 0.3:
            text = damage_text(text, draw)
        check(["config", f"experiment={experiment}", *([text] if not text.startswith("-") else [])], text[:80], capsys)


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check(command: list[str], case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with limited(LIMIT_S):
        try:
            code = main(command)
        except SystemExit as end:
            code = end.code
    errors = capsys.readouterr().err
    assert code in (0, 2), f"{case}: exit code {code}: {errors[-500:]}"
    if code:
        assert errors.startswith("rlpipe: error: ") or "rlpipe config: error: " in errors, f"{case}: {errors[-500:]}"
    assert errors.count("\n") == (code == 2), f"{case}: {errors[:1000]}"
    assert len(errors) < 2000, f"{case}: a line of {len(errors)} characters: {errors[:500]}"
