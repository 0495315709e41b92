"""The policy that most tests of the learner train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlpipe.models.tiny_model import make_tiny_policy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=96)
