"""Tests that a packed strided pass gives every block the results of a separate, ordinary causal sequence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from family_cases import FAMILIES, make_family
from learner_cases import make_document, make_model_config
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, TopPLogitsWarper

from rlpipe.algorithms.strided import StridedRow
from rlpipe.configs.schema.algorithm_config import StridedConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, allows_flex_attention
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.errors import ModelError
from rlpipe.learner import policy, row_plan
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.policy import load_logprob_model
from rlpipe.learner.strided_objective import StridedInputs, plan_strided, sample_blocks, score_blocks
from rlpipe.learner.workload import Workload
from rlpipe.models.loading import open_model

CPU = torch.device("cpu")
TEMPERATURE = 0.6
LINEAR = {"qwen3.5", "qwen3.5-images"}
"""Families with layers of linear attention."""
FOLDER = TemporaryDirectory()
CASES = {
    # lengths of the documents, stride, context, tokens of a block, samples
    "the defaults": ((41,), (8, 8, 8), 4),
    "overlapping blocks": ((22,), (1, 2, 5), 2),
    "gaps between blocks": ((30,), (7, 3, 2), 3),
    "blocks of one token": ((9,), (2, 1, 1), 2),
    "documents": ((13, 26, 5, 11), (3, 4, 3), 2),
}


@cache
def family(name: str) -> Path:
    return make_family(name, Path(FOLDER.name) / name)


@cache
def module_of(name: str, attention: str = "sdpa") -> LogprobModel:
    module = load_logprob_model(make_model_config(family(name), adapter="none", attention=attention), "cpu")
    module.take_masks(attention, CPU)
    return module.eval()


@cache
def plain_model(name: str) -> PreTrainedModel:
    config = make_model_config(family(name), attention="eager")
    return open_model(config.path, config, torch.float32).eval()


def make_inputs(lengths: tuple[int, ...], sizes: tuple[int, int, int], num_samples: int) -> StridedInputs:
    stride, context, num_tokens = sizes
    config = StridedConfig(stride=stride, context_length=context, generate_tokens=num_tokens)
    rng = np.random.default_rng(1)
    documents = [make_document(index, rng.integers(7, 100, length)) for index, length in enumerate(lengths)]
    (batch,) = pack_step(documents, step=0, num_ranks=1, max_tokens=1024)
    (micro_batch,) = batch.mini_batches[0].micro_batches
    return plan_strided(micro_batch, config, num_samples=num_samples, device=torch.device("cpu"))


def sample(
    module: LogprobModel, inputs: StridedInputs, temperature: float = TEMPERATURE, seed: int = 0, top_p: float = 1.0
) -> Tensor:
    uniforms = torch.rand(inputs.plan.num_steps, inputs.plan.num_columns, generator=torch.Generator().manual_seed(seed))
    config = StridedConfig(temperature=temperature, top_p=top_p)
    return sample_blocks(module, inputs, uniforms, config=config, chunk_tokens=5)


def contexts_of(inputs: StridedInputs) -> list[Tensor]:
    """Return the tokens that each column's block continues."""
    plan = inputs.plan
    return [
        inputs.documents[torch.from_numpy(plan.document_ids) == document][:context]
        for document, context in zip(plan.column_documents, plan.contexts, strict=True)
    ]


@torch.no_grad()
def logprobs_alone(name: str, inputs: StridedInputs, sampled: Tensor) -> Tensor:
    """Return the log-probs ``[g, C]`` of each block after its context, run as a sequence of its own."""
    columns = []
    for context, tokens in zip(contexts_of(inputs), sampled.T, strict=True):
        logits = plain_model(name)(input_ids=torch.cat([context, tokens])[None]).logits[0]
        logprobs = (logits[len(context) - 1 : -1] / TEMPERATURE).log_softmax(1)
        columns.append(logprobs.gather(1, tokens[:, None])[:, 0])
    return torch.stack(columns, dim=1)


@torch.no_grad()
def logprobs_packed(module: LogprobModel, inputs: StridedInputs, sampled: Tensor) -> Tensor:
    return score_blocks(module, inputs, sampled, temperature=TEMPERATURE, chunk_tokens=7).sampled.view_as(sampled)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logprobs_of_one_packed_pass_equal_those_of_each_block_alone(case: tuple) -> None:
    inputs = make_inputs(*case)
    sampled = sample(module_of("qwen3"), inputs)
    packed, alone = logprobs_packed(module_of("qwen3"), inputs, sampled), logprobs_alone("qwen3", inputs, sampled)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - LINEAR))
