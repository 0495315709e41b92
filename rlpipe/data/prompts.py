"""The sources of training prompts and SFT sequences, and the held-out rows that these never yield."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.ebft_config import EbftConfig
from rlpipe.data.cache.cache_key import Rendering
from rlpipe.data.cache.cached_rows import PreparedRow, prompt_settings, sequence_settings
from rlpipe.data.held_out import KeepOut, Renderers, Split
from rlpipe.data.render.ground_truth import TruthRenderer
from rlpipe.data.render.processor import ImageProcessor
from rlpipe.data.render.row_renderer import PromptRenderer, SequenceRenderer
from rlpipe.data.row import Row, RowLocation, UnusableRow
from rlpipe.data.sources.row_source import RowSource
from rlpipe.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptSource = RowSource[Prompt]
SequenceSource = RowSource[Rollout]


def open_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    ebft: EbftConfig | None = None,
    processor: ImageProcessor | None = None,
    tried: bool = True,
) -> tuple[PromptSource, list[Prompt]]:
    """Open the source of training prompts, and the held-out prompts; with ``ebft``, only rows with a ground truth.

    The held-out rows are those of ``data.held_out.path`` or ``data.held_out.split``, or ``data.held_out.size`` rows
    that ``seed`` splits off. A training row whose rendered prompt equals a held-out one is skipped. Raises
    ``DataError`` if the data can't be read, lacks a column, or, if ``tried``, yields no prompt.
    """

    def renderers_of(data: DataConfig) -> Renderers[Prompt]:
        renderer = PromptRenderer(tokenizer, data, processor)
        truth = None if ebft is None else TruthRenderer(tokenizer, data, ebft)

        def render(row: Row, place: RowLocation) -> Prompt:
            if isinstance(row, PreparedRow):
                return row.prompt(place)
            prompt = renderer.render(row, place)
            return prompt if truth is None else truth.prepare(prompt)

        def render_trained(row: Row, place: RowLocation, keep_out: KeepOut | None) -> Prompt:
            prompt = render(row, place)
            if keep_out is not None:
                keep_out(prompt)
            return prompt

        return Renderers(check=renderer.check, prompt=render, trained=render_trained)

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=prompt_settings(ebft))
    split = Split(data, rendering, renderers_of, seed, tried=tried)
    return split.source(), split.held_out


def open_sft_rows(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int,
    processor: ImageProcessor | None = None,
    tried: bool = True,
) -> tuple[SequenceSource, list[Rollout]]:
    """Open the source of SFT sequences of at most ``max_tokens`` tokens, and the held-out sequences.

    With the same ``data`` and ``seed`` the held-out rows are those of ``open_prompts``. A conversation's prompt is all
    before its first assistant turn, a text's prompt all of it. A row without a renderable prompt can't be held out, and
    is trained on if its sequence can be rendered. Raises ``DataError`` as ``open_prompts`` does.
    """

    def renderers_of(data: DataConfig) -> Renderers[Rollout]:
        renderer = SequenceRenderer(tokenizer, data, max_tokens=max_tokens, processor=processor)

        def render(row: Row, place: RowLocation) -> Prompt:
            return row.sequence_prompt(place) if isinstance(row, PreparedRow) else renderer.prompt(row, place)

        def render_trained(row: Row, place: RowLocation, keep_out: KeepOut | None) -> Rollout:
            if keep_out is not None:
                try:
                    prompt = render(row, place)
                except UnusableRow:
                    pass  # a row without a prompt equals no held-out one, and may still make a sequence
                else:
                    keep_out(prompt)
            encoded, loss_mask, task = row.sequence() if isinstance(row, PreparedRow) else renderer.whole(row, place)
            return renderer.fit(encoded, loss_mask, task, place)

        return Renderers(check=renderer.check, prompt=render, trained=render_trained)

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=sequence_settings(data))
    split = Split(data, rendering, renderers_of, seed, tried=tried)
    return split.source(), split.render_held_out()
