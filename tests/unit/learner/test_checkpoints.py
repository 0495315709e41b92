import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from disk_cases import largest_file
from learner_cases import (
    assert_close,
    make_adapter_config,
    make_batches,
    make_learner,
    make_model_config,
    make_rollouts,
    parameters_of,
)
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe.cli import main
from rlpipe.common.atomic_io import DIGESTS, SEAL
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig, ReferenceConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig, WeightScaleRule
from rlpipe.data.packing import pack_step
from rlpipe.errors import ConfigError, ModelError, RunError
from rlpipe.learner.checkpoint_files import (
    RECORD,
    latest,
    list_checkpoints,
    newest_of_run,
    read_extra,
    resolve_checkpoint,
)
from rlpipe.learner.checkpoints import CheckpointStore, export_policy
from rlpipe.learner.publish import named_weights, publish_weights
from rlpipe.learner.step import Learner
from rlpipe.models.adapter import TrainingRecord
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.types import WeightsKind
from rlpipe.weights.buckets import unpack

FULL_WITH_REFERENCE = AlgorithmConfig(loss=LossConfig(beta=0.1), reference=ReferenceConfig(sync_steps=2), num_steps=6)
WITH_GROWING_ENTROPY_BONUS = AlgorithmConfig(loss=LossConfig(entropy_target=10.0, entropy_step=0.1), num_steps=6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=128)


def train(learner: Learner, first: int, last: int) -> Learner:
    for step in range(first, last):
        learner.train_step(make_batches(step=step)[0])
    return learner


