"""Tests of GGUF files as models (conversion, place, refused files), and of the configs of known models."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.errors import ModelError
from rlpipe.learner.policy import describe_policy
from rlpipe.models.gguf_models import convert, describe_gguf, model_folder
from rlpipe.models.model_files import (
    DEFAULT_WIDTH,
    converted_folder,
    known_tokenizer_class,
    read_known_config,
    read_widths,
)
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.plan.model_shape import describe_offline

pytestmark = pytest.mark.usefixtures("empty_cache")

gguf = pytest.importorskip("gguf")

WIDTH, INNER, HEADS, KEY_HEADS, LAYERS = 64, 96, 4, 2, 2
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def write_gguf(file: Path, *, architecture: str = "llama", seed: int = 0, without: str = "") -> dict[str, np.ndarray]:
    """Write a random Llama with grouped heads, tied embeddings and one matrix in Q4_1, and return its values."""
    tokens = ["<s>", "</s>", *(chr(code) for code in range(33, 127)), "ab"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(seed)
    sizes = {"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH)}
    sizes |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
    sizes |= {"ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in sizes.items()}
    shapes.pop(without, None)
    values = {}
    for name, shape in shapes.items():
        value = random.standard_normal(shape).astype(np.float32)
        if name == "blk.0.ffn_up":
            packed = gguf.quantize(value, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            value = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", value)
        values[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    file = tmp_path / "small.gguf"
    return file, write_gguf(file)


def test_every_process_reads_the_same_dequantised_folder(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    file, values = made
    folder = model_folder(str(file))
    assert folder == str(converted_folder(file))
    assert describe_policy(ModelConfig(path=str(file))).model_type == "llama"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(model.named_parameters())
    for ours, theirs in {
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down",
        "model.embed_tokens.weight": "token_embd",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v",
    }.items():
        assert torch.equal(weights[ours].detach(), torch.from_numpy(values[theirs].reshape(weights[ours].shape)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = ModelConfig(path=str(file))
    tokenizer = load_tokenizer(config)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("ab", add_special_tokens=False)["input_ids"]) == "ab"
    assert describe_offline(str(file), config).num_key_value_heads == KEY_HEADS
    assert read_widths(str(file)) == (WIDTH, INNER)


def test_what_was_made_is_said(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    file, _ = made
    folder = model_folder(str(file))
    made_of = "llama with 0M parameters in F32, Q4_1, trained and sampled with dequantized weights"
    assert describe_gguf(str(file)) == f"model.path={file}: {made_of}: {folder}"
    assert describe_gguf(folder) is None


def test_a_file_is_converted_once_and_again_when_it_changed(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    file, _ = made
    first = Path(model_folder(str(file)))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert Path(model_folder(str(file))) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    values = write_gguf(file, seed=1)
    second = Path(model_folder(str(file)))
    assert second != first
    model = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32)
    embeddings = model.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(embeddings, values["token_embd"])


def test_processes_that_begin_at_one_time_convert_it_once(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    file, _ = made
    with multiprocessing.get_context("fork").Pool(3) as pool:
        folders = set(pool.map(model_folder, [str(file)] * 3))
    assert folders == {str(converted_folder(file))}
    assert json.loads((converted_folder(file) / "config.json").read_text())["hidden_size"] == WIDTH


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"", "this is not a GGUF file"),
        ("model.gguf", b"GGML and more", "this is not a GGUF file"),
        ("model.gguf", b"GGUF and then nothing that makes sense", "can't dequantize it"),
        ("model-00001-of-00002.gguf", b"GGUF", "join them with llama-gguf-split --merge"),
    ],
)
def test_what_can_not_be_read_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as refusal:
        model_folder(str(file))
    assert "\n" not in str(refusal.value)
    assert not converted_folder(file).exists()


def test_a_file_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file, without="blk.1.ffn_down")
    with pytest.raises(ModelError, match=r"small\.gguf lacks model\.layers\.1\.mlp\.down_proj\.weight, which"):
        model_folder(str(file))


def test_a_file_that_was_cut_off_leaves_nothing_behind(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    file, _ = made
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="can't dequantize it"):
        model_folder(str(file))
    assert not converted_folder(file).exists()
    file.write_bytes(whole)
    assert Path(model_folder(str(file))).is_dir()


def test_an_architecture_that_transformers_can_not_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    write_gguf(file, architecture="starfish")
    with pytest.raises(ModelError, match=r"odd\.gguf: transformers can't dequantize it.*starfish"):
        model_folder(str(file))


def test_a_config_names_the_file_and_not_its_folder(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    file, _ = made
    given = ["experiment=quickstart", "model.prepare=null"]
    load_config([*given, f"model.path={file}"])
    with pytest.raises(ModelError, match=r"only GGUF files; name one of them, such as .*small\.gguf"):
        load_config([*given, f"model.path={file.parent}"])
    with pytest.raises(ModelError, match=r"there is no file .*missing\.gguf"):
        load_config([*given, f"model.path={file.parent}/missing.gguf"])


def test_a_full_disk_is_said(made: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = made
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100})())
    with pytest.raises(ModelError, match=r"the model can't be written.*the disk has"):
        convert(file, converted_folder(file))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden_size=64, num_layers=1)


def changed(policy: Path, folder: Path, model_type: str, tokenizer_class: str | None, **more: object) -> Path:
    for file in policy.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((policy / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    own = json.loads((policy / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "phi3"])
@pytest.mark.parametrize(
    "tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"]
)
def test_the_class_is_that_of_transformers(policy: Path, tmp_path: Path, model_type: str, tokenizer_class: str) -> None:
    folder = changed(policy, tmp_path, model_type, tokenizer_class)
    chosen = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded = load_tokenizer(ModelConfig(path=str(folder)))
    assert type(loaded) is type(chosen)
    assert loaded("27+45=").input_ids == chosen("27+45=").input_ids
    assert loaded.chat_template == chosen.chat_template


def test_files_in_doubt_are_left_to_transformers(policy: Path, tmp_path: Path) -> None:
    assert known_tokenizer_class(policy) == "PreTrainedTokenizerFast"
    code = {"auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}}
    assert known_tokenizer_class(changed(policy, tmp_path, "qwen3", "TokenizersBackend", **code)) is None
    assert known_tokenizer_class(changed(policy, tmp_path, "qwen3", None)) is None
    assert known_tokenizer_class(tmp_path / "missing") is None
    (tmp_path / "config.json").write_text("no json")
    assert read_known_config(tmp_path) is None


@pytest.mark.parametrize(
    "text", ['{"model_type": [], "hidden_size": 1000000000}', '{"text_config": [1], "hidden_size": -1}', "[" * 100_000]
)
def test_a_damaged_config_has_the_widths_of_a_small_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_known_config(tmp_path) is None
    assert read_widths(tmp_path) == (DEFAULT_WIDTH, 4 * DEFAULT_WIDTH)