def test_packed_logprobs_equal_separate_ones_for_common_families(name: str, attention: str) -> None:
    inputs = make_inputs((13, 21), (3, 4, 3), 2)
    sampled = sample(module_of(name, attention), inputs)
    packed, alone = logprobs_packed(module_of(name, attention), inputs, sampled), logprobs_alone(name, inputs, sampled)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_packed_logprobs_equal_separate_ones_with_flex_attention(name: str) -> None:
    module = load_logprob_model(make_model_config(family(name), adapter="none"), "cpu").eval()
    module.take_masks("sdpa", CPU)
    module.causal_model.set_attn_implementation("flex_attention")
    module.requires_grad_(False)  # its backward pass needs a GPU
    inputs = make_inputs((13, 41), (3, 4, 3), 4)
    sampled = sample(module, inputs)
    packed, alone = logprobs_packed(module, inputs, sampled), logprobs_alone(name, inputs, sampled)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_models_without_plain_attention_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"can't use custom attention masks, which algorithm\.kind=ebft_strided needs"):
        module_of(name)


def test_likelihoods_of_the_documents_come_from_the_same_pass() -> None:
    inputs = make_inputs((13, 26), (3, 4, 3), 2)
    module, sampled = module_of("qwen3"), sample(module_of("qwen3"), inputs)
    with torch.no_grad():
        got = score_blocks(module, inputs, sampled, temperature=TEMPERATURE, chunk_tokens=7).truth
        expected = []
        for places in map(torch.from_numpy, (inputs.plan.document_ids == 0, inputs.plan.document_ids == 1)):
            document = inputs.documents[places]
            logprobs = plain_model("qwen3")(input_ids=document[None]).logits[0, :-1].log_softmax(1)
            expected.append(logprobs.gather(1, document[1:, None])[:, 0])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-5, rtol=0)


def test_a_row_without_blocks_still_scores_its_documents() -> None:
    inputs = make_inputs((7, 9), (8, 8, 8), 4)
    module, sampled = module_of("qwen3"), sample(module_of("qwen3"), inputs)
    assert sampled.shape == (8, 0)
    assert inputs.plan.num_skipped == 2
    assert len(score_blocks(module, inputs, sampled, temperature=TEMPERATURE, chunk_tokens=7).truth) == 14


# Likely mistakes, planted one by one ----------------------------------------------------------------------------------


def beside(plan: StridedRow) -> np.ndarray:
    """Return each token's left neighbour in the packed row."""
    places = np.arange(plan.num_document_tokens, plan.num_tokens) - 1
    return places.reshape(plan.num_steps, plan.num_columns)


def one_early(plan: StridedRow) -> np.ndarray:
    early = plan.predecessors().copy()
    early[0] -= 1
    return early


def at_the_context_end(plan: StridedRow) -> np.ndarray:
    late = plan.predecessors().copy()
    late[0] += 1
    return late


def block_major(plan: StridedRow) -> np.ndarray:
    """Return the predecessors as if the tokens of a block were adjacent."""
    return plan.predecessors().T.reshape(plan.num_steps, plan.num_columns)


@pytest.mark.parametrize("planted", [beside, one_early, at_the_context_end, block_major])
def test_log_probs_read_at_another_position_differ(planted: Callable[[StridedRow], np.ndarray]) -> None:
    inputs = make_inputs((41,), (8, 8, 8), 2)
    sampled = sample(module_of("qwen3"), inputs)
    wrong = replace(inputs, predecessors=torch.from_numpy(planted(inputs.plan)))
    alone = logprobs_alone("qwen3", inputs, sampled)
    assert (logprobs_packed(module_of("qwen3"), wrong, sampled) - alone).abs().max() > 1e-2


@pytest.mark.parametrize("shift", [-1, 1])
def test_contexts_that_are_off_by_one_are_other_ones(shift: int) -> None:
    inputs = make_inputs((41,), (8, 8, 8), 2)
    sampled = sample(module_of("qwen3"), inputs)
    alone = logprobs_alone("qwen3", inputs, sampled)
    plan = inputs.plan
    visible = torch.from_numpy(plan.visible()).clone()
    visible[plan.num_document_tokens :] += shift
    positions = inputs.position_ids.clone()
    positions[plan.num_document_tokens :] += shift
    for wrong in (replace(inputs, mask=replace(inputs.mask, visible=visible)), replace(inputs, position_ids=positions)):
        assert (logprobs_packed(module_of("qwen3"), wrong, sampled) - alone).abs().max() > 1e-4


# Drawing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral"])
def test_the_coldest_samples_are_what_each_block_alone_continues_with(name: str) -> None:
    inputs = make_inputs((13, 21), (3, 4, 3), 2)
    sampled = sample(module_of(name), inputs, temperature=1e-6)
    for context, tokens in zip(contexts_of(inputs), sampled.T, strict=True):
        expected = context
        for _ in tokens:
            with torch.no_grad():
                expected = torch.cat([expected, plain_model(name)(input_ids=expected[None]).logits[0, -1:].argmax(1)])
        assert torch.equal(tokens, expected[len(context) :])


