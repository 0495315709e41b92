"""Tests that pairs with images are trained with the loss of completions that transformers runs one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import IMAGE_FAMILIES, picture, text, turns
from learner_cases import assert_close, make_learner
from preference_cases import algorithm_of
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForImageTextToText, PreTrainedModel

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.data.pairs import PreferenceRenderer
from rlpipe.data.render.images import open_image
from rlpipe.data.render.processor import ImageProcessor, load_tokenizer
from rlpipe.data.row import RowLocation
from rlpipe.errors import ModelError
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.learner.step import Learner
from rlpipe.types import Rollout

pytestmark = pytest.mark.covering(1)
BETA = 0.1


def conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[bytes]]]:
    """Return the chosen and the rejected conversation of pairs with images in the prompt, later, or nowhere."""
    look = {"type": "image"}
    return [
        (*(turns([look, text("the cat")], answer) for answer in ("the mat", "sat on")), [picture(40, 30, 1)]),
        (*(turns("the cat", answer) for answer in ("sat", "the mat")), []),
        (
            *(turns([look, text("the")], answer, [text("cat"), look], "mat") for answer in ("sat", "on the mat")),
            [picture(40, 30, 1), picture(70, 30, 2)],
        ),
    ]


def rendered(model: ModelConfig) -> list[Rollout]:
    """Return the pairs; the first row has a column with the prompt, the others begin with it."""
    renderer = PreferenceRenderer(
        load_tokenizer(model),
        DataConfig(source="jsonl"),
        takes_pairs=True,
        max_tokens=512,
        processor=ImageProcessor(model),
    )
    found = []
    for number, (chosen, rejected, images) in enumerate(conversations()):
        row: dict[str, Any] = {"chosen": chosen, "rejected": rejected, **({"images": images} if images else {})}
        if number == 0:
            row |= {"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]}
        place = RowLocation(row=number, epoch=0, location=f"row {number + 1}")
        found.append(renderer.fit(renderer.whole(row, place), place))
    return found


def log_prob(
    policy: PreTrainedModel, model: ModelConfig, messages: list[Any], images: list[bytes], own: Rollout
) -> Tensor:
    """Return the log-prob of a sequence's loss tokens by transformers alone, whose tokens are those of ``own``."""
    processor, tokenizer = ImageProcessor(model).hf_processor, load_tokenizer(model)
    made = processor(
        text=[tokenizer.apply_chat_template(messages, tokenize=False)],
        return_tensors="pt",
        add_special_tokens=False,
        return_mm_token_type_ids=True,
        **({"images": [[open_image(image) for image in images]]} if images else {}),
    )
    token_ids = made["input_ids"][0]
    np.testing.assert_array_equal(own.token_ids, token_ids.numpy())
    logprobs = policy(**made).logits[0, :-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(own.loss_mask[1:])].sum()


def loss_alone(policy: PreTrainedModel, base: PreTrainedModel, model: ModelConfig, pairs: list[Rollout]) -> Tensor:
    """Return DPO's loss (arXiv:2305.18290, equation 7) of sequences that are run one by one."""
    losses = []
    for pair, (chosen, rejected, images) in zip(pairs, conversations(), strict=True):
        assert pair.rejected is not None
        ratios = []
        for messages, own in ((chosen, pair), (rejected, pair.rejected)):
            with torch.no_grad():
                reference = log_prob(base, model, messages, images, own)
            ratios.append(log_prob(policy, model, messages, images, own) - reference)
        losses.append(-logsigmoid(BETA * (ratios[0] - ratios[1])))
    return torch.stack(losses).mean()


def learner_of(folder: Path) -> tuple[Learner, ModelConfig]:
    """Return a learner whose policy is not its reference."""
    model = ModelConfig(path=str(folder), dtype="float32", images=True, adapter=AdapterConfig(kind="none"))
    learner = make_learner(folder, adapter="none", model=model, algorithm=algorithm_of("dpo", beta=BETA))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.policy.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return learner, model


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3", "qwen3.5"])
def test_the_loss_of_packed_pairs_with_images_is_that_of_pairs_run_alone(family: str, tmp_path: Path) -> None:
    folder = IMAGE_FAMILIES[family].write(tmp_path)
    learner, model = learner_of(folder)
    pairs = rendered(model)
    assert [len(sequence.images) for pair in pairs for sequence in pair.sequences] == [1, 1, 0, 0, 2, 2]
    (batch,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=512)
    (mini_batch,) = batch.mini_batches
    total, num_shared = 0.0, 0
    for inputs in learner._objective.prepare(mini_batch):
        output = learner._objective.loss(mini_batch, inputs)
        output.loss.backward()
        total += output.loss.item()
        num_shared += inputs.row.num_shared
    if learner.policy.module.layout is AttentionLayout.SHARED:
        assert num_shared >= sum(int(np.argmax(pair.loss_mask)) for pair in pairs), "an image of a prompt is run once"
    policy, base = (AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    policy.load_state_dict(learner.policy.model.state_dict())
    expected = loss_alone(policy, base, model, pairs)
    expected.backward()
    assert abs(expected.item() - np.log(2)) > 1e-3, "the policy is not its reference"
    assert total == pytest.approx(expected.item(), abs=1e-5)
    gradients = {name: own.grad for name, own in policy.named_parameters() if own.grad is not None}
    found = {name: own.grad for name, own in learner.policy.model.named_parameters() if own.grad is not None}
    assert any("visual" in name or "vision" in name for name in gradients), "gradients reach the vision tower"
    assert_close(found, gradients, 2e-5 * max(float(gradient.abs().max()) for gradient in gradients.values()))


def test_a_model_that_runs_each_sequence_alone_is_refused(tmp_path: Path) -> None:
    learner, model = learner_of(IMAGE_FAMILIES["mllama"].write(tmp_path))
    (batch,) = pack_step(rendered(model), step=0, num_ranks=1, max_tokens=512)
    with pytest.raises(ModelError, match=r"dpo needs both completions of a pair in one pass.* use algorithm=kto"):
        learner.train_step(batch)
