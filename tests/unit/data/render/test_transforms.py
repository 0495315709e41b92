"""Tests that row transforms written for axolotl, TRL and Hugging Face's ``map`` work unchanged."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.formats import apply_transform
from rlpipe.data.row import Row, Rows, UnusableRow
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()


class FakeRows:
    name = "rows.jsonl"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def location(self, index: int) -> str:
        return f"{self.name}, line {index + 1}"


def transform_all(tmp_path: Path, code: str, rows: list[dict[str, Any]], **arguments: Any) -> Rows:
    file = tmp_path / "mine.py"
    file.write_text(code)
    data = DataConfig(source="jsonl", transform=f"{file}:transform", transform_args=arguments)
    return apply_transform(FakeRows(rows), data, TOKENIZER)


def transform(tmp_path: Path, code: str, row: dict[str, Any], **arguments: Any) -> Row:
    return transform_all(tmp_path, code, [row], **arguments)[0]


AXOLOTL = """
def transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip()
        content = example["question"] + tokenizer.eos_token
        return {"prompt": [{"role": "user", "content": content}], "answer": label}
    return transform_fn, {"remove_columns": ["question"]}
"""


def test_axolotl_transform_runs_unchanged(tmp_path: Path) -> None:
    row = transform(tmp_path, AXOLOTL, {"question": "2+2?", "answer": "so #### 4", "level": 1})
    assert row == {"prompt": [{"role": "user", "content": "2+2?<|end|>"}], "answer": "4", "level": 1}


def test_all_removes_every_original_column(tmp_path: Path) -> None:
    code = "def transform(cfg):\n    return (lambda row: {'prompt': row['q'], 'a': 1}), {'remove_columns': '__all__'}"
    assert transform(tmp_path, code, {"q": "x", "a": 0, "b": 2}) == {"prompt": "x", "a": 1}


def test_cfg_holds_the_data_config_and_the_arguments(tmp_path: Path) -> None:
    code = (
        "def transform(cfg, **kwargs):\n"
        "    return lambda row: {'got': [cfg.source, cfg['suffix'], cfg.suffix, cfg.unknown, cfg.get('x', 3)]}"
    )
    assert transform(tmp_path, code, {"q": "x"}, suffix="!") == {"q": "x", "got": ["jsonl", "!", "!", None, 3]}


def test_map_function_can_change_its_row_in_place(tmp_path: Path) -> None:
    code = (
        "def transform(cfg):\n"
        "    def change(row):\n"
        "        row['prompt'] = row.pop('q')\n"
        "        return row\n"
        "    return change, {'remove_columns': ['q']}"
    )
    original = {"q": "x"}
    assert transform(tmp_path, code, original) == {"prompt": "x"}
    assert original == {"q": "x"}


def test_a_function_that_changes_lists_in_place_is_called_on_the_original_row_each_time(tmp_path: Path) -> None:
    change = "row['turns'].insert(0, 'x')\n        return row"
    code = f"def transform(cfg):\n    def map_row(row):\n        {change}\n    return map_row\n"
    rows = transform_all(tmp_path, code, [{"turns": ["a"]}])
    assert [rows[0]["turns"] for _ in range(3)] == [["x", "a"]] * 3


def test_row_on_which_the_map_function_raises_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(UnusableRow, match=r"data.transform raised KeyError: 'question'"):
        transform(tmp_path, AXOLOTL, {"answer": "4"})


OWN_ERRORS = """
class NoLevel(Exception):
    pass

class Speechless(Exception):
    def __str__(self):
        return self.missing

