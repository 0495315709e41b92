"""Tests that log-probs of a reference are computed once, and that runs without it have the same losses."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_cases import make_adapter_config, make_learner, make_model_config
from preference_cases import algorithm_of, make_pairs

from rlpipe import cli
from rlpipe.actors.dataset import DatasetActor, DatasetSetup
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_labelled, pack_step
from rlpipe.data.reference_cache import ReferenceCache, all_micro_batches, reference_folder
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import RunError
from rlpipe.learner.step import Learner
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.types import TrainBatch

SAME = 1e-6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


def pack(loss: str, step: int) -> list[TrainBatch]:
    packing = pack_labelled if loss == "kto" else pack_step
    return packing(make_pairs(step), step=step, num_ranks=1, max_tokens=40, num_minibatches=2)


def losses_of(learner: Learner, loss: str, cache: ReferenceCache | None) -> list[dict[str, float]]:
    found = []
    for step in range(3):
        batches = pack(loss, step)
        if cache is not None:
            cache.fill(batches)
        found.append(learner.train_step(batches[0]))
    return found


@pytest.mark.covering(0)
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_losses_are_those_with_a_reference_in_memory(tiny: Path, tmp_path: Path, loss: str, adapter: str) -> None:
    whole = make_learner(tiny, adapter=adapter, algorithm=algorithm_of(loss))
    learner = make_learner(tiny, adapter=adapter, algorithm=algorithm_of(loss, precompute_ref_log_probs=True))
    assert whole.reference is not None
    assert learner.reference is None
    cache = ReferenceCache(tmp_path)
    for step in range(3):
        batches = pack(loss, step)
        assert cache.is_due(batches)
        cache.add(learner.reference_logprobs(batches[0].mini_batches))
        assert not cache.is_due(batches)
    assert cache.flush() == len(cache)
    again = ReferenceCache(tmp_path)
    expected, found = losses_of(whole, loss, None), losses_of(learner, loss, again)
    assert expected[0]["loss"] != expected[-1]["loss"]
    for with_reference, without in zip(expected, found, strict=True):
        for name in ("loss", "rewards/margins", "grad_norm"):
            assert without[name] == pytest.approx(with_reference[name], abs=SAME), name


def test_batches_are_due_once_and_again_if_they_are_given_up(tiny: Path, tmp_path: Path) -> None:
    cache, batches = ReferenceCache(tmp_path), pack("dpo", 0)
    assert [cache.is_due(batches), cache.is_due(batches), cache.is_due([])] == [True, False, False]
    cache.forget_due()
    assert cache.is_due(batches)
    with pytest.raises(RunError, match=r"a row has other tokens than when .*data\.transform"):
        cache.fill(batches)


def test_the_reference_of_an_adapter_that_training_continues_is_that_adapter(tiny: Path, tmp_path: Path) -> None:
    algorithm = algorithm_of("dpo", precompute_ref_log_probs=True)
    first = make_learner(tiny, algorithm=algorithm_of("dpo"))
    first.train_step(pack("dpo", 0)[0])
    first.policy.module.model.save_pretrained(tmp_path / "adapter")
    model = make_model_config(tiny, adapter=make_adapter_config(path=str(tmp_path / "adapter")))
    learner, cache = make_learner(tiny, model=model, algorithm=algorithm), ReferenceCache(tmp_path)
    batches = pack_step(make_pairs(), step=0, num_ranks=1, max_tokens=40)
    cache.add(learner.reference_logprobs(batches[0].mini_batches))
    cache.fill(batches)
    values = learner.train_step(batches[0])
    assert values["rewards/chosen"] == pytest.approx(0, abs=1e-6), "policy and reference begin equal"
    assert values["loss"] == pytest.approx(np.log(2), abs=1e-6)


def test_damaged_files_are_ignored_and_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"not arrow")
    assert len(ReferenceCache(tmp_path)) == 0
    cache = ReferenceCache(tmp_path / "x.arrow" / "below")
    cache.add({b"k" * 16: np.zeros(3, np.float32)})
    with pytest.raises(RunError, match=r"can't be written to .*set data\.cache"):
        cache.flush()


def test_the_folder_depends_on_what_log_probs_depend_on(tiny: Path, tmp_path: Path) -> None:
    data, model = DataConfig(cache=str(tmp_path)), ModelConfig(path=str(tiny), dtype="float32")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    others = [
        replace(model, dtype="bfloat16"),
        replace(model, attention="eager"),
        replace(model, processor_kwargs={"size": {"shortest_edge": 256}}),
        replace(model, adapter=AdapterConfig(kind="qlora")),
        replace(model, adapter=AdapterConfig(path=str(adapter))),
        replace(model, path="org/policy"),
        replace(model, path="org/policy", revision="v2"),
    ]
    folders = {reference_folder(data, one) for one in (model, *others)}
    assert len(folders) == 1 + len(others)
    assert reference_folder(data, replace(model, gradient_checkpointing=True)) in folders
    copy = make_tiny_policy(tmp_path / "copy")
    before = reference_folder(data, replace(model, path=str(copy)))
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert reference_folder(data, replace(model, path=str(copy))) != before
    assert reference_folder(data, model) in folders


ROWS = [{"prompt": f"{number}?", "chosen": str(number), "rejected": "no" * (1 + number % 5)} for number in range(12)]


def options_of(tiny: Path, folder: Path, *others: str) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        *("algorithm=dpo", "algorithm.preference.precompute_ref_log_probs=true", "data.source=jsonl"),
        *(f"data.path={folder}/rows.jsonl", f"data.cache={folder}/cache", "data.held_out.size=2"),
        *("algorithm.groups_per_step=4", "algorithm.num_steps=4", f"model.path={tiny}", "model.dtype=float32", *others),
    ]


def actor_of(tiny: Path, folder: Path, *others: str, first_step: int = 0, position: int = 0) -> DatasetActor:
    config = load_config(options_of(tiny, folder, *others))
    parts: dict[str, Any] = {name: getattr(config, name) for name in ("data", "model", "algorithm", "learner", "seed")}
    cursor = Cursor(epoch=0, position=position)
    return DatasetActor(DatasetSetup(**parts, folder=str(folder), first_step=first_step, cursor=cursor))


async def precompute(actor: DatasetActor, learner: Learner) -> list[int]:
    """Return the steps whose log-probs are computed, as a rank does before the first step."""
    found = []
    for step in await actor.reference_steps():
        if share := await actor.reference_share(step, 0):
            await actor.add_reference(learner.reference_logprobs(share))
            found.append(step)
    return found


def test_rows_are_computed_once_for_all_epochs_and_runs(tiny: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny, algorithm=algorithm_of("dpo", precompute_ref_log_probs=True))

    async def run() -> None:
        first = actor_of(tiny, tmp_path)
        computed = await precompute(first, learner)
        assert computed[0] == -1, "the held-out rows"
        assert set(computed) <= {-1, 0, 1, 2}, "ten rows, in steps of four"
        assert await precompute(first, learner) == computed, "the same steps on all ranks"
        await first.learner_died("for a test")
        assert await precompute(first, learner) == [], "a group that begins anew has nothing to compute"
        held_out = await first.held_out(0)
        batches = [await first.next_batch(step, 0) for step in range(4)]
        micros = [*all_micro_batches(held_out), *(m for b in batches if b for m in all_micro_batches(b.mini_batches))]
        for micro in micros:
            assert micro.ref_logprobs is not None
            assert (micro.ref_logprobs[micro.loss_mask] < 0).all()
            assert not micro.ref_logprobs[~micro.loss_mask].any()
        assert await precompute(actor_of(tiny, tmp_path, "seed=5"), learner) == [], "rows in another order"
        more = actor_of(tiny, tmp_path, "algorithm.preference.loss=hinge", "algorithm.num_steps=6")
        assert await precompute(more, learner) == [], "another loss, and more steps"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "first_step", "position", "expected"),
    [
        ([], 0, 0, [0, 1, 2]),  # of ten rows, four a step
        ([], 2, 8, [2, 3, 4]),  # two rows of this epoch, and all of the next one
        (["algorithm.preference.loss=kto"], 0, 0, [0, 1, 2, 3, 4, 5]),  # completions of other rows, which change
        (["algorithm.num_steps=2"], 0, 0, [0, 1]),
    ],
)
def test_no_step_is_packed_for_its_log_probs_after_every_row_was_in_one(
    tiny: Path, tmp_path: Path, options: list[str], first_step: int, position: int, expected: list[int]
) -> None:
    actor = actor_of(tiny, tmp_path, "algorithm.num_steps=6", *options, first_step=first_step, position=position)
    assert asyncio.run(actor.reference_steps()) == [-1, *expected]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_prepared_log_probs_are_found_by_a_run(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    options = options_of(tiny, tmp_path, f"algorithm.preference.loss={loss}")
    assert cli.main(["data", "prepare", "--workers", "1", *options]) == 0
    printed = capsys.readouterr().out
    assert "computed the reference's log-probs of" in printed
    assert f"{tmp_path}/cache/reference/" in printed
    learner = make_learner(tiny, algorithm=algorithm_of(loss, precompute_ref_log_probs=True))
    actor = actor_of(tiny, tmp_path, f"algorithm.preference.loss={loss}")
    assert asyncio.run(precompute(actor, learner)) == []
    assert cli.main(["data", "prepare", "--workers", "1", *options]) == 0
    assert "already computed: " in capsys.readouterr().out
