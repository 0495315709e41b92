"""Tests that the learner trains as plain PyTorch does, whatever the lm_head is, and wherever its weights lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import HYBRID, SIZES, WINDOW, write_model
from learner_cases import (
    assert_close,
    make_adapter_config,
    make_batches,
    make_learner,
    make_model_config,
    parameters_of,
    train_steps,
)
from plain_training import load_plain, train_plain
from rank_cases import Ranks
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    set_seed,
)

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, FsdpConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.learner.checkpoints import export_policy
from rlpipe.learner.publish import whole_weights
from rlpipe.models.tiny_model import make_tokenizer

pytestmark = pytest.mark.covering(0)
NUM_STEPS, MAX_NORM, LEARNING_RATE = 3, 0.05, 1e-4
MAX_TOKENS = 48
"""The tokens of a micro batch, so few that every step of each rank has several micro batches."""
FEW_TOKENS, MANY_TOKENS = 8, 1024
"""The numbers of tokens whose logits exist at one time."""
ENTROPY_COEF = 0.3
VARIANTS = [(0.0, FEW_TOKENS), (ENTROPY_COEF, FEW_TOKENS), (0.0, MANY_TOKENS), (ENTROPY_COEF, MANY_TOKENS)]
"""Entropy coefficients and chunks of tokens, in turns over heads and strategies."""
SPREAD = {"initializer_range": 0.1, "intermediate_size": 128}
"""A wide initialization, with which logits differ so much that entropies have a significant gradient."""
MODELS: dict[str, type[PreTrainedConfig]] = {
    "tied": Qwen3Config,
    "untied": Qwen3Config,
    "capped": Gemma3TextConfig,
    "scaled": GraniteConfig,
    "biased": PhiConfig,
}
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "capped": {"sliding_window": WINDOW, "layer_types": HYBRID, "final_logit_softcapping": 2.0},
    "scaled": {"logits_scaling": 2.0},
    "biased": {},
}
FROZEN = {"target_modules": ["q_proj"]}
LOW_RANK = {"target_modules": ["q_proj", "lm_head"]}
WHOLE = {"kind": "none"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Head:
    model: str
    adapter: dict[str, Any]


HEADS = {
    "tied, trained": Head(model="tied", adapter=WHOLE),
    "tied, frozen": Head(model="tied", adapter=FROZEN),
    "tied, low rank": Head(model="tied", adapter=LOW_RANK),
    "untied, trained": Head(model="untied", adapter=WHOLE),
    "untied, frozen": Head(model="untied", adapter=FROZEN),
    "untied, low rank": Head(model="untied", adapter=LOW_RANK),
    "untied, saved": Head(model="untied", adapter=FROZEN | {"modules_to_save": ["lm_head"]}),
    "nf4, frozen": Head(model="untied", adapter=FROZEN | {"kind": "qlora"}),
    "nf4, low rank": Head(model="untied", adapter=LOW_RANK | {"kind": "qlora"}),
    "capped, trained": Head(model="capped", adapter=WHOLE),
    "capped, frozen": Head(model="capped", adapter=FROZEN),
    "scaled, trained": Head(model="scaled", adapter=WHOLE),
    "biased, trained": Head(model="biased", adapter=WHOLE),
    "biased, frozen": Head(model="biased", adapter=FROZEN),
}
CHUNKS = ChunkedConfig(
    chunk_mib=0.06, num_persistent=0, num_slots=4, num_swapped=1, num_checkpointed=0, num_offloaded=1
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Strategy:
    num_ranks: int
    options: dict[str, Any] = field(default_factory=dict)


def chunked(strategy: str, num_ranks: int, sharing: str) -> Strategy:
    options = {"offload": "chunked", "max_tokens_per_microbatch": MAX_TOKENS}
    return Strategy(
        num_ranks=num_ranks, options=options | {"strategy": strategy, "chunked": replace(CHUNKS, sharing=sharing)}
    )


STRATEGIES = {
    "single": Strategy(num_ranks=1),
    "fsdp2": Strategy(num_ranks=2, options={"strategy": "fsdp2"}),
    "fsdp2, offloaded": Strategy(num_ranks=2, options={"strategy": "fsdp2", "offload": "policy"}),
    "fsdp2, by size": Strategy(
        num_ranks=2, options={"strategy": "fsdp2", "fsdp": FsdpConfig(wrap="size", min_num_params=64 * 64)}
    ),
    "zero3": Strategy(num_ranks=2, options={"strategy": "zero3"}),
    "zero3, offloaded": Strategy(
        num_ranks=2,
        options={"strategy": "zero3", "zero3": Zero3Config(offload_optimizer=True, offload_parameters=True)},
    ),
    "chunked": chunked("single", 1, "auto"),
    "chunked, replicated": chunked("fsdp2", 2, "replicated"),
    "chunked, sharded": chunked("fsdp2", 2, "sharded"),
}
CASES = [
    (head, strategy, *VARIANTS[(row + column) % len(VARIANTS)])
    for row, head in enumerate(HEADS)
    for column, strategy in enumerate(STRATEGIES)
]
NARROW_CASES = [
    (head, strategy, (0.0, ENTROPY_COEF)[(row + column) % 2])
    for row, head in enumerate(["tied, trained", "untied, frozen", "untied, low rank", "untied, saved"])
    for column, strategy in enumerate(STRATEGIES)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer, folder = make_tokenizer(), tmp_path_factory.mktemp("models")
    paths = {}
    for name, config_class in MODELS.items():
        set_seed(0)
        config = config_class(**SIZES | SPREAD | MODEL_OPTIONS[name], vocab_size=len(tokenizer))
        model = AutoModelForCausalLM.from_config(config)
        if model.lm_head.bias is not None:
            nn.init.normal_(model.lm_head.bias)
        paths[name] = write_model(model, tokenizer, folder / name)
    return paths


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Ranks]]:
    started = {num_ranks: Ranks(num_ranks) for num_ranks in (1, 2)}
    yield started
    for ranks in started.values():
        ranks.end()


@cache
def expect(path: Path, head: str, entropy_coef: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    return train_plain(
        path,
        make_adapter_config(**HEADS[head].adapter),
        num_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        max_norm=MAX_NORM,
        entropy_coef=entropy_coef,
    )


def train(
    path: Path, head: str, strategy: str, entropy_coef: float, chunk_tokens: int, model: dict[str, Any], out: Path
) -> None:
    learner = make_learner(
        path,
        learner=LearnerConfig(
            num_ranks=STRATEGIES[strategy].num_ranks,
            max_grad_norm=MAX_NORM,
            logprob_chunk_tokens=chunk_tokens,
            optimizer=OptimizerConfig(lr=LEARNING_RATE),
            **STRATEGIES[strategy].options,
        ),
        model=make_model_config(path, adapter=make_adapter_config(**HEADS[head].adapter), **model),
        algorithm=AlgorithmConfig(num_steps=10, loss=LossConfig(entropy_coef=entropy_coef)),
    )
    metrics = train_steps(learner, 0, NUM_STEPS, max_tokens=MAX_TOKENS)
    torch.save((metrics, parameters_of(learner)), out / f"rank{learner.policy.sharding.rank}.pt")


def run(
    groups: dict[int, Ranks], path: Path, head: str, strategy: str, entropy_coef: float, chunk_tokens: int, out: Path,
    **model: Any,
) -> Iterator[tuple[list[float], list[float], dict[str, torch.Tensor]]]:  # fmt: skip
    """Yield each rank's losses, gradient norms, and trained parameters."""
    num_ranks = STRATEGIES[strategy].num_ranks
    groups[num_ranks].run(train, path, head, strategy, entropy_coef, chunk_tokens, model, out)
    for rank in range(num_ranks):
        metrics, parameters = torch.load(out / f"rank{rank}.pt", weights_only=False)
        yield [step["loss"] for step in metrics], [step["grad_norm"] for step in metrics], parameters


