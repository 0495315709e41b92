"""Tests that rows of reward models are the tokens that scorers run, with a mark after each token that is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_cases import PAIR, PLACE, TOKENIZER, write_rows
from tokenizers import processors

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.preference_config import ProcessRewardConfig, RewardModelConfig
from rlpipe.data.pairs import RewardRenderer, StepRenderer
from rlpipe.data.prompts import open_run_sequences
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.render_rows import prepare_rows
from rlpipe.data.row import SkipKind, UnusableRow
from rlpipe.data.row_renderer import PromptRenderer
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.scoring.reward_model import SequenceReward, StepReward
from rlpipe.types import Rollout, RolloutGroup

STEPS = {"prompt": "2+2+1?", "completions": ["2+2=4.", "4+1=6."], "labels": [True, False]}
"""A row with a good and a bad step."""


def pair_of(
    row: dict[str, Any], *, margin: str | None = None, max_tokens: int = 200, tokenizer: Any = TOKENIZER, **options: Any
) -> Rollout:
    config = RewardModelConfig(margin_column=margin)
    renderer = RewardRenderer(tokenizer, DataConfig(source="jsonl", **options), config, max_tokens=max_tokens)
    return renderer.fit(renderer.whole(row, PLACE), PLACE)


def steps_of(row: dict[str, Any], *, max_tokens: int = 200, chat: bool = True, **options: Any) -> Rollout:
    data = DataConfig(source="jsonl", chat=chat)
    renderer = StepRenderer(TOKENIZER, data, ProcessRewardConfig(**options), max_tokens=max_tokens)
    return renderer.fit(renderer.whole(row, PLACE), PLACE)


def run_and_read(rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return the tokens that are run, and the places of those whose values are read."""
    assert rollout.loss_mask[-1]
    return rollout.token_ids[:-1].tolist(), (np.flatnonzero(rollout.loss_mask) - 1).tolist()


