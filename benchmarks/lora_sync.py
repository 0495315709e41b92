"""Seconds from publishing a LoRA adapter until every engine serves it, through the object store and through files.

Through the object store as in a run: the learner's process packs and puts the adapter, the weights actor hands it to
the rollout actors, and each returns the digest of what its vLLM then serves. Through files as in trainers that save a
PEFT folder and send its path: vLLM loads it with a ``LoRARequest``. Both use the same processes, in turns. Run:
``python -m benchmarks.lora_sync --adapter-mb 40 --engines 2``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from rlpipe.actors.rollout import RolloutActor
from rlpipe.actors.weights import WeightsActor
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig, SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.learner.policy import load_policy
from rlpipe.learner.publish import publish_weights
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.rollout.engine_thread import EngineThread
from rlpipe.run.cluster import ASYNC_CALLS, ENGINE_CALLS, ResourceRequest, start_actor
from rlpipe.types import Buckets, ByteArray, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import BucketMemory

FOLDER = Path("outputs/benchmarks/lora_sync")
HIDDEN, INTERMEDIATE, RANK = 256, 768, 64
LAYER_WIDTHS = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + HIDDEN // 2) + 3 * (HIDDEN + INTERMEDIATE)
"""Inputs plus outputs of a layer's seven linear modules: query and output, key and value, and three of the MLP."""
WARMUP = 3


def layers_for(adapter_mb: float) -> int:
    """Return the number of layers for an adapter in float32 of about ``adapter_mb`` million bytes."""
    return max(1, round(adapter_mb * 1e6 / (LAYER_WIDTHS * RANK * 4)))


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper quartile."""
    lower, _, upper = statistics.quantiles(seconds, n=4)
    return round(lower, 4), round(upper, 4)


class PathRolloutActor(RolloutActor):
    """The rollout actor, with an engine that also loads adapters by path."""

    def start(self, model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, max_prompt_tokens: int) -> None:
        from rlpipe.rollout.vllm.vllm_engine import VllmEngine

        class PathEngine(VllmEngine):
            """An engine that treats a version without tensors as the path of an adapter."""

            def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
                return super().load(manifest, buckets) if buckets else self._load_path(manifest)

            def _load_path(self, manifest: WeightsManifest) -> str:
                from vllm.lora.request import LoRARequest

                if self._adapter is not None:
                    self._llm.remove_lora(self._adapter.lora_int_id)
                self._num_loads += 1
                assert manifest.adapter_config is not None
                path = manifest.adapter_config["path"]
                self._adapter = LoRARequest(f"path-{self._num_loads}", self._num_loads, path)
                assert self._llm.add_lora(self._adapter), f"vllm did not load {path}"
                return manifest.digest

        self._thread = EngineThread(
            self._name, lambda: PathEngine(self._name, model, rollout, weights, max_prompt_tokens=max_prompt_tokens)
        )

    def load(self, manifest: WeightsManifest, timeout_s: float, *buckets: ByteArray) -> str:
        started = time.perf_counter()
        digest = super().load(manifest, timeout_s, *buckets)
        self._load_s = time.perf_counter() - started
        return digest

    def load_seconds(self) -> float:
        """Return the seconds of the last load, without the remote call."""
        return self._load_s


class Publisher:
    """A holder of the policy, like a learner rank, that publishes it through the object store or through files."""

    def __init__(self, model: ModelConfig, engines: Mapping[str, ActorHandle], weights: ActorHandle) -> None:
        torch.set_num_threads(1)
        self._policy = load_policy(model, LearnerConfig(), torch.device("cpu"))
        self._engines, self._weights = engines, weights
        self._version, self._served = 0, 0
        self._memory = BucketMemory()

    def adapter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._policy.trainable_parameters().values())

    def train(self) -> None:
        """Change every element, as an optimizer's step would."""
        self._version += 1
        with torch.no_grad():
            for parameter in self._policy.trainable_parameters().values():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)

    def publish_objects(self) -> dict[str, float]:
        """Return the seconds of one publication through the object store: the total, and its parts on this side."""
        self.train()
        buckets: list[ray.ObjectRef] = []
        started = time.perf_counter()
        put_s = 0.0

        def put(bucket: Any) -> None:
            nonlocal put_s
            began = time.perf_counter()
            buckets.append(ray.put(bucket))
            put_s = time.perf_counter() - began

        manifest = publish_weights(
            self._policy, version=self._version, bucket_bytes=2**28, emit=put, memory=self._memory
        )
        packed = time.perf_counter()
        self._weights.publish.remote(manifest, buckets, incarnation=0)
        served = ray.get(self._weights.wait_served.remote(self._served, 60.0))
        ended = time.perf_counter()
        assert served is not None
        assert (served.version, served.lost) == (self._version, {})
        self._served = served.number
        parts = {"total": ended - started, "pack": packed - started - put_s, "put": put_s, "load": ended - packed}
        return parts | {"of which in the engines": self._slowest_load()}

    def publish_files(self, folder: str) -> dict[str, float]:
        """Return the seconds of one publication through a PEFT folder: the total, and its parts."""
        self.train()
        started = time.perf_counter()
        self._policy.model.save_pretrained(folder)
        saved = time.perf_counter()
        manifest = WeightsManifest(
            version=self._version, kind=WeightsKind.LORA, digest="path", num_buckets=0, num_bytes=0,
            adapter_config={"path": folder},
        )  # fmt: skip
        ray.get([engine.load.remote(manifest, 60.0) for engine in self._engines.values()])
        ended = time.perf_counter()
        parts = {"total": ended - started, "save": saved - started, "load": ended - saved}
        return parts | {"of which in the engines": self._slowest_load()}

    def _slowest_load(self) -> float:
        return max(ray.get([engine.load_seconds.remote() for engine in self._engines.values()]))