@pytest.mark.parametrize(("head", "strategy", "entropy_coef", "chunk_tokens"), CASES)
def test_every_head_trains_under_every_strategy_as_in_plain_pytorch(
    models: dict, groups: dict, tmp_path: Path, head: str, strategy: str, entropy_coef: float, chunk_tokens: int
) -> None:
    num_ranks, path = STRATEGIES[strategy].num_ranks, models[HEADS[head].model]
    for step in range(NUM_STEPS):
        batches = make_batches(step=step, num_ranks=num_ranks, max_tokens=MAX_TOKENS)
        assert all(len(batch.mini_batches[0].micro_batches) > 1 for batch in batches)
    expected_losses, expected_norms, expected = expect(path, head, entropy_coef)
    for losses, norms, parameters in run(groups, path, head, strategy, entropy_coef, chunk_tokens, tmp_path):
        assert losses == pytest.approx(expected_losses, abs=1e-5)
        assert norms == pytest.approx(expected_norms, abs=1e-5)
        assert_close(expected, parameters, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "strategy", "entropy_coef"), NARROW_CASES)
def test_bfloat16_stays_within_its_rounding(
    models: dict, groups: dict, tmp_path: Path, head: str, strategy: str, entropy_coef: float
) -> None:
    """Check the errors in bfloat16; plain PyTorch's norms under autocast are off by most of an epsilon, too."""
    path = models[HEADS[head].model]
    expected_losses, expected_norms, _ = expect(path, head, entropy_coef)
    epsilon = torch.finfo(torch.bfloat16).eps
    found = run(groups, path, head, strategy, entropy_coef, FEW_TOKENS, tmp_path, dtype="bfloat16")
    for losses, norms, parameters in found:
        assert losses == pytest.approx(expected_losses, abs=epsilon / 2)
        assert norms == pytest.approx(expected_norms, rel=2 * epsilon)
        assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}


