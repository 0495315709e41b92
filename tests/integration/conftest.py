"""Fixtures of the integration tests: a local Ray, tiny policies, prompts, ranks, engines, and a browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from engine_cases import OpenVllm, model_config, rollout_config
from rank_cases import Ranks
from run_cases import SIX_STEPS, make_config

import rlpipe
from rlpipe.actors.ray_internals import patient_start
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.preload import preloading
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.engine_thread import open_engine

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NUM_ROWS = 24
NUM_BLOCKS = 512
"""Blocks of an engine's KV cache, which otherwise has a gigabyte, and is kept until a file's last test."""
FIRST_FILES = (
    "test_real_model.py",
    "test_recovery.py",
    "test_isolated_runs.py",
    "test_frozen_parts.py",
    "test_families.py",
    "test_pipeline.py",
    "test_strategies.py",
    "test_example_runs.py",
    "test_strategy_options.py",
    "test_agent_frameworks.py",
    "test_resume.py",
    "test_benchmark_runs.py",
    "test_faults.py",
    "test_learner_group.py",
)
"""The test files that run first, because they take longest and would otherwise run alone at the end.

Files of whole runs, which have many processes, alternate with files of few processes.
"""
RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # with Ray's default of 15, other tests' drivers would starve the actors
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # look for new files at the interval below, not ten times a second
    "LOG_NAME_UPDATE_INTERVAL_S": "2",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # nobody watches these dashboards
}
for option, value in RAY_ENVIRONMENT.items():
    os.environ.setdefault(option, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).with_name(name): index for index, name in enumerate(FIRST_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Start a local cluster with more CPUs than the machine has, so that every run fits."""
    started_here = not ray.is_initialized()
    if started_here:
        preloading.begin_stages(["learner", "engine"])
        with preloading.used_by_ray(), patient_start():
            hosts = {"engine_host": 1, "learner_host": 1}  # of runs in which the two don't share cores
            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "WARNING"}
            ray.init("local", num_cpus=8, resources=hosts, **quiet)
    yield
    if started_here:
        ray.shutdown()
        preloading.end()


@pytest.fixture
def cluster_environment(local_ray: None) -> dict[str, str]:
    """Return an environment with which another process can join the tests' cluster."""
    address = ray.get_runtime_context().gcs_address
    return {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy with two layers of width 64 in fp32.

    vLLM's CPU attention needs heads of at least 32, and NF4 multiples of 64.
    """
    folder = tmp_path_factory.mktemp("policy")
    return make_tiny_policy(folder, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy for tests of ranks."""
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=96)


@pytest.fixture(scope="module")
def tiny_wide_mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ``tiny`` with a wider MLP."""
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=128)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Yield two gloo ranks."""
    started = Ranks(2)
    yield started
    started.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a headless Chromium."""
    from browser_cases import open_browser  # Playwright, which the other tests do without

    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def open_vllm(tiny_policy: Path) -> Iterator[OpenVllm]:
    """Yield a function that opens engines and keeps all of them until the module's last test.

    An engine that stops would end the others in its process.
    """
    engines: list[Engine] = []

    def open_one(
        kind: str = "lora",
        on_update: str = "wait",
        *,
        model: ModelConfig | None = None,
        serve: str = "auto",
        **options: Any,
    ) -> Engine:
        weights = WeightsConfig(on_update=on_update, serve=serve)
        name, model = f"engine-{len(engines)}", model or model_config(tiny_policy, kind)
        options["engine_args"] = {"num_gpu_blocks_override": NUM_BLOCKS} | options.get("engine_args", {})
        rollout = rollout_config("vllm", **options)
        engines.append(open_engine(name, model, rollout, weights, max_prompt_tokens=256))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def full_engine(open_vllm: OpenVllm) -> Engine:
    """Return an engine that serves full weights."""
    return open_vllm("none")


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of plain prompts with one answer each."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"{number}+{number + 3}=", "answer": str(2 * number + 3)} for number in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def undisturbed_run(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the output folder of a synchronous LoRA run of six steps, to compare other runs with."""
    output = tmp_path_factory.mktemp("undisturbed")
    rlpipe.train(make_config(tiny_policy, prompts_file, output, *SIX_STEPS))
    return output
