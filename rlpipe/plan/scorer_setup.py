"""The scorers of a config that run a model of their own: their number, and the work of each in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlpipe.common.imports import import_object
from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.schema.scoring_config import RewardConfig
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.hardware.dtypes import AUTO
from rlpipe.learner.workload import sequence_tokens
from rlpipe.plan.dtype_work import dtype_on, scorer_products
from rlpipe.scoring.pools import FEATURE_PATH, MAX_GROUPS_PER_CALL, REWARD_MODELS, resolve_pools
from rlpipe.scoring.reward_model import ClassifierReward


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerSetup:
    """One process of a scorer; all its processes are alike."""

    name: str
    option: str
    """Name of its section in the config."""
    batch_option: str
    reward: ClassifierReward | None
    """The reward before it loads its model; None: EBFT's feature network."""
    dtype: str
    """Dtype that it computes in."""
    copies: int
    """Number of processes, or of replicas under load."""
    num_gpus: float
    """GPUs that one process asks for."""
    batch_tokens: int
    """Tokens per pass, including padding."""
    sequence_tokens: int
    groups_per_copy: int
    """Groups of a step per process."""
    groups_per_call: int
    sequences_per_group: int

    @property
    def copies_per_gpu(self) -> int:
        return min(self.copies, int(1 / self.num_gpus + 1e-9) or 1) if self.num_gpus else self.copies

    @property
    def batch(self) -> int:
        """Sequences per pass."""
        most = self.groups_per_call * self.sequences_per_group
        return min(most, max(1, self.batch_tokens // self.sequence_tokens))

    @property
    def num_passes(self) -> float:
        """Passes per step."""
        return max(1.0, self.groups_per_copy * self.sequences_per_group / self.batch)


def has_model(members: Mapping[str, RewardConfig]) -> bool:
    """Return whether each process of a pool loads a model that a plan knows."""
    return next(iter(members.values())).path.startswith((FEATURE_PATH, REWARD_MODELS))


def read_scorer_setups(config: Config, device: Device) -> Iterator[ScorerSetup]:
    """Yield the scorers' setups; raise ``ConfigError`` for one that can't be made or asks for an absent GPU."""
    for pool in resolve_pools(config).values():
        name, reward = next(iter(pool.members.items()))
        if has_model(pool.members):
            setup = _read_setup(config, name, reward, pool.max_size, device)
            if device.kind == "cpu" and reward.num_gpus > 0:
                asked = f"{setup.option}.num_gpus={reward.num_gpus:g}"
                raise ConfigError(f"{asked}: {device.name} has no GPU; give the GPU's --device, or set 0")
            yield setup


def _read_setup(config: Config, name: str, reward: RewardConfig, copies: int, device: Device) -> ScorerSetup:
    is_features = reward.path == FEATURE_PATH
    option = "algorithm.ebft.features" if is_features else f"scoring.rewards.{name}"
    model = None if is_features else _make_reward(option, reward)
    asked = config.model.dtype if model is None else model.dtype
    made = scorer_products(config.model.path if model is None else model.source, reward.num_cpus)
    groups, length = -(-config.algorithm.groups_per_step // copies), sequence_tokens(config)
    per_call = reward.serve.batch_groups if reward.is_served else MAX_GROUPS_PER_CALL
    return ScorerSetup(
        name="features" if is_features else name,
        option=option,
        batch_option=_batch_option(option, reward),
        reward=model,
        dtype=dtype_on(device, [made], on_gpu=reward.num_gpus > 0) if asked == AUTO else asked,
        copies=copies,
        num_gpus=reward.num_gpus,
        batch_tokens=config.algorithm.ebft.features.micro_batch_tokens if model is None else model.batch_tokens,
        sequence_tokens=length if model is None else min(length, model.max_tokens),
        groups_per_copy=groups,
        groups_per_call=min(groups, per_call),
        sequences_per_group=config.algorithm.group_size + is_features,  # and the ground truth
    )


def _make_reward(option: str, reward: RewardConfig) -> ClassifierReward:
    kind = import_object(reward.path, what=f"{option}.path", error=ConfigError)
    try:
        made: ClassifierReward = kind(**reward.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option}.kwargs: {error}") from None
    return made


def _batch_option(option: str, reward: RewardConfig) -> str:
    """Return the option that limits a pass, for the command line: a plus adds one that the config does not have yet."""
    if reward.path == FEATURE_PATH:
        return f"{option}.micro_batch_tokens"
    return f"{'' if 'batch_tokens' in reward.kwargs else '+'}{option}.kwargs.batch_tokens"
