"""Rendering of the rows' ground truths to the tokens that the policy would have to write."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.ebft_config import EbftConfig
from rlpipe.data.render.row_renderer import SequenceRenderer
from rlpipe.data.row import Row, UnusableRow
from rlpipe.types import Prompt, Truth

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_TOKENS = 64
"""Lower bound of a completion limit that is derived from the length of the ground truth."""
REMAINING_TURNS = "remaining_turns"
"""The column with the messages after the first answer, the last of which is the assistant's."""


class TruthRenderer:
    """A renderer of ``ebft.truth_column``, and ``remaining_turns`` if there is one, as the answer to a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, ebft: EbftConfig) -> None:
        self._column, self._prompt_column, self._tools_column = ebft.truth_column, data.prompt_column, data.tools_column
        self._factor = ebft.gt_length_multiplier if ebft.adaptive_max_tokens else None
        # source="jsonl": with reasoning_gym, the completion would be read from its "answer" column, which may not be
        # the ground truth. Whatever SFT would train on, the policy has to write the assistant's turns with their ends.
        source = replace(
            data,
            source="jsonl",
            completion_column=self._column,
            text_column=None,
            loss_mask="roles",
            roles_to_train=["assistant"],
            train_on_inputs=False,
            train_on_eos="turn",
        )
        self._renderer = SequenceRenderer(tokenizer, source, max_tokens=2**31)

    def render(self, prompt: Prompt) -> Truth:
        """Render the ground truth of a prompt's row; raise ``UnusableRow`` if it has none that can be rendered."""
        row = {**self._tools(prompt), self._prompt_column: prompt.prompt, self._column: self._answer(prompt)}
        encoded, loss_mask = self._renderer.encode(row)
        first = int(np.argmax(loss_mask))
        return Truth(token_ids=encoded.token_ids[first:], is_assistant=loss_mask[first:])

    def prepare(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its ground truth, the turns between its answers, and a limit for completions.

        The limit, if ``ebft.adaptive_max_tokens``, is ``ebft.gt_length_multiplier`` times the longest turn, and at
        least ``MIN_TOKENS``. Raises ``UnusableRow`` as ``render`` does.
        """
        truth = self.render(prompt)
        spans = truth.turns()
        limit = None
        if self._factor is not None:
            longest = max(end - start for start, end in spans)
            limit = max(int(self._factor * longest), MIN_TOKENS)
        gaps = [truth.token_ids[end:start] for (_, end), (start, _) in pairwise(spans)]
        return replace(prompt, max_tokens=limit, turns=gaps, truth=truth)

    def _tools(self, prompt: Prompt) -> Row:
        return {name: value for name, value in prompt.task.items() if name == self._tools_column}

    def _answer(self, prompt: Prompt) -> Any:
        truth, remaining = prompt.task.get(self._column), prompt.task.get(REMAINING_TURNS)
        if truth is None:
            raise UnusableRow(f"no ground truth in the column {self._column!r} (algorithm.ebft.truth_column)")
        if not remaining:
            return truth
        if not prompt.is_chat:
            raise UnusableRow(f"{REMAINING_TURNS} of a prompt that is no conversation")
        if remaining[-1].get("role") != "assistant":
            raise UnusableRow(f"{REMAINING_TURNS} does not end with a turn of the assistant")
        first = [{"role": "assistant", "content": truth}] if isinstance(truth, str) else list(truth)
        return [*first, *remaining]