def dropping_out(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32", adapter=AdapterConfig(r=4, dropout=0.2))


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_resumed_run_ends_bitwise_where_one_that_was_not_stopped_ends(
    tiny: Path, tmp_path: Path, adapter: str
) -> None:
    algorithm = FULL_WITH_REFERENCE if adapter == "none" else WITH_GROWING_ENTROPY_BONUS
    model = dropping_out(tiny) if adapter == "lora" else None

    def make() -> Learner:
        torch.manual_seed(3)
        return make_learner(tiny, adapter=adapter, algorithm=algorithm, model=model)

    store = CheckpointStore(tmp_path, keep=2)
    stopped = train(make(), 0, 3)
    path = store.save(stopped, step=3, extra={"cursor": [1, 2]})
    unbroken = parameters_of(train(stopped, 3, 6))

    resumed = make()
    checkpoint = store.load(path, resumed)
    assert (checkpoint.step, checkpoint.extra) == (3, {"cursor": [1, 2]})
    assert resumed.num_steps_done == 3
    assert_close(unbroken, parameters_of(train(resumed, 3, 6)), 0)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_moments_in_eight_bit_keep_their_codes(tmp_path: Path, optimizer: str) -> None:
    path = make_tiny_policy(tmp_path / "wide", hidden_size=64, num_layers=1, intermediate_size=128)
    config = LearnerConfig(optimizer=OptimizerConfig(name=optimizer, lr=1e-3))
    stopped = train(make_learner(path, adapter="none", learner=config), 0, 3)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    saved = store.save(stopped, step=3, extra={})
    resumed = make_learner(path, adapter="none", learner=config)
    store.load(saved, resumed)
    states = [
        [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in (stopped.updates.optimizer, resumed.updates.optimizer)
    ]
    assert {state["state1"].dtype for state in states[0]} == {torch.uint8, torch.float32}, "small ones are not rounded"
    for one, other in zip(*states, strict=True):
        assert torch.equal(one["state1"], other["state1"])
        assert torch.equal(one["state2"], other["state2"])
    # One step: rounding in a gradient may change a code, and with it the steps after this one by more.
    assert_close(parameters_of(train(stopped, 3, 4)), parameters_of(train(resumed, 3, 4)), 1e-6)


def test_a_checkpoint_before_the_first_step_holds_no_moments(tiny: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    fresh = make_learner(tiny)
    path = store.save(fresh, step=0, extra={})
    resumed = train(make_learner(tiny), 5, 6)
    store.load(path, resumed)
    assert not resumed.updates.optimizer.state
    assert_close(parameters_of(train(fresh, 0, 2)), parameters_of(train(resumed, 0, 2)), 0)


def test_only_the_adapter_is_written(tiny: Path, tmp_path: Path) -> None:
    learner = train(make_learner(tiny), 0, 1)
    path = CheckpointStore(tmp_path, keep=1).save(learner, step=1, extra={})
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {name.removeprefix("policy.") for name in names if name.startswith("policy.")}
    assert weights == learner.policy.trainable_parameters().keys()
    assert all("lora_" in name for name in weights)


def test_a_crash_while_writing_leaves_the_last_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(tiny)
    store = CheckpointStore(tmp_path, keep=2)
    first = store.save(learner, step=1, extra={})

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rlpipe.learner.checkpoint_files.complete_folder", crash)
        with pytest.raises(KeyboardInterrupt):
            store.save(learner, step=2, extra={})
    assert latest(tmp_path) == first
    store.load(first, learner)
    assert latest(tmp_path) == first
    second = store.save(learner, step=2, extra={})
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name, second.name]


def test_a_checkpoint_that_cannot_be_written_is_an_os_error_and_leaves_no_rest(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", keep=2)
    with pytest.raises(OSError, match="file"):
        store.save(make_learner(tiny), step=1, extra={})


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_leaves_the_last_one(tiny: Path, tmp_path: Path) -> None:
    learner, store = train(make_learner(tiny), 0, 1), CheckpointStore(tmp_path, keep=2)
    first = store.save(learner, step=1, extra={})
    largest = max(path.stat().st_size for path in first.iterdir())
    for num_bytes in (largest // 2, 100):
        with largest_file(num_bytes), pytest.raises(OSError, match=r"can't be written|too large"):
            store.save(learner, step=2, extra={})
        assert list(tmp_path.iterdir()) == [first]
    assert list_checkpoints(tmp_path) == [first]
    store.save(learner, step=2, extra={})


def test_a_checkpoint_leaves_room_for_the_ledger(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, learner = CheckpointStore(tmp_path, keep=2), make_learner(tiny)
    first = store.save(learner, step=1, extra={})
    monkeypatch.setattr("rlpipe.common.atomic_io.RESERVE", 2**60)
    with pytest.raises(OSError, match=r"the disk has \S+ MiB left, but needs 0.\d MiB, plus \d+ MiB for the ledger"):
        store.save(learner, step=2, extra={})
    assert list(tmp_path.iterdir()) == [first]


def test_a_policy_that_cannot_be_exported_leaves_the_last_one(tiny: Path, tmp_path: Path) -> None:
    for adapter in ("lora", "none"):
        learner, folder = make_learner(tiny, adapter=adapter), tmp_path / adapter
        export_policy(learner.policy, folder)
        before = {path.name: path.stat().st_size for path in folder.iterdir()}
        with largest_file(1000), pytest.raises(RunError, match=f"the policy can't be written to {folder}: .*too large"):
            export_policy(learner.policy, folder)
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


def test_the_oldest_checkpoints_are_removed_and_a_step_can_be_written_again(tiny: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny)
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10, 10):
        store.save(learner, step=step, extra={"written": step})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000010"]
    assert read_extra(list_checkpoints(tmp_path)[-1]) == (10, {"written": 10})


def test_a_learner_that_begins_again_finds_the_newest_of_its_run(tiny: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny)
    store, elsewhere = CheckpointStore(tmp_path / "run", keep=2), CheckpointStore(tmp_path / "other", keep=2)
    other = elsewhere.save(learner, step=4, extra={})
    assert newest_of_run(tmp_path / "run", None) is None
    assert newest_of_run(tmp_path / "run", other) == other
    first = store.save(learner, step=2, extra={})
    assert newest_of_run(tmp_path / "run", first) == first
    assert newest_of_run(tmp_path / "run", other) == other, "that of an earlier run"
    newest = [store.save(learner, step=step, extra={}) for step in (6, 8)][-1]
    assert not first.exists()
    for began_with in (None, first, other):
        assert newest_of_run(tmp_path / "run", began_with) == newest


def test_resume_names_a_checkpoint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_checkpoint("auto", tmp_path) is None
    path = CheckpointStore(tmp_path, keep=2).save(make_learner(tiny), step=4, extra={})
    assert resolve_checkpoint("auto", tmp_path) == path
    assert resolve_checkpoint("never", tmp_path) is None
    assert resolve_checkpoint(str(path), tmp_path / "elsewhere") == path
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_checkpoint(str(tmp_path / "step_000009"), tmp_path)
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        resolve_checkpoint(str(tmp_path), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint(path.name, tmp_path / "elsewhere") == path, "other processes run in other folders"


def test_a_checkpoint_of_other_parameters_is_refused(tiny: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = store.save(make_learner(tiny), step=1, extra={})
    with pytest.raises(ConfigError, match="has other trained parameters"):
        store.load(path, make_learner(tiny, adapter="none"))
    model = ModelConfig(path=str(tiny), dtype="float32", adapter=AdapterConfig(r=3))
    with pytest.raises(ConfigError, match=r"has other trained parameters .*lora_A.*: set model\.adapter to"):
        store.load(path, make_learner(tiny, model=model))


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        (LossConfig(), LossConfig(entropy_coef=0.01), 0.01),
        (LossConfig(entropy_coef=0.1), LossConfig(entropy_coef=0.01), 0.01),
        (LossConfig(entropy_target=-1.0), LossConfig(entropy_coef=0.01), 0.01),
        (LossConfig(entropy_coef=0.1), LossConfig(entropy_coef=0.01, entropy_target=10.0), 0.0),
        (LossConfig(entropy_target=10.0, entropy_step=0.1), LossConfig(entropy_target=9.0, entropy_coef_max=0.2), 0.2),
        (LossConfig(entropy_target=10.0, entropy_step=0.1), LossConfig(entropy_target=9.0), 0.3),
    ],
)
def test_a_changed_entropy_bonus_counts_after_a_checkpoint(
    tiny: Path, tmp_path: Path, before: LossConfig, after: LossConfig, want: float
) -> None:
    stopped = train(make_learner(tiny, algorithm=AlgorithmConfig(loss=before, num_steps=6)), 0, 3)
    path = CheckpointStore(tmp_path, keep=2).save(stopped, step=3, extra={})
    resumed = make_learner(tiny, algorithm=AlgorithmConfig(loss=after, num_steps=6))
    CheckpointStore(tmp_path, keep=2).load(path, resumed)
    assert resumed.entropy_bonus.weight == pytest.approx(want)


def test_a_reference_may_begin_to_move_after_a_checkpoint_but_not_stop(tiny: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    fixed = AlgorithmConfig(loss=LossConfig(beta=0.1), num_steps=6)
    path = store.save(train(make_learner(tiny, adapter="none", algorithm=fixed), 0, 2), step=2, extra={})
    moving = make_learner(tiny, adapter="none", algorithm=FULL_WITH_REFERENCE)
    untouched = parameters_of(make_learner(tiny, adapter="none", algorithm=FULL_WITH_REFERENCE))
    store.load(path, moving)
    assert moving.reference is not None
    assert_close({name: value for name, value in moving.reference.moving().items() if name in untouched}, untouched, 0)
    path = store.save(train(moving, 2, 4), step=4, extra={})
    with pytest.raises(ConfigError, match=r"set algorithm\.reference\.sync_steps to its earlier value"):
        store.load(path, make_learner(tiny, adapter="none", algorithm=fixed))


def scores(learner: Learner) -> torch.Tensor:
    batch = pack_step(make_rollouts(), step=0, num_ranks=1, max_tokens=4096)[0]
    with learner.policy.inference():
        return learner.policy.logprobs(batch.mini_batches[0].micro_batches[0], temperature=1.0)[0]


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_others_load_what_is_exported_and_score_the_same(tiny: Path, tmp_path: Path, adapter: str) -> None:
    learner = train(make_learner(tiny, adapter=adapter), 0, 2)
    export_policy(learner.policy, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path if adapter == "none" else tiny)
    if adapter == "lora":
        model = PeftModel.from_pretrained(model, str(tmp_path))
    expected = []
    for rollout in make_rollouts():
        token_ids = torch.from_numpy(rollout.token_ids).long()
        with torch.no_grad():
            taken = model(token_ids[None]).logits[0, :-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        expected.append(torch.cat([taken.new_zeros(1), taken]) * torch.from_numpy(rollout.loss_mask))
    torch.testing.assert_close(scores(learner), torch.cat(expected), atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path).decode([30]) == AutoTokenizer.from_pretrained(tiny).decode([30])


MENDED = {"normalize_weight_scales": {"all": WeightScaleRule(name_pattern="down_proj", threshold=1.0001)}}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        ({"kind": "none"}, {}),
        ({}, {}),
        ({"use_dora": True, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}, {}),
        ({"kind": "qlora"}, {}),
        ({}, MENDED),
        ({"path": True}, {}),
    ],
)
@pytest.mark.parametrize("moved", [False, True])
def test_a_checkpoints_policy_is_exported_as_that_of_the_end(
    tiny: Path, tmp_path: Path, adapter: dict, options: dict, moved: bool
) -> None:
    if "path" in adapter:
        export_policy(train(make_learner(tiny), 0, 1).policy, tmp_path / "first")
        adapter = {"path": str(tmp_path / "first")}
    model = make_model_config(tiny, adapter=make_adapter_config(**adapter), **options)
    learner = train(make_learner(tiny, model=model), 0, 2)
    assert any(drift.factor != 1 for drift in learner.policy.module.drifts) == bool(options)
    recorded = replace(model, path=str(tmp_path / "elsewhere")) if moved else model
    checkpoint = CheckpointStore(tmp_path, keep=1).save(learner, step=2, extra={"model": to_tree(recorded)})
    export_policy(learner.policy, tmp_path / "end")
    base = ["--base", str(tiny)] if moved else []
    assert main(["export", str(checkpoint), str(tmp_path / "policy"), *base]) == 0
    names = {path.name for path in (tmp_path / "end").iterdir()}
    assert {path.name for path in (tmp_path / "policy").iterdir()} == names
    for name in names:
        assert (tmp_path / "policy" / name).read_bytes() == (tmp_path / "end" / name).read_bytes(), name


@pytest.mark.parametrize("start", ["~/", ""])
def test_an_exported_adapter_names_its_base_for_every_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    extra = {"model": to_tree(make_model_config(tiny))}
    checkpoint = CheckpointStore(tmp_path, keep=1).save(make_learner(tiny), step=1, extra=extra)
    monkeypatch.setenv("HOME", str(tiny.parent))
    monkeypatch.chdir(tiny.parent)
    assert main(["export", str(checkpoint), str(tmp_path / "policy"), f"--base={start}{tiny.name}"]) == 0
    config = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny)


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_what_cant_be_exported_is_named_with_the_fix(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"model": to_tree(make_model_config(tiny))}
    checkpoint = CheckpointStore(tmp_path, keep=1).save(make_learner(tiny), step=1, extra=extra)
    wider = make_tiny_policy(tmp_path / "wider", hidden_size=96, num_layers=2, intermediate_size=128)
    for arguments, message in (
        ([str(tmp_path), str(tmp_path / "policy")], "not a complete checkpoint"),
        ([str(checkpoint), str(tiny)], "exists: choose another folder"),
        ([str(checkpoint), str(tmp_path / "policy"), "--base", str(tmp_path / "none")], "there is no folder"),
        ([str(checkpoint), str(tmp_path / "policy"), "--base", str(wider)], "use the model that was trained"),
        ([str(checkpoint), str(tmp_path / "policy"), "more"], "unexpected argument: more"),
    ):
        assert exit_code(["export", *arguments]) == 2
        assert message in capsys.readouterr().err


class Planted:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_nothing_in_a_checkpoint_is_executed(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"model": to_tree(make_model_config(tiny))}
    checkpoint = CheckpointStore(tmp_path, keep=1).save(make_learner(tiny), step=1, extra=extra)
    record = json.loads((checkpoint / RECORD).read_text())
    for planted in (Planted(tmp_path / "ran"), {"state_dict_metadata": Planted(tmp_path / "ran")}):
        (checkpoint / ".metadata").write_bytes(pickle.dumps(planted))
        old = {name: value for name, value in record.items() if name not in (SEAL, DIGESTS)}  # as of earlier versions
        old["files"][".metadata"] = (checkpoint / ".metadata").stat().st_size
        (checkpoint / RECORD).write_text(json.dumps(old))
        assert exit_code(["export", str(checkpoint), str(tmp_path / "policy")]) == 2
        error = capsys.readouterr().err
        assert "can't be read as a checkpoint (.metadata: " in error
        assert error.count("\n") == 1
        assert not (tmp_path / "ran").exists()
        with pytest.raises(ConfigError, match="can't be read as a checkpoint"):
            CheckpointStore(tmp_path, keep=1).load(checkpoint, make_learner(tiny))
        assert not (tmp_path / "ran").exists()


def test_a_changed_bit_is_noticed_and_an_earlier_checkpoint_is_taken(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, extra = CheckpointStore(tmp_path, keep=3), {"model": to_tree(make_model_config(tiny))}
    learner = make_learner(tiny)
    first, second = (store.save(train(learner, step, step + 1), step=step + 1, extra=extra) for step in range(2))
    assert resolve_checkpoint("auto", tmp_path) == second
    file = next(second.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    assert resolve_checkpoint("auto", tmp_path) == first
    with pytest.raises(ConfigError, match=rf"{file.name} has changed since it was written"):
        resolve_checkpoint(str(second), tmp_path)
    with pytest.raises(ConfigError, match=rf"{file.name} has changed since it was written"):
        store.load(second, make_learner(tiny))
    assert exit_code(["export", str(second), str(tmp_path / "policy")]) == 2
    assert f"{file.name} has changed since it was written" in capsys.readouterr().err
    assert exit_code(["export", str(first), str(tmp_path / "policy")]) == 0


def test_a_models_own_code_is_executed_only_if_this_command_allows_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(make_model_config(tiny), trust_remote_code=True)
    checkpoint = CheckpointStore(tmp_path, keep=1).save(make_learner(tiny), step=1, extra={"model": to_tree(model)})
    assert exit_code(["export", str(checkpoint), str(tmp_path / "policy")]) == 2
    assert "add --trust-remote-code if you trust it" in capsys.readouterr().err
    assert exit_code(["export", str(checkpoint), str(tmp_path / "policy"), "--trust-remote-code"]) == 0


def test_an_exported_adapter_can_be_started_from(tiny: Path, tmp_path: Path) -> None:
    learner = train(make_learner(tiny), 0, 1)
    export_policy(learner.policy, tmp_path)
    config = ModelConfig(path=str(tiny), dtype="float32", adapter=AdapterConfig(path=str(tmp_path)))
    again = make_learner(tiny, model=config)
    assert_close(parameters_of(learner), parameters_of(again), 0)
    assert again.train_step(make_batches()[0])["grad_norm"] > 0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TrainingRecord(base_precision="nf4"), r"base in NF4: set model\.adapter\.kind=qlora"),
        (TrainingRecord(weight_scales={"lm_head.weight": 2.0}), "another scale of lm_head.weight: set model.normalize"),
    ],
)
def test_an_adapter_of_another_base_can_not_be_started_from(
    tiny: Path, tmp_path: Path, record: TrainingRecord, message: str
) -> None:
    export_policy(make_learner(tiny).policy, tmp_path)
    record.write(tmp_path)
    config = ModelConfig(path=str(tiny), dtype="float32", adapter=AdapterConfig(path=str(tmp_path)))
    with pytest.raises(ModelError, match=message):
        make_learner(tiny, model=config)


def test_a_half_precision_model_is_exported_in_its_type(tiny: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny), dtype="bfloat16", adapter=AdapterConfig(kind="none"))
    export_policy(make_learner(tiny, model=config).policy, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_published_names_are_those_of_the_saved_files(tiny: Path) -> None:
    full = make_learner(tiny, adapter="none")
    published = dict(named_weights(full.policy))
    assert published.keys() == load_file(tiny / "model.safetensors").keys()
    assert "lm_head.weight" not in published


def test_publishing_gives_the_adapter_in_one_bucket_with_its_config(tiny: Path, tmp_path: Path) -> None:
    learner = train(make_learner(tiny), 0, 1)
    buckets: list = []
    manifest = publish_weights(learner.policy, version=7, bucket_bytes=1024, emit=buckets.append)
    assert manifest is not None
    assert (manifest.version, manifest.kind, len(buckets)) == (7, WeightsKind.LORA, 1)
    assert manifest.adapter_config is not None
    assert manifest.adapter_config["r"] == 4
    export_policy(learner.policy, tmp_path)
    assert_close(unpack(buckets[0]), load_file(tmp_path / "adapter_model.safetensors"), 0)


def test_a_merge_draws_no_random_numbers_and_changes_no_weight(tiny: Path) -> None:
    model = make_model_config(tiny, adapter=make_adapter_config(merge=True))
    learner = train(make_learner(tiny, model=model), 0, 1)
    state, before = torch.get_rng_state(), {name: t.clone() for name, t in learner.policy.model.state_dict().items()}
    manifest = publish_weights(learner.policy, version=1, bucket_bytes=20_000, emit=lambda _: None)
    assert manifest is not None
    assert manifest.kind is WeightsKind.FULL
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(before, learner.policy.model.state_dict(), 0)


def test_publishing_changes_no_weight(tiny: Path) -> None:
    learner = train(make_learner(tiny, adapter="none"), 0, 1)
    before = parameters_of(learner)
    buckets: list = []
    manifest = publish_weights(learner.policy, version=1, bucket_bytes=20_000, emit=buckets.append)
    assert manifest is not None
    assert manifest.num_buckets == len(buckets) > 1
    assert manifest.adapter_config is None
    assert_close(before, parameters_of(learner), 0)
