"""Shapes of models without their weights: the table of known models, and the memory of their sequences."""

import json
import time
from pathlib import Path

import pytest
import yaml
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    JambaConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    Zamba2Config,
    ZambaConfig,
)

from rlpipe.configs.compose import list_groups, load_config
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.errors import ModelError
from rlpipe.plan import model_shape as module
from rlpipe.plan.engine_memory import read_kv_cache
from rlpipe.plan.model_shape import ModelShape, describe_offline, known_models, read_shape

TOTALS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "google/gemma-3-1b-pt": 999_885_952,
}
"""The numbers of parameters of the published weights, with tied ones counted once."""


def describe(name: str) -> PreTrainedConfig:
    return describe_offline(name, ModelConfig(path=name))


def shape_of(name: str, **adapter: object) -> ModelShape:
    return read_shape(describe(name), ModelConfig(path=name, adapter=AdapterConfig(**adapter)))


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", TOTALS)
def test_known_models_have_their_number_of_parameters(name: str) -> None:
    assert shape_of(name).num_parameters == TOTALS[name]


def test_every_known_shape_is_checked() -> None:
    content = yaml.safe_load(Path(module.__file__).with_name("offline_models.yaml").read_text())
    assert [entry["repositories"][0] for entry in content] == [*TOTALS]
    assert len(known_models()) == sum(len(entry["repositories"]) for entry in content)


@pytest.mark.slow
def test_models_of_the_experiments_are_known() -> None:
    for experiment in list_groups()["experiment"]:
        config = load_config([f"experiment={experiment}"], need_files=False)
        assert config.model.prepare is not None or config.model.path in known_models()


def test_an_unknown_model_is_refused_within_seconds() -> None:
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"model.path=.*config\.json|neither a folder here nor a model"):
        describe("rlpipe-tests/no-such-model")
    assert time.monotonic() - begin < 5


def test_a_path_that_is_no_hub_id_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"there is no folder 'a/b/c', and it is not a hub id: set model\.path to a folder"
    ):
        describe("a/b/c")
    config = ModelConfig(path="a/b/c", prepare="rlpipe.quickstart:warm_up")
    with pytest.raises(ModelError, match=r"rlpipe\.quickstart:warm_up creates it when a run starts"):
        describe_offline("a/b/c", config)


def test_a_folder_comes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"model\.path=Qwen/Qwen3-8B can't be read"):
        describe("Qwen/Qwen3-8B")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    assert describe("Qwen/Qwen3-8B").hidden_size == 96


def test_a_config_that_describes_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ModelError, match=r"can't be read: .*hidden_size"):
        describe(str(tmp_path))
    config = LlamaConfig(hidden_act="none such")
    with pytest.raises(ModelError, match=r"model\.path=here: its config does not describe a model"):
        read_shape(config, ModelConfig(path="here"))


def test_experts_count_as_far_as_they_are_used() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    assert (shape.num_experts, shape.experts_per_token) == (128, 8)
    assert shape.num_active + shape.num_looked_up == pytest.approx(3_353_032_704)
    assert shape.num_active < shape.num_used(8) < shape.num_used(1000)
    assert shape.num_used(1000) == pytest.approx(shape.num_parameters - shape.num_looked_up)


GEMMA_4_EXPERTS = Gemma4TextConfig(
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=6,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=64,
)


def test_experts_of_gemma_4_are_counted() -> None:
    shape = read_shape(GEMMA_4_EXPERTS, ModelConfig(path="x"))
    assert (shape.num_experts, shape.experts_per_token, shape.intermediate_size) == (128, 8, 8 * 64)
    assert shape.num_in_experts == 6 * 128 * 3 * 256 * 64


def test_embeddings_of_each_layer_are_looked_up() -> None:
    shape = read_shape(Gemma3nTextConfig(), ModelConfig(path="x"))
    assert shape.num_looked_up == 262_144 * 35 * 256
    assert shape.intermediate_size == 16_384


def test_an_embedding_that_is_the_output_layer_too_is_used() -> None:
    assert shape_of("Qwen/Qwen3-4B").num_looked_up == 0
    assert shape_of("Qwen/Qwen3-8B").num_looked_up == 151_936 * 4096
    assert shape_of("Qwen/Qwen3-8B").num_active == 8_190_735_360 - 151_936 * 4096


def test_adapters_are_as_wide_as_the_layers_that_they_target() -> None:
    # q, k, v, o and the three matrices of the MLP, in 36 layers.
    layer = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 12288)
    assert shape_of("Qwen/Qwen3-8B").adapter_width == 36 * layer
    assert shape_of("Qwen/Qwen3-8B", target_modules=["q_proj", "v_proj"]).adapter_width == 36 * (8192 + 5120)


