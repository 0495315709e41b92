"""Ground truths of rows, as the tokens that the policy would have to write."""

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
"""The lowest limit that a group's completions get by the length of its ground truth."""
REMAINING_TURNS = "remaining_turns"
"""The column with the messages behind the first answer, which end with one of the assistant."""


class TruthRenderer:
    """Renders the column ``ebft.truth_column``, and where there is one ``remaining_turns``, as answer to a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, ebft: EbftConfig) -> None:
        self._column, self._prompt_column, self._tools_column = ebft.truth_column, data.prompt_column, data.tools_column
        self._factor = ebft.gt_length_multiplier if ebft.adaptive_max_tokens else None
        # A reasoning-gym entry's answer is in a column of its own, which may not be the ground truth. And whatever SFT
        # trains of such rows, the policy would have to write the assistant's turns, with their ends.
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
        """Raises ``UnusableRow`` if the row has no ground truth that can be rendered."""
        row = {**self._tools(prompt), self._prompt_column: prompt.prompt, self._column: self._answer(prompt)}
        encoded, loss_mask = self._renderer.encode(row)
        first = int(np.argmax(loss_mask))
        return Truth(token_ids=encoded.token_ids[first:], is_assistant=loss_mask[first:])

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt with its ground truth, its further turns, and the longest answer that is worth generating.

        Raises as ``render``.
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