def conversation(question: str, answer: str, tokenizer: Any = TOKENIZER) -> list[int]:
    """Return the tokens that ``SequenceReward`` runs for a conversation."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def test_the_reward_is_read_at_the_last_token_of_a_conversation() -> None:
    chosen = pair_of(PAIR)
    assert chosen.rejected is not None
    for rollout, answer in ((chosen, "4"), (chosen.rejected, "five")):
        tokens, read = run_and_read(rollout)
        assert tokens == conversation("2+2?", answer)
        assert read == [len(tokens) - 1]
        assert not rollout.advantages.any()


def test_texts_have_no_end_token() -> None:
    chosen = pair_of(PAIR, chat=False)
    tokens, read = run_and_read(chosen)
    assert tokens == TOKENIZER("2+2?4")["input_ids"]
    assert read == [len(tokens) - 1]


@pytest.mark.parametrize("chat", [True, False])
def test_special_tokens_spelled_in_an_answer_are_plain_text_as_in_scoring(chat: bool) -> None:
    spelled, end = "so<|end|><|tool|>", TOKENIZER.convert_tokens_to_ids("<|end|>")
    chosen = pair_of({**PAIR, "chosen": spelled}, chat=chat)
    tokens, read = run_and_read(chosen)
    assert TOKENIZER.decode(tokens) == (
        f"<|user|>2+2?<|end|><|assistant|>{spelled}<|end|>" if chat else f"2+2?{spelled}"
    )
    assert (tokens.count(end), tokens.count(TOKENIZER.convert_tokens_to_ids("<|tool|>"))) == (2 * chat, 0)
    assert read == [len(tokens) - 1]
    steps = steps_of({**STEPS, "completions": [spelled, "4"]}, chat=chat, step_token="<|system|>")
    assert steps.token_ids.tolist().count(end) == chat


@pytest.mark.parametrize("pad_token", [None, "<|end|>"])
def test_an_end_token_that_is_padding_is_not_read(pad_token: str | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = pad_token
    tokens, read = run_and_read(pair_of(PAIR, tokenizer=tokenizer))
    assert tokens == conversation("2+2?", "4")[:-1]
    assert read == [len(tokens) - 1]


def test_the_margin_is_the_chosen_sequences_advantage() -> None:
    chosen = pair_of({**PAIR, "lead": 0.75}, margin="lead")
    assert chosen.rejected is not None
    assert chosen.advantages[chosen.loss_mask].tolist() == [0.75]
    assert not chosen.rejected.advantages.any()


def test_margins_are_numbers_in_a_column_that_exists() -> None:
    with pytest.raises(DataError, match=r"'lead'.*algorithm\.reward_model\.margin_column"):
        pair_of(PAIR, margin="lead")
    for value in ("much", True, float("nan")):
        with pytest.raises(UnusableRow, match=r"column 'lead' is .*, not a number"):
            pair_of({**PAIR, "lead": value}, margin="lead")
    with pytest.raises(UnusableRow, match="column 'lead' is null"):
        pair_of({**PAIR, "lead": None}, margin="lead")


def test_a_column_margin_is_read_as_trl_reads_it() -> None:
    usual = RewardModelConfig().margin_column
    assert pair_of({**PAIR, "margin": 2}, margin=usual).advantages.max() == 2
    assert pair_of(PAIR, margin=usual).advantages.max() == 0
    assert pair_of({**PAIR, "margin": 2}, margin=None).advantages.max() == 0
    assert pair_of({**PAIR, "margin": None}, margin=usual).advantages.max() == 0


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"tools": [{"name": "look", "parameters": {}}]}, {}),
        ({"chat_template_kwargs": {"mood": "glad"}}, {"chat_template_kwargs": {"mood": "calm"}}),
        ({}, {"chat_template_kwargs": {"mood": "calm"}, "tools": [{"name": "look", "parameters": {}}]}),
        ({"prompt": "A: ", "chosen": "yes", "rejected": "no"}, {"chat": False}),
        ({"prompt": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "It is"}]}, {}),
    ],
    ids=["tools", "row_options", "data_options", "text", "continued"],
)
@pytest.mark.parametrize("ends_texts", [False, True], ids=["", "ended"])
@pytest.mark.parametrize("kind", ["pair", "steps"])
def test_scorers_run_the_tokens_that_were_trained(
    row: dict[str, Any], options: dict[str, Any], kind: str, ends_texts: bool
) -> None:
    if kind == "pair" and "role" in str(row):
        pytest.skip("a completion is a turn of its own in a pair")
    tokenizer = make_tokenizer()
    if ends_texts:
        added = [("<|user|>", 4), ("<|end|>", 2)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|user|> $A <|end|>", special_tokens=added
        )
    tokenizer.chat_template = "{{ mood }}{% if tools %}{{ tools }}{% endif %}" + str(tokenizer.chat_template)
    data = DataConfig(source="jsonl", **options)
    prompt = PromptRenderer(tokenizer, data).render({**(PAIR if kind == "pair" else STEPS), **row}, PLACE)
    group = RolloutGroup(group_id=0, prompt=prompt, rollouts=[])
    given = {name: value for name, value in options.items() if name != "chat"}
    scorer: Any = (SequenceReward if kind == "pair" else StepReward)(model="none", **given)
    scorer._own, scorer._template = tokenizer, ChatTemplate(tokenizer, scorer._data)
    if kind == "pair":
        trained = pair_of({**PAIR, **row}, tokenizer=tokenizer, **options)
        text = str({**PAIR, **row}["chosen"])
        assert run_and_read(trained)[0] == scorer.prompt_and_answer(group, text)
    else:
        renderer = StepRenderer(tokenizer, data, ProcessRewardConfig(), max_tokens=500)
        trained = renderer.fit(renderer.whole({**STEPS, **row}, PLACE), PLACE)
        assert run_and_read(trained)[0] == scorer._cut(group, "\n\n".join(STEPS["completions"]))[0]


def test_texts_that_are_the_same_without_their_end_tokens_are_skipped() -> None:
    with pytest.raises(UnusableRow, match="rendered to the same tokens"):
        pair_of({**PAIR, "chosen": "4<|end|>", "rejected": "4"}, chat=False)


def test_a_pair_fits_with_its_marks() -> None:
    length = sum(len(sequence.token_ids) for sequence in pair_of(PAIR).sequences)
    pair_of(PAIR, max_tokens=length)
    with pytest.raises(UnusableRow, match="tokens together, more than learner") as caught:
        pair_of(PAIR, max_tokens=length - 1)
    assert caught.value.kind is SkipKind.TOO_LONG


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("options", "mark"), [({}, "\n\n"), ({"step_token": "<|tool|>"}, "<|tool|>")])
def test_steps_are_read_at_the_ends_of_their_marks(chat: bool, options: dict[str, Any], mark: str) -> None:
    rollout = steps_of(STEPS, chat=chat, **options)
    tokens, read = run_and_read(rollout)
    prompt = "<|user|>2+2+1?<|end|><|assistant|>" if chat else "2+2+1?"
    assert TOKENIZER.decode(tokens) == f"{prompt}2+2=4.{mark}4+1=6.{mark}"
    assert [TOKENIZER.decode(tokens[: place + 1]).endswith(f".{mark}") for place in read] == [True, True]
    assert read[1] == len(tokens) - 1
    assert rollout.advantages[rollout.loss_mask].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": [True]}, "2 steps in column 'completions', and 1 labels in 'labels'"),
        ({"completions": [], "labels": []}, "0 steps in column 'completions'"),
        ({"completions": ["4", " "]}, "has the step ' ', which is not a string with visible characters"),
        ({"completions": ["4", None]}, "has the step None, which is not a string with visible characters"),
        ({"labels": [True, 2]}, "has the label 2, neither true nor false"),
        ({"labels": None}, "column 'labels' is null"),
        ({"completions": ["4\n\n5", "6"]}, "contains '.*n.*n', the end of a step .*process_reward_model.separator"),
        ({"labels": "good"}, "column 'labels' holds a str, not a list"),
    ],
)
def test_unusable_steps_are_skipped_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        steps_of({**STEPS, **changes})


def test_steps_contain_no_step_token_but_may_contain_the_separator() -> None:
    row = {**STEPS, "completions": ["4\n\n5", "6"]}
    assert steps_of(row, step_token="<|tool|>").num_loss_tokens == 2
    with pytest.raises(
        UnusableRow, match=r"contains '<\|tool\|>', the end of a step .*process_reward_model.step_token"
    ):
        steps_of({**row, "completions": ["4<|tool|>", "6"]}, step_token="<|tool|>")


def test_missing_columns_of_steps_are_named() -> None:
    with pytest.raises(DataError, match=r"'labels'.*algorithm\.process_reward_model\.steps_column and labels_column"):
        steps_of({"prompt": "a", "completions": ["b"]})


def test_long_steps_are_skipped() -> None:
    length = len(steps_of(STEPS).token_ids)
    steps_of(STEPS, max_tokens=length)
    with pytest.raises(UnusableRow) as caught:
        steps_of(STEPS, max_tokens=length - 1)
    assert caught.value.kind is SkipKind.TOO_LONG


def write_steps(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**STEPS, "prompt": f"{number}?"}) + "\n" for number in range(24)))
    return str(path)


@pytest.mark.parametrize(("kind", "write"), [("reward_model", write_rows), ("process_reward_model", write_steps)])
def test_prepared_rows_are_the_same_rows(tmp_path: Path, kind: str, write: Any) -> None:
    data = DataConfig(source="jsonl", path=write(tmp_path), cache=str(tmp_path / "cache"))
    data.held_out.size = 4
    algorithm = AlgorithmConfig(kind=kind, group_size=1)

    def rows() -> list[Rollout]:
        source, held_out = open_run_sequences(
            data, ModelConfig(path="tiny"), TOKENIZER, algorithm=algorithm, learner=LearnerConfig(), seed=1
        )
        return [*source.take(20), *held_out]

    plain = rows()
    options = [f"algorithm={kind}", "data.source=jsonl", f"data.path={data.path}", "data.held_out.size=4", "seed=1"]
    config = load_config([*options, "model.path=tiny", f"data.cache={data.cache}"], need_files=False)
    (prepared,) = prepare_rows(config, TOKENIZER, workers=1, report=lambda done, total: None)
    assert prepared.is_new
    assert prepared.rows.num_skipped == 0
    for first, second in zip(plain, rows(), strict=True):
        for mine, other in zip(first.sequences, second.sequences, strict=True):
            assert mine.token_ids.tolist() == other.token_ids.tolist()
            assert mine.loss_mask.tolist() == other.loss_mask.tolist()
            assert mine.advantages.tolist() == other.advantages.tolist()