def publish(path: Path, head: str, strategy: str, out: Path) -> None:
    """Train one step, and write the trained parameters with the weights that engines and users receive."""
    options = STRATEGIES[strategy].options
    config = LearnerConfig(num_ranks=STRATEGIES[strategy].num_ranks, optimizer=OptimizerConfig(lr=1e-2), **options)
    adapter = make_adapter_config(**HEADS[head].adapter, merge=True)
    learner = make_learner(path, learner=config, model=make_model_config(path, adapter=adapter))
    train_steps(learner, 0, 1)
    served = {name: tensor.clone() for name, tensor in whole_weights(learner.policy)}
    parameters = parameters_of(learner)
    export_policy(learner.policy, out / "adapter")
    if learner.policy.sharding.rank == 0:
        torch.save((parameters, served), out / "first.pt")


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "fsdp2, by size"])
@pytest.mark.parametrize("head", ["untied, low rank", "untied, saved", "nf4, low rank"])
def test_engines_and_users_are_given_what_is_trained_of_the_head(
    models: dict, groups: dict, tmp_path: Path, head: str, strategy: str
) -> None:
    path = models[HEADS[head].model]
    groups[STRATEGIES[strategy].num_ranks].run(publish, path, head, strategy, tmp_path)
    trained, served = torch.load(tmp_path / "first.pt", weights_only=False)
    plain = load_plain(path, make_adapter_config(**HEADS[head].adapter))
    assert any("lm_head" in name for name in trained)
    assert all(
        not torch.equal(tensor, plain.get_parameter(name)) for name, tensor in trained.items() if "lora_A" not in name
    )
    plain.load_adapter(tmp_path / "adapter", adapter_name="exported")
    exported = {name: plain.get_parameter(name.replace(".default", ".exported")) for name in trained}
    assert_close(trained, exported, 0)
    for name, tensor in trained.items():
        plain.get_parameter(name).data.copy_(tensor)
    plain.set_adapter("default")
    plain.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_close(load_file(tmp_path / "merged" / "model.safetensors"), served, 1e-6)
