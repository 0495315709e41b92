"""Rows with images, from the row to the log-probs of their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import one_in
from engine_cases import rollout_config, sample
from image_cases import IMAGE_FAMILIES, render_prompts, render_rows, rows
from transformers import AutoModelForImageTextToText

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.data.packing import pack_step, split_padded
from rlpipe.data.render.images import open_image
from rlpipe.data.render.processor import ImageProcessor, load_tokenizer
from rlpipe.errors import ModelError
from rlpipe.learner.policy import load_policy
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.rollout.hf_engine import HfEngine
from rlpipe.types import GroupRequest, Rollout

pytestmark = pytest.mark.covering(1)

CPU = torch.device("cpu")
GENERATION_TEMPLATE = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}{{ p.text if p.type == 'text' else 'PLACEHOLDER' }}{% endfor %}{% endif %}{% endmacro %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "A: {% generation %}{{ show(m.content) }}.{% endgeneration %} {% else %}U: {{ show(m.content) }} {% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module", params=one_in(2, IMAGE_FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = IMAGE_FAMILIES[request.param].write(tmp_path_factory.mktemp("model"))
    return ModelConfig(path=str(folder), dtype="float32", images=True, adapter=AdapterConfig(kind="none"))


@torch.no_grad()
def alone(model: ModelConfig, row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return a row's tokens, and the log-probs of all but the first, by transformers alone."""
    policy = AutoModelForImageTextToText.from_pretrained(model.path, dtype=torch.float32).eval()
    processor, tokenizer = ImageProcessor(model).hf_processor, load_tokenizer(model)
    images = {"images": [[open_image(image) for image in row["images"]]]} if "images" in row else {}
    made = processor(
        text=[tokenizer.apply_chat_template(row["messages"], tokenize=False)],
        return_tensors="pt",
        add_special_tokens=False,
        return_mm_token_type_ids=True,
        **images,
    )
    logits = policy(**made).logits[0, :-1]
    token_ids = made["input_ids"][0]
    return token_ids.numpy(), logits.log_softmax(-1).gather(1, token_ids[1:, None]).squeeze(1).numpy()


def packed(model: ModelConfig, rollouts: list[Rollout]) -> np.ndarray:
    """Return the log-probs of all loss tokens, packed into one micro batch."""
    (batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=4096)
    (micro_batch,) = batch.mini_batches[0].micro_batches
    policy = load_policy(model, LearnerConfig(), CPU)
    parts = split_padded(micro_batch, 1) if policy.module.layout is AttentionLayout.ALONE else [micro_batch]
    parts.sort(key=lambda part: int(part.group_ids[0]))
    with policy.inference():
        return np.concatenate([policy.logprobs(part, temperature=1.0)[0].numpy()[part.loss_mask] for part in parts])


def test_packed_rows_are_scored_as_each_alone(model: ModelConfig) -> None:
    rollouts = render_rows(model)
    expected = []
    for rollout, row in zip(rollouts, rows(), strict=True):
        token_ids, logprobs = alone(model, row)
        np.testing.assert_array_equal(rollout.token_ids, token_ids)
        expected.append(logprobs[rollout.loss_mask[1:]])
    np.testing.assert_allclose(packed(model, rollouts), np.concatenate(expected), atol=2e-5)


def test_generation_blocks_mark_what_transformers_marks(model: ModelConfig, tmp_path: Path) -> None:
    processor = ImageProcessor(model).hf_processor
    template = GENERATION_TEMPLATE.replace("PLACEHOLDER", processor.image_token)
    (tmp_path / "template.jinja").write_text(template)
    found = render_rows(dataclasses.replace(model, chat_template=str(tmp_path / "template.jinja")))
    for rollout, row in zip(found, rows(), strict=True):
        images = iter(row.get("images", []))
        messages = [{**message, "content": with_pictures(message["content"], images)} for message in row["messages"]]
        made = processor.apply_chat_template(
            [messages],
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            processor_kwargs={"add_special_tokens": False},
        )
        np.testing.assert_array_equal(rollout.token_ids, made["input_ids"][0])
        np.testing.assert_array_equal(rollout.loss_mask, np.array(made["assistant_masks"][0], np.bool_))


def with_pictures(content: Any, images: Iterator[bytes]) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{"type": "image", "image": open_image(next(images))} if part["type"] == "image" else part for part in parts]


def test_sampled_tokens_have_the_log_probs_that_the_learner_computes(
    model: ModelConfig, request: pytest.FixtureRequest
) -> None:
    engine = HfEngine(
        "hf", model, rollout_config("hf", sampling={"max_tokens": 6}), WeightsConfig(), max_prompt_tokens=512
    )
    requests = [
        GroupRequest(group_id=prompt.prompt_id, prompt=prompt, group_size=2, max_tokens=6, temperature=1.0, seed=7)
        for prompt in render_prompts(model)
    ]
    rollouts = [rollout for group in sample(engine, requests) for rollout in group]
    for rollout in rollouts:
        rollout.advantages = np.ones(len(rollout.token_ids), np.float32)
    sampled = np.concatenate([rollout.logprobs[rollout.loss_mask] for rollout in rollouts])
    assert sum(len(rollout.images) for rollout in rollouts) == 2 * 4
    # Qwen3.5 draws with the recurrent form of its linear attention and trains with the chunked form. Their
    # exponentials round differently: torch's vector code for AVX2 puts them 3.1e-5 apart, its plain code 1.4e-5.
    atol = 5e-5 if request.node.callspec.params["model"] == "qwen3.5" else 2e-5
    np.testing.assert_allclose(packed(model, rollouts), sampled, atol=atol)


def test_a_vision_tower_has_an_adapter_by_a_regex_alone(tmp_path: Path) -> None:
    folder = IMAGE_FAMILIES["qwen2-vl"].write(tmp_path)

    def load(targets: list[str] | str) -> list[str]:
        model = ModelConfig(path=str(folder), dtype="float32", adapter=AdapterConfig(r=2, target_modules=targets))
        return list(load_policy(model, LearnerConfig(), CPU).trainable_parameters())

    with pytest.raises(ModelError, match="adapters go on the language model, unless target_modules is a regex"):
        load(["qkv"])
    assert {name.split(".qkv.")[0][-6:] for name in load(".*visual.*qkv")} == {"0.attn", "1.attn"}
