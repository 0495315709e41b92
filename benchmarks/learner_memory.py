"""Memory of a training step and of publishing full weights, beside the model: never all logits, at most two buckets.

A model with a large vocabulary and little else trains one packed row; a deeper one, sharded over two ranks with FSDP2,
publishes all of its weights. On a GPU there is one rank. Run: ``python -m benchmarks.learner_memory``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

from benchmarks.peak_memory import MB, peak_memory, return_what_is_freed
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.policy import load_policy
from rlpipe.learner.publish import publish_weights
from rlpipe.learner.step import Learner
from rlpipe.types import Rollout, TrainBatch
from rlpipe.weights.buckets import BucketMemory

FOLDER = Path("outputs/benchmarks/learner_memory")
ROW_TOKENS = 512
"""Tokens of each rollout in the packed row."""
PUBLISHED = {"vocabulary": 1024, "hidden": 512, "layers": 16}


def make_model(folder: Path, *, vocabulary: int, hidden: int, layers: int) -> ModelConfig:
    set_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=hidden // 2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="float32", adapter=AdapterConfig(kind="none"))


def make_batch(step: int, tokens: int, vocabulary: int) -> TrainBatch:
    """Make one micro batch of about ``tokens`` tokens."""
    random = np.random.default_rng(step)
    rollouts = []
    for index in range(tokens // ROW_TOKENS):
        mask = np.ones(ROW_TOKENS, bool)
        mask[0] = False
        rollouts.append(
            Rollout(
                group_id=index,
                sample_index=0,
                prompt_id=index,
                task={},
                token_ids=random.integers(0, vocabulary, ROW_TOKENS).astype(np.int32),
                loss_mask=mask,
                logprobs=np.full(ROW_TOKENS, -np.log(vocabulary), np.float32),
                policy_versions=np.zeros(ROW_TOKENS, np.int32),
                advantages=np.full(ROW_TOKENS, random.normal(), np.float32),
            )
        )
    return pack_step(rollouts, step=step, num_ranks=1, max_tokens=tokens)[0]


def measure_step(arguments: argparse.Namespace, device: torch.device) -> dict[str, float]:
    tokens, vocabulary = arguments.tokens, arguments.vocabulary
    model = make_model(FOLDER / "wide", vocabulary=vocabulary, hidden=128, layers=2)
    settings = LearnerConfig(max_tokens_per_microbatch=tokens, logprob_chunk_tokens=arguments.chunk_tokens)
    learner = Learner(load_policy(model, settings, device), settings, AlgorithmConfig(num_steps=10))
    learner.train_step(make_batch(0, tokens, vocabulary))  # allocates the optimizer's moments
    with peak_memory(device) as peak:
        learner.train_step(make_batch(1, tokens, vocabulary))
    logits = tokens * vocabulary * torch.float32.itemsize / MB
    return {"peak_mb": round(peak.mb, 1), "logits_mb": round(logits, 1), "share": round(peak.mb / logits, 3)}


def measure_publishing(rank: int, num_ranks: int, model: ModelConfig, bucket_bytes: int, result: Path) -> None:
    """Publish as one rank and measure its memory; the first rank writes the result."""
    return_what_is_freed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = LearnerConfig()
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{result}.store", num_ranks), rank=rank, world_size=num_ranks
        )
        settings = LearnerConfig(strategy="fsdp2", num_ranks=num_ranks)
    policy, memory = load_policy(model, settings, device), BucketMemory()
    sizes: list[int] = []

    def publish() -> None:
        sizes.clear()
        publish_weights(
            policy, version=1, bucket_bytes=bucket_bytes, emit=lambda bucket: sizes.append(len(bucket)), memory=memory
        )

    publish_weights(policy, version=0, bucket_bytes=1, emit=lambda _: None)  # warms up what is loaded only once
    with peak_memory(device) as peak:
        publish()
    if rank == 0:
        found = {
            "publish_extra_mb": round(peak.mb, 1),
            "bucket_mb": round(max(sizes) / MB, 1),
            "buckets": len(sizes),
            "model_mb": round(sum(sizes) / MB, 1),
            "extra_buckets": round(peak.mb * MB / max(sizes), 2),
        }
        result.write_text(json.dumps(found))
    if num_ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the packed row")
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="learner.logprob_chunk_tokens")
    parser.add_argument("--bucket-mb", type=float, default=40.0)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return_what_is_freed()
    step = measure_step(arguments, device)
    print(f"a step needs {step['share']:.0%} of the memory of all logits")
    model, result = make_model(FOLDER / "deep", **PUBLISHED), FOLDER / "publishing.json"
    num_ranks = 1 if device.type == "cuda" else 2
    Path(f"{result}.store").unlink(missing_ok=True)
    spawn(measure_publishing, (num_ranks, model, round(arguments.bucket_mb * MB), result), nprocs=num_ranks)
    print(json.dumps({"device": str(device), "ranks": num_ranks, **step, **json.loads(result.read_text())}))


if __name__ == "__main__":
    main()
