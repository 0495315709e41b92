"""The feature network's features against transformers' own hidden states, sequence by sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from covering import one_in
from family_cases import FAMILIES, HYBRID, SIZES, make_family, write_model
from feature_cases import join_reference
from learner_cases import make_model_config
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma4TextConfig, PreTrainedConfig, set_seed

from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.learner.objectives import BaseModelReference
from rlpipe.learner.policy import load_policy
from rlpipe.models.loading import open_model
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.scoring.feature_scorer import FeatureReader, FeatureSequence, open_feature_network

CPU = torch.device("cpu")
LENGTHS = (9, 14, 3, 14, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def make_sequences() -> list[FeatureSequence]:
    rng = np.random.default_rng(0)
    return [
        FeatureSequence(
            token_ids=rng.integers(7, 100, length).astype(np.int32), completion_mask=np.arange(length) >= length // 2
        )
        for length in LENGTHS
    ]


def alone(
    folder: Path, sequence: FeatureSequence, depths: list[int], pooling: str, normalize: str = "each"
) -> np.ndarray:
    config = make_model_config(folder, attention="eager")
    model = open_model(config.path, config, torch.float32).eval()
    with torch.no_grad():
        token_ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        states = model(input_ids=token_ids[None], output_hidden_states=True).hidden_states
    length = len(token_ids)
    layers = [states[depth].reshape(-1, length, states[depth].shape[-1])[0].double().numpy() for depth in depths]
    tokens = np.stack([join_reference([layer[place] for layer in layers], normalize) for place in range(length)])
    if pooling == "concat":
        return np.concatenate([tokens[int(length * share)] for share in (0.25, 0.5, 0.75)])
    return {"last_token": tokens[-1], "mean_pooling": tokens.mean(0), "completion_mean": tokens[length // 2 :].mean(0)}[
        pooling
    ]


@pytest.mark.parametrize("pooling", ["last_token", "mean_pooling", "completion_mean", "concat"])
def test_features_are_those_of_each_sequence_alone(folder: Path, pooling: str) -> None:
    config = FeatureConfig(layers=[0.5, 1.0], pooling=pooling)
    reader = open_feature_network(make_model_config(folder), config, CPU, max_tokens=20)
    for got, sequence in zip(reader.read(make_sequences()), make_sequences(), strict=True):
        np.testing.assert_allclose(got, alone(folder, sequence, [1, 2], pooling), atol=1e-5)


@pytest.mark.parametrize("normalize", ["joint", "none"])
def test_features_are_normalized_as_the_option_says(folder: Path, normalize: str) -> None:
    config = FeatureConfig(layers=[0.5, 1.0], pooling="mean_pooling", normalize_layers=normalize)
    reader = open_feature_network(make_model_config(folder), config, CPU, max_tokens=20)
    for got, sequence in zip(reader.read(make_sequences()), make_sequences(), strict=True):
        expected = alone(folder, sequence, [1, 2], "mean_pooling", normalize)
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", one_in(4, sorted(FAMILIES)))
def test_so_they_are_for_the_families_that_people_train(tmp_path: Path, family: str) -> None:
    make_family(family, tmp_path)
    config = FeatureConfig(layers=[0.5, 1.0])
    reader = open_feature_network(make_model_config(tmp_path), config, CPU, max_tokens=30)
    for got, sequence in zip(reader.read(make_sequences()), make_sequences(), strict=True):
        np.testing.assert_allclose(got, alone(tmp_path, sequence, [1, 2], "last_token"), atol=1e-5)


VOCABULARY = {"vocab_size": 300, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16}
DEEP = {"layer_types": HYBRID * 2, "sliding_window": 5, "num_hidden_layers": 4, "num_kv_shared_layers": 1}


@pytest.mark.parametrize(
    "config",
    [
        Gemma4TextConfig(**SIZES | DEEP | VOCABULARY, global_head_dim=64),
        Gemma3nTextConfig(**SIZES | DEEP | VOCABULARY, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4),
    ],
    ids=["gemma4", "gemma3n"],
)
def test_models_with_embeddings_for_each_layer_are_read_at_their_inner_layers(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    set_seed(0)
    model = write_model(AutoModelForCausalLM.from_config(config), make_tokenizer(), tmp_path)
    reader = open_feature_network(make_model_config(model), FeatureConfig(layers=[0.25, 0.5]), CPU, max_tokens=30)
    for got, sequence in zip(reader.read(make_sequences()), make_sequences(), strict=True):
        np.testing.assert_allclose(got, alone(model, sequence, [1, 2], "last_token"), atol=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 14, 28, 1000])
def test_features_do_not_depend_on_the_micro_batches(folder: Path, max_tokens: int) -> None:
    config = FeatureConfig()
    whole = open_feature_network(make_model_config(folder), config, CPU, max_tokens=1000)
    cut = open_feature_network(make_model_config(folder), config, CPU, max_tokens=max_tokens)
    torch.testing.assert_close(cut.read(make_sequences()), whole.read(make_sequences()), atol=1e-6, rtol=0)


def test_layers_that_are_not_read_and_the_head_are_not_kept(folder: Path) -> None:
    def num_parameters(layers: list[float]) -> int:
        reader = open_feature_network(make_model_config(folder), FeatureConfig(layers=layers), CPU, max_tokens=100)
        module = reader._depths.__self__  # type: ignore[attr-defined]
        return sum(parameter.numel() for parameter in module.parameters())

    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert num_parameters([1.0]) == whole.num_parameters() - whole.lm_head.weight.numel()
    layer = sum(parameter.numel() for parameter in whole.model.layers[1].parameters())
    assert num_parameters([0.5]) == num_parameters([1.0]) - layer


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_the_learners_weights_with_the_adapter_off_give_the_same_features(tmp_path: Path, adapter: str) -> None:
    folder = make_tiny_policy(tmp_path / "policy", num_layers=2)  # with widths that NF4 supports on CPUs
    model, config = make_model_config(folder, adapter=adapter), FeatureConfig(layers=[0.25, 0.5, 1.0])
    policy = load_policy(model, LearnerConfig(), CPU)
    for parameter in policy.trainable_parameters().values():
        parameter.data += 0.05
    shared = FeatureReader(
        BaseModelReference(policy).depths,
        config,
        num_layers=policy.module.num_layers,
        layout=policy.module.layout,
        device=CPU,
        max_tokens=50,
    )
    own = open_feature_network(model, config, CPU, max_tokens=50)
    torch.testing.assert_close(shared.read(make_sequences()), own.read(make_sequences()), atol=1e-5, rtol=0)
