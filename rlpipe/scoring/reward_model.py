"""Reward models of transformers: one value for a whole answer, or one for each of its steps.

Shapes: S sequences, T tokens in the longest, L labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.option import DTYPES
from rlpipe.data.packing import padded_parts
from rlpipe.data.render.control_tokens import scored_ids
from rlpipe.data.render.messages import content_text
from rlpipe.data.render.processor import check_ids
from rlpipe.data.render.template import ChatTemplate, end_token_ids, plain_token_ids, token_ids_of
from rlpipe.errors import ModelError
from rlpipe.hardware.dtypes import AUTO
from rlpipe.models.loading import COMPLETE, load_complete, own_dtype, torch_device
from rlpipe.scoring.rewards import RewardActor
from rlpipe.scoring.toolbox import completion_text, last_answer
from rlpipe.types import ChatMessages, RolloutGroup

Answer = str | ChatMessages
"""Text of a completion, or an episode's messages after the prompt."""
DTYPE_CHOICES = (AUTO, *DTYPES)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"minimum": torch.amin, "mean": torch.mean, "last": itemgetter(-1)}
"""Functions that combine the values of the steps into one."""


class ClassifierReward(RewardActor):
    """Base class of both kinds: a model with a classification head, run on padded batches.

    ``model`` is a folder or hub id. Conversations go through the chat template of its own tokenizer; a text prompt and
    its completion are concatenated. Batches have at most ``batch_tokens`` tokens, padding included; a sequence of more
    than ``max_tokens`` fails its group. Rows have their tools in ``tools_column``; ``tools`` and
    ``chat_template_kwargs`` are those of the data that the model was trained on. The model runs on the GPU if the
    process has one. ``dtype=auto`` is bfloat16 where that is faster on the device, else float32.
    """

    auto_class: Any
    has_dtype = True
    _label = 0

    def __init__(
        self,
        *,
        model: str,
        revision: str | None = None,
        dtype: str = AUTO,
        batch_tokens: int = 16384,
        max_tokens: int = 8192,
        trust_remote_code: bool = False,
        tools: Sequence[Any] = (),
        tools_column: str | None = "tools",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if dtype not in DTYPE_CHOICES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_CHOICES)}")
        self.source, self.dtype = model, dtype
        self.options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.batch_tokens, self.max_tokens = batch_tokens, max_tokens
        self._data = DataConfig(
            tools=list(tools), tools_column=tools_column, chat_template_kwargs=dict(chat_template_kwargs or {})
        )

    def setup(self) -> None:
        self._device = torch_device()
        dtype = getattr(torch, own_dtype(self._device, self.source) if self.dtype == AUTO else self.dtype)
        with reading_files(f"the reward model {self.source} can't be loaded", COMPLETE, error=ModelError):
            check_ids(Path(self.source))
            self._own: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.source, **self.options)
            if self._own.pad_token_id is None:
                self._own.pad_token = self._own.eos_token
            self._template = ChatTemplate(self._own, self._data)
            loaded = load_complete(self.auto_class, self.source, dtype=dtype, **self.options)
        if not 0 <= self._label <= (last := int(loaded.config.num_labels or 0) - 1):
            raise ModelError(f"label={self._label} of the reward model {self.source}: it has labels 0 to {last}")
        prepare_config(loaded.config, self._own.pad_token_id)
        self._model = loaded.to(self._device).eval()  # type: ignore[arg-type]

    def score(self, group: RolloutGroup) -> list[float | None]:
        return self.score_groups([group])[0]

    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        answers: list[tuple[RolloutGroup, Answer]] = [
            (group, text if rollout.episode is None else rollout.episode.messages)
            for group in groups
            for rollout, text in zip(group, self.texts(group), strict=True)
        ]
        values = iter(self.score_answers(answers))
        return [[next(values) for _ in group] for group in groups]

    @abstractmethod
    def score_answers(self, answers: Sequence[tuple[RolloutGroup, Answer]]) -> list[float | None]:
        """Return one value for each answer, which is given with its group."""

    def tokens(self, text: str, *, begins: bool = False) -> list[int]:
        return token_ids_of(self._own, text, begins=begins).tolist()

    def prompt_and_answer(self, group: RolloutGroup, answer: Answer) -> list[int]:
        """Return the tokens of the prompt followed by the answer."""
        prompt = group.prompt.prompt
        if not isinstance(prompt, str):
            template = self._template_of(group)
            messages = _with_answer(prompt, answer)
            num_trusted = len(prompt) - (len(messages) == len(prompt))  # the answer may continue the prompt's last turn
            return scored_ids(template, messages, template.text, num_trusted=num_trusted).tolist()
        assert isinstance(answer, str), "episodes are conversations"
        return [*self.prompt_tokens(group), *plain_token_ids(self._own, answer), *end_token_ids(self._own)]

    def prompt_tokens(self, group: RolloutGroup, later: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the tokens of the prompt and ``later`` messages, after which an answer begins."""
        prompt = group.prompt.prompt
        if isinstance(prompt, str):
            return self.tokens(prompt, begins=True)
        template = self._template_of(group)
        return scored_ids(template, [*prompt, *later], template.prompt_text, num_trusted=len(prompt)).tolist()

    def _template_of(self, group: RolloutGroup) -> ChatTemplate:
        """Return the reward model's own template, with the tools and options of the group's row."""
        return self._template.for_row(group.prompt.task)

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits of each sequence, in float32 on the CPU: ``[L]``, or ``[T, L]`` of a token classifier."""
        for sequence in sequences:
            if len(sequence) > self.max_tokens:
                raise ValueError(f"{len(sequence)} tokens, more than max_tokens={self.max_tokens}")
        logits_by_index: dict[int, Tensor] = {}
        for members in padded_parts([len(sequence) for sequence in sequences], self.batch_tokens):
            rows = [torch.tensor(sequences[i], dtype=torch.long) for i in members]
            token_ids = pad_sequence(rows, batch_first=True, padding_value=self._own.pad_token_id)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            inputs = {"input_ids": token_ids.to(self._device), "attention_mask": mask.to(self._device)}
            logits = self._model(**inputs).logits
            logits_by_index.update(zip(members, logits.float().cpu(), strict=True))
        return [logits_by_index[index] for index in range(len(sequences))]


def prepare_config(config: PreTrainedConfig, padding_id: int) -> None:
    """Set the token that the model skips at the end; the classes of transformers read it in the text's own config."""
    for part in (config, config.get_text_config()):
        part.pad_token_id = padding_id
        part.use_cache = False  # else keys and values of all layers are kept, though nothing reads them


def _with_answer(prompt: ChatMessages, answer: Answer) -> ChatMessages:
    """Return the conversation with its answer; a text continues a prompt that ends with an assistant turn."""
    if not isinstance(answer, str):
        return [*prompt, *answer]
    if prompt[-1]["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": answer}]
    return [*prompt[:-1], {**prompt[-1], "content": content_text(prompt[-1].get("content")) + answer}]


