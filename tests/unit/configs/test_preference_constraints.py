"""Tests that contradictions among the options of preferences are named."""

from __future__ import annotations

import pytest

from rlpipe.configs.compose import load_config
from rlpipe.errors import ConfigError

RUN = ["data.source=jsonl", "data.path=rows.jsonl", "model.path=tiny"]
REWARD = "scoring.rewards.a.path=rlpipe.scoring.toolbox:exact_match"
ONLINE = ["algorithm=online_dpo", REWARD]

PRECOMPUTE = "algorithm.preference.precompute_ref_log_probs"


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*RUN, *overrides], need_files=False)
    return str(caught.value)


def test_options_of_evaluation_are_no_contradiction() -> None:
    """``rlpipe eval`` samples from the policy of the same config, and scores what it samples."""
    assert load_config([*RUN, "algorithm=dpo", "rollout.sampling.max_tokens=9", REWARD], need_files=False)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "orpo", "simpo", "cpo"])
def test_presets_are_valid(name: str) -> None:
    assert load_config([*RUN, f"algorithm={name}"], need_files=False).algorithm.preference.loss == name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=dpo", "algorithm.loss.beta=0.2"], "algorithm.loss.beta: has no effect on preferences"),
        (["algorithm=dpo", "algorithm.preference.margin=1"], "algorithm.preference.margin: has no effect on dpo"),
        (["algorithm=ipo", "algorithm.preference.label_smoothing=0.1"], "label_smoothing: has no effect on ipo"),
        (["algorithm=dpo", "algorithm.preference.label_smoothing=0.5"], "half of all labels wrong"),
        (["algorithm=dpo", "algorithm.preference.loss=exo"], "exo needs more than 0"),
        (["algorithm=dpo", "algorithm.preference.loss=orpo"], "orpo's odds ratio is added to a cross-entropy"),
        (["algorithm=kto", "algorithm.preference.cross_entropy_coef=1"], "kto has no chosen completions"),
        (["algorithm=kto", "algorithm.preference.path=mine.py:f"], "takes pairs, which kto has none of; set dpo"),
        (["algorithm=dpo", "algorithm.preference.kwargs={a: 1}"], "there is no function to use it"),
        (["algorithm=kto", "algorithm.groups_per_step=1"], "an update needs at least 2"),
        (["algorithm=kto", "data.train_on_inputs=true"], "data.train_on_inputs: kto trains only completions"),
        (["algorithm=kto", "data.loss_mask=all"], "data.loss_mask: kto trains only completions"),
        (["algorithm=orpo", "algorithm.reference.sync_steps=5", "model=full"], "orpo has no reference"),
        (["algorithm=dpo", "data.text_column=text"], "data.text_column: preferences are between completions"),
        (["algorithm=dpo", "algorithm.stop_loss=0.1"], "algorithm.stop_loss: only has an effect in SFT"),
        (["algorithm=dpo", "model.adapter.path=org/first"], "the reference is this adapter as it is now"),
        (["algorithm=simpo", f"{PRECOMPUTE}=true"], "ref_log_probs: simpo has no reference"),
        (["algorithm=dpo", f"{PRECOMPUTE}=true", "data.streaming=true"], "the rows of a stream would be read twice"),
        (
            ["algorithm=dpo", "model=full", f"{PRECOMPUTE}=true", "algorithm.reference.sync_steps=5"],
            "a reference that moves can't be computed before",
        ),
        ([*ONLINE, "algorithm.loss.clip_high=0.3"], "algorithm.loss.clip_high: has no effect on the loss dpo"),
        ([*ONLINE, f"{PRECOMPUTE}=true"], "rollouts are not known before they are sampled"),
        (["algorithm=dpo", "algorithm.advantage.name=rloo"], "algorithm.advantage.name: has no effect with"),
        (["algorithm=kto", "algorithm.loss.covariance.share=0.1"], "algorithm.loss.covariance.share: has no effect"),
        (
            ["algorithm=dpo", "algorithm.correction.cap=3"],
            "algorithm.correction.cap: has no effect with algorithm.kind",
        ),
        (["algorithm=dpo", "algorithm.combine=normalize_then_sum"], "algorithm.combine: has no effect"),
        (["algorithm=dpo", "algorithm.ebft.features.layers=[0.5]"], "algorithm.ebft.features.layers: has no effect"),
        (
            ["algorithm=dpo", "algorithm.reward_model.center_coef=1"],
            "algorithm.reward_model.center_coef: has no effect",
        ),
        (["algorithm.preference.beta=0.5", REWARD], "algorithm.preference.beta: has no effect with algorithm.kind=rl"),
        (["algorithm.reward_model.center_coef=1", REWARD], "reward_model.center_coef: has no effect with"),
        (["algorithm=sft", "algorithm.preference.beta=0.5"], "preference.beta: has no effect with algorithm.kind=sft"),
        (["algorithm=sft", "algorithm.loss.entropy_coef=0.1"], "loss.entropy_coef: has no effect with"),
        (["algorithm=sft", "algorithm.reference.sync_steps=3"], "reference.sync_steps: has no effect with"),
        (
            ["algorithm=ebft_strided", "data.text_column=text", "algorithm.combine=normalize_then_sum"],
            "algorithm.combine: has no effect with algorithm.kind=ebft_strided",
        ),
        ([*ONLINE, "algorithm.reward_model.center_coef=1"], "reward_model.center_coef: has no effect with"),
        (
            ["algorithm=ebft_strided", "data.text_column=text", "algorithm.loss.name=dpo"],
            "algorithm.loss.name: dpo compares rollouts, which ebft_strided has none of",
        ),
        ([*ONLINE, "algorithm.loss.path=mine.py:f"], "algorithm.loss.path: your function would replace the loss dpo"),
        (["algorithm=reward_model", "algorithm.loss.beta=1"], "algorithm.loss.beta: has no effect with"),
        (["algorithm=reward_model", "algorithm.preference.beta=1"], "preference.beta: has no effect with"),
        ([*ONLINE, "algorithm.preference.loss=kto"], "kto takes no pairs"),
        ([*ONLINE, "algorithm.loss.beta=0.1"], "algorithm.loss.beta: has no effect on the loss dpo"),
        ([*ONLINE, "algorithm.group_size=1"], "set 2 or more"),
        ([*ONLINE, "algorithm.ebft.reward=true"], "dpo has no part for EBFT"),
        ([*ONLINE, "algorithm.advantage.name=rloo"], "without advantages"),
        (
            [
                *ONLINE,
                "data.max_prompt_tokens=10",
                "rollout.sampling.max_tokens=10",
                "learner.max_tokens_per_microbatch=39",
            ],
            "39 can't hold the longest pair",
        ),
    ],
)
def test_contradictions_are_named(overrides: list[str], message: str) -> None:
    assert message in error_of(*overrides)


def test_a_sampled_pair_may_have_a_reference_that_moves() -> None:
    config = load_config([*RUN, *ONLINE, "model=full", "algorithm.reference.sync_steps=5"], need_files=False)
    assert config.algorithm.samples_pairs
    assert "orpo has no reference" in error_of(
        *ONLINE,
        *("model=full", "algorithm.reference.sync_steps=5", "algorithm.preference.loss=orpo"),
        "algorithm.preference.cross_entropy_coef=1",
    )
