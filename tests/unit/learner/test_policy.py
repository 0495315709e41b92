import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases import make_family
from learner_cases import load_tiny, make_batches, make_learner, make_rollouts, micro_batch_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.errors import ConfigError, ModelError
from rlpipe.learner.forward import logit_scale
from rlpipe.learner.policy import empty_policy, load_policy, pads_sequences
from rlpipe.learner.row_plan import AttentionLayout, plan_row
from rlpipe.models.adapter import WEIGHTS_FILE
from rlpipe.types import MicroBatch, Rollout

CPU = torch.device("cpu")


def logprobs_alone(model: PreTrainedModel, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Return log-probs of transformers' own forward pass over one sequence."""
    token_ids = torch.from_numpy(rollout.token_ids).long()
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0] / temperature
    taken = logits[:-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return torch.cat([taken.new_zeros(1), taken]) * torch.from_numpy(rollout.loss_mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_score_as_each_row_alone(tiny: Path, attention: str) -> None:
    policy = load_tiny(tiny, attention=attention)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    rollouts = make_rollouts()
    with policy.inference():
        packed, entropy = policy.logprobs(micro_batch_of(rollouts), temperature=0.7, with_entropy=True)
    alone = torch.cat([logprobs_alone(model, rollout, 0.7) for rollout in rollouts])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    assert entropy is not None
    assert ((entropy > 0) == (packed != 0)).all()


def test_rows_would_leak_into_each_other_with_a_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_tiny(tiny, attention="eager")
    rollouts = make_rollouts()
    backbone = policy.module.causal_model.base_model
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda **arguments: forward(**{**arguments, "use_cache": True}))
    with policy.inference():
        packed, _ = policy.logprobs(micro_batch_of(rollouts), temperature=1.0)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    alone = torch.cat([logprobs_alone(model, rollout, 1.0) for rollout in rollouts])
    assert (packed - alone).abs().max() > 1e-3


def test_shared_prompts_run_once_and_give_the_same_gradient(tiny: Path) -> None:
    micro_batch = micro_batch_of(make_rollouts())
    shared = plan_row(micro_batch, layout=AttentionLayout.SHARED, device=CPU)
    separate = plan_row(micro_batch, layout=AttentionLayout.POSITIONS, device=CPU)
    assert len(shared.token_ids) < len(separate.token_ids) < micro_batch.num_tokens
    gradients = []
    for attention in ("sdpa", "eager"):
        policy = load_tiny(tiny, adapter="none", attention=attention)
        scores, _ = policy.logprobs(micro_batch, temperature=1.0)
        (scores.square().sum() / micro_batch.loss_mask.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable_parameters().values()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=0)
    assert gradients[0].norm() > 1


def test_sliding_windows_hold_in_packed_rows(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.update({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0})
    model.config.layer_types = ["sliding_attention"] * 2
    model.save_pretrained(tmp_path)
    micro_batch = micro_batch_of(make_rollouts())
    scores = []
    for path, attention in ((tmp_path, "sdpa"), (tmp_path, "eager"), (tiny, "sdpa")):
        policy = load_tiny(path, attention=attention)
        with policy.inference():
            scores.append(policy.logprobs(micro_batch, temperature=1.0)[0])
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    assert (scores[0] - scores[2]).abs().max() > 1e-3


def test_a_row_ends_with_the_token_that_predicts_its_last_loss_token() -> None:
    micro_batch = MicroBatch(
        token_ids=np.arange(10, 17),
        position_ids=np.array([0, 1, 2, 3, 0, 1, 2]),
        sequence_starts=np.array([0, 4, 7], np.int32),
        loss_mask=np.array([0, 0, 1, 0, 0, 0, 0], bool),
        logprobs=np.zeros(7, np.float32),
        advantages=np.zeros(7, np.float32),
        policy_versions=np.zeros(7, np.int32),
        group_ids=np.zeros(2, np.int32),
        first_indices=np.zeros(2, np.int64),
    )
    row = plan_row(micro_batch, layout=AttentionLayout.SHARED, device=CPU)
    assert row.token_ids.tolist() == [10, 11]
    assert (row.predictors.tolist(), row.loss_tokens.tolist(), row.targets.tolist()) == ([1], [2], [12])


def test_gradient_checkpointing_changes_nothing(tiny: Path) -> None:
    micro_batch = micro_batch_of(make_rollouts())
    gradients = []
    for checkpointing in (False, True):
        policy = load_tiny(tiny, gradient_checkpointing=checkpointing)
        for name, parameter in policy.trainable_parameters().items():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.01)
        policy.logprobs(micro_batch, temperature=1.0)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable_parameters().values()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


def test_an_adapter_on_the_lm_head_is_part_of_the_scores_and_can_be_switched_off(tiny: Path) -> None:
    config = ModelConfig(path=str(tiny), dtype="float32", adapter=AdapterConfig(target_modules=["lm_head", "q_proj"]))
    policy = load_policy(config, LearnerConfig(), CPU)
    micro_batch = micro_batch_of(make_rollouts())
    with policy.inference():
        before, _ = policy.logprobs(micro_batch, temperature=1.0)
        for name, parameter in policy.trainable_parameters().items():
            if "lm_head.lora_B" in name:
                torch.nn.init.normal_(parameter)
        changed, _ = policy.logprobs(micro_batch, temperature=1.0)
        with policy.adapter_off():
            off, _ = policy.logprobs(micro_batch, temperature=1.0)
    assert (changed - before).abs().max() > 1e-3
    torch.testing.assert_close(off, before, atol=1e-6, rtol=0)
    assert all(parameter.requires_grad for parameter in policy.trainable_parameters().values())


def test_new_adapters_are_alike_for_the_same_seed_and_draw_nothing_from_the_run(tiny: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = load_tiny(tiny).trainable_parameters(), load_tiny(tiny).trainable_parameters()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


def test_a_half_precision_policy_trains_float32_parameters(tiny: Path) -> None:
    micro_batch = micro_batch_of(make_rollouts())
    for adapter in ("lora", "none"):
        exact = load_tiny(tiny, adapter=adapter)
        config = ModelConfig(path=str(tiny), dtype="bfloat16", adapter=AdapterConfig(kind=adapter, r=4))
        policy = load_policy(config, LearnerConfig(), CPU)
        assert {p.dtype for p in policy.trainable_parameters().values()} == {torch.float32}
        scores, _ = policy.logprobs(micro_batch, temperature=1.0)
        scores.sum().backward()
        torch.testing.assert_close(scores, exact.logprobs(micro_batch, temperature=1.0)[0], atol=0.1, rtol=0)
        assert all(parameter.grad is not None for parameter in policy.trainable_parameters().values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/no/such/folder"}, "/no/such/folder"),
        ({"path": "no-such-model-anywhere"}, "no-such-model-anywhere"),
        ({"adapter": AdapterConfig(target_modules=["no_such_module"])}, "no_such_module"),
        ({"adapter": AdapterConfig(path="/no/adapter")}, "/no/adapter"),
        ({"adapter": AdapterConfig(target_modules=["lm_head"], dropout=0.1)}, "dropout"),
        ({"adapter": AdapterConfig(target_modules=["lm_head"], use_dora=True)}, "use_dora"),
    ],
)
def test_what_cannot_be_loaded_is_named_in_one_line_at_once(tiny: Path, options: dict, message: str) -> None:
    config = ModelConfig(**({"path": str(tiny), "dtype": "float32"} | options))
    started = time.monotonic()
    with pytest.raises(ModelError, match=message) as raised:
        load_policy(config, LearnerConfig(), CPU)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("target", ["q_proj", "embed_tokens"])
def test_adapters_with_changed_copies_of_the_bases_embeddings_are_refused(
    tiny: Path, tmp_path: Path, target: str
) -> None:
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(target_modules=[target]))
    config = ModelConfig(path=str(tiny), dtype="bfloat16", adapter=AdapterConfig(path=str(tmp_path)))
    adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    assert any("embed_tokens" in name and "lora_" not in name for name in load_file(tmp_path / WEIGHTS_FILE))
    load_policy(config, LearnerConfig(), CPU)  # copies of the same values are left out
    adapted.get_input_embeddings().weight.data[3] += 0.5
    adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    with pytest.raises(ModelError, match=r"weight, which differs from the base .*: merge it .rlpipe merge"):
        load_policy(config, LearnerConfig(), CPU)
    empty_policy(config)


