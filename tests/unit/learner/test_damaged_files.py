"""Tests that damaged models, adapters and checkpoints are refused in one line, or give the same weights as before."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from damage_cases import DEEP, damage_of, flip_bits, remove
from learner_cases import make_adapter_config, make_batches, make_learner, make_model_config
from ledger_cases import Run
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpipe.cli import main
from rlpipe.common.atomic_io import DIGESTS, SEAL, seal
from rlpipe.configs.options import to_tree
from rlpipe.errors import ModelError
from rlpipe.learner.checkpoint_files import RECORD
from rlpipe.learner.checkpoints import CheckpointStore, export_policy
from rlpipe.models.adapter import FILE, WEIGHTS_FILE, TrainingRecord, read_record
from rlpipe.models.tiny_model import make_tiny_policy

LIMIT_S, LIMIT_BYTES = 20, 4 * 2**30
"""Limits on a command; the memory is what it may take beyond that of the process so far."""
NUM_CASES = 250
CHECKPOINT = [RECORD, ".metadata", "__0_0.distcp"]
ADAPTER = [FILE, WEIGHTS_FILE, "adapter_config.json"]
MODEL_FILE = "model.safetensors"
MODEL = ["config.json", "tokenizer.json", "tokenizer_config.json", MODEL_FILE, "generation_config.json"]
COMMANDS: dict[str, tuple[str, list[str], list[str]]] = {
    "export": ("lora", CHECKPOINT, ["export", "DAMAGED", "OUT"]),
    "export full": ("full", CHECKPOINT, ["export", "DAMAGED", "OUT"]),
    "export old": ("old lora", CHECKPOINT, ["export", "DAMAGED", "OUT"]),
    "export old full": ("old full", CHECKPOINT, ["export", "DAMAGED", "OUT"]),
    "export over": ("base", MODEL, ["export", "lora", "OUT", "--base", "DAMAGED"]),
    "export full over": ("base", MODEL, ["export", "full", "OUT", "--base", "DAMAGED"]),
    "merge": ("adapter", ADAPTER, ["merge", "DAMAGED", "OUT"]),
    "merge plain": ("plain adapter", ADAPTER[1:], ["merge", "DAMAGED", "OUT"]),
    "merge over": ("base", MODEL, ["merge", "adapter", "OUT", "--base", "DAMAGED"]),
    "inspect": ("model", MODEL[:3], ["inspect", "run", "--group", "1"]),
}
"""Folder that is damaged, files of which one is damaged, and command, whose folders are named, by test."""
MAY_DIFFER = {"export old", "export old full", "merge plain", "merge over"}
"""Tests in which the weights come from files without digests."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run's checkpoints, its adapter, the base and a ledger."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("originals")
    base = make_tiny_policy(
        folder / "base", hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=48
    )
    for kind, adapter in (("lora", "lora"), ("full", "none")):
        learner = make_learner(base, adapter=adapter)
        learner.train_step(make_batches()[0])
        extra = {"model": to_tree(make_model_config(base, adapter=adapter))}
        CheckpointStore(folder / "checkpoints", keep=2).save(learner, step=1, extra=extra).rename(folder / kind)
        if adapter == "lora":
            export_policy(learner.policy, folder / "adapter")
        shutil.copytree(folder / kind, folder / f"old {kind}")
        forget_digests(folder / f"old {kind}" / RECORD)
    shutil.copytree(folder / "adapter", folder / "plain adapter")
    (folder / "plain adapter" / FILE).unlink()
    shutil.copytree(base, folder / "model")
    Run(folder / "run", model=str(folder / "model")).train_all()
    return folder


def forget_digests(path: Path) -> None:
    """Rewrite a record as earlier versions of rlpipe wrote it."""
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in record.items() if name not in (SEAL, DIGESTS)}))


