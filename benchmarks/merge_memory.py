"""Memory of merging an adapter: one shard of the base and the adapter, however many shards there are.

Makes a model of 20 shards and merges it with a LoRA adapter on its attention. Its matrices are small compared with a
shard, as a real model's are: PEFT holds two more matrices of the same size while one is merged. So is Python's overhead
per module, about 0.1 MB a layer. Run: ``python -m benchmarks.merge_memory``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from benchmarks.peak_memory import MB, peak_memory, return_what_is_freed
from rlpipe.learner.merging import MergeRequest, merge

FOLDER = Path("outputs/benchmarks/merge_memory")
LAYERS_PER_SHARD = 2
HEADS, VOCABULARY, RANK = 8, 512, 16


def make(folder: Path, shards: int, hidden: int) -> None:
    """Make a base model in about ``shards`` shards, and an adapter with random values."""
    set_seed(0)
    intermediate = 8 * hidden
    layer_bytes = 4 * (4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS_PER_SHARD * shards,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base", max_shard_size=LAYERS_PER_SHARD * layer_bytes)
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")


def merge_in(folder: Path) -> None:
    for line in merge(
        MergeRequest(base=str(folder / "base"), adapter=str(folder / "adapter"), output=folder / "merged")
    ):
        print(line)


def measure(folder: Path, *, shards: int, hidden: int) -> dict[str, float]:
    shutil.rmtree(folder, ignore_errors=True)
    for name, size in {"small": (2, 256), "large": (shards, hidden)}.items():
        # In a separate process, so that this one cannot reuse memory that was freed.
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(folder / name, *size))
        maker.start()
        maker.join()
        assert maker.exitcode == 0, f"the model can't be created in {folder}"
    return_what_is_freed()
    merge_in(folder / "small")  # warms up what is loaded only once
    with peak_memory(torch.device("cpu")) as peak:
        merge_in(folder / "large")
    sizes = [path.stat().st_size / MB for path in (folder / "large" / "base").glob("*.safetensors")]
    adapter = sum(path.stat().st_size for path in (folder / "large" / "adapter").glob("*.safetensors")) / MB
    shutil.rmtree(folder)
    return {
        "shards": len(sizes),
        "largest_shard_mb": round(max(sizes), 1),
        "model_mb": round(sum(sizes), 1),
        "adapter_mb": round(adapter, 1),
        "peak_mb": round(peak.mb, 1),
        "ratio": round(peak.mb / (max(sizes) + adapter), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=768, help="hidden size h; a shard has 224 h² bytes")
    arguments = parser.parse_args()
    print(json.dumps(measure(FOLDER, shards=arguments.shards, hidden=arguments.hidden)))


if __name__ == "__main__":
    main()