def test_models_that_change_their_logits_in_other_ways_are_refused(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.output_logit_soft_cap = 30.0
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="output_logit_soft_cap"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("name", ["logit_scale", "output_multiplier"])
def test_scaled_logits_are_scaled(tiny: Path, tmp_path: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    setattr(model.config, name, 0.5)
    model.save_pretrained(tmp_path)
    micro_batch = micro_batch_of(make_rollouts())
    with torch.no_grad():
        scaled, _ = load_tiny(tmp_path).logprobs(micro_batch, temperature=1.0)
        expected, _ = load_tiny(tiny).logprobs(micro_batch, temperature=2.0)
    torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize(("family", "factor"), [("granite", 0.5), ("hyperclovax", 2.0)])
def test_logits_scaling_divides_or_multiplies_as_the_family_does(family: str, factor: float) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, logits_scaling=2.0)
    model = AutoModelForCausalLM.from_config(config)
    token_ids = torch.arange(5)[None]
    with torch.no_grad():
        hidden = model.model(token_ids).last_hidden_state
        torch.testing.assert_close(model(token_ids).logits, factor * model.lm_head(hidden))
    assert logit_scale(model) == factor


def test_several_ranks_need_a_strategy(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="fsdp2"):
        make_learner(tiny, learner=LearnerConfig(num_ranks=2))


def test_an_empty_micro_batch_runs(tiny: Path) -> None:
    batch = make_batches(num_ranks=2, max_tokens=40)[0].mini_batches[0].micro_batches[0]
    batch.loss_mask[:] = False
    policy = load_tiny(tiny)
    scores, entropy = policy.logprobs(batch, temperature=1.0, with_entropy=True)
    scores.sum().backward()
    assert not scores.any()
    assert all(not parameter.grad.any() for parameter in policy.trainable_parameters().values())
    assert entropy is not None


def test_a_token_beyond_the_embedding_is_named(tiny: Path) -> None:
    batch = make_batches()[0].mini_batches[0].micro_batches[0]
    batch.token_ids[3] = 10**6
    with pytest.raises(ModelError, match=r"token 1000000 is beyond the model's \d+ embeddings: use its own tokenizer"):
        load_tiny(tiny).logprobs(batch, temperature=1.0)


def test_the_models_own_dropout_is_off_in_training(tmp_path: Path) -> None:
    noise = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=2000, **noise)).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32", adapter=AdapterConfig(r=2, dropout=0.5))
    policy = load_policy(config, LearnerConfig(), CPU)
    batch = make_batches()[0].mini_batches[0].micro_batches[0]
    with policy.adapter_off():
        scores = [policy.logprobs(batch, temperature=1.0)[0] for _ in range(2)]
    assert policy.module.training
    assert torch.equal(*scores)
    assert {drop.p for name, drop in policy.module.named_modules() if name.endswith("lora_dropout.default")} == {0.5}


@pytest.mark.parametrize(("family", "pads"), [("qwen3", False), ("gemma3", False), ("qwen3.5", True)])
def test_models_that_pad_their_sequences_are_known_without_their_weights(
    tmp_path: Path, family: str, pads: bool
) -> None:
    path = make_family(family, tmp_path / "model")
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert pads_sequences(ModelConfig(path=str(path))) is pads


@pytest.mark.parametrize(
    ("kind", "merge", "is_refused"), [("none", None, True), ("lora", True, True), ("lora", None, False)]
)
def test_quantized_models_are_not_trained_or_merged_as_a_whole(
    tiny: Path, tmp_path: Path, kind: str, merge: bool | None, is_refused: bool
) -> None:
    quantized = shutil.copytree(tiny, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "dequantize": True}
    (quantized / "config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(quantized), dtype="float32", adapter=AdapterConfig(kind=kind, merge=merge))
    expected = r"its weights are quantized, .* adapter on it that is not merged"
    with pytest.raises(ModelError, match=expected) if is_refused else nullcontext():
        load_policy(model, LearnerConfig(), CPU)