@pytest.mark.parametrize(
    ("name", "num_devices", "token_bytes"),
    [
        ("Qwen/Qwen3-8B", 1, 36 * 2 * 8 * 128 * 2),
        ("meta-llama/Llama-3.1-8B", 1, 32 * 2 * 8 * 128 * 2),
        ("meta-llama/Llama-3.1-70B", 4, 80 * 2 * 2 * 128 * 2),
        ("Qwen/Qwen2.5-7B", 8, 28 * 2 * 1 * 128 * 2),  # fewer heads than devices: each device has one
        ("meta-llama/Llama-3.2-1B", 1, 16 * 2 * 8 * 64 * 2),
        ("mistralai/Mistral-7B-v0.3", 1, 32 * 2 * 8 * 128 * 2),
    ],
)
def test_keys_and_values_of_a_token(name: str, num_devices: int, token_bytes: int) -> None:
    cache = read_kv_cache(describe(name), element_bytes=2, num_devices=num_devices)
    assert cache.token_bytes == token_bytes
    assert cache.held_bytes(1000) == 1008 * token_bytes  # whole blocks of 16


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    cache = read_kv_cache(describe("google/gemma-3-1b-pt"), element_bytes=2)
    layer = 2 * 1 * 256 * 2
    assert cache.read_bytes(100) == 26 * layer * 100
    assert cache.read_bytes(4096) == layer * (4 * 4096 + 22 * 512)
    windowed = read_kv_cache(MistralConfig(sliding_window=4096), element_bytes=2)
    assert windowed.read_bytes(10_000) == windowed.read_bytes(4096)


def test_layers_of_two_head_sizes_each_keep_their_own() -> None:
    described = Gemma4TextConfig(
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
    )
    cache = read_kv_cache(described, element_bytes=2)
    assert [(kind.count, kind.token_bytes, kind.query_width, kind.window) for kind in cache.layers] == [
        (50, 2 * 16 * 256 * 2, 32 * 256, 1024),
        (10, 2 * 4 * 512 * 2, 32 * 512, None),
    ]


def test_layers_that_share_keys_and_values_read_them_and_hold_none() -> None:
    layer = 2 * 2 * 256 * 2
    cache = read_kv_cache(Gemma3nTextConfig(), element_bytes=2)  # every fifth of 35 layers is full; the last 15 share
    assert cache.token_bytes == 20 * layer
    assert cache.held_bytes(4096) == layer * (4 * 4096 + 16 * 512)
    assert cache.read_bytes(4096) == layer * (7 * 4096 + 28 * 512)


def test_latent_attention_keeps_one_vector_on_every_device() -> None:
    for num_devices in (1, 8):
        cache = read_kv_cache(DeepseekV3Config(), element_bytes=2, num_devices=num_devices)
        assert cache.token_bytes == 61 * (512 + 64) * 2


def test_linear_attention_keeps_a_state_of_one_size() -> None:
    cache = read_kv_cache(Qwen3NextConfig(), element_bytes=2)
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert cache.state_bytes == 36 * state
    assert cache.read_bytes(1000) == 36 * state + 12 * 2 * 2 * 256 * 2 * 1000


def test_mamba_keeps_a_state_of_one_size() -> None:
    attention = 2 * 8 * 128 * 2
    nemotron = read_kv_cache(
        NemotronHConfig(layer_types=["mamba", "moe", "mamba", "attention", "mlp"]), element_bytes=2
    )
    state = 128 * 64 * 128 * 4 + (128 * 64 + 2 * 8 * 128) * 3 * 2
    assert (nemotron.state_bytes, nemotron.token_bytes) == (2 * state, attention)
    bamba = read_kv_cache(BambaConfig(attn_layer_indices=[3]), element_bytes=2, num_devices=4)
    state = 128 * 64 * 256 * 4 + (128 * 64 + 2 * 256) * 3 * 2
    assert (bamba.state_bytes, bamba.token_bytes) == (31 * state // 4, attention // 4)
    falcon = read_kv_cache(FalconH1Config(), element_bytes=2)  # attention and Mamba side by side in each layer
    state = 1024 * 256 * 4 + (1024 + 2 * 256) * 3 * 2
    assert (falcon.state_bytes, falcon.token_bytes) == (32 * state, 32 * attention)
    zamba = read_kv_cache(Zamba2Config(), element_bytes=2)  # a shared transformer before every sixth Mamba layer
    state = 8 * 640 * 64 * 4 + (8 * 640 + 2 * 64) * 3 * 2
    assert (zamba.state_bytes, zamba.token_bytes) == (54 * state, 9 * 2 * 32 * 160 * 2)
    assert read_kv_cache(ZambaConfig(), element_bytes=2).state_bytes == 76 * 2 * 3712 * (16 * 4 + 3 * 2)
    jamba = read_kv_cache(JambaConfig(), element_bytes=2)
    assert (jamba.state_bytes, jamba.token_bytes) == (28 * (8192 * 16 * 4 + 8192 * 3 * 2), 4 * attention)
