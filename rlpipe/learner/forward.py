"""Forward pass of the policy over a packed row, to log-probs and entropies.

Shapes: M tokens of the row (T where any tokens are meant), K loss tokens, H hidden size, V vocabulary, L outputs of a
reward head, r rank of all LoRA of the lm_head together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpipe.errors import ModelError
from rlpipe.kernels.logprob import linear_logits, linear_logprob
from rlpipe.learner.adapter_layers import Drift
from rlpipe.learner.row_plan import AttentionLayout, Row, mask_for, use_masks
from rlpipe.models.adapter import ADAPTER
from rlpipe.models.loading import CLASSIFIER, num_embeddings

LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
LOGITS_SCALING = "logits_scaling"
"""Divides the logits, but multiplies them in HyperCLOVA X."""
STATES_NDIM = 3
"""Dimensions of hidden states ``[S, L, H]``."""
LOGIT_CAP = "final_logit_softcapping"
LOGIT_CHANGES = ("logits_soft_cap", "output_logit_soft_cap", "logits_mup_width_multiplier")
"""Config names of logit changes that ``LmHead`` does not implement; models that set one are refused."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LmHead:
    """The lm_head's weights and settings; its tensors are the model's own, so it is read anew for each use."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    down: Tensor | None  # [r, H], with the LoRA's scale
    up: Tensor | None  # [V, r]
    scale: float
    softcap: float | None
    dtype: torch.dtype
    """Dtype of the matrix products."""

    @classmethod
    def read(cls, model: PreTrainedModel, dtype: torch.dtype) -> LmHead:
        """Read the lm_head of a model, with its LoRA unless that is disabled."""
        head = model.get_output_embeddings()
        base = cast(nn.Linear, head.base_layer if isinstance(head, LoraLinear) else head)
        pairs = _adapters(head) if isinstance(head, LoraLinear) else []
        return cls(
            weight=base.weight,
            bias=base.bias,
            down=torch.cat([down for down, _ in pairs]) if pairs else None,
            up=torch.cat([up for _, up in pairs], 1) if pairs else None,
            scale=logit_scale(model),
            softcap=logit_cap(model),
            dtype=dtype,
        )

    def logprobs(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies of targets ``[T]`` of states ``[T, H]``; see ``linear_logprob``."""
        return linear_logprob(targets=targets, **self._inputs(hidden), **options)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return logits ``[T, V]`` of ``[T, H]`` over the temperature, in at least float32, without gradient."""
        return linear_logits(temperature=temperature, **self._inputs(hidden))

    def _inputs(self, hidden: Tensor) -> dict[str, Any]:
        hidden = hidden.to(self.dtype)
        return {
            "hidden": hidden,
            "weight": self.weight.to(self.dtype),
            "bias": self.bias,
            "states": None if self.down is None else nn.functional.linear(hidden, self.down.to(self.dtype)),
            "up": None if self.up is None else self.up.to(self.dtype),
            "scale": self.scale,
            "softcap": self.softcap,
        }


def _adapters(head: LoraLinear) -> list[tuple[Tensor, Tensor]]:
    """Return the matrices ``[r, H]``, scaled, and ``[V, r]`` of each active LoRA."""
    if head.disable_adapters or head.merged:
        return []
    active = [name for name in head.active_adapters if name in head.lora_A]
    down, up = cast(dict[str, nn.Linear], head.lora_A), cast(dict[str, nn.Linear], head.lora_B)
    return [(down[name].weight * head.scaling[name], up[name].weight) for name in active]


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the lm_head, or the head of a reward model; its weight is read without calling it."""
    head: nn.Module | None = getattr(model, CLASSIFIER, None)
    return model.get_output_embeddings() if head is None else head