def restate_sizes(checkpoint: Path) -> None:
    """Make an old checkpoint's record agree with the sizes of its files, unless the record itself is damaged."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        record = json.loads((checkpoint / RECORD).read_text())
        for name in record["files"].keys() & {path.name for path in checkpoint.iterdir() if path.is_file()}:
            record["files"][name] = (checkpoint / name).stat().st_size
        (checkpoint / RECORD).write_text(json.dumps(record))


class TooSlow(KeyboardInterrupt):
    """Raised when a command has run for too long; not an error that a command may catch."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit time and memory, so that a huge number in a file is seen and harms nobody."""

    def stop(*_: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


class Bench:
    """Runs commands on copies of the originals, of which one is damaged."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys

    def run(self, test: str, damage: Callable[[Path], object]) -> tuple[str | None, dict[str, Tensor]]:
        """Run the command of a ``test``; return its line of error or None, and the weights that it wrote."""
        name, _, command = COMMANDS[test]
        out, damaged = self._folder / "out", self._folder / ("model" if name == "model" else "damaged")
        for path in (out, damaged):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._folder / ("base" if name == "model" else name), damaged)
        damage(damaged)
        if name.startswith("old") and damaged.joinpath(RECORD).is_file():
            restate_sizes(damaged)
        places = {"DAMAGED": damaged, "OUT": out} | {each.name: each for each in self._folder.iterdir()}
        self._capsys.readouterr()
        with limited():
            code = main([str(places.get(word, word)) for word in command])
        error = self._capsys.readouterr().err
        if code == 0:
            return None, weights(out)
        assert code == 2, error
        assert error.startswith("rlpipe: error: ")
        assert error.count("\n") == 1, error
        assert not out.exists()
        return error, {}


@pytest.fixture
def bench(originals: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(originals, capsys)


@pytest.fixture(scope="module")
def undamaged() -> dict[str, dict[str, Tensor]]:
    """Return the weights by test, once the first case of each has computed them."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_any_damage_is_an_error_or_changes_nothing(
    bench: Bench, undamaged: dict[str, dict[str, Tensor]], seed: int
) -> None:
    rng = Random(seed)
    test = [*COMMANDS][seed % len(COMMANDS)]
    file = rng.choice(COMMANDS[test][1])
    if test not in undamaged:
        error, undamaged[test] = bench.run(test, lambda _: None)
        assert error is None
    error, found = bench.run(test, lambda folder: damage_of(folder / file, rng)(folder / file, rng))
    if error is None:
        assert_good(test, undamaged[test], found)


