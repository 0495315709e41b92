"""The quickstart's rows: plain sums with their grader's entry, and held-out prompts that are never trained on."""

from pathlib import Path

import huggingface_hub
import pytest

from rlpipe import quickstart
from rlpipe.configs.compose import load_config, quoted
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_prompts, open_sft_rows
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import ModelError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.run import pipeline

CONFIG = load_config(["experiment=quickstart", "model.prepare=rlpipe.quickstart:warm_up"])


def test_prompts_are_bare_sums_with_the_entry_for_the_grader() -> None:
    prompts, _ = open_prompts(CONFIG.data, make_tokenizer(), seed=0)
    prompt = prompts.next()
    (message,) = prompt.prompt
    left, right = message["content"].rstrip("=").split("+")
    assert str(int(left) + int(right)) == prompt.task["answer"] == prompt.task["entry"]["answer"]


@pytest.mark.parametrize("num_rows", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_warm_up_and_run_hold_out_the_same_prompts(num_rows: int) -> None:
    tokenizer = make_tokenizer()
    prompts, held_out = open_prompts(CONFIG.data, tokenizer, seed=0)
    rows, sft_held_out = open_sft_rows(
        load_config(["experiment=quickstart_warmup"]).data, tokenizer, seed=0, max_tokens=64
    )
    kept = {prompt.token_ids.tobytes() for prompt in held_out}
    assert len(held_out) == 200
    assert kept == {sequence.token_ids[: int(sequence.loss_mask.argmax())].tobytes() for sequence in sft_held_out}
    trained = [prompts.next() for _ in range(num_rows)]
    assert not kept & {prompt.token_ids.tobytes() for prompt in trained}
    for sequence in rows.take(num_rows):
        first = int(sequence.loss_mask.argmax())
        assert sequence.token_ids[:first].tobytes() not in kept


def test_the_source_continues_from_a_cursor() -> None:
    prompts, _ = open_prompts(CONFIG.data, make_tokenizer(), seed=0)
    prompts.take(5)
    cursor = prompts.cursor
    ids = [prompt.prompt_id for prompt in prompts.take(5)]
    prompts.seek(Cursor(epoch=cursor.epoch, position=cursor.position))
    assert [prompt.prompt_id for prompt in prompts.take(5)] == ids


def test_names_with_special_characters_reach_a_cold_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: list[Config] = []
    monkeypatch.setattr(pipeline, "train", trained.append)
    rows = tmp_path / "rows, (1)=a.jsonl"
    rows.write_text('{"prompt": "1+1=", "right, in words": "2"}\n')
    config = load_config(
        [
            f"name={quoted('sums, (1)=a')}",
            f"output={quoted(tmp_path / 'run, (1)=a')}",
            "model.path=${output}/warm_up/policy",
            "model.prepare=rlpipe.quickstart:make_policy",
            "data=jsonl",
            f"data.path={quoted(rows)}",
        ]
    )
    quickstart.learn_solutions(config, "right, in words")
    (warm_up,) = trained
    assert warm_up.name == "sums, (1)=a_warm_up"
    assert warm_up.output == str(tmp_path / "run, (1)=a" / "warm_up")
    assert (warm_up.data.path, warm_up.data.completion_column) == (str(rows), "right, in words")


def test_the_wheel_stands_in_for_a_hub_whose_files_do_not_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cut(*_: object, **__: object) -> None:
        raise ConnectionError("the proxy forbids it")

    monkeypatch.setattr(quickstart, "hub_has", lambda *_, **__: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cut)
    converted: list[Path] = []
    monkeypatch.setattr(quickstart, "convert", lambda file, target: converted.append(target))
    config = load_config(["experiment=smollm2", f"model.path={tmp_path / 'model'}", f"output={tmp_path}"])
    monkeypatch.setattr(quickstart, "smollm2_file", lambda: tmp_path / "model.gguf")
    quickstart.fetch_smollm2(config)
    assert converted == [Path(config.model.path)]
    assert not converted[0].exists()
    monkeypatch.setattr(quickstart, "smollm2_file", lambda: None)
    with pytest.raises(ModelError, match=r"can't be fetched .*the proxy forbids it.*pip install"):
        quickstart.fetch_smollm2(config)
