"""Threads of a rank: the reserved ones, or its share of the machine's if the host updates a GPU's weights."""

import pytest

from rlpipe.configs.schema.learner_config import LearnerConfig, Zero3Config
from rlpipe.hardware import cgroup
from rlpipe.hardware.cgroup import learner_threads


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        (LearnerConfig(num_cpus=2.5), 2),
        (LearnerConfig(num_cpus=0.5), 1),
        (LearnerConfig(num_gpus=1, num_cpus=2), 2),
        (LearnerConfig(num_gpus=1, num_cpus=2, offload="chunked"), 8),
        (LearnerConfig(num_gpus=1, num_cpus=12, offload="chunked"), 12),
        (LearnerConfig(num_gpus=1, num_cpus=2, offload="chunked", num_threads=3), 3),
        (LearnerConfig(num_gpus=0, num_cpus=2, offload="chunked"), 2),
        (LearnerConfig(num_gpus=1, strategy="zero3", zero3=Zero3Config(offload_optimizer=True)), 8),
        (LearnerConfig(num_gpus=1, strategy="zero3"), 1),
    ],
)
def test_the_host_that_updates_has_its_share_of_the_machine(
    learner: LearnerConfig, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(cgroup, "num_cores", lambda: 16)
    assert learner_threads(learner) == expected
