"""EBFT's scorer on groups: the sequences that it reads, and the scores that it makes of their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from feature_cases import baseline_reference, score_reference, score_whitened, whiten_layers_reference, whiten_reference
from torch import Tensor

from rlpipe.configs.schema.algorithm_config import AdvantageConfig, AlgorithmConfig, EbftConfig, FeatureConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.row import UnusableRow
from rlpipe.data.row_renderer import GroundTruthRenderer
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.replay.assemble import reward_metrics, set_advantages
from rlpipe.scoring.feature_scorer import FeatureScorer, FeatureSequence
from rlpipe.scoring.pools import feature_configs
from rlpipe.scoring.scorer import apply_scores
from rlpipe.types import Prompt, Rollout, RolloutGroup

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "user", "content": "2+2?"}]


def make_group(*texts: str, truth: Any = "four", group_id: int = 0, chat: bool = True) -> RolloutGroup:
    prompt_ids = TOKENIZER("<|user|>2+2?<|end|><|assistant|>" if chat else "2+2=")["input_ids"]
    prompt = Prompt(
        prompt_id=0,
        epoch=0,
        token_ids=np.array(prompt_ids, np.int32),
        prompt=MESSAGES if chat else "2+2=",
        task={"ground_truth": truth},
    )
    prompt = renderer(chat=chat).prepare(prompt)
    rollouts = []
    for index, text in enumerate(texts):
        token_ids = np.array([*prompt_ids, *TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], np.int32)
        mask = np.arange(len(token_ids)) >= len(prompt_ids)
        rollouts.append(
            Rollout(
                group_id=group_id,
                sample_index=index,
                prompt_id=0,
                task=prompt.task,
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts)


def renderer(**ebft: Any) -> GroundTruthRenderer:
    chat = ebft.pop("chat", True)
    return GroundTruthRenderer(TOKENIZER, DataConfig(source="jsonl", chat=chat), EbftConfig(**ebft))


class Reader:
    """A feature network that depends on the text alone, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[FeatureSequence]] = []

    def __call__(self, sequences: Sequence[FeatureSequence]) -> Tensor:
        self.calls.append(list(sequences))
        return torch.stack([feature(str(TOKENIZER.decode(sequence.token_ids))) for sequence in sequences])


def feature(text: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 2**31)
    return torch.randn(12, generator=generator)


PREFIX = "<|user|>2+2?<|end|><|assistant|>"


def features_of(*texts: str) -> np.ndarray:
    return torch.stack([feature(f"{PREFIX}{text}<|end|>") for text in texts]).double().numpy()


@pytest.mark.parametrize("whitening", ["sample", "feature", "none"])
def test_groups_are_scored_against_their_ground_truths(whitening: str) -> None:
    reader, config = Reader(), FeatureConfig(whitening=whitening, alignment_coef=0.7, diversity_coef=1.2)
    groups = [make_group("4", "five", "6"), make_group("it is 4", "3", truth="IV", group_id=1)]
    results = FeatureScorer(reader, config).score(groups)
    assert len(reader.calls) == 1
    for texts, truth, result in ((("4", "five", "6"), "four", results[0]), (("it is 4", "3"), "IV", results[1])):
        alignment, diversity, cfm = score_reference(features_of(*texts), features_of(truth)[0], whitening)
        assert result.scores["alignment"] == pytest.approx(alignment, abs=1e-6)
        assert result.scores["diversity"] == pytest.approx(diversity, abs=1e-6)
        assert result.metrics["ebft/cfm_loss"] == pytest.approx(cfm, rel=1e-5)
        expected = 1.4 * np.mean(alignment) - 2.4 * np.mean(diversity)
        assert result.metrics["ebft/reward"] == pytest.approx(expected, abs=1e-6)
    assert [result.group_id for result in results] == [0, 1]


def test_layers_are_whitened_by_themselves() -> None:
    config = FeatureConfig(whiten_layers="each", pooling="mean_pooling")
    (result,) = FeatureScorer(Reader(), config).score([make_group("4", "five", "6")])
    pair = features_of("4", "five", "6"), features_of("four")[0]
    alignment, diversity, _ = score_whitened(*whiten_layers_reference(*pair, "sample", 3))
    assert result.scores["alignment"] == pytest.approx(alignment, abs=1e-6)
    assert result.scores["diversity"] == pytest.approx(diversity, abs=1e-6)


def test_only_the_answer_counts_as_completion() -> None:
    reader = Reader()
    FeatureScorer(reader, FeatureConfig()).score([make_group("4")])
    (completion, truth) = reader.calls[0]
    for sequence, text in ((completion, "4<|end|>"), (truth, "four<|end|>")):
        assert TOKENIZER.decode(sequence.token_ids) == PREFIX + text
        assert TOKENIZER.decode(sequence.token_ids[sequence.completion_mask]) == text


def test_text_prompts_have_text_truths() -> None:
    reader = Reader()
    FeatureScorer(reader, FeatureConfig()).score([make_group("4", chat=False)])
    assert TOKENIZER.decode(reader.calls[0][-1].token_ids) == "2+2=four<|end|>"


