"""Tests that training in chunks on a GPU, where copies run beside the passes, equals plain training there."""

from __future__ import annotations

import pytest
import torch
from offload_cases import arrange_all, fused, train_offloaded, train_plainly, with_lora
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.decision import Mode
from rlpipe.offload.runtime.runtime import OffloadedModel

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
GPU = "cuda:0"
CONFIG = OptimizerConfig(lr=1e-4)
CYCLES = {
    "keep": [Mode.KEEP],
    "checkpoint": [Mode.CHECKPOINT],
    "swap": [Mode.SWAP],
    "offload": [Mode.OFFLOAD],
    "mixed": [Mode.SWAP, Mode.CHECKPOINT, Mode.OFFLOAD, Mode.KEEP],
}
CHUNK_BYTES = 8 * 2**20


def make_model() -> nn.Module:
    """Return a model whose layers take the GPU about as long as their copies do, so that a copy too late is seen."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
    )
    return Qwen3ForCausalLM(config).train()


def token_loss(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(0, 4096, (1, 512), generator=torch.Generator().manual_seed(number)).to(GPU)
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@pytest.mark.parametrize("num_persistent", [0, 5])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("modes", CYCLES)
def test_every_mode_trains_as_without_offload(kind: str, modes: str, num_persistent: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False

    def make() -> nn.Module:
        return make_model() if kind == "full" else fused(with_lora(make_model()))

    options = {"num_steps": 5, "num_micro_batches": 3, "max_norm": 0.5}
    losses, norms, expected = train_plainly(make().to(GPU), token_loss, CONFIG, **options)
    model = make()
    arrangement = arrange_all(model, *CYCLES[modes], num_persistent=num_persistent, num_slots=6)
    device = torch.device(GPU)
    with OffloadedModel(model, arrangement, device=device, optimizer=CONFIG, sizes=[CHUNK_BYTES]) as offloaded:
        found = train_offloaded(offloaded, token_loss, CONFIG, **options)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(norms), atol=1e-5, rtol=1e-4)
    for name, parameter in expected.items():
        distance = (found[2][name].cpu() - parameter.cpu()).abs().mean()
        assert distance < 0.02 * CONFIG.lr * options["num_steps"], name