def start_engines(model: ModelConfig, count: int) -> dict[str, ActorHandle]:
    rollout = RolloutConfig(num_threads=1, max_model_len=64, sampling=SamplingConfig(max_tokens=8))
    engines = {}
    for index in range(count):
        need = ResourceRequest(name=f"rollout-{index}")
        engines[need.name] = start_actor(PathRolloutActor, need, need.name, max_concurrency=ENGINE_CALLS)
    ray.get([engine.start.remote(model, rollout, WeightsConfig(), 32) for engine in engines.values()])
    return engines


def measure(publisher: ActorHandle, repetitions: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of every repetition after the warm-up; the two methods take turns."""
    found: dict[str, list[dict[str, float]]] = {"object_store": [], "file": []}
    for index in range(WARMUP + repetitions):
        folder = FOLDER.absolute() / f"adapter-{index % 2}"
        seconds = {
            "object_store": ray.get(publisher.publish_objects.remote()),
            "file": ray.get(publisher.publish_files.remote(str(folder))),
        }
        for way, parts in seconds.items():
            if index >= WARMUP:
                found[way].append(parts)
    return found


def medians(repetitions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part."""
    return {part: round(statistics.median(r[part] for r in repetitions), 4) for part in repetitions[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter-mb", type=float, default=40.0, help="million bytes of the adapter in float32")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    path = make_tiny_policy(
        FOLDER / "base", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_layers=layers_for(arguments.adapter_mb)
    ).absolute()
    model = ModelConfig(path=str(path), dtype="float32", adapter=AdapterConfig(r=RANK, alpha=2 * RANK))
    ray.init(num_cpus=arguments.engines + 2, include_dashboard=False, log_to_driver=False)
    engines = start_engines(model, arguments.engines)
    weights = start_actor(
        WeightsActor,
        ResourceRequest(name="weights"),
        engines=list(engines),
        timeout_s=60.0,
        max_concurrency=ASYNC_CALLS,
    )
    publisher = start_actor(Publisher, ResourceRequest(name="publisher"), model, engines, weights)
    adapter_mb = ray.get(publisher.adapter_bytes.remote()) / 1e6
    print(f"adapter of {adapter_mb:.1f} MB, {arguments.engines} engines, load average {os.getloadavg()[0]:.1f}")
    found = measure(publisher, arguments.repetitions)
    ray.shutdown()
    for way, repetitions in found.items():
        print(f"{way}: {medians(repetitions)}, middle half of the totals: {totals_spread(repetitions)}")
    print(json.dumps(summarize(found, adapter_mb=adapter_mb, engines=arguments.engines)))


def totals_spread(repetitions: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    return spread([repetition["total"] for repetition in repetitions])


def summarize(found: Mapping[str, Sequence[Mapping[str, float]]], *, adapter_mb: float, engines: int) -> dict[str, Any]:
    """Return the benchmark's last line."""
    object_store_s, file_s = (medians(found[way])["total"] for way in ("object_store", "file"))
    return {
        "adapter_mb": round(adapter_mb, 1),
        "engines": engines,
        "object_store_s": object_store_s,
        "file_s": file_s,
        "ratio": round(file_s / object_store_s, 2),
        "object_store_spread_s": totals_spread(found["object_store"]),
        "file_spread_s": totals_spread(found["file"]),
    }


if __name__ == "__main__":
    main()
