"""The models of the example: a reward model, trained on the pairs, and a policy that writes the rejected answers.

With models from the hub none of this is needed, but for the row transform ``to_prompt``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlpipe
from rlpipe.quickstart import cold_start

if TYPE_CHECKING:
    from torch import Tensor


NUM_TEST_PAIRS = 40
Row = dict[str, Any]


def prepare(config: rlpipe.Config) -> None:
    """Make the policy, and the reward model if there is none; ``model.prepare`` of the example."""
    folder = config.scoring.rewards["preference"].kwargs["model"]
    if Path(folder).is_dir():
        warm_up(config)
        return
    rows = [json.loads(line) for line in Path(str(config.data.path)).read_text().splitlines()]
    share = train_reward_model(folder, rows, seed=config.seed)
    print(
        f"reward model: {share:.1%} of {NUM_TEST_PAIRS} pairs that it has not seen are in the right order", flush=True
    )
    warm_up(config)


def train_reward_model(
    folder: str | Path, rows: list[dict[str, str]], *, num_steps: int = 150, batch_size: int = 8, seed: int = 0
) -> float:
    """Train a tiny classifier with one label on all but the last pairs, and return its accuracy on the last ones.

    The loss is the Bradley-Terry loss, -log sigmoid(r(chosen) - r(rejected)). Half of a batch's pairs are a chosen
    answer and a spoiled copy: a model that has seen only whole sentences would reward fragments of them.
    """
    import torch
    from torch.nn.functional import logsigmoid
    from transformers import AutoModelForSequenceClassification, Qwen3Config, set_seed

    from rlpipe.models.tiny import make_tokenizer

    set_seed(seed)
    tokenizer = make_tokenizer()
    model = AutoModelForSequenceClassification.from_config(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=384,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=1,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def margins(pairs: list[dict[str, str]]) -> Tensor:
        """Return r(chosen) - r(rejected) of each pair."""
        texts = [conversation(tokenizer, pair, column) for column in ("chosen", "rejected") for pair in pairs]
        better, worse = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0].chunk(2)
        return better - worse

    training, test = rows[:-NUM_TEST_PAIRS], rows[-NUM_TEST_PAIRS:]
    for _ in range(num_steps):
        pairs = random.sample(training, batch_size)
        spoiled = [{**pair, "rejected": spoil(pair["chosen"])} for pair in pairs]
        loss = -logsigmoid(margins(pairs + spoiled)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.inference_mode():
        return float((margins(test) > 0).float().mean())


def half_spoiled(cfg: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a ``data.transform`` that replaces every other rejected answer by a spoiled copy of the chosen one."""

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        draws = random.Random(row["prompt"])  # so that a row is the same in every epoch
        return {**row, "rejected": spoil(row["chosen"], draws)} if draws.random() < 0.5 else row

    return map_row


def spoil(text: str, draws: Any = random) -> str:
    """Return the text without a piece of it, or with a piece repeated somewhere later."""
    start, end = sorted(draws.sample(range(len(text)), 2))
    place = draws.randrange(start + 1, len(text) + 1)
    return draws.choice([text[:start] + text[end:], text[:place] + text[start:end] + text[place:]])


def conversation(tokenizer: Any, pair: dict[str, str], column: str) -> str:
    """Return the conversation's text, as ``SequenceReward`` gives it to the model."""
    turns = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[column]}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False))


def warm_up(config: rlpipe.Config) -> None:
    """Train the policy on the rejected answers, so that it has something to improve."""
    cold_start(
        config,
        f"seed={config.seed}",
        "data.completion_column=rejected",
        f"data.held_out.size={config.data.held_out.size}",
        "algorithm.num_steps=150",
        "algorithm.stop_loss=0.12",
        "algorithm.groups_per_step=16",
        "learner.num_cpus=2",
        "learner.optimizer.lr=1e-3",
    )


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Keep only ``prompt``, since the answers, which no reward reads, would be sent with every group."""

    def prompt_alone(row: Row) -> Row:
        return {"prompt": row["prompt"].strip()}

    return prompt_alone, {"remove_columns": "__all__"}
