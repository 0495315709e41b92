"""Plans of scorers that run a model: memory against numbers by hand and real passes, time, and proposed changes."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.learner.policy import load_logprob_model
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.offload.api import SHARE_USED
from rlpipe.offload.planner.trace import TensorTracker
from rlpipe.plan.actors import ActorKind, fill
from rlpipe.plan.engine_plan import plan_engine
from rlpipe.plan.learner_memory import CUDA_CONTEXT_BYTES
from rlpipe.plan.learner_plan import plan_learner
from rlpipe.plan.model_shape import describe_offline
from rlpipe.plan.scorer_model import meta_scorer, read_scorer_setups
from rlpipe.plan.scorer_plan import ScorerPlan, UnplannedScorer, plan_scorers
from rlpipe.plan.sections import Loop, read_loop
from rlpipe.scoring.feature_scorer import FeatureSequence, open_feature_network
from rlpipe.scoring.reward_model import SequenceReward

H100 = DEVICES["h100-80g"]
CPU = replace(H100, name="laptop", kind="cpu", memory_bytes=H100.host_memory_bytes, measured_at="2026-11-22")
POLICY = ("model.path=Qwen/Qwen3-0.6B", "model.dtype=bfloat16")
LAYER = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
EMBEDDING = 151_936 * 1024
NUM_SMALL = 28 * LAYER + EMBEDDING + 1024
FEATURES = ("algorithm.ebft.features.weights=own", "algorithm.ebft.features.num_gpus=1")
ENGINE = ActorKind(name="rollout engine", count=1, num_gpus=0.7, gpu_bytes=50 * 10**9, host_bytes=0)
OWN_GPU = "scoring.rewards.preference.num_gpus=1"


@cache
def config_of(experiment: str, *overrides: str) -> Config:
    """Return a config of 32 groups, in which all sequences have 2,048 tokens."""
    return load_config([f"experiment={experiment}", *POLICY, *overrides], need_files=False)


def plans(
    config: Config, device: Device = H100, others: tuple[ActorKind, ...] = ()
) -> list[ScorerPlan | UnplannedScorer]:
    return plan_scorers(config, describe_offline(config.model.path, config.model), device, others)


def plan(config: Config, device: Device = H100, others: tuple[ActorKind, ...] = ()) -> ScorerPlan:
    (found,) = plans(config, device, others)
    assert isinstance(found, ScorerPlan)
    return found


def test_a_reward_model_takes_its_weights_and_a_full_pass() -> None:
    found = plan(config_of("reward_model"))
    assert found.fits
    assert found.memory.weights == found.memory.starting == 2 * (NUM_SMALL + 2 * 1024)  # with a head of two labels
    assert found.setup.batch == 16384 // 2048
    assert found.memory.total == found.memory.weights + found.memory.activations + CUDA_CONTEXT_BYTES


@pytest.mark.slow
def test_a_reward_model_takes_more_in_float32_and_less_with_a_smaller_batch() -> None:
    found = plan(config_of("reward_model"))
    in_float32 = plan(config_of("reward_model", "+scoring.rewards.preference.kwargs.dtype=float32"))
    assert in_float32.memory.weights == 2 * found.memory.weights
    halved = plan(config_of("reward_model", "+scoring.rewards.preference.kwargs.batch_tokens=8192"))
    assert halved.memory.activations == pytest.approx(found.memory.activations / 2, rel=0.01)


def test_a_pass_of_a_reward_model_takes_what_a_real_one_does(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32, "vocab_size": 200}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 2}
    Qwen3ForSequenceClassification(Qwen3Config(**shape, **heads)).save_pretrained(tmp_path)  # type: ignore[arg-type]
    make_tokenizer().save_pretrained(tmp_path)
    kwargs = f"scoring.rewards.preference.kwargs={{model: {tmp_path}, dtype: float32}}"
    config = config_of("reward_model", kwargs, "data.max_prompt_tokens=40", "rollout.sampling.max_tokens=24")
    (setup,) = read_scorer_setups(config, H100)
    model = meta_scorer(setup, config, describe_offline(config.model.path, config.model))
    reward = SequenceReward(model=str(tmp_path), dtype="float32")
    reward.setup()
    with TensorTracker() as tracker:
        reward.run([[9] * 64] * 5)
    found = model.cost(5, 64, H100)
    assert found.peak_bytes == pytest.approx(tracker.peak, rel=0.02)
    assert model.weights_bytes == sum(parameter.nbytes for parameter in reward._model.parameters())


def test_a_pass_of_a_feature_network_takes_what_a_real_one_does(tmp_path: Path) -> None:
    policy = make_tiny_policy(tmp_path / "policy")
    config = config_of("ebft", *FEATURES, f"model.path={policy}", "model.dtype=float32")
    (setup,) = read_scorer_setups(config, H100)
    model = meta_scorer(setup, config, describe_offline(str(policy), config.model))
    cpu, features = torch.device("cpu"), config.algorithm.ebft.features
    reader = open_feature_network(config.model, features, cpu, max_tokens=4096)
    sequence = FeatureSequence(token_ids=np.zeros(64, np.int32), completion_mask=np.ones(64, np.bool_))
    with TensorTracker() as tracker:
        reader.read([sequence] * 5)
    assert model.cost(5, 64, H100).peak_bytes == pytest.approx(tracker.peak, rel=0.02)
    whole = load_logprob_model(config.model, cpu, frozen=True)
    assert model.starting_bytes == sum(parameter.nbytes for parameter in whole.parameters())


def test_a_feature_network_is_the_policy_as_far_as_it_is_read() -> None:
    found = plan(config_of("ebft", *FEATURES))
    assert found.memory.starting == 2 * NUM_SMALL
    assert found.memory.weights == 2 * (21 * LAYER + EMBEDDING + 1024)  # layers up to three quarters of 28
    assert found.setup.sequences_per_group == 4 + 1  # the samples and the ground truth
    deepest = plan(config_of("ebft", *FEATURES, "algorithm.ebft.features.layers=[0.25]"))
    assert deepest.memory.weights == 2 * (7 * LAYER + EMBEDDING + 1024)
    assert deepest.seconds is not None
    assert found.seconds is not None
    assert deepest.seconds < found.seconds / 2


@pytest.mark.slow
def test_a_feature_network_of_qlora_is_in_four_bits() -> None:
    quantized = ("model=qlora", "rollout.engine_args.quantization=bitsandbytes")
    found, plain = plan(config_of("ebft", *FEATURES, *quantized)), plan(config_of("ebft", *FEATURES))
    assert found.memory.weights - 2 * EMBEDDING < (plain.memory.weights - 2 * EMBEDDING) / 3
    assert found.memory.activations == plain.memory.activations + 2 * 1024 * 3072  # a dequantized weight
    assert (found.memory.loading > 0, plain.memory.loading) == (True, 0)


@pytest.mark.slow
def test_replicas_share_the_work_and_those_of_one_gpu_have_it_in_turns() -> None:
    seconds = {}
    for copies, part in ((1, 1), (2, 1), (2, 0.15)):
        options = (f"scoring.rewards.preference.serve.replicas={copies}", f"scoring.rewards.preference.num_gpus={part}")
        found = plan(config_of("reward_model", *options))
        assert found.setup.copies == copies
        assert found.seconds is not None
        seconds[copies, part] = found.seconds
    assert seconds[2, 1] == pytest.approx(seconds[1, 1] / 2)
    assert seconds[2, 0.15] == pytest.approx(seconds[1, 1])
    products = 2 * 28 * LAYER * 256 * 2048 / H100.flops("bfloat16")
    assert products < seconds[1, 1] < 4 * products


@pytest.mark.slow
def test_neighbours_on_the_gpu_reduce_a_scorers_memory() -> None:
    alone = plan(config_of("reward_model", OWN_GPU))
    assert (alone.room_bytes, alone.neighbours) == (int(SHARE_USED * H100.memory_bytes), [])
    replica = plan(config_of("reward_model"), others=(ENGINE,))
    taken = 50 * 10**9 + replica.memory.total  # the engine's memory, and the other replica's
    assert replica.room_bytes == int(SHARE_USED * (H100.memory_bytes - taken))
    found = plan(config_of("reward_model"), others=(replace(ENGINE, gpu_bytes=H100.memory_bytes),))
    assert found.problem is not None
    assert found.problem.endswith("may use 0 bytes of its device next to 1 preference scorer and 1 rollout engine")
    assert found.seconds is None
    assert [change.change for change in found.changes] == [OWN_GPU]


def test_what_is_asked_for_decides_who_comes_together() -> None:
    small = replace(ENGINE, name="small", count=5, num_gpus=0.15, gpu_bytes=10**9)
    whole = replace(ENGINE, name="whole", num_gpus=1.0)
    none = replace(ENGINE, name="none", count=3, num_gpus=0)
    assert fill([none, small, ENGINE, whole], 1, lambda kind: kind.gpu_bytes) == [(none, 3), (small, 2), (ENGINE, 1)]


@pytest.mark.slow
def test_a_smaller_batch_makes_it_fit() -> None:
    config = config_of("reward_model", OWN_GPU)
    device = replace(H100, memory_bytes=int(plan(config).memory.total / SHARE_USED) - 100 * 2**20)
    found = plan(config, device)
    assert found.problem is not None
    assert found.problem.startswith("a process needs ")
    changes = [change.change for change in found.changes]
    assert changes[0] == "+scoring.rewards.preference.kwargs.batch_tokens=8192"
    assert changes[1].startswith("--device ")
    assert plan(config_of("reward_model", OWN_GPU, changes[0]), device).memory.total == found.changes[0].num_bytes
    assert plan(config_of("reward_model", OWN_GPU, changes[0]), device).fits


def test_without_a_gpu_a_scorer_is_on_the_host() -> None:
    found = plan(config_of("reward_model", "scoring.rewards.preference.num_gpus=0"))
    assert found.memory.beside == found.actor.gpu_bytes == 0
    assert found.actor.host_bytes == found.memory.process + found.memory.total
    assert found.seconds is None  # a processor with unknown rates
    with pytest.raises(ConfigError, match=r"scoring.rewards.preference.num_gpus=0.15: laptop has no GPU"):
        plans(config_of("reward_model"), CPU)


@pytest.mark.slow
def test_a_scorer_on_a_measured_host_has_its_time() -> None:
    options = ("scoring.rewards.preference.num_gpus=0", "rollout.num_gpus=0", "learner.num_gpus=0")
    assert plan(config_of("reward_model", *options), CPU).seconds is not None


def test_what_can_not_be_planned_is_said(tmp_path: Path) -> None:
    (missing,) = plans(config_of("reward_model", f"scoring.rewards.preference.kwargs.model={tmp_path}/none"))
    assert isinstance(missing, UnplannedScorer)
    assert missing.reason.startswith("not planned: scoring.rewards.preference.kwargs.model: there is no folder ")
    own = "+scoring.rewards.mine={path: 'mine.py:Model', num_gpus: 0.5, num_processes: 2}"
    unknown, _ = plans(config_of("reward_model", own))
    assert unknown == UnplannedScorer(
        name="mine", reason="2 processes, each requesting 0.5 of a GPU; the memory of mine.py:Model is not known"
    )
    (learner,) = plans(config_of("ebft"))
    assert isinstance(learner, UnplannedScorer)
    assert learner.reason == "computed by the learner's ranks, as part of the learner's time"
    with pytest.raises(ConfigError, match=r"scoring.rewards.preference.kwargs: dtype 'int8' is not one of"):
        plans(config_of("reward_model", "+scoring.rewards.preference.kwargs.dtype=int8"))


@pytest.mark.slow
def test_sequences_that_are_too_long_are_noted() -> None:
    found = plan(config_of("reward_model", "scoring.rewards.preference.kwargs.max_tokens=2000"))
    assert found.setup.sequence_tokens == 2000
    assert found.note == "sequences of full length have 2,048 tokens, more than max_tokens: their groups fail"
    assert plan(config_of("reward_model")).note is None


@pytest.mark.slow
def test_scoring_continues_alongside_sampling_unless_they_share_a_gpu() -> None:
    config = config_of("reward_model")
    described = describe_offline(config.model.path, config.model)
    engine = plan_engine(config, described, H100)
    learner = plan_learner(config, described, H100, engine.setup)

    def loop_of(*overrides: str) -> Loop:
        changed = config_of("reward_model", *overrides)
        found = read_loop(changed, engine, learner, [plan(changed)])
        assert found is not None
        return found

    apart, shared = loop_of(OWN_GPU), loop_of()
    assert apart.scoring_s == plan(config_of("reward_model", OWN_GPU)).seconds
    assert not apart.scores_after
    assert apart.generating_s == max(apart.sampling_s, apart.scoring_s)
    assert shared.scores_after
    assert shared.generating_s == shared.sampling_s + shared.scoring_s
    assert loop_of(OWN_GPU, "replay.streaming=false").scores_after


def test_the_bottleneck_is_what_takes_longest() -> None:
    loop = Loop(sampling_s=3, scoring_s=4, training_s=5, tokens=1, takes_turns=False, scores_after=False)
    assert (loop.seconds, loop.bottleneck) == (5, "training")
    assert replace(loop, training_s=1).bottleneck == "scoring"
    after = replace(loop, scores_after=True)
    assert (after.seconds, after.bottleneck) == (7, "scoring")
    assert (replace(after, takes_turns=True).seconds, replace(after, takes_turns=True).bottleneck) == (12, "training")
