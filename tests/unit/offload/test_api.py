"""Tests that one call offloads a model of any kind, given a batch for it, in the best way that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import make_learner, make_model_config
from offload_cases import (
    CPU,
    make_image_text,
    make_moe,
    make_nf4,
    make_qwen,
    make_t5,
    token_loss,
    train_offloaded,
    train_plainly,
    with_lora,
)
from torch import nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    T5Config,
    T5ForSequenceClassification,
)

from rlpipe.common.formatting import gib
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.hardware.calibration import measured_device
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.learner.policy import load_logprob_model
from rlpipe.learner.strategies import chunked
from rlpipe.learner.strategies.chunked import Chunked
from rlpipe.learner.workload import Workload
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.offload import api
from rlpipe.offload.api import OffloadedAdamW, free_memory, offload
from rlpipe.offload.decision import Capacity, Mode
from rlpipe.offload.planner.planner import describe_small_update
from rlpipe.offload.planner.search import DoesNotFit
from rlpipe.offload.representative_batch import representative_batch
from rlpipe.offload.runtime.runtime import least_memory

pytestmark = pytest.mark.covering(1)

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SIZES = [100 * 1024]
KIB = 1024
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}


@pytest.fixture(autouse=True, scope="module")
def _rates() -> None:
    """Measure this machine roughly, in a tenth of the time, unless another test has measured it."""
    measured_device(CPU, scale=0.1)


def make_classifier() -> nn.Module:
    config = Qwen3Config(**SMALL, vocab_size=97, num_key_value_heads=1, head_dim=32, num_labels=3, pad_token_id=5)
    return Qwen3ForSequenceClassification(config)


def make_reward_model() -> nn.Module:
    config = Qwen3Config(**SMALL, vocab_size=97, num_key_value_heads=1, head_dim=32, num_labels=1, pad_token_id=5)
    return Qwen3ForSequenceClassification(config)


def make_encoder_classifier() -> nn.Module:
    """Make a model with an encoder and a decoder, and no list of architectures in its config."""
    config = T5Config(**T5, num_labels=3, decoder_start_token_id=0, eos_token_id=0, pad_token_id=5)
    config.architectures = None
    return T5ForSequenceClassification(config)


def make_gemma() -> nn.Module:
    text = SMALL | {"vocab_size": 97, "num_key_value_heads": 1, "head_dim": 32}
    vision = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 56}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90)
    )


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "causal": make_qwen,
    "lora": lambda: with_lora(make_qwen()),
    "qlora": lambda: with_lora(make_nf4()),
    "experts": make_moe,
    "classes": make_classifier,
    "reward": make_reward_model,
    "classes of tokens": lambda: BertForTokenClassification(BertConfig(**SMALL, vocab_size=97)),
    "encoder and decoder": make_t5,
    "encoder and decoder, classes": make_encoder_classifier,
    "image and text, patches": make_image_text,
    "image and text, squares": make_gemma,
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_is_profiled_with_a_batch_of_its_kind(kind: str) -> None:
    model = MAKERS[kind]().train()
    batch = representative_batch(model, 32)

    def make_gradients() -> None:
        torch.manual_seed(0)  # seeds dropout
        model(**batch).loss.backward()

    make_gradients()
    expected = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    assert expected > 0
    with offload(model, device=CPU, optimizer=CONFIG, num_tokens=32, sizes=SIZES) as offloaded:
        make_gradients()
        squared = offloaded.optimizer.squared_norm() + offloaded.resident_squared_norm()
        assert float(squared) == pytest.approx(expected, rel=1e-4)


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["image and text, patches", "image and text, squares"])
def test_the_vision_tower_is_among_what_is_traced(kind: str) -> None:
    model = MAKERS[kind]().train()
    ran = set()
    for name, module in model.named_modules():
        if name.endswith((".blocks.1", "encoder.layers.1")):
            module.register_forward_pre_hook(lambda *_, name=name: ran.add(name))
    with offload(model, device=CPU, optimizer=CONFIG, num_tokens=32, sizes=SIZES):
        assert ran


def test_what_no_batch_is_known_for_needs_one() -> None:
    model = Qwen3Model(Qwen3Config(**SMALL, vocab_size=97, num_key_value_heads=1, head_dim=32))
    with pytest.raises(ValueError, match="Qwen3Model has no default batch: pass one"):
        offload(model, device=CPU)


def test_what_does_not_fit_is_said_before_anything_is_changed() -> None:
    model = make_qwen()
    with pytest.raises(DoesNotFit, match="the smallest on the device needs"):
        offload(model, device=CPU, optimizer=CONFIG, num_tokens=64, capacity=Capacity(device_bytes=10, host_bytes=10))
    assert torch.isfinite(token_loss(model, 0))


def test_the_way_that_fits_trains_as_without_offload(caplog: pytest.LogCaptureFixture) -> None:
    options = {"num_steps": 3, "num_micro_batches": 2, "max_norm": 0.5}
    _, _, expected = train_plainly(make_qwen(num_layers=6), token_loss, CONFIG, **options)
    model = make_qwen(num_layers=6)
    with (
        caplog.at_level(logging.INFO, logger="rlpipe.offload"),
        offload(
            model,
            device=CPU,
            optimizer=CONFIG,
            num_tokens=18,
            num_micro_batches=2,
            capacity=Capacity(device_bytes=1400 * KIB, host_bytes=2**30),
            sizes=SIZES,
        ) as offloaded,
    ):
        assert 0 < offloaded.arrangement.num_slots < len(offloaded.layout.chunks)
        _, _, found = train_offloaded(offloaded, token_loss, CONFIG, **options)
        held, predicted = offloaded.host_bytes, offloaded.decision.prediction.host_bytes
    decided, small, compared = (record.getMessage() for record in caplog.records)
    assert "chunks stay (all would need " in decided
    assert "slots; of 6 layers" in decided
    assert small == "offload: " + describe_small_update(2)
    assert compared.startswith("offload: an update of 2 micro batches took ")
    assert f"; it holds {gib(held)} on the host; {gib(predicted)} were predicted; the process uses " in compared
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)


def test_what_gives_no_loss_is_refused() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM returns no loss for the batch: add labels to it"):
        offload(make_qwen(), device=CPU, optimizer=CONFIG, batch={"input_ids": tokens})
    with pytest.raises(ValueError, match="Linear has no default batch: pass one"):
        offload(nn.Linear(3, 3), device=CPU, optimizer=CONFIG)
    with pytest.raises(ValueError, match="sharing=both: give one of auto, replicated, sharded"):
        offload(make_qwen(), device=CPU, optimizer=CONFIG, sharing="both")


def test_what_can_not_be_taken_is_refused_before_it_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    model, options = make_qwen(), {"device": CPU, "num_tokens": 18, "sizes": SIZES}
    with pytest.raises(ValueError, match=r"optimizer\.name=adamw_8bit: chunks are updated by adamw"):
        offload(model, optimizer=OptimizerConfig(name="adamw_8bit"), **options)
    offloaded = offload(model, optimizer=CONFIG, **options)
    optimizer = OffloadedAdamW(offloaded, CONFIG)
    with caplog.at_level(logging.INFO, logger="rlpipe.offload"), pytest.raises(RuntimeError, match="offloaded already"):
        offload(model, optimizer=CONFIG, **options)
    assert not caplog.records
    offloaded.close()
    with pytest.raises(RuntimeError, match="the offloaded model is closed"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="the offloaded model is closed"):
        optimizer.zero_grad()


def test_weights_that_chunks_replace_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "free_host_bytes", lambda: 2**33)
    model = nn.Linear(4096, 4096, bias=False)  # 64 MiB
    assert free_memory(CPU, replaced=model).host_bytes == int(0.9 * (2**33 + 2**26)) // 2
    with torch.device("meta"):
        empty = nn.Linear(2**16, 2**16)
    assert free_memory(CPU, replaced=empty).host_bytes == int(0.9 * 2**33) // 2


def test_knobs_that_are_given_stay() -> None:
    model = make_qwen()
    knobs = {"num_persistent": 2, "num_checkpointed": 1}
    with offload(model, device=CPU, optimizer=CONFIG, num_tokens=32, knobs=knobs, sizes=SIZES) as offloaded:
        assert offloaded.arrangement.num_persistent == 2
        assert list(offloaded.arrangement.modes).count(Mode.CHECKPOINT) == 1
    with pytest.raises(ValueError, match="there is no knob num_buffers"):
        offload(model, device=CPU, optimizer=CONFIG, num_tokens=32, knobs={"num_buffers": 2}, sizes=SIZES)


@pytest.mark.parametrize(
    "others", [{}, {"num_persistent": 0, "num_slots": 9, "num_checkpointed": 0, "num_offloaded": 0}]
)
def test_knobs_are_no_negative_numbers(others: dict[str, int]) -> None:
    model = make_qwen()
    model.register_forward_pre_hook(lambda *_: 1 / 0)  # fails if anything is traced
    with pytest.raises(ValueError, match="num_swapped=-2: give 0 or more"):
        offload(
            model,
            device=CPU,
            optimizer=CONFIG,
            num_tokens=32,
            knobs=others | {"num_slots": 9, "num_swapped": -2},
            sizes=SIZES,
        )


def test_a_copy_is_spread_after_what_is_trained(tmp_path: Path) -> None:
    path = make_tiny_policy(tmp_path / "tiny", hidden_size=64, num_layers=2, intermediate_size=96)
    module = load_logprob_model(make_model_config(path, adapter="none"), CPU)
    with pytest.raises(AssertionError, match="the trained model is spread first"):
        Chunked(LearnerConfig(offload="chunked"), CPU, Workload()).shard(module, trained=False)


def test_where_all_knobs_are_given_nothing_is_measured_or_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_qwen()
    monkeypatch.setattr(api, "measured_device", lambda _: 1 / 0)
    knobs = {"num_persistent": 1, "num_slots": 3, "num_swapped": 1, "num_checkpointed": 2, "num_offloaded": 1}
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with offload(model, device=CPU, optimizer=CONFIG, knobs=knobs, sizes=SIZES) as offloaded:
        modes = [Mode.KEEP, Mode.SWAP, Mode.CHECKPOINT, Mode.CHECKPOINT, Mode.OFFLOAD, Mode.KEEP, Mode.KEEP]
        assert list(offloaded.arrangement.modes) == modes
    with pytest.raises(ValueError, match="num_swapped, num_checkpointed and num_offloaded are 6 of 4 layers"):
        offload(model, device=CPU, optimizer=CONFIG, knobs=knobs | {"num_offloaded": 3}, sizes=SIZES)


def test_a_model_that_looks_at_its_values_needs_all_knobs() -> None:
    model = make_qwen()
    model.model.layers[1].register_forward_pre_hook(lambda _, args: print(float(args[0].sum())))
    with pytest.raises(
        ValueError, match=r"can't be traced without real tensors .* set all of num_persistent, num_slots"
    ):
        offload(model, device=CPU, optimizer=CONFIG, num_tokens=16, sizes=SIZES)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("groups", "is_noted"), [(1, True), (4, False)])
def test_updates_of_few_sequences_are_noted(tmp_path: Path, groups: int, is_noted: bool) -> None:
    path = make_tiny_policy(tmp_path / "tiny", hidden_size=64, num_layers=2, intermediate_size=96)
    algorithm = AlgorithmConfig(num_steps=2, groups_per_step=groups, group_size=2)
    learner = make_learner(
        path, learner=LearnerConfig(offload="chunked", max_tokens_per_microbatch=64), algorithm=algorithm
    )
    assert any("an update of 2 sequences" in note for note in learner.policy.notes) == is_noted


def test_room_is_left_for_a_frozen_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where transfers are slow, the best arrangement keeps as much on the device as fits.
    slow = replace(DEVICES["h100-80g"], host_to_device=1e6, device_to_host=1e6, both=1e6)
    monkeypatch.setattr(chunked, "measured_device", lambda _: slow)
    path = make_tiny_policy(tmp_path / "tiny", hidden_size=64, num_layers=4, intermediate_size=96)
    chunks = ChunkedConfig(chunk_mib=0.06, device_memory_gib=2 / 1024, host_memory_gib=1.0)
    config = LearnerConfig(offload="chunked", chunked=chunks, max_tokens_per_microbatch=64)
    taken = []
    for beta in (0.0, 0.1):
        algorithm = AlgorithmConfig(num_steps=2, loss=LossConfig(beta=beta))
        sharding = make_learner(path, adapter="none", learner=config, algorithm=algorithm).policy.sharding
        assert isinstance(sharding, Chunked)
        taken.append(sharding.decision.prediction.device_bytes)
    copy = load_logprob_model(make_model_config(path, adapter="none"), CPU)
    room = least_memory(copy, sizes=[int(0.06 * 2**20)]).device_bytes
    assert 2 * 2**20 - room < taken[0] <= 2 * 2**20
    assert taken[1] <= 2 * 2**20 - room
