"""Tests that the chat template shows a row's own tools to the policy, and that nothing of them is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import refused, write_run

from rlpipe import cli
from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.row import RowLocation, UnusableRow
from rlpipe.data.row_renderer import GroundTruthRenderer, PromptRenderer, SequenceRenderer
from rlpipe.models.tiny_model import CHAT_TEMPLATE, make_tokenizer

TEMPLATE = "{% if tools %}<|system|>{{ tools | map(attribute='function.name') | join(' ') }}<|end|>{% endif %}"
TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = TEMPLATE + CHAT_TEMPLATE
PLACE = RowLocation(row=4, epoch=0, location="rows.jsonl, line 5")
MARKERS = [{"role": "assistant", "start": "<|assistant|>", "end": "<|end|>"}]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}


def prompt_of(**columns: Any) -> str:
    data = DataConfig(source="jsonl", tools=[tool("config")])
    prompt = PromptRenderer(TOKENIZER, data).render({"prompt": "hi", **columns}, PLACE)
    assert dict(prompt.task) == columns
    return str(TOKENIZER.decode(prompt.token_ids))


@pytest.mark.parametrize("given", [[tool("add"), tool("look")], json.dumps([tool("add"), tool("look")])])
def test_a_row_s_tools_take_the_place_of_the_config_s(given: Any) -> None:
    assert prompt_of(tools=given) == "<|system|>add look<|end|><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("columns", [{}, {"tools": None}, {"tools": "null"}])
def test_a_row_without_tools_has_those_of_the_config(columns: dict[str, Any]) -> None:
    assert prompt_of(**columns) == "<|system|>config<|end|><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("given", [[], "[]", "", " "])
def test_a_row_may_have_no_tools_at_all(given: Any) -> None:
    assert prompt_of(tools=given) == "<|user|>hi<|end|><|assistant|>"


def test_nulls_that_tables_add_to_schemas_are_dropped_and_those_of_json_are_not() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}"
    renderer = PromptRenderer(tokenizer, DataConfig(source="jsonl"))
    schema = tool("add", a={"default": None, "type": "int"}, b=None)
    as_table = renderer.render({"prompt": "hi", "tools": [schema]}, PLACE)
    as_text = renderer.render({"prompt": "hi", "tools": json.dumps([schema])}, PLACE)
    assert json.loads(tokenizer.decode(as_table.token_ids)) == [tool("add", a={"type": "int"})]
    assert json.loads(tokenizer.decode(as_text.token_ids)) == [schema]


def test_a_column_of_something_else_is_reported_with_the_mend() -> None:
    with pytest.raises(UnusableRow, match=r"found 'search'; set data\.tools_column=null if it holds something else"):
        prompt_of(tools=["search"])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("[{", r"column 'tools': not JSON \(.*\): '\[\{'"),
        ({"name": "add"}, r"column 'tools': expected a list of tools, or its JSON, found dict"),
        ('"add"', r"column 'tools': expected a list of tools, or its JSON, found str"),
        ([tool("add"), "look"], r"column 'tools', tool 2: expected a JSON schema with a name, found 'look'"),
        ([{"type": "function", "function": "add"}], r"tool 1: its key 'function' is 'add', not a schema"),
        ([{"type": "function", "function": {}}], r"tool 1: its key 'name' is None, not a string"),
    ],
)
def test_tools_that_are_none_make_a_row_unusable(given: Any, problem: str) -> None:
    with pytest.raises(UnusableRow, match=problem):
        prompt_of(tools=given)


def test_the_column_can_be_another_or_none() -> None:
    row = {"prompt": "hi", "tools": [tool("add")], "functions": [tool("look")]}
    for column, shown in (("functions", "<|system|>look<|end|>"), (None, "")):
        prompt = PromptRenderer(TOKENIZER, DataConfig(source="jsonl", tools_column=column)).render(row, PLACE)
        assert TOKENIZER.decode(prompt.token_ids) == f"{shown}<|user|>hi<|end|><|assistant|>"


CONVERSATION = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
PAIR = {"prompt": CONVERSATION["messages"][:1], "completion": "ok"}


@pytest.mark.parametrize("row", [CONVERSATION, PAIR])
@pytest.mark.parametrize("role_boundaries", [None, MARKERS])
def test_nothing_of_a_row_s_tools_is_trained(row: dict[str, Any], role_boundaries: Any) -> None:
    data = DataConfig(source="jsonl", role_boundaries=role_boundaries)
    renderer = SequenceRenderer(TOKENIZER, data, max_tokens=99)
    row = {**row, "tools": [tool("add")], "level": 3}
    sequence, prompt = renderer.render(row, PLACE), renderer.prompt(row, PLACE)
    text = "<|system|>add<|end|><|user|>hi<|end|><|assistant|>"
    assert TOKENIZER.decode(sequence.token_ids) == f"{text}ok<|end|>"
    assert TOKENIZER.decode(sequence.token_ids[np.flatnonzero(sequence.loss_mask)]) == "ok<|end|>"
    assert TOKENIZER.decode(prompt.token_ids) == text
    assert dict(sequence.task) == {"level": 3}


def test_a_ground_truth_stands_after_its_row_s_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE + CHAT_TEMPLATE.replace(
        "<|end|>{% endgen", "{{ tools | length }}<|end|>{% endgen"
    )
    data = DataConfig(source="jsonl")
    row = {"prompt": "hi", "ground_truth": "ok", "tools": [tool("add")]}
    prompt = PromptRenderer(tokenizer, data).render(row, PLACE)
    truth = GroundTruthRenderer(tokenizer, data, EbftConfig()).render(prompt)
    assert tokenizer.decode(truth.token_ids) == "ok1<|end|>"


def test_a_preview_shows_tools_and_names_the_row_whose_tools_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**CONVERSATION, "tools": json.dumps([tool("add")])}, {**CONVERSATION, "tools": "[{"}]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    assert cli.main(["data", "preview", *arguments]) == 0
    text = capsys.readouterr().out
    assert "\n<|system|>add<|end|><|user|>hi<|end|><|assistant|>⟦ok<|end|>⟧\n" in text
    assert "rows.jsonl, line 2): skipped, unrenderable: column 'tools': not JSON" in text
    assert "tools_colum" in refused(capsys, "preview", *arguments, "data.tools_colum=x")