@pytest.mark.parametrize("top_p", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_samples_follow_the_policys_distribution(top_p: float) -> None:
    inputs = make_inputs((9,), (8, 8, 1), 20_000)
    with torch.no_grad():
        logits = plain_model("qwen3")(input_ids=inputs.documents[None, :8]).logits[0, -1]
    warped = TopPLogitsWarper(top_p)(None, logits[None] / 0.3)[0] if top_p < 1 else logits / 0.3
    probabilities = warped.softmax(0)
    sampled = sample(module_of("qwen3"), inputs, temperature=0.3, top_p=top_p)
    counts = sampled.flatten().bincount(minlength=len(logits))[: len(logits)]
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = 20_000 * probabilities[possible]
    deviations = (counts[possible] - expected) / expected.sqrt()
    assert deviations.square().sum() < 2 * possible.sum()  # chi-square, whose mean is the number of tokens less one


def test_a_seed_samples_the_same_tokens_again() -> None:
    inputs = make_inputs((41,), (8, 8, 8), 4)
    first, again, other = (sample(module_of("qwen3"), inputs, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Hidden states --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3-moe", "mistral"])
def test_hidden_states_are_transformers_own_at_every_depth(name: str) -> None:
    inputs = make_inputs((13, 21), (3, 4, 3), 2)
    sampled = sample(module_of(name), inputs)
    row, plan = inputs.row(sampled), inputs.plan
    with torch.no_grad():
        depths = module_of(name).depths(row, [2, 0, 1, 1])
        for column, context in enumerate(contexts_of(inputs)):
            alone = torch.cat([context, sampled[:, column]])[None]
            expected = plain_model(name)(input_ids=alone, output_hidden_states=True).hidden_states
            places = [plan.step_slice(step).start + column for step in range(plan.num_steps)]
            for depth, got in zip((2, 0, 1, 1), depths, strict=True):
                torch.testing.assert_close(got[places], expected[depth][0, len(context) :], atol=1e-5, rtol=0)


def test_queries_and_keys_have_the_dtype_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check flex_attention's arguments, because its kernel needs a GPU."""
    seen = []

    def note(module: object, *tensors: Tensor, **_: object) -> tuple[Tensor, None]:
        seen.append([tensor.dtype for tensor in tensors])
        return tensors[2], None

    monkeypatch.setattr(row_plan, "flex_attention_forward", note)
    wide, narrow = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    AttentionInterface()["flex_attention"](torch.nn.Identity(), wide, wide, narrow, narrow)
    assert seen == [[torch.bfloat16] * 4]


@pytest.mark.parametrize(
    ("takes_masks", "form", "flex", "reentrant"),
    [(True, None, True, True), (True, False, False, False), (False, None, False, False)],
)
def test_flex_attention_is_taken_where_what_is_recomputed_can_have_it(
    monkeypatch: pytest.MonkeyPatch, takes_masks: bool, form: bool | None, flex: bool, reentrant: bool
) -> None:
    """Check a policy whose passes run on a GPU, though its weights are on the CPU."""
    chosen: list[dict[str, bool]] = []
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", lambda _, options: chosen.append(options))
    monkeypatch.setattr(
        policy, "load_logprob_model", lambda model, *_, **options: load_logprob_model(model, "cpu", **options)
    )
    model = make_model_config(family("qwen3"), adapter="none", gradient_checkpointing=True)
    model.reentrant_checkpointing = form
    workload = Workload(takes_masks=takes_masks)
    loaded = policy.load_policy(model, LearnerConfig(), torch.device("cuda"), workload=workload)
    assert chosen == [{"use_reentrant": reentrant}]
    assert (loaded.module.causal_model.config._attn_implementation == "flex_attention") == flex


def test_fsdp2_and_recomputed_chunks_have_dense_masks() -> None:
    recomputed, kept = ModelConfig(gradient_checkpointing=True), ModelConfig(gradient_checkpointing=False)
    assert allows_flex_attention(recomputed, LearnerConfig(strategy="zero3"))
    assert not allows_flex_attention(recomputed, LearnerConfig(strategy="fsdp2"))
    assert allows_flex_attention(kept, LearnerConfig(strategy="fsdp2"))
    assert not allows_flex_attention(kept, LearnerConfig(offload="chunked"))
    assert allows_flex_attention(kept, LearnerConfig(offload="chunked", chunked=ChunkedConfig(num_checkpointed=0)))
