"""Rows of a real tokenizer and a real model: their trained tokens, and packed rows against plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_cases import make_model_config
from mask_cases import assert_marks, turns
from real_cases import gsm8k_rows, real_model, real_rollouts, real_tokenizer, require_real_model
from transformers import AutoModelForCausalLM

from rlpipe import cli
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.packing import pack_step
from rlpipe.data.render.template import ChatTemplate
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.learner.row_plan import plan_row
from rlpipe.types import MicroBatch, Rollout

require_real_model()
pytestmark = pytest.mark.slow

HELLO = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
"""The beginning of the template's output without a system turn."""
CPU = torch.device("cpu")
Record = Callable[[str, object], None]


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def answer(text: str) -> str:
    return f"<|im_start|>assistant\n«{text}<|im_end|>»\n"


def test_answers_and_their_ends_count_in_the_models_own_template() -> None:
    tokenizer = real_tokenizer()
    assert_marks(tokenizer, turns("What is 12+30?", "It is 42."), HELLO + user("What is 12+30?") + answer("It is 42."))
    system = "<|im_start|>system\nYou are terse.<|im_end|>\n"
    assert_marks(tokenizer, turns("hi", "Hi!", system="You are terse."), system + user("hi") + answer("Hi!"))


def test_every_answer_of_several_turns_counts_whatever_it_is_written_in() -> None:
    asked = ["a list?", "naïve, 東京 🙂?", ""]
    answers = ["- one\n- two\n\n```python\nx = 10_000\n```", "ja: 東京 🙂 – naïve", "3.14159\t1e-4\n"]
    conversation = turns(*(text for pair in zip(asked, answers, strict=True) for text in pair), system="Help.")
    expected = "<|im_start|>system\nHelp.<|im_end|>\n"
    expected += "".join(user(text) + answer(reply) for text, reply in zip(asked, answers, strict=True))
    assert_marks(real_tokenizer(), conversation, expected)


def test_options_choose_other_tokens_of_the_models_own_template() -> None:
    tokenizer, conversation = real_tokenizer(), turns("hi", "Hi!", "who?", "Me.")
    plain = HELLO + user("hi") + answer("Hi!") + user("who?") + answer("Me.")
    assert_marks(tokenizer, conversation, plain.replace("<|im_end|>»", "»<|im_end|>"), train_on_eos="none")
    last = plain.replace("«Hi!<|im_end|>»", "«Hi!»<|im_end|>")
    assert_marks(tokenizer, conversation, last, train_on_eos="last")
    asked = plain.replace("«", "").replace("»", "").replace("user\nhi<|im_end|>", "user\n«hi<|im_end|>»")
    asked = asked.replace("user\nwho?<|im_end|>", "user\n«who?<|im_end|>»")
    assert_marks(tokenizer, conversation, asked, roles_to_train=["user"])


def test_markers_in_a_question_open_no_answer() -> None:
    asked = "<|im_end|>\n<|im_start|>user\nnot an answer"
    assert_marks(real_tokenizer(), turns(asked, "no"), HELLO + user(asked) + answer("no"))


@pytest.mark.parametrize(("text", "counted"), [("\n\nIndeed.", "\n\n\nIndeed."), ("  Indeed.", "\n  Indeed.")])
def test_an_answer_whose_beginning_merges_with_its_marker_counts_with_the_merged_token(text: str, counted: str) -> None:
    data = DataConfig(source="jsonl")
    tokenizer = real_tokenizer()
    encoded, mask = ConversationMask(ChatTemplate(tokenizer, data), data).tokens(turns("Is it?", text))
    assert tokenizer.decode(encoded.token_ids[mask]) == f"{counted}<|im_end|>"


def packed(rollouts: list[Rollout]) -> MicroBatch:
    (micro_batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=4096)[0].mini_batches[0].micro_batches
    return micro_batch


def load(attention: str = "sdpa") -> Policy:
    return load_policy(make_model_config(real_model(), adapter="none", attention=attention), LearnerConfig(), CPU)


def plain_logprobs(model: torch.nn.Module, rollout: Rollout) -> torch.Tensor:
    """Return the log-probs of transformers' own forward pass over one row."""
    token_ids = torch.from_numpy(rollout.token_ids).long()
    logprobs = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, token_ids[1:, None])[:, 0][torch.from_numpy(rollout.loss_mask)[1:]]


@pytest.fixture(scope="module")
def plain() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probs of each row run alone, and the gradients of their mean, in float64.

    In float32, transformers' own backward pass is off by 3e-4 on this model.
    """
    model = AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float64)
    logprobs = torch.cat([plain_logprobs(model, rollout) for rollout in real_rollouts()])
    logprobs.mean().backward()
    return logprobs.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_score_and_teach_what_plain_rows_do(
    plain: tuple[torch.Tensor, dict[str, torch.Tensor]], attention: str, record_property: Record
) -> None:
    micro_batch, policy = packed(real_rollouts()), load(attention)
    row = plan_row(micro_batch, layout=policy.module.layout, device=CPU)
    assert (len(row.token_ids) < 0.7 * micro_batch.num_tokens) == (attention == "sdpa"), "prompts are run once"
    logprobs = policy.logprobs(micro_batch, temperature=1.0)[0][torch.from_numpy(micro_batch.loss_mask)]
    logprobs.mean().backward()
    expected, gradients = plain
    difference = float((logprobs.detach() - expected).abs().max())
    record_property("largest difference of a log-prob", difference)
    assert difference < 1e-4
    found = {name: parameter.grad for name, parameter in policy.trainable_parameters().items()}
    assert len(found) == len(gradients), "the tied embedding is trained once"
    apart = [float((found[name] - theirs).norm() / theirs.norm()) for name, theirs in gradients.items()]
    record_property("largest relative difference of a gradient", max(apart))
    assert max(apart) < 1e-4


def test_data_stats_counts_the_tokens_of_gsm8k(capsys: pytest.CaptureFixture[str]) -> None:
    file, tokenizer = gsm8k_rows(), real_tokenizer()
    options = ["data=jsonl", "algorithm=sft", f"data.path={file}", f"model.path={real_model()}"]
    columns = ["data.prompt_column=question", "data.completion_column=answer"]
    assert cli.main(["data", "stats", "--json", *options, *columns, "learner.max_tokens_per_microbatch=2048"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert (found["num_rows"], found["num_used"], found["skipped"]) == (7473, 7473, {})
    answers = tokenizer([row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    assert found["num_trained_tokens"] == sum(len(ids) + 1 for ids in answers)
    beside = HELLO + user("") + "<|im_start|>assistant\n<|im_end|>\n"
    num_beside = len(tokenizer(beside, add_special_tokens=False)["input_ids"]) - 1  # not the end, which is trained
    asked = tokenizer([row["question"] for row in rows], add_special_tokens=False)["input_ids"]
    assert found["tokens"]["total"] == found["num_trained_tokens"] + sum(len(ids) + num_beside for ids in asked)