def test_advantages_are_ebfts_own() -> None:
    config = FeatureConfig(whitening="sample", alignment_coef=0.7, diversity_coef=1.2)
    rewards, texts = feature_configs(config), ("4", "five", "6", "seven")
    group = make_group(*texts)
    apply_scores(group, FeatureScorer(Reader(), config).score([group]), rewards)
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo"), ebft=EbftConfig(reward=True))
    set_advantages([group], algorithm, {name: reward.weight for name, reward in rewards.items()})
    samples, truth = features_of(*texts), features_of("four")[0]
    whitened, _ = whiten_reference(samples, truth, "sample")
    alignment, diversity, _ = score_reference(samples, truth, "sample")
    expected = baseline_reference(np.array(alignment), whitened @ whitened.T, 0.7, 1.2)
    assert [rollout.advantages[0] for rollout in group] == pytest.approx(expected, abs=1e-5)  # type: ignore[index]
    rewards_by_hand = 1.4 * np.array(alignment) - 2.4 * np.array(diversity)
    assert [rollout.reward for rollout in group] == pytest.approx(rewards_by_hand.tolist())
    metrics = reward_metrics([group])
    assert metrics["ebft/alignment"] == pytest.approx(np.mean(alignment), abs=1e-6)
    assert metrics["rewards/alignment/mean"] == pytest.approx(np.mean(alignment), abs=1e-6)


def test_a_completion_alone_has_no_diversity_and_keeps_its_reward() -> None:
    rewards, group = feature_configs(FeatureConfig()), make_group("4")
    (result,) = FeatureScorer(Reader(), FeatureConfig()).score([group])
    assert result.scores["diversity"] == [None]
    apply_scores(group, [result], rewards)
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo"), ebft=EbftConfig(reward=True))
    set_advantages([group], algorithm, {name: reward.weight for name, reward in rewards.items()})
    (rollout,) = group
    assert rollout.reward == pytest.approx(2 * result.scores["alignment"][0])  # type: ignore[operator]
    assert rollout.advantages[0] == pytest.approx(rollout.reward)  # type: ignore[index]


def test_a_group_that_cannot_be_scored_leaves_the_others_alone() -> None:
    def read(sequences: Sequence[FeatureSequence]) -> Tensor:
        found = Reader()(sequences)
        found[["6" in TOKENIZER.decode(sequence.token_ids) for sequence in sequences]] = torch.inf
        return found

    groups = [make_group("4", "5"), make_group("6", "5", group_id=1)]
    fine, infinite = FeatureScorer(read, FeatureConfig()).score(groups)
    assert not fine.failures
    assert infinite.failures == dict.fromkeys(("alignment", "diversity"), "its features are not finite")


# Ground truths --------------------------------------------------------------------------------------------------------


def test_limits_follow_the_ground_truths_length() -> None:
    prompt = make_group("4", truth="x" * 99).prompt
    assert len(renderer().render(prompt).token_ids) == 100
    assert renderer().prepare(prompt).max_tokens == 150
    assert renderer(gt_length_multiplier=2.0).prepare(prompt).max_tokens == 200
    assert renderer(adaptive_max_tokens=False).prepare(prompt).max_tokens is None
    assert renderer().prepare(make_group("4", truth="x").prompt).max_tokens == 64
    assert list(renderer().prepare(prompt).turns) == []


def test_a_truth_may_be_messages_and_in_another_column() -> None:
    prompt = make_group("4").prompt
    prompt = replace(prompt, task={"answer": [{"role": "assistant", "content": "four"}]})
    assert TOKENIZER.decode(renderer(truth_column="answer").render(prompt).token_ids) == "four<|end|>"
    with pytest.raises(UnusableRow, match="no ground truth in the column 'ground_truth'"):
        renderer().prepare(prompt)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_further_turns_are_what_stands_between_those_of_the_assistant() -> None:
    further = [turn("user", "3+3?"), turn("assistant", "six"), turn("user", "sure?"), turn("assistant", "y" * 60)]
    prompt = make_group("4").prompt
    prompt = replace(prompt, task={**prompt.task, "remaining_turns": further})
    prepared = renderer().prepare(prompt)
    assert [TOKENIZER.decode(gap) for gap in prepared.turns] == [
        "<|user|>3+3?<|end|><|assistant|>",
        "<|user|>sure?<|end|><|assistant|>",
    ]
    assert prepared.max_tokens == int(1.5 * 61), "of the longest turn"
    truth = renderer().render(prompt)
    assert TOKENIZER.decode(truth.token_ids[truth.is_assistant]) == f"four<|end|>six<|end|>{'y' * 60}<|end|>"


def test_further_turns_that_cannot_be_used_are_said() -> None:
    prompt = make_group("4").prompt
    with pytest.raises(UnusableRow, match="does not end with an assistant turn"):
        renderer().prepare(replace(prompt, task={**prompt.task, "remaining_turns": [turn("user", "3+3?")]}))
    text = make_group("4", chat=False).prompt
    with pytest.raises(UnusableRow, match="needs a prompt that is a conversation"):
        renderer(chat=False).prepare(replace(text, task={**text.task, "remaining_turns": [turn("assistant", "x")]}))
