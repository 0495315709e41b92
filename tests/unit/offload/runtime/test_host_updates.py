"""The waits for the host's updates, on ranks that hold parts of chunks."""

from __future__ import annotations

from typing import Any

import pytest
from offload_cases import CPU, EagerWorker, LateWorker, arrange_all, make_qwen, token_loss
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Mode
from rlpipe.offload.runtime.activations import InlineStream, Streams
from rlpipe.offload.runtime.chunk_adam import ChunkAdam
from rlpipe.offload.runtime.runtime import OffloadedModel

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)


class FirstOfTwo:
    """A rank that holds the first half of every chunk; the second half is always 0."""

    rank, num_ranks, num_parts = 0, 2, 2

    def __init__(self, log: list[str]) -> None:
        self._log, self._numbers = log, dict[int, int]()

    def part(self, length: int) -> slice:
        return slice(0, length // 2)

    def gather(self, whole: Tensor) -> None:
        whole[len(whole) // 2 :] = 0
        number = self._numbers.setdefault(whole.untyped_storage()._cdata, len(self._numbers))
        self._log.append(f"gather {number}")

    def reduce(self, whole: Tensor) -> Tensor:
        return whole.float()[self.part(len(whole))]

    def sum(self, values: Tensor) -> Tensor:
        return values.mul_(2)  # the other rank has the same


def log_updates(adam: ChunkAdam, log: list[str]) -> None:
    """Log the end of each update."""
    update = adam.update

    def told(*arguments: Any) -> None:
        update(*arguments)
        log.append("update")

    adam.update = told


def log_of_second_step(worker: LateWorker, *, num_slots: int) -> tuple[list[str], dict[str, int]]:
    """Return the log of a second step's forward pass on one of two ranks, and how many chunks each layer needs."""
    log: list[str] = []
    model = make_qwen()
    queues = Streams(copies_in=InlineStream(), copies_out=InlineStream(), worker=worker)
    arrangement = arrange_all(model, Mode.CHECKPOINT, num_slots=num_slots)
    with OffloadedModel(
        model, arrangement, device=CPU, optimizer=CONFIG, sizes=[100 * 1024], ranks=FirstOfTwo(log), queues=queues
    ) as offloaded:
        needed, so_far = {}, set[int]()
        for unit, chunks in zip(offloaded.inventory.units, offloaded.unit_chunks, strict=True):
            so_far |= chunks
            unit.module.register_forward_pre_hook(lambda *_, name=unit.name: log.append(f"call {name}"))
            if unit.is_block:
                needed[unit.name] = max(so_far) + 1
                first = unit.module.input_layernorm
                first.register_forward_pre_hook(lambda *_, name=unit.name: log.append(name))
        for adam in offloaded.optimizer.adams.values():
            log_updates(adam, log)
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        token_loss(model, 0).backward()
        optimizer.step()
        log.clear()
        token_loss(model, 1)
        return list(log), needed


@pytest.mark.parametrize("num_slots", [3, 5, 8])
def test_ranks_wait_for_no_update_that_a_layer_does_not_need(num_slots: int) -> None:
    log, needed = log_of_second_step(LateWorker(), num_slots=num_slots)
    num_updated = {name: log[: log.index(name)].count("update") for name in needed}
    assert num_updated == needed


def test_ranks_fetch_what_the_next_layer_needs_during_the_one_before() -> None:
    log, needed = log_of_second_step(LateWorker(), num_slots=8)
    needed["model.norm"] = 8  # the head's: the norm itself has none
    assert {name: log[: log.index(f"call {name}")].count("update") for name in needed} == needed


@pytest.mark.parametrize("num_slots", [3, 5, 8])
def test_ranks_gather_at_the_same_points_whatever_their_hosts_are_up_to(num_slots: int) -> None:
    logs = [log_of_second_step(worker, num_slots=num_slots)[0] for worker in (LateWorker(), EagerWorker())]
    late, eager = ([entry for entry in log if entry != "update"] for log in logs)
    assert late == eager
    assert sum(entry.startswith("gather") for entry in late) >= 8


def test_a_chunk_larger_than_all_others_has_one_buffer_for_its_gradients() -> None:
    """Check a large tied embedding, for which a second buffer would exceed the predicted memory."""
    config = LlamaConfig(
        vocab_size=3000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    with OffloadedModel(
        model, arrange_all(model, Mode.KEEP, num_slots=8), device=CPU, optimizer=CONFIG, sizes=[160 * 1024]
    ) as offloaded:
        held = []
        for number in range(3):
            token_loss(model, number).backward()
            held.append(offloaded.optimizer.gradients.device_bytes)
        assert held[1:] == held[:1] * 2