"""


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("NoLevel('no level in it')", "data.transform raised NoLevel: no level in it"),
        ("Speechless()", "data.transform raised Speechless"),
        ("StopIteration()", "data.transform raised StopIteration"),
        ("MemoryError('1 TiB')", "data.transform raised MemoryError: 1 TiB"),
        ("BufferError('locked')", "data.transform raised BufferError: locked"),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_exceptions_of_every_kind_make_a_row_unusable(tmp_path: Path, raised: str, reason: str, batched: bool) -> None:
    code = f"{OWN_ERRORS}def change(row):\n    raise {raised}\ndef transform(cfg):\n"
    code += f"    return change, {{'batched': {batched}}}"
    with pytest.raises(UnusableRow, match=f"^{re.escape(reason)}$"):
        transform(tmp_path, code, {"q": "x"})


def test_the_reason_of_a_row_that_a_transform_gives_up_stays_as_it_is(tmp_path: Path) -> None:
    code = "from rlpipe.data.row import UnusableRow\ndef change(row):\n    raise UnusableRow('no turn')\n"
    with pytest.raises(UnusableRow, match=r"^no turn$"):
        transform(tmp_path, f"{code}def transform(cfg):\n    return change", {"q": "x"})


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_signals_that_end_the_process_pass_a_transform(tmp_path: Path, signal: type[BaseException]) -> None:
    code = f"def change(row):\n    raise {signal.__name__}\ndef transform(cfg):\n    return change"
    with pytest.raises(signal):
        transform(tmp_path, code, {"q": "x"})


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("raise Own('no level')", r"; python .*mine\.py shows where"),
        ("def transform(cfg):\n    raise Own('no level')", ""),
    ],
)
def test_an_exception_of_the_users_own_before_the_first_row_is_a_data_error(
    tmp_path: Path, code: str, end: str
) -> None:
    with pytest.raises(DataError, match=rf"data.transform .*mine.py:transform.* Own: no level{end}$"):
        transform(tmp_path, f"class Own(Exception):\n    pass\n{code}", {"q": "x"})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def transform(cfg):\n    return 3", "must return"),
        (
            "def transform(cfg):\n    return (lambda row: row), {'num_proc': 2}",
            "the options are remove_columns and batched, not num_proc",
        ),
        ("def transform(cfg):\n    return lambda row: [row]", "line 1: data.transform returned list"),
        (
            "from rlpipe.errors import DataError\n"
            "def transform(cfg):\n"
            "    def change(row):\n"
            "        raise DataError('no level')\n"
            "    return change",
            "rows.jsonl, line 1: no level$",
        ),
        ("from rlpipe.errors import DataError\ndef transform(cfg):\n    raise DataError('no level')", "^no level$"),
        ("def transform(cfg):\n    return cfg.path + '/x'", "raised TypeError"),
        ("other = 1", "has no 'transform'"),
    ],
)
def test_unfit_transform_is_a_data_error(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        transform(tmp_path, code, {"q": "x"})


# Batched --------------------------------------------------------------------------------------------------------------


LETTERS = """
def transform(cfg):
    def split(batch, tokenizer):
        letters = [letter for text in batch["text"] for letter in text]
        return {"prompt": letters, "end": [tokenizer.eos_token] * len(letters)}
    return split, {"remove_columns": ["text"], "batched": True}
"""


def test_a_batched_transform_makes_any_number_of_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["abc", "", "d", "", "ef", ""]
    with caplog.at_level(logging.WARNING):
        rows = transform_all(tmp_path, LETTERS, [{"text": text, "id": text} for text in texts])
    assert [rows[index] for index in range(len(rows))] == [
        {"prompt": letter, "end": "<|end|>", "id": text} for text in texts for letter in text
    ]
    assert [rows.location(index) for index in range(len(rows))] == [
        "rows.jsonl, line 1, part 1 of 3",
        "rows.jsonl, line 1, part 2 of 3",
        "rows.jsonl, line 1, part 3 of 3",
        "rows.jsonl, line 3",
        "rows.jsonl, line 5, part 1 of 2",
        "rows.jsonl, line 5, part 2 of 2",
    ]
    assert rows.name == "rows.jsonl"
    assert caplog.messages == ["rows.jsonl: data.transform created no rows from 3 of its 6 rows"]


def test_a_row_on_which_a_batched_transform_raises_stays_one_unusable_row(tmp_path: Path) -> None:
    rows = transform_all(tmp_path, LETTERS, [{"text": "ab"}, {"text": None}, {"text": "c"}])
    assert [rows.location(index) for index in (2, 3)] == ["rows.jsonl, line 2", "rows.jsonl, line 3"]
    with pytest.raises(UnusableRow, match=r"data.transform raised TypeError"):
        rows[2]
    assert [rows[index]["prompt"] for index in (0, 1, 3)] == ["a", "b", "c"]
    assert len(rows) == 4


def test_batched_transforms_can_remove_all_columns(tmp_path: Path) -> None:
    code = LETTERS.replace('["text"], "b', '"__all__", "b')
    assert transform(tmp_path, code, {"text": "a", "id": 3}) == {"prompt": "a", "end": "<|end|>"}


BATCHED = "def transform(cfg):\n    return (lambda batch: {}), {{'batched': True}}"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{'a': [1, 2], 'b': [1]}", "line 1: data.transform returned columns of different lengths: a 2, b 1"),
        ("{'a': 'xy'}", "line 1: data.transform is batched, but 'a' is a str instead of a list"),
        ("[{'a': 1}]", "line 1: data.transform returned list instead of a dict"),
        ("{'a': []}", "data.transform created no rows from its 1 rows"),
        ("{}", "data.transform created no rows from its 1 rows"),
    ],
)
def test_unfit_batches_are_data_errors_at_the_start(tmp_path: Path, columns: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        transform_all(tmp_path, BATCHED.format(columns), [{"q": "x"}])


def test_a_batched_transform_that_changes_its_mind_is_a_data_error(tmp_path: Path) -> None:
    code = "import itertools\nCOUNT = itertools.count(1)\n" + BATCHED.format("{'a': [0] * next(COUNT)}")
    rows = transform_all(tmp_path, code, [{"q": "x"}])
    with pytest.raises(
        DataError, match=r"line 1: data.transform created 2 rows from it, but 1 when the data was opened"
    ):
        rows[0]
