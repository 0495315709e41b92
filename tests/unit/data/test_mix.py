"""Tests that a mix takes each source's rows by weight, in epochs of its own, and can resume anywhere."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.data.prompts import PromptSource, open_prompts, open_sft_rows
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.types import Prompt

TOKENIZER = make_tokenizer()


def mix(folder: Path, rows: Mapping[str, Sequence[Any]], sources: Mapping[str, Any], **options: Any) -> DataConfig:
    """Write the rows of each source, given as prompts or as whole rows, and return the config of their mix."""
    own: dict[str, Any] = {}
    for name, values in rows.items():
        lines = [value if isinstance(value, dict) else {"prompt": value, "completion": "y"} for value in values]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        own[name] = {"source": "jsonl", "path": str(folder / f"{name}.jsonl"), **sources.get(name, {})}
    return DataConfig(source="mix", sources=own, **options)


def letters(name: str, count: int) -> list[str]:
    return [f"{name}{number}" for number in range(count)]


def text(prompt: Prompt) -> str:
    return str(prompt.prompt[-1]["content"]) if not isinstance(prompt.prompt, str) else prompt.prompt


def opened(data: DataConfig, seed: int = 1) -> PromptSource:
    return open_prompts(data, TOKENIZER, seed=seed)[0]


def test_rows_come_by_weight_and_every_source_in_epochs_of_its_own(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": letters("a", 4), "b": letters("b", 100)}, {"a": {"weight": 3}, "b": {"weight": 1}})
    prompts = opened(data).take(40)
    assert Counter(text(prompt)[0] for prompt in prompts) == {"a": 30, "b": 10}
    of_a = [prompt for prompt in prompts if text(prompt).startswith("a")]
    for epoch in range(7):
        assert sorted(text(prompt) for prompt in of_a if prompt.epoch == epoch) == letters("a", 4)
    assert len({text(prompt) for prompt in prompts if text(prompt).startswith("b")}) == 10


def test_the_seed_determines_the_order_and_parallel_sources_differ_in_theirs(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": letters("a", 20), "b": letters("b", 20)}, {})
    first, again, other = ([text(p) for p in opened(data, seed).take(40)] for seed in (1, 1, 2))
    assert first == again != other
    assert [t[1:] for t in first if t[0] == "a"] != [t[1:] for t in first if t[0] == "b"]


def test_prompt_ids_are_unique_and_the_same_in_every_epoch(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": letters("a", 3), "b": letters("b", 5), "c": letters("c", 2)}, {})
    by_id = {(prompt.prompt_id, text(prompt)) for prompt in opened(data).take(90)}
    assert len(by_id) == len({prompt_id for prompt_id, _ in by_id}) == 10


def test_rewards_learn_the_source_unless_the_row_has_one_of_its_own(tmp_path: Path) -> None:
    own = {"prompt": "b", "data_source": "openai/gsm8k"}
    prompts = opened(mix(tmp_path, {"a": ["a"], "b": [own]}, {})).take(2)
    assert {text(prompt): prompt.task["data_source"] for prompt in prompts} == {"a": "a", "b": "openai/gsm8k"}


def test_each_source_has_its_columns_and_transforms(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def shout(cfg):\n    return lambda row: {'prompt': row['q'] + cfg.mark}\n")
    transform = {"transform": f"{tmp_path}/mine.py:shout", "transform_args": {"mark": "!"}}
    rows = {"a": [{"question": "a"}], "b": [{"q": "b"}], "c": ["c"]}
    data = mix(tmp_path, rows, {"a": {"prompt_column": "question"}, "b": transform, "c": {"system_prompt": "S"}})
    prompts = opened(data).take(3)
    assert {text(prompt) for prompt in prompts} == {"a", "b!", "c"}
    assert [len(prompt.prompt) for prompt in prompts if text(prompt) == "c"] == [2]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 12), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    drawn=st.integers(0, 60),
    shuffle=st.booleans(),
)
def test_a_source_continues_from_any_cursor(sizes: list[int], weights: list[float], drawn: int, shuffle: bool) -> None:
    names = "abcd"[: len(sizes)]
    rows = {name: [*letters(name, size), None] for name, size in zip(names, sizes, strict=True)}
    entries = {name: {"weight": weight} for name, weight in zip(names, weights, strict=False)}
    with TemporaryDirectory() as folder:
        data = mix(Path(folder), rows, entries, shuffle=shuffle, held_out=HeldOutConfig(size=1))
        source = opened(data)
        source.take(drawn)
        cursor = source.cursor
        expected = [(prompt.prompt_id, prompt.epoch) for prompt in source.take(30)]
        other = opened(data)
        other.take(7)
        other.seek(cursor)
        assert other.cursor == cursor
        assert [(prompt.prompt_id, prompt.epoch) for prompt in other.take(30)] == expected


def test_skipped_rows_keep_their_position_and_are_counted_by_source(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": ["a", None], "b": ["b", None, None]}, {})
    source = opened(data)
    source.take(40)
    assert source.skip_counts["unrenderable"] == 3
    assert source.metrics["rows/skipped/a"] == 1
    assert source.metrics["rows/skipped/b"] == 2
    taken = source.metrics["rows/taken/a"], source.metrics["rows/taken/b"]
    assert sum(taken) == source.cursor.position
    assert abs(taken[0] - taken[1]) <= 1
    assert source.metrics["epoch/a"] == taken[0] // 2


def test_a_source_without_a_usable_row_fails_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"b\.jsonl: all 2 rows .* skipped, .*line \d because column 'prompt' is null"):
        opened(mix(tmp_path, {"a": ["a"], "b": [None, None]}, {}))


def test_a_source_that_can_not_be_opened_is_named(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": ["a"], "b": [{"question": "b"}]}, {})
    with pytest.raises(DataError, match=r"^data\.sources\.b: .*b\.jsonl, line 1: no column 'prompt'"):
        opened(data)


@pytest.mark.parametrize("cursor", [Cursor(1, 0), Cursor(0, -1)])
def test_a_cursor_with_epochs_is_not_of_a_mix(tmp_path: Path, cursor: Cursor) -> None:
    with pytest.raises(DataError, match="does not belong to this data"):
        opened(mix(tmp_path, {"a": ["a"]}, {})).seek(cursor)


def test_held_out_rows_come_from_all_sources_by_weight(tmp_path: Path) -> None:
    rows = {"a": letters("a", 10), "b": [*letters("b", 9), "a0", "a1", "a2", "a3"]}
    data = mix(tmp_path, rows, {"a": {"weight": 3}}, held_out=HeldOutConfig(size=4))
    source, held_out = open_prompts(data, TOKENIZER, seed=1)
    kept = {text(prompt) for prompt in held_out}
    assert len(held_out) == 4
    assert Counter(prompt.task["data_source"] for prompt in held_out) == {"a": 3, "b": 1}
    assert not kept & {text(prompt) for prompt in source.take(200)}
    _, sequences = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
    assert [sequence.prompt_id for sequence in sequences] == [prompt.prompt_id for prompt in held_out]


def test_a_source_that_has_fewer_rows_than_its_share_of_the_held_out_ones_is_named(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": letters("a", 9), "b": ["b", None]}, {}, held_out=HeldOutConfig(size=4))
    message = (
        r"^data\.held_out\.size: 2 of the 4 rows, by weight, must come from .*b\.jsonl, "
        "which has 2 rows, of which 1 can be"
    )
    with pytest.raises(DataError, match=message):
        opened(data)


def test_a_held_out_file_is_kept_out_of_all_sources(tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a1"}\n{"prompt": "b1"}')
    held_out = HeldOutConfig(path=str(tmp_path / "held_out.jsonl"))
    source, kept = open_prompts(
        mix(tmp_path, {"a": letters("a", 3), "b": letters("b", 3)}, {}, held_out=held_out), TOKENIZER, seed=1
    )
    assert [text(prompt) for prompt in kept] == ["a1", "b1"]
    assert {text(prompt) for prompt in source.take(20)} == {"a0", "a2", "b0", "b2"}


def test_supervised_rows_of_different_forms_are_mixed(tmp_path: Path) -> None:
    rows = {
        "alpaca": [{"instruction": "1", "output": "one"}],
        "chat": [{"conversations": [{"from": "human", "value": "2"}, {"from": "gpt", "value": "two"}]}],
        "text": [{"text": "three"}],
    }
    data = mix(tmp_path, rows, {"text": {"text_column": "text"}})
    source, _ = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=64)
    trained = {sequence.task["data_source"]: TOKENIZER.decode(sequence.completion_ids) for sequence in source.take(3)}
    assert trained == {"alpaca": "one<|end|>", "chat": "two<|end|>", "text": "hree<|end|>"}
    assert len({sequence.name for sequence in source.take(12)}) == 12


def test_ground_truths_are_read_from_each_source_in_its_way(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "two"}]
    rows = {"pairs": [{"prompt": "1", "ground_truth": "one"}], "chats": [{"messages": chat}]}
    data = mix(tmp_path, rows, {"chats": {"transform": "rlpipe.data.ebft_rows:last_turn"}})
    source, _ = open_prompts(data, TOKENIZER, seed=1, ebft=EbftConfig())
    truths = {text(prompt): prompt.truth for prompt in source.take(2)}
    assert {key: TOKENIZER.decode(truth.token_ids) for key, truth in truths.items() if truth is not None} == {
        "1": "one<|end|>",
        "2": "two<|end|>",
    }


def test_a_mix_of_one_source_has_its_rows(tmp_path: Path) -> None:
    data = mix(tmp_path, {"a": letters("a", 5)}, {}, shuffle=False)
    assert [text(prompt) for prompt in opened(data).take(10)] == letters("a", 5) * 2
    assert opened(replace(data, shuffle=True)).num_rows is None