class SequenceReward(ClassifierReward):
    """Outcome reward model: the logit of ``label`` for the prompt and the whole completion or episode.

    ``sigmoid`` maps the logit to between 0 and 1.
    """

    auto_class = AutoModelForSequenceClassification

    def __init__(self, *, label: int = 0, sigmoid: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._label, self._sigmoid = label, sigmoid

    def score_answers(self, answers: Sequence[tuple[RolloutGroup, Answer]]) -> list[float | None]:
        logits = [values[self._label] for values in self.run([self.prompt_and_answer(*answer) for answer in answers])]
        return [float(value.sigmoid() if self._sigmoid else value) for value in logits]


class StepReward(ClassifierReward):
    """Process reward model, by token classification: the probability of ``label`` at the end of each step.

    ``separator`` splits a completion into steps; empty steps do not count, and a completion without any is left out.
    In an episode, the steps are those of the policy's last message that has text, after the messages before it.
    Each step is followed by ``step_token`` (Qwen's process reward models: ``<extra_0>``), or else by the separator
    itself; the value is read at the last token of either. ``combine`` is ``minimum``, ``mean`` or ``last``.
    """

    auto_class = AutoModelForTokenClassification

    def __init__(
        self,
        *,
        separator: str = "\n\n",
        step_token: str | None = None,
        label: int = 1,
        combine: str = "minimum",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if combine not in REDUCTIONS:
            raise ValueError(f"combine {combine!r} is not one of {', '.join(REDUCTIONS)}")
        if not separator:
            raise ValueError("separator is empty; set the text between the steps of a completion")
        self._separator, self._mark, self._label, self._combine = separator, step_token or separator, label, combine

    def score_answers(self, answers: Sequence[tuple[RolloutGroup, Answer]]) -> list[float | None]:
        truncated = [self._cut(*answer) for answer in answers]
        scored = [index for index, (_, ends) in enumerate(truncated) if ends]
        logits = self.run([truncated[index][0] for index in scored])
        values: list[float | None] = [None] * len(answers)
        for index, answer_logits in zip(scored, logits, strict=True):
            steps = answer_logits[truncated[index][1]].softmax(1)[:, self._label]
            values[index] = float(REDUCTIONS[self._combine](steps))
        return values

    def _cut(self, group: RolloutGroup, answer: Answer) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt and the steps, and the indices of the tokens that end a step."""
        earlier = [] if isinstance(answer, str) else answer[: last_answer(answer) or 0]
        steps = [step for step in completion_text(answer).split(self._separator) if step.strip()]
        token_ids, ends = self.prompt_tokens(group, earlier), list[int]()
        for step in steps:
            token_ids += plain_token_ids(self._own, step) + self.tokens(self._mark)
            ends.append(len(token_ids) - 1)
        return token_ids, ends
