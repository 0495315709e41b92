"""The error of a merged model's log-probs, against those of the adapter on the base that it was trained on.

Shapes: B texts, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpipe.kernels.row_access import IGNORED
from rlpipe.learner.lm_head import Head
from rlpipe.learner.merge.adapter_patches import Patch
from rlpipe.learner.merge.streaming import Streamed

CHUNK_TOKENS = 128
"""Number of tokens whose logits are in memory at once."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Texts:
    """Texts to compare log-probs on, padded at the end."""

    token_ids: Tensor  # [B, T]
    lengths: Tensor  # [B]

    @property
    def targets(self) -> Tensor:
        """The next token of each token ``[B, T]``, ``IGNORED`` where there is none."""
        last = torch.arange(self.token_ids.shape[1]) >= self.lengths[:, None] - 1
        return self.token_ids.roll(-1, 1).masked_fill(last, IGNORED)


def fill_up(texts: Sequence[Sequence[int]]) -> Texts:
    rows = [torch.tensor(text) for text in texts]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Texts(token_ids=padded, lengths=torch.tensor([len(row) for row in rows]))


class Gap:
    """The error of merges against the unmerged adapter; ``live`` patches the files' weights to the adapter's base."""

    def __init__(
        self, model: PreTrainedModel, adapted: PeftModel, weights: Streamed, live: Mapping[str, Patch]
    ) -> None:
        self._model, self._adapted, self._weights, self._live = model, adapted, weights, live

    def sample(self, *, num: int, num_tokens: int, start: int, seed: int = 0) -> Texts:
        """Sample texts from the unmerged adapter on its base, each starting with the token ``start``."""
        with torch.random.fork_rng(), self._weights.running(self._live):
            torch.manual_seed(seed)
            begun = torch.full((num, 1), start)
            drawn = self._adapted.generate(input_ids=begun, max_new_tokens=num_tokens, do_sample=True)
        ends = self._model.generation_config.eos_token_id
        after_end = torch.isin(drawn, torch.tensor(ends if ends is not None else [])).cumsum(1) > 0
        lengths = (~after_end[:, 1:]).sum(1) + 2  # with the start token and the end token
        return Texts(token_ids=drawn, lengths=lengths.clamp(max=drawn.shape[1]))

    def measure(self, texts: Texts, merges: Mapping[str, Mapping[str, Patch]]) -> dict[str, float]:
        """Return the mean absolute difference of log-probs, in nats, for each merge."""
        live = self._logprobs(texts, self._live, adapter=True)
        counted = texts.targets != IGNORED
        return {
            name: float((self._logprobs(texts, patches, adapter=False) - live)[counted].abs().mean())
            for name, patches in merges.items()
        }

    def _logprobs(self, texts: Texts, patches: Mapping[str, Patch], *, adapter: bool) -> Tensor:
        """Return the log-probs of the targets ``[B, T]``."""
        dtype = self._model.dtype
        with (
            nullcontext() if adapter else self._adapted.disable_adapter(),
            self._weights.running(patches),
            torch.no_grad(),
        ):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                hidden = self._model.base_model(input_ids=texts.token_ids, use_cache=False).last_hidden_state
            with self._weights.filled(self._model.get_output_embeddings(), patches):
                logprobs, _ = Head.read(self._model, dtype).logprobs(
                    hidden.flatten(0, 1), texts.targets.flatten(), chunk_tokens=CHUNK_TOKENS, with_entropy=False
                )
        return logprobs.view_as(texts.token_ids)
