"""Row transforms written for axolotl and TRL work unchanged."""

from pathlib import Path
from typing import Any

import pytest

from rlpipe.configs.schema import DataConfig
from rlpipe.data.rows import Row, UnusableRow
from rlpipe.data.transforms import apply_transform
from rlpipe.errors import DataError
from rlpipe.tiny import make_tokenizer

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


def transform(tmp_path: Path, code: str, row: dict[str, Any], **arguments: Any) -> Row:
    file = tmp_path / "mine.py"
    file.write_text(code)
    data = DataConfig(source="jsonl", transform=f"{file}:transform", transform_args=arguments)
    return apply_transform(FakeRows([row]), data, TOKENIZER)[0]


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


def test_row_on_which_the_map_function_raises_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(UnusableRow, match=r"data.transform raised KeyError: 'question'"):
        transform(tmp_path, AXOLOTL, {"answer": "4"})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def transform(cfg):\n    return 3", "must return"),
        ("def transform(cfg):\n    return (lambda row: row), {'batched': True}", "only remove_columns is known"),
        ("def transform(cfg):\n    return lambda row: [row]", "line 1: data.transform returned list"),
        ("def transform(cfg):\n    return cfg.path + '/x'", "raised TypeError"),
        ("other = 1", "has no 'transform'"),
    ],
)
def test_unfit_transform_is_a_data_error(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        transform(tmp_path, code, {"q": "x"})