def assert_good(test: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    if test in MAY_DIFFER:
        assert all(tensor.isfinite().all() for tensor in found.values())
        return
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


# Chosen damage --------------------------------------------------------------------------------------------------------


def values(name: str, part: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Return a damage that changes the tensors whose name contains ``part``, or removes them for None."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        changed = {key: change(tensor) if part in key else tensor for key, tensor in tensors.items()}
        kept = {key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / name, metadata={"format": "pt"})

    return damage


def shorten(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


def json_values(name: str, **new: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | new))

    return damage


def content(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def bits(name: str) -> Callable[[Path], None]:
    return lambda folder: flip_bits(folder / name, Random(0))


def sealed(folder: Path) -> None:
    """Forge a checkpoint's record, which has the digest of a file elsewhere that never ends."""
    record = json.loads((folder / RECORD).read_text())
    record.pop(SEAL)
    (folder / RECORD).write_text(seal({**record, DIGESTS: {"/dev/zero": "0"}}))


UP, KEY, NORM, WHOLE = "0.mlp.up_proj.lora_B", "k_proj.lora_A", "model.norm", ""
"""Parts of tensors' names."""
REFUSED: tuple[tuple[str, Callable[[Path], object], str], ...] = (
    ("merge", bits(WEIGHTS_FILE), rf"{WEIGHTS_FILE} has changed since it was written: export"),
    ("merge", json_values("adapter_config.json", lora_alpha=9), r"adapter_config\.json has changed since"),
    ("merge", bits(FILE), r"rlpipe\.json can't be read: .*; export or download the adapter again"),
    ("merge plain", values(WEIGHTS_FILE, UP, lambda old: old / 0), rf"{UP}\.weight holds values that are not finite"),
    ("merge plain", values(WEIGHTS_FILE, UP, shorten), rf"size mismatch for .*{UP}"),
    ("merge plain", values(WEIGHTS_FILE, KEY, lambda _: None), rf"tensors are missing: .*{KEY}"),
    ("merge plain", json_values("adapter_config.json", r=10**9), r"asks for rank 1000000000, which no tensor has"),
    ("merge plain", content("adapter_config.json", DEEP), r"holds no PEFT adapter: RecursionError"),
    ("export", content(RECORD, DEEP), r"has no complete learner\.json"),
    ("export", sealed, r"has no complete learner\.json"),
    (
        "export old full",
        json_values(RECORD, extra={"model": {"path": "x", "dtype": "\ud800"}}),
        r"no usable .*model\.dtype: '\\ud800'",
    ),
    ("export old", json_values(RECORD, extra={}), r"has no usable config of a model: KeyError: 'model'; give another"),
    ("export over", json_values("config.json", num_hidden_layers=10**9), r"has num_hidden_layers=1e\+09; give"),
    ("export over", json_values("config.json", model_type="\ud800\0"), r"can't be read: ValueError: .*\\ud800"),
    ("export over", content("tokenizer.json", '{"model": {"vocab": {"a": 2147483648}}}'), r"has the number 2147483648"),
    ("export over", content("tokenizer.json", '{"model": '), r"model\.path: the tokenizer of .* can't be loaded"),
    ("export full over", values(MODEL_FILE, NORM, lambda _: None), r"lacks model\.norm\.weight, which its config asks"),
    (
        "export full over",
        values(MODEL_FILE, NORM, shorten),
        r"model\.norm\.weight has shape \[31\] in the files, and \[32",
    ),
    ("merge over", values(MODEL_FILE, NORM, lambda _: None), r"lacks model\.norm\.weight, which its config asks for"),
    (
        "merge over",
        values(MODEL_FILE, WHOLE, Tensor.char),
        r"is quantized \(.* is stored as I8\): merge into the model",
    ),
    (
        "merge over",
        values(MODEL_FILE, WHOLE, lambda old: old.to(torch.float8_e4m3fn)),
        r"is stored as F8_E4M3\): merge",
    ),
    (
        "merge over",
        json_values("config.json", quantization_config={"quant_method": "fp8"}),
        r"is quantized: merge into",
    ),
    (
        "merge over",
        content("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}'),
        r"a file in another folder",
    ),
)


@pytest.mark.parametrize(("test", "damage", "message"), REFUSED, ids=range(len(REFUSED)))
def test_chosen_damage_is_named_with_the_fix(
    bench: Bench, test: str, damage: Callable[[Path], object], message: str
) -> None:
    error, _ = bench.run(test, damage)
    assert error is not None
    assert re.search(message, error), error


def test_an_adapter_without_digests_is_merged_as_one_with_them(bench: Bench) -> None:
    merged = [bench.run(test, lambda _: None) for test in ("merge", "merge plain")]
    assert [error for error, _ in merged] == [None, None]
    assert_good("merge", *(found for _, found in merged))


def test_a_damaged_tokenizer_leaves_the_rest_of_a_group_to_look_at(bench: Bench) -> None:
    assert bench.run("inspect", content("tokenizer.json", DEEP)) == (None, {})


def test_an_adapter_over_another_base_is_refused_without_its_record(originals: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(originals / "adapter", tmp_path / "adapter")
    record = TrainingRecord(base_precision="nf4")
    save_file(load_file(adapter / WEIGHTS_FILE), adapter / WEIGHTS_FILE, metadata=record.metadata)
    record.write(adapter)
    assert read_record(adapter) == record
    for damage in (remove, lambda path, _: path.write_text("{}")):
        damage(adapter / FILE, Random(0))
        with pytest.raises(ModelError, match="the adapter's weights say that it has digests"):
            read_record(adapter)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (values(WEIGHTS_FILE, KEY, lambda _: None), rf"these tensors are missing: .*{KEY}"),
        (values(WEIGHTS_FILE, UP, lambda old: old / 0), rf"{UP}.* not finite"),
        (values(WEIGHTS_FILE, UP, shorten), rf"size mismatch for .*{UP}"),
        (json_values("adapter_config.json", target_modules=["q_proj"]), r"no parameters for these tensors: .*k_proj"),
    ],
)
def test_a_learner_does_not_start_from_a_damaged_adapter(
    originals: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    for name in ("plain adapter", "adapter"):
        adapter = shutil.copytree(originals / name, tmp_path / name)
        damage(adapter)
        model = make_model_config(originals / "base", adapter=make_adapter_config(path=str(adapter)))
        expected = "has changed since it was written" if name == "adapter" else message
        with pytest.raises(ModelError, match=expected) as caught:
            make_learner(originals / "base", model=model)
        assert "\n" not in str(caught.value)
