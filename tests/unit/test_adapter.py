"""What an engine learns from an adapter's folder."""

from pathlib import Path

import pytest
from peft import LoraConfig

from rlpipe.errors import ModelError
from rlpipe.rollout.adapter import read_adapter_config
from rlpipe.training_record import TrainingRecord


def test_room_is_made_for_the_largest_rank(tmp_path: Path) -> None:
    LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 16}, use_rslora=True
    ).save_pretrained(str(tmp_path))
    adapter = read_adapter_config(str(tmp_path))
    assert (adapter.r, adapter.alpha, adapter.use_rslora) == (16, 6, True)
    assert adapter.target_modules == ["k_proj", "q_proj"]
    assert adapter.path == str(tmp_path)


def test_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--adapter: .* holds no PEFT adapter"):
        read_adapter_config(str(tmp_path))


@pytest.mark.parametrize(("precision", "kind"), [("nf4", "qlora"), ("full", "lora"), (None, "lora")])
def test_an_adapter_is_served_over_the_base_that_it_was_trained_on(
    tmp_path: Path, precision: str | None, kind: str
) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    if precision is not None:
        TrainingRecord(base_precision=precision).write(tmp_path)
    assert read_adapter_config(str(tmp_path)).kind == kind