def check_adapter(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if the lm_head has a LoRA that is more than a product of two matrices."""
    head = model.get_output_embeddings()
    if not isinstance(head, LoraLinear):
        return
    options = {
        "use_dora": bool(head.lora_magnitude_vector),
        "dropout": any(isinstance(dropout, nn.Dropout) and dropout.p for dropout in head.lora_dropout.values()),
        "lora_bias": any(head.lora_bias.values()),
    }
    for name, is_used in options.items():
        if is_used:
            raise ModelError(
                f"model.adapter.{name} can't apply to the lm_head: leave it out, or take lm_head out of the targets"
            )


def check_logits(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if the model changes its logits in a way that ``LmHead`` does not implement."""
    config = model.config.get_text_config()
    for name in LOGIT_CHANGES:
        if getattr(config, name, None) is not None:
            raise ModelError(
                f"{type(model).__name__} has {name}: rlpipe can't train a model that changes its logits in this way"
            )


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor that the model multiplies its logits by."""
    config = model.config.get_text_config()
    scale = 1.0
    for name in LOGIT_MULTIPLIERS:
        scale *= getattr(config, name, 1.0)
    scaling = getattr(config, LOGITS_SCALING, 1.0)
    return scale * scaling if config.model_type.startswith("hyperclovax") else scale / scaling


def logit_cap(model: PreTrainedModel) -> float | None:
    """Return the bound of the model's logits, applied as cap · tanh(logits / cap), or None."""
    cap: float | None = getattr(model.config.get_text_config(), LOGIT_CAP, None)
    return cap


Result = TypeVar("Result")


class LogprobModel(nn.Module):
    """The causal model with a fused lm_head, as one module that can be sharded as a whole.

    ``compute_dtype`` is the dtype of matrix products; parameters in a wider one are cast by autocast. ``drifts`` are
    the weights whose scale was found to be off when they were loaded.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        compute_dtype: torch.dtype,
        layout: AttentionLayout,
        drifts: Sequence[Drift] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.layout = layout
        self.drifts = drifts
        self.announce: Callable[[nn.Module], None] = lambda _: None
        """Callback that is given a module whose weights are read next without calling it."""
        self.num_layers: int = self.causal_model.config.get_text_config().num_hidden_layers
        self.num_embeddings = num_embeddings(self.causal_model)
        check_logits(self.causal_model)

    @property
    def causal_model(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.get_base_model()) if isinstance(self.model, PeftModel) else self.model

    @property
    def classifier(self) -> nn.Module | None:
        """The head of a reward model, in PEFT's wrapper if there is an adapter; None if the model has an lm_head."""
        return getattr(self.causal_model, CLASSIFIER, None)

    def forward(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, which reads the weights; sharding gathers them around this call."""
        return work()

    def logprobs(
        self,
        row: Row,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs ``[K]`` of the row's targets and, if asked for, the entropies in nats ``[K]``."""
        work = partial(self._logprobs, row, temperature, chunk_tokens, with_entropy, entropy_gradient)
        result: tuple[Tensor, Tensor | None] = self(work)
        return result

    def read_states(self, row: Row) -> Tensor:
        """Return the last hidden states ``[K, H]`` before the row's targets, without gradient."""
        states: Tensor = self(lambda: self.hidden_states(row).index_select(0, row.predictors))
        return states

    def energies(self, row: Row, temperature: float, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        """Return log-probs ``[K]`` of the row's targets, and the squared lengths ``[K]`` of their gradients by logits.

        These are 1 - 2 p + the sum of all tokens' squared probabilities. The sum's logarithm is twice the log-prob of
        any token minus its log-prob at half the temperature. Without gradient.
        """

        def work() -> tuple[Tensor, Tensor]:
            hidden = self.hidden_states(row).index_select(0, row.predictors)  # [K, H]
            logprobs, _ = self.score_hidden(hidden, row.targets, temperature, chunk_tokens)
            sharper, _ = self.score_hidden(hidden, row.targets, temperature / 2, chunk_tokens)
            return logprobs, (1 - 2 * logprobs.exp() + (2 * logprobs - sharper).exp()).clamp(min=0)

        result: tuple[Tensor, Tensor] = self(work)
        return result

    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of every token at some depths, each ``[M, H]``; 0 is the embedding."""
        result: list[Tensor] = self(partial(self._depths, row, indices))
        return result

    def head_outputs(self, row: Row) -> Tensor:
        """Return the reward head's outputs ``[K, L]``, in float32, at the tokens before the row's targets."""
        result: Tensor = self(partial(self._head_outputs, row))
        return result

    def take_masks(self, implementation: str, device: torch.device, *, flex: bool = True) -> None:
        """Switch to an attention that takes each row's own mask on the device where the passes run.

        ``implementation`` is that of ``model.attention``; ``flex`` allows flex_attention.
        """
        use_masks(self.causal_model, implementation, takes_flex=flex and device.type == "cuda")
        self.layout = AttentionLayout.POSITIONS

    def hidden_states(self, row: Row) -> Tensor:
        """Return the last hidden state of every token of the row ``[M, H]``; call it inside ``forward`` only."""
        if self.layout is AttentionLayout.APART:
            assert row.attention is not None
            (block,) = row.attention.blocks  # [S, L]
            inputs = _vision_inputs(row)
            if row.position_ids.ndim == 2:
                inputs["position_ids"] = row.position_ids[:, block]
            return self._select_row_tokens(row, self.run_backbone(row.token_ids[block], **inputs))
        arguments = _vision_inputs(row)
        if row.attention is not None:
            arguments["attention_plan"] = row.attention
        if row.mask is not None:
            arguments["attention_mask"] = mask_for(self.causal_model, row.mask)
        states = self.run_backbone(row.token_ids[None], position_ids=row.position_ids.unsqueeze(-2), **arguments)
        return self._select_row_tokens(row, states)

    def run_backbone(self, token_ids: Tensor, **arguments: Any) -> Tensor:
        """Return the last hidden states ``[S, L, H]`` of token ids ``[S, L]``; call it inside ``forward`` only."""
        # Without use_cache=False, transformers does not look at the position ids and rows see each other.
        options = {"use_cache": "past_key_values" in arguments, **arguments}
        narrow = self.compute_dtype is not torch.float32
        # Each weight is cast once a pass; autocast's cache would only keep all cast weights until the pass ends.
        with torch.autocast(token_ids.device.type, self.compute_dtype, enabled=narrow, cache_enabled=False):
            output = self.causal_model.base_model(input_ids=token_ids, **options)
        return cast(Tensor, output.last_hidden_state)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return the next tokens' logits ``[K, V]`` of hidden states ``[K, H]``, divided by the temperature.

        They have no gradient, and are in at least float32. Call it inside ``forward`` only.
        """
        return self._head().logits(hidden, temperature)

    def _head_outputs(self, row: Row) -> Tensor:
        head: Any = self.classifier
        assert head is not None, "the model was loaded with a reward head"
        if not isinstance(head, nn.Linear):
            head = head.modules_to_save[ADAPTER]
        hidden = self.hidden_states(row).index_select(0, row.predictors)  # [K, H]
        # Sharding gathers the weight in the dtype of computation, which a call of the head would multiply in.
        return nn.functional.linear(
            hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()
        )

    def _logprobs(
        self, row: Row, temperature: float, chunk_tokens: int, with_entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.hidden_states(row).index_select(0, row.predictors)  # [K, H]
        return self.score_hidden(hidden, row.targets, temperature, chunk_tokens, with_entropy, entropy_gradient)

    def score_hidden(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies ``[K]`` of the targets of states ``[K, H]``; only inside ``forward``."""
        return self._head().logprobs(
            hidden,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            has_ignored=False,
        )

    def _depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        states_by_depth: dict[int, Tensor] = {}
        layers = find_layers(self.causal_model)

        def keep(index: int, states: Tensor) -> None:
            if states.ndim > STATES_NDIM:  # parallel streams, of which Gemma 3n's layers compute one
                states = states[self.causal_model.config.get_text_config().altup_active_idx]
            states_by_depth[index] = self._select_row_tokens(row, states)

        def keep_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(0, args[0] if args else kwargs["hidden_states"])

        def keep_output(index: int, _: nn.Module, args: Any, output: Any) -> None:
            keep(index, output[0] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for index in set(indices) - {self.num_layers}:
                handle = (
                    layers[index - 1].register_forward_hook(partial(keep_output, index))
                    if index
                    else layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
                )
                hooks.callback(handle.remove)
            last = self.hidden_states(row)
        states_by_depth[self.num_layers] = last
        return [states_by_depth[index] for index in indices]

    def _select_row_tokens(self, row: Row, states: Tensor) -> Tensor:
        """Return the model's hidden states, reordered to the tokens of the row ``[M, H]``."""
        if self.layout is AttentionLayout.APART:
            assert row.attention is not None
            return states.flatten(0, 1).index_select(0, row.attention.selected)
        return states[0]

    def _head(self) -> LmHead:
        self.announce(self.causal_model.get_output_embeddings())
        return LmHead.read(self.causal_model, self.compute_dtype)


def _vision_inputs(row: Row) -> dict[str, Any]:
    """Return the model's inputs for the row's images, on the row's device."""
    device = row.token_ids.device
    return {name: value.to(device, non_blocking=True) for name, value in row.vision.items()}


def find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a model, in order; raise ``ModelError`` if they can't be found."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(model).__name__} has no list of its {count} layers, so their hidden states can't be read")


def drop_unread(module: LogprobModel, deepest: int) -> None:
    """Free the lm_head and the layers after the one that gives the ``deepest`` hidden states.

    Models with embeddings for each layer, which are stored together, keep all layers.
    """
    module.causal_model.set_output_embeddings(nn.Identity())
    layers, text = find_layers(module.causal_model), module.causal_model.config.get_text_config()
    if deepest < len(layers) and not getattr(text, "hidden_size_per_layer_input", None):
        del layers[max(deepest, 1) :]
        text.num_hidden_layers = len(layers)
