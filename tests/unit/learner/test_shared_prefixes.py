"""Tests that sequences run what they share once, wherever they part, and that nothing else changes."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import assert_close, load_tiny, make_learner, micro_batch_of

from rlpipe.data.packing import PrefixIndex, common_length, pack_step
from rlpipe.learner.row_plan import AttentionLayout, plan_row
from rlpipe.learner.step import Learner
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.types import EpisodeTrace, PlacedImage, Rollout

CPU = torch.device("cpu")
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


def rollout_of(tokens: list[int], *, mask: list[bool] | None = None, sample: int = 0, group: int = 0) -> Rollout:
    counted = np.array([False, *[True] * (len(tokens) - 1)] if mask is None else mask)
    return Rollout(
        group_id=group,
        sample_index=sample,
        prompt_id=group,
        task={},
        token_ids=np.array(tokens, np.int32),
        loss_mask=counted,
        logprobs=np.where(counted, -1.0, 0).astype(np.float32),
        policy_versions=np.where(counted, 0, -1).astype(np.int32),
        advantages=np.where(counted, 1.0 + sample, 0).astype(np.float32),
    )


def rewritten(num_turns: int, *, thought: int = 40, said: int = 12, seen: int = 12) -> list[Rollout]:
    """Return the branches of an episode whose thoughts are left out of later prompts, as reasoning templates do."""
    random = np.random.default_rng(num_turns)
    history, branches = random.integers(3, 90, 60).tolist(), []
    for _ in range(num_turns):
        sampled, answer = random.integers(3, 90, thought).tolist(), random.integers(3, 90, said).tolist()
        tokens = history + sampled + answer
        branches.append(rollout_of(tokens, mask=[False] * len(history) + [True] * (thought + said)))
        history = history + answer + random.integers(3, 90, seen).tolist()
    return branches


def as_episode(branches: list[Rollout]) -> Rollout:
    first, *others = branches
    first.episode = EpisodeTrace(
        messages=[], reward=0.0, turn_rewards=[0.0] * len(branches), end="done", branches=others
    )
    return first


@given(SEQUENCES)
@settings(max_examples=300, deadline=None)
def test_rows_hold_each_distinct_prefix_once(sequences: list[list[int]]) -> None:
    micro_batch = micro_batch_of([rollout_of(tokens, sample=index) for index, tokens in enumerate(sequences)])
    row = plan_row(micro_batch, layout=AttentionLayout.SHARED, device=CPU)
    run = [tuple(tokens[:-1]) for tokens in sequences]  # a row ends with the token that predicts the last loss token
    distinct = {tokens[:length] for tokens in run for length in range(1, len(tokens) + 1)}
    assert len(row.token_ids) == len(distinct)
    assert row.num_shared == sum(map(len, run)) - len(distinct)
    assert row.targets.tolist() == [token for tokens in sequences for token in tokens[1:]]
    paths = {place: path for path in row.sequences for place in path}
    for place, token in zip(row.predictors.tolist(), (t for own in run for t in own), strict=True):
        assert row.token_ids[place] == token
        assert place in paths
    own = {tuple(row.token_ids[path].tolist()) for path in row.sequences}
    assert own <= set(run)
    assert all(any(path[: len(tokens)] == tokens for path in own) for tokens in run)


@given(SEQUENCES)
@settings(max_examples=100, deadline=None)
def test_the_index_finds_the_longest_common_prefix(sequences: list[list[int]]) -> None:
    index, added = PrefixIndex(), list[np.ndarray]()
    for tokens in map(np.array, sequences):
        number, shared = index.add(tokens)
        assert shared == max((common_length(other, tokens) for other in added), default=0)
        added.append(tokens)
        assert common_length(added[number], tokens) >= shared


def test_log_probs_and_gradients_are_those_of_each_sequence_alone(tiny: Path) -> None:
    random = np.random.default_rng(3)
    trees = [[5, 6, *random.integers(3, 6, 14)] for _ in range(24)]
    rollouts = [rollout_of(tokens, sample=index) for index, tokens in enumerate(trees)] + rewritten(6)
    together = micro_batch_of(rollouts)
    assert plan_row(together, layout=AttentionLayout.SHARED, device=CPU).num_shared > 600
    found = []
    for batches in ([together], [micro_batch_of([rollout]) for rollout in rollouts]):
        policy = load_tiny(tiny, adapter="none", attention="sdpa")
        scores = torch.cat([policy.logprobs(micro_batch, temperature=1.0)[0] for micro_batch in batches])
        weights = torch.from_numpy(together.advantages)
        (scores * weights).sum().div(len(scores)).backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.trainable_parameters().values()])
        found.append((scores.detach(), gradient))
    (shared, gradient), (alone, expected) = found
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
    assert expected.norm() > 0.1


def gradients_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Return the sums of all gradients that the parameters will get."""
    parameters = learner.policy.trainable_parameters()
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    def add(gradient: torch.Tensor, total: torch.Tensor) -> None:
        total += gradient

    for name, parameter in parameters.items():
        parameter.register_hook(partial(add, total=sums[name]))
    return sums


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_step_trains_shared_prefixes_as_it_does_sequences_apart(tiny: Path, adapter: str) -> None:
    """Compare a step of one micro batch with one of small micro batches, in which hardly any sequence has a sibling."""
    branches, found = rewritten(12), []
    for max_tokens in (10_000, max(len(branch.token_ids) for branch in branches)):
        learner = make_learner(tiny, adapter=adapter)
        gradients = gradients_of(learner)
        (batch,) = pack_step(branches, step=0, num_ranks=1, max_tokens=max_tokens)
        found.append((learner.train_step(batch), gradients))
    (shared, gradients), (alone, expected) = found
    assert shared["tokens/shared_ratio"] > 0.6
    assert alone["tokens/shared_ratio"] < 0.1  # two short ones fit in one micro batch
    assert shared["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert_close(gradients, expected, 1e-5)
    assert shared["grad_norm"] > 0.1


def test_other_layouts_share_nothing() -> None:
    micro_batch = micro_batch_of([rollout_of([5, 6, 7, 8], sample=0), rollout_of([5, 6, 7, 9], sample=1)])
    for layout in (AttentionLayout.POSITIONS, AttentionLayout.APART):
        row = plan_row(micro_batch, layout=layout, device=CPU)
        assert (row.token_ids.tolist(), row.num_shared) == ([5, 6, 7, 5, 6, 7], 0)


def test_sequences_share_no_images_that_differ() -> None:
    def with_image(content: bytes, sample: int) -> Rollout:
        rollout = rollout_of([5, 9, 9, 6, 7, 8], mask=[False] * 4 + [True] * 2, sample=sample)
        rollout.images = (PlacedImage(start=1, num_tokens=2, content=content),)
        return rollout

    row = plan_row(
        micro_batch_of([with_image(b"a", 0), with_image(b"b", 1), with_image(b"a", 2)]),
        layout=AttentionLayout.SHARED,
        device=CPU,
    )
    assert row.token_ids.tolist() == [5, 9, 9, 6, 7, 9, 9, 6, 7]
    assert [(image.start, image.content) for image in row.images] == [(1, b"a"), (5, b"b")]
    assert row.num_shared == 6


def test_an_episodes_branches_are_packed_together() -> None:
    """With a limit of 1/4 of all their tokens, most branches would run with none of their siblings."""
    branches = rewritten(12)
    lengths = [len(branch.token_ids) for branch in branches]
    max_tokens = sum(lengths)
    others = [rollout_of([group + 100] * 30, group=group) for group in range(1, 9)]
    (batch,) = pack_step([as_episode(branches), *others], step=0, num_ranks=1, max_tokens=max_tokens)
    rows = [plan_row(micro, layout=AttentionLayout.SHARED, device=CPU) for micro in batch.mini_batches[0].micro_batches]
    run = sum(len(row.token_ids) for row in rows)
    shared = sum(row.num_shared for row in rows)
    assert shared / (run + shared) > 0.6
    assert shared == sum(common_length(a.token_ids, b.token_ids) for a, b in pairwise(branches))
