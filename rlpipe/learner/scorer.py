"""Runs a packed row through a causal language model and returns the log-probs of its loss tokens.

Shapes: M tokens of the row, K loss tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpipe.errors import ModelError
from rlpipe.kernels.logprob import linear_logprob
from rlpipe.learner.rows import Layout, Row
from rlpipe.learner.weight_scales import Drift

LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISORS = ("logits_scaling",)
LOGIT_CAP = "final_logit_softcapping"
LOGIT_CHANGES = ("logits_soft_cap", "output_logit_soft_cap", "logits_mup_width_multiplier")
"""What no model that is known to train here does to its logits."""


class TokenScorer(nn.Module):
    """The model with the fused lm_head in place of its own; one module, so that it can be sharded as a whole.

    ``compute_dtype`` is what matrix products run in; where it is narrower than that of the trained parameters,
    they are cast on the way (autocast). ``drifts`` are the weights whose scale stood out when they were loaded.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        compute_dtype: torch.dtype,
        layout: Layout,
        drifts: Sequence[Drift] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.layout = layout
        self.drifts = drifts
        self.logit_scale = logit_scale(self.causal_model)
        self.logit_cap = logit_cap(self.causal_model)

    @property
    def causal_model(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.get_base_model()) if isinstance(self.model, PeftModel) else self.model

    def hidden_states(self, row: Row) -> Tensor:
        """The last hidden state of every token of the row ``[M, H]``."""
        if self.layout is Layout.APART:
            assert row.attention is not None
            (block,) = row.attention.blocks  # [S, L]
            output = self.causal_model.base_model(input_ids=row.token_ids[block], use_cache=False)
            return output.last_hidden_state.flatten(0, 1).index_select(0, row.attention.selected)
        arguments = {"attention_plan": row.attention} if row.attention is not None else {}
        # Without use_cache=False, transformers does not look at the position ids and rows see each other.
        output = self.causal_model.base_model(
            input_ids=row.token_ids[None], position_ids=row.position_ids[None], use_cache=False, **arguments
        )
        return output.last_hidden_state[0]

    def forward(
        self, row: Row, temperature: float, chunk_tokens: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs ``[K]`` of the row's targets and, if asked for, the entropies in nats ``[K]``."""
        narrow = self.compute_dtype is not torch.float32
        with torch.autocast(row.token_ids.device.type, self.compute_dtype, enabled=narrow):
            hidden = self.hidden_states(row).index_select(0, row.predictors)  # [K, H]
        weight, bias = lm_head(self.causal_model)
        return linear_logprob(
            hidden,
            weight.to(self.compute_dtype),
            row.targets,
            bias=None if bias is None else bias.to(self.compute_dtype),
            temperature=temperature / self.logit_scale,
            softcap=self.logit_cap,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )


def lm_head(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight ``[V, H]`` and bias ``[V]`` that make logits of hidden states, with its LoRA unless that is off."""
    head = model.get_output_embeddings()
    base = cast(nn.Linear, head.base_layer if isinstance(head, LoraLinear) else head)
    weight: Tensor = base.weight
    if isinstance(head, LoraLinear) and not head.disable_adapters:
        for adapter in head.active_adapters:
            weight = weight + head.get_delta_weight(adapter)
    return weight, base.bias


def logit_scale(model: PreTrainedModel) -> float:
    """What the model multiplies its logits with; refuses models that do anything else to them."""
    config = model.config.get_text_config()
    for name in LOGIT_CHANGES:
        if getattr(config, name, None) is not None:
            raise ModelError(
                f"{type(model).__name__} has {name}: rlpipe can't train a model that changes its logits so"
            )
    scale = 1.0
    for name in LOGIT_MULTIPLIERS:
        scale *= getattr(config, name, 1.0)
    for name in LOGIT_DIVISORS:
        scale /= getattr(config, name, 1.0)
    return scale


def logit_cap(model: PreTrainedModel) -> float | None:
    """What the logits are bounded to, by cap · tanh(logits / cap)."""
    cap: float | None = getattr(model.config.get_text_config(), LOGIT_CAP, None)
    return cap
