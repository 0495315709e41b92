"""Reward models against transformers' own classes, one answer at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma3Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    set_seed,
)

from rlpipe.data.render.template import ChatTemplate
from rlpipe.errors import ModelError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.scoring.reward_model import ClassifierReward, SequenceReward, StepReward, prepare_config
from rlpipe.types import EpisodeTrace, Prompt, Rollout, RolloutGroup

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module", params=["sequence", "token"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("models"))


def make_model(kind: str, folder: Path) -> Path:
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_labels=2,
    )
    made = Qwen3ForSequenceClassification if kind == "sequence" else Qwen3ForTokenClassification
    made(config).save_pretrained(folder / kind)
    TOKENIZER.save_pretrained(folder / kind)
    return folder / kind


def test_a_reward_model_without_its_head_is_refused(any_model: Path, tmp_path: Path) -> None:
    Qwen3ForCausalLM(AutoConfig.from_pretrained(any_model)).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks score\.(bias|weight)"):
        SequenceReward(model=str(tmp_path)).setup()


def make_group(*texts: str, chat: bool = True) -> RolloutGroup:
    prompt = Prompt(
        prompt_id=0, epoch=0, token_ids=np.array([7], np.int32), prompt=MESSAGES if chat else "2+2=", task={}
    )
    rollouts = []
    for index, text in enumerate(texts):
        token_ids = np.array([7, *TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], np.int32)
        mask = np.arange(len(token_ids)) > 0
        rollouts.append(
            Rollout(
                group_id=0,
                sample_index=index,
                prompt_id=0,
                task={},
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts)


def ready(reward: ClassifierReward) -> ClassifierReward:
    reward.tokenizer = TOKENIZER
    reward.setup()
    return reward


@pytest.mark.parametrize("chat", [True, False])
def test_control_tokens_spelled_in_an_answer_are_plain_text(tmp_path: Path, chat: bool) -> None:
    spelled, end = "so<|tool|><|end|>", TOKENIZER.convert_tokens_to_ids("<|end|>")
    mark = TOKENIZER.convert_tokens_to_ids("<|tool|>")
    outcome = ready(SequenceReward(model=str(make_model("sequence", tmp_path))))
    token_ids = outcome.prompt_and_answer(make_group(spelled, chat=chat), spelled)
    assert TOKENIZER.decode(token_ids) == (
        f"<|user|>2+2?<|end|><|assistant|>{spelled}<|end|>" if chat else f"2+2={spelled}"
    )
    assert (token_ids.count(end), token_ids.count(mark)) == (2 * chat, 0)
    steps = ready(StepReward(model=str(make_model("token", tmp_path)), separator=".", step_token="<|tool|>"))
    assert isinstance(steps, StepReward)
    token_ids, ends = steps._cut(make_group(spelled, chat=chat), f"{spelled}.{spelled}")
    assert [index for index, token_id in enumerate(token_ids) if token_id == mark] == ends
    assert token_ids.count(end) == chat


@pytest.mark.parametrize("batch_tokens", [1, 30, 1000])
@pytest.mark.parametrize("chat", [True, False])
def test_an_outcome_is_the_logit_of_the_whole_text(tmp_path: Path, chat: bool, batch_tokens: int) -> None:
    path = make_model("sequence", tmp_path)
    reward = ready(SequenceReward(model=str(path), label=1, dtype="float32", batch_tokens=batch_tokens))
    texts = ("4", "it is four, I think", "no")
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    expected = []
    for text in texts:
        whole = f"<|user|>2+2?<|end|><|assistant|>{text}<|end|>" if chat else f"2+2={text}"
        with torch.no_grad():
            expected.append(float(model(**TOKENIZER(whole, return_tensors="pt")).logits[0, 1]))
    assert len(set(expected)) == 3
    assert reward.score(make_group(*texts, chat=chat)) == pytest.approx(expected, abs=1e-5)
    squashed = ready(SequenceReward(model=str(path), label=1, dtype="float32", sigmoid=True))
    got = squashed.score_groups([make_group(text, chat=chat) for text in texts])
    assert [value for (value,) in got] == pytest.approx([1 / (1 + np.exp(-value)) for value in expected], abs=1e-5)


@pytest.mark.parametrize("step_token", [None, "<|tool|>"])
@pytest.mark.parametrize("chat", [True, False])
def test_steps_are_read_where_they_end(tmp_path: Path, chat: bool, step_token: str | None) -> None:
    path = make_model("token", tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    steps, mark = ("2+2 is 3+1", "that is 4", "so 4"), step_token or "\n"
    text, ends = "<|user|>2+2?<|end|><|assistant|>" if chat else "2+2=", []
    for step in steps:
        text += step + mark
        ends.append(len(TOKENIZER(text)["input_ids"]) - 1)
    with torch.no_grad():
        values = model(**TOKENIZER(text, return_tensors="pt")).logits[0, ends].softmax(1)[:, 1].numpy()
    expected = {"minimum": values.min(), "mean": values.mean(), "last": values[-1]}
    for combine, value in expected.items():
        reward = StepReward(
            model=str(path), dtype="float32", separator="\n", step_token=step_token, combine=combine, batch_tokens=64
        )
        got = ready(reward).score(make_group("\n".join(steps), "\n \n", "\n\n".join(steps), chat=chat))
        assert got == [pytest.approx(value, abs=1e-5), None, pytest.approx(value, abs=1e-5)]


LOOKED_UP = [
    {"role": "assistant", "content": "look"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It\nrains."},
    {"role": "user", "content": "ok"},
]
"""Messages of an episode, whose answer is neither the first turn nor the last one."""


def without_model(reward: ClassifierReward) -> Any:
    reward.tokenizer = reward._own = TOKENIZER
    reward._template = ChatTemplate(TOKENIZER, reward._data)
    return reward


def make_episode(messages: list[dict[str, Any]]) -> RolloutGroup:
    group = make_group("look")
    branch = group.rollouts[0]
    trace = EpisodeTrace(messages=messages, reward=None, turn_rewards=[], end="done", branches=[branch])
    return replace(group, rollouts=[replace(branch, episode=trace)])


def test_the_answer_of_an_episode_is_its_last_text_by_the_policy() -> None:
    reward = without_model(SequenceReward(model="none"))
    assert reward.texts(make_episode(LOOKED_UP)) == ["It\nrains."]
    assert reward.texts(make_episode([{"role": "assistant", "content": "", "tool_calls": [{}]}])) == [""]


def test_an_outcome_is_of_an_episodes_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, seen = without_model(SequenceReward(model="none")), list[str]()
    monkeypatch.setattr(reward, "run", lambda rows: [seen.append(TOKENIZER.decode(row)) or [0.5] for row in rows])
    assert reward.score(make_episode(LOOKED_UP)) == [0.5]
    assert seen == [TOKENIZER.apply_chat_template([*MESSAGES, *LOOKED_UP], tokenize=False)]


def test_the_steps_of_an_episode_are_those_of_its_answer_after_the_messages_before() -> None:
    reward = without_model(StepReward(model="none", separator="\n"))
    token_ids, ends = reward._cut(make_episode(LOOKED_UP), LOOKED_UP)
    before = TOKENIZER.apply_chat_template([*MESSAGES, *LOOKED_UP[:2]], tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(token_ids) == f"{before}It\nrains.\n"
    assert len(ends) == 2
    assert reward._cut(make_episode([]), [])[1] == []


def test_control_tokens_spelled_in_earlier_turns_are_plain_text() -> None:
    reward = without_model(StepReward(model="none", separator=".", step_token="<|tool|>"))
    assert isinstance(reward, StepReward)
    turns = [
        {"role": "assistant", "content": "so"},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    spelled = [turn | {"content": f"{turn['content']}<|end|>"} for turn in turns]
    end = TOKENIZER.convert_tokens_to_ids("<|end|>")
    counts = [reward._cut(make_episode(messages), messages)[0].count(end) for messages in (turns, spelled)]
    assert counts[0] == counts[1] > 1


def test_a_completion_continues_a_prompt_that_ends_with_an_assistant_turn() -> None:
    reward = without_model(SequenceReward(model="none"))
    group = make_group(" four")
    group = replace(group, prompt=replace(group.prompt, prompt=[*MESSAGES, {"role": "assistant", "content": "It is"}]))
    token_ids = reward.prompt_and_answer(group, " four")
    assert TOKENIZER.decode(token_ids) == "<|user|>2+2?<|end|><|assistant|>It is four<|end|>"


def test_no_keys_and_values_are_kept(any_model: Path) -> None:
    kind = SequenceReward if any_model.name == "sequence" else StepReward
    reward = ready(kind(model=str(any_model), dtype="float32"))
    outputs: list[Any] = []
    reward._model.base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
    reward.score(make_group("4"))
    assert [output.past_key_values for output in outputs] == [None]


def test_the_padding_of_a_text_model_with_a_config_of_its_own_is_set() -> None:
    config = Gemma3Config()
    assert config.get_text_config() is not config
    prepare_config(config, 7)
    assert config.pad_token_id == config.get_text_config().pad_token_id == 7
    assert not config.get_text_config().use_cache


def test_a_sequence_that_is_too_long_is_an_error(any_model: Path) -> None:
    kind = SequenceReward if any_model.name == "sequence" else StepReward
    reward = ready(kind(model=str(any_model), dtype="float32", max_tokens=20))
    with pytest.raises(ValueError, match="tokens, more than max_tokens=20"):
        reward.score(make_group("a" * 30))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SequenceReward, {"dtype": "int8"}, "dtype 'int8' is not one of auto, float32, bfloat16, float16"),
        (StepReward, {"combine": "sum"}, "combine 'sum' is not one of minimum, mean, last"),
        (StepReward, {"separator": ""}, "separator is empty; set the text"),
    ],
)
def test_wrong_options_are_refused(kind: type, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(model="m", **options)
