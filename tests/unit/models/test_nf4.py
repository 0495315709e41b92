"""Tests that the NF4 base as rlpipe computes it equals the one that transformers loads for QLoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from learner_cases import make_model_config
from transformers import AutoModelForCausalLM

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.errors import ModelError
from rlpipe.learner.policy import load_logprob_model, load_policy
from rlpipe.models.nf4 import nf4_parameters, nf4_round_trip, resolve_nf4, to_nf4_and_back
from rlpipe.models.tiny_model import make_tiny_policy


def test_the_parameters_in_nf4_are_those_that_transformers_quantises(tmp_path: Path) -> None:
    path = make_tiny_policy(tmp_path, hidden_size=64, num_layers=2, intermediate_size=128)
    loaded = load_logprob_model(make_model_config(path, adapter="qlora", attention="eager"), "cpu").causal_model
    quantised = {f"{name}.weight": module for name, module in loaded.named_modules() if isinstance(module, Linear4bit)}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert nf4_parameters(plain) == quantised.keys()
    assert not any("lm_head" in name for name in quantised)

    resolve_nf4(loaded, torch.device("cpu"))
    to_nf4_and_back(plain)
    token_ids = torch.arange(7, 27)[None]
    with torch.no_grad():
        expected = plain(token_ids).logits
        for _ in range(2):  # bitsandbytes may repack weights in the first call
            torch.testing.assert_close(loaded.eval()(token_ids).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(64, 96), (5, 7), (64, 128)])
def test_a_round_trip_stays_within_half_the_widest_gap_between_values(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    once = nf4_round_trip(weight)
    largest = float(weight.abs().max())
    assert 0.05 < float((once - weight).abs().mean()) < 0.1
    assert float((once - weight).abs().max()) < 0.16 * largest
    torch.testing.assert_close(nf4_round_trip(once), once, atol=1e-2, rtol=0)


def test_widths_that_bitsandbytes_misreads_are_refused(tmp_path: Path) -> None:
    path = make_tiny_policy(tmp_path, hidden_size=64, num_layers=1, intermediate_size=96)
    with pytest.raises(ModelError, match=r"here 96, .*kind=lora"):
        load_policy(make_model_config(path, adapter="qlora"), LearnerConfig(), torch.device("cpu"))
