"""Merging of an adapter into the files of its base model, one file at a time.

Shapes: B texts, T tokens of the longest.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rlpipe.common.atomic_io import begin_folder, complete_folder, write_whole, writing_path
from rlpipe.common.hub import local_model
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.errors import DataError, ModelError, RunError
from rlpipe.kernels.primitives import IGNORED
from rlpipe.learner.adapter_patches import (
    UNQUANTIZED,
    Patch,
    empty_base,
    is_made_for,
    load_adapter,
    over_nf4,
    over_scaled,
)
from rlpipe.learner.forward import LmHead
from rlpipe.models.adapter import read_adapter, read_peft_config, read_record
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.hf_weight_map import WeightGroup, plan_units
from rlpipe.models.loading import refuse_missing
from rlpipe.models.model_files import read_json
from rlpipe.models.nf4 import nf4_parameters
from rlpipe.models.weight_files import ModelFiles, open_files

METADATA = {"format": "pt"}
"""Metadata without which transformers refuses a file."""
UNROUNDED = {"F64", "F32", "F16", "BF16"}
"""Types of tensors that a merge can change; others stand for values with scales that are stored elsewhere."""


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, which gets its name only once it is complete."""
    temporary = writing_path(path)
    save_file(dict(tensors), temporary, metadata=METADATA)
    temporary.replace(path)


def data_bytes(path: Path) -> int:
    """Return the bytes of all tensors in a safetensors file."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


class StreamedModel:
    """An empty model whose modules load their weights from files; create it before an adapter is put on the model."""

    def __init__(self, model: PreTrainedModel, files: ModelFiles, units: Sequence[WeightGroup]) -> None:
        self._files = files
        self._names = {module: name for name, module in model.named_modules() if _parameters_of(module)}
        meta_tensors = files.meta_tensors()
        self._units = {
            parameter: unit
            for unit in units
            for parameter in unit.to_parameters({name: meta_tensors[name] for name in unit.sources})
        }
        self._tied: Mapping[str, str] = dict(model.all_tied_weights_keys or {})

    def check_complete(self, model: PreTrainedModel) -> None:
        """Raise ``ModelError`` for parameters of the model that the files lack."""
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        missing = {name for name in names if name not in self._units and self._tied.get(name) not in self._units}
        may_miss = "|".join(model._keys_to_ignore_on_load_missing or ())
        refuse_missing(self._files.folder, {name for name in missing if not (may_miss and re.search(may_miss, name))})

    @contextmanager
    def running(self, patches: Mapping[str, Patch]) -> Iterator[None]:
        """Make calls of the model load the patched weights, inside the context."""
        handles: list[Any] = []
        for module in self._names:
            placeholder = _parameters_of(module)
            handles += [
                module.register_forward_pre_hook(lambda module, _: self._fill(module, patches)),
                module.register_forward_hook(
                    lambda module, *_, placeholder=placeholder: _set(module, placeholder), always_call=True
                ),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def filled(self, module: nn.Module, patches: Mapping[str, Patch]) -> Iterator[None]:
        """Load one module's patched weights without calling it, inside the context; it may be an adapter's wrapper."""
        module = module if module in self._names else module.get_base_layer()  # type: ignore[operator]
        placeholder = _parameters_of(module)
        self._fill(module, patches)
        try:
            yield
        finally:
            _set(module, placeholder)

    def _fill(self, module: nn.Module, patches: Mapping[str, Patch]) -> None:
        _set(module, {name: self._read(f"{self._names[module]}.{name}", patches) for name in _parameters_of(module)})

    def _read(self, name: str, patches: Mapping[str, Patch]) -> Tensor:
        name = name if name in self._units else self._tied[name]
        unit = self._units[name]
        weight = unit.to_parameters(self._files.read(unit.sources))[name]
        return patches[name](weight) if name in patches else weight


def _parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False))


def _set(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        if is_parametrized(module, name):  # PEFT adapts expert weights by a parametrization
            module.parametrizations[name].original = parameter  # type: ignore[index,union-attr]
        else:
            setattr(module, name, parameter)


CHUNK_TOKENS = 128
"""Number of tokens whose logits are in memory at once."""


@dataclass(kw_only=True, frozen=True, slots=True)
class TextBatch:
    """Texts to compare log-probs on, padded at the end."""

    token_ids: Tensor  # [B, T]
    lengths: Tensor  # [B]

    @property
    def targets(self) -> Tensor:
        """The next token of each token ``[B, T]``, ``IGNORED`` where there is none."""
        last = torch.arange(self.token_ids.shape[1]) >= self.lengths[:, None] - 1
        return self.token_ids.roll(-1, 1).masked_fill(last, IGNORED)


def fill_up(texts: Sequence[Sequence[int]]) -> TextBatch:
    rows = [torch.tensor(text) for text in texts]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return TextBatch(token_ids=padded, lengths=torch.tensor([len(row) for row in rows]))


class MergeDifference:
    """The error of merges against the unmerged adapter; ``live`` patches the files' weights to the adapter's base."""

    def __init__(
        self, model: PreTrainedModel, adapted: PeftModel, weights: StreamedModel, live: Mapping[str, Patch]
    ) -> None:
        self._model, self._adapted, self._weights, self._live = model, adapted, weights, live

    def sample(self, *, num: int, num_tokens: int, start: int, seed: int = 0) -> TextBatch:
        """Sample texts from the unmerged adapter on its base, each starting with the token ``start``."""
        with torch.random.fork_rng(), self._weights.running(self._live):
            torch.manual_seed(seed)
            start_tokens = torch.full((num, 1), start)
            sampled = self._adapted.generate(input_ids=start_tokens, max_new_tokens=num_tokens, do_sample=True)
        ends = self._model.generation_config.eos_token_id
        after_end = torch.isin(sampled[:, 1:], torch.tensor(ends if ends is not None else [])).cumsum(1) > 0
        lengths = (~after_end).sum(1) + 2  # with the start token, which may be an end token, and the end token
        return TextBatch(token_ids=sampled, lengths=lengths.clamp(max=sampled.shape[1]))

    def measure(self, texts: TextBatch, merges: Mapping[str, Mapping[str, Patch]]) -> dict[str, float]:
        """Return the mean absolute difference of log-probs, in nats, for each merge."""
        live = self._logprobs(texts, self._live, adapter=True)
        counted = texts.targets != IGNORED
        return {
            name: float((self._logprobs(texts, patches, adapter=False) - live)[counted].abs().mean())
            for name, patches in merges.items()
        }

    def _logprobs(self, texts: TextBatch, patches: Mapping[str, Patch], *, adapter: bool) -> Tensor:
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
                logprobs, _ = LmHead.read(self._model, dtype).logprobs(
                    hidden.flatten(0, 1), texts.targets.flatten(), chunk_tokens=CHUNK_TOKENS, with_entropy=False
                )
        return logprobs.view_as(texts.token_ids)


PLAN = "merge.json"
"""File in an unfinished output folder that describes the merge, so that only the same merge continues it."""
MAX_TEXTS, MAX_TEXT_TOKENS = 64, 512
"""Limits on the texts read from a file to measure on."""
SAMPLED_TEXTS, SAMPLED_TOKENS = 32, 24
"""Number of texts sampled to measure on, and tokens of each; every token costs a pass over the files."""
WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json"),
    *("*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.npz"),
)
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.*")
TOKENIZER = (*VOCABULARY, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt")
"""Tokenizer files, which the adapter's folder may hold as it was trained with them; they replace the base's."""
CHAT_TEMPLATES = ("chat_template*", "additional_chat_templates")
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(kw_only=True, frozen=True, slots=True)
class MergeRequest:
    """The adapter and base to merge, and the precision of the base to merge in."""

    adapter: str
    """Folder or hub id of a PEFT adapter."""
    output: Path
    base: str | None = None
    """Folder or hub id of the base; None: the one that the adapter's config names."""
    base_precision: str | None = None
    """``full`` or ``nf4``; None: the one whose merge is closer to the adapter on the base that it was trained on."""
    trained_on: str | None = None
    """Precision of the base in training; None: as the adapter's folder records it, or ``full``."""
    text: Path | None = None
    """File of texts to measure on, one per line; None: texts are sampled from the adapter."""
    trust_remote_code: bool = False
    """Run the code that comes with the base."""


def merge(request: MergeRequest) -> Iterator[str]:
    """Write the merged model in the format of ``from_pretrained`` and ``vllm serve``; yield progress messages.

    Files that an interrupted merge wrote are kept. Raises ``InputError`` if the inputs do not fit together or can't be
    merged exactly, and ``RunError`` if the output can't be written.
    """
    if request.output.exists():
        raise ModelError(f"{request.output} exists: choose another folder for the merged model, or delete it")
    adapter = local_model(request.adapter, "adapter")
    named, revision = named_base(adapter, request.base)
    base = local_model(model_folder(named), "--base", revision=revision)
    config, tensors = read_adapter(str(adapter), f"the adapter {adapter}")
    files, make_empty = open_files(base), partial(empty_base, base, trust_remote_code=request.trust_remote_code)
    model = make_empty()
    if not is_made_for(model, tensors) and is_made_for(named_model := make_empty(as_named=True), tensors):
        model = named_model
    units = plan_units(model, [name for names in files.by_file.values() for name in names])
    quantized, weights = nf4_parameters(model), StreamedModel(model, files, units)
    record = read_record(adapter)
    weights.check_complete(model)
    adapted, patches, copied = load_adapter(model, adapter, config, tensors)
    patches = over_scaled(patches | copied, record.weight_scales)
    merges = {"full": patches, "nf4": over_nf4(patches, quantized)}
    trained_on = request.trained_on or record.base_precision
    chosen = request.base_precision or trained_on
    if request.text is not None and trained_on != "nf4":
        raise ModelError(
            "--text: nothing is measured for an adapter that was trained on the unchanged base: leave it out"
        )
    if trained_on == "nf4":
        gap = MergeDifference(model, adapted, weights, live=over_nf4(copied, quantized))
        tokenizer = load_tokenizer(ModelConfig(path=str(base), trust_remote_code=request.trust_remote_code))
        texts = _read_texts(request.text, tokenizer) if request.text is not None else _sample_texts(gap, tokenizer)
        gaps = gap.measure(texts, merges)
        yield from (f"base in {name}: log-probs differ by {nats:.3g} nats on average" for name, nats in gaps.items())
        chosen = request.base_precision or min(gaps, key=gaps.__getitem__)
    plan = _describe(files, adapter, chosen)
    write_merged(files, units, merges[chosen], adapter, request.output, plan)
    yield f"merged into the base in {chosen}: {request.output}"


def named_base(adapter: Path, wanted: str | None = None) -> tuple[str, str | None]:
    """Return the ``wanted`` base, or else the one that an adapter names; and the revision if the adapter names it."""
    config = read_peft_config(str(adapter), str(adapter))
    named = config.base_model_name_or_path
    base = named if wanted is None else wanted
    if not isinstance(base, str):
        raise ModelError(f"the adapter {adapter} does not name its base: give it with --base")
    return base, config.revision if base == named else None


def _read_texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> TextBatch:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text: {path} can't be read: {describe_error(error)}") from None
    texts = [tokenizer.encode(line)[:MAX_TEXT_TOKENS] for line in lines[:MAX_TEXTS]]
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise DataError(f"--text: {path} has no line of two tokens or more")
    return fill_up(texts)


def _sample_texts(gap: MergeDifference, tokenizer: PreTrainedTokenizerBase) -> TextBatch:
    start = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), 0)
    return gap.sample(num=SAMPLED_TEXTS, num_tokens=SAMPLED_TOKENS, start=start)


def write_merged(
    files: ModelFiles,
    units: Sequence[WeightGroup],
    patches: Mapping[str, Patch],
    adapter: Path,
    output: Path,
    plan: str,
) -> None:
    """Write the merged model to ``output``; keep the files that an interrupted merge with the same ``plan`` wrote."""
    changed = _changed_units(units, files, patches)
    try:
        folder = _open_output(output, plan)
        for file, names in files.by_file.items():
            if not (folder / file).exists():
                write_file(folder / file, _merge_file(files, names, changed, patches))
        _copy_other_files(files, adapter, folder)
        (folder / PLAN).unlink()
        complete_folder(folder, output)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the merged model can't be written to {output}: {error}; the same command continues with the missing files"
        ) from error


def _changed_units(units: Sequence[WeightGroup], files: ModelFiles, patches: Mapping[str, Patch]) -> list[WeightGroup]:
    """Return the units that have a patch, after checking on shapes alone that their conversion can be reverted."""
    meta_tensors, unmatched, changed = files.meta_tensors(), set(patches), list[WeightGroup]()
    for unit in units:
        sources = {name: meta_tensors[name] for name in unit.sources}
        parameters = unit.to_parameters(sources)
        if unmatched.isdisjoint(parameters):
            continue
        unmatched -= parameters.keys()
        for name, dtype in files.dtypes(unit.sources).items():
            if dtype not in UNROUNDED:
                raise ModelError(f"{files.folder} is quantized ({name} is stored as {dtype}): {UNQUANTIZED}")
        changed.append(unit)
        try:
            restored = unit.to_sources(parameters)
        except ValueError as error:
            raise ModelError(f"{unit.target} can't be merged: {error}") from None
        for name, source in sources.items():
            if restored[name].shape != source.shape:
                raise ModelError(f"{unit.target} can't be merged: {name} would change its shape")
    tied: Mapping[str, str] = (units[0].model.all_tied_weights_keys or {}) if units else {}
    if unmatched := {name for name in unmatched if tied.get(name) not in patches}:
        raise ModelError(f"{files.folder} lacks parameters that the adapter changes: {', '.join(sorted(unmatched))}")
    return changed


def _merge_file(
    files: ModelFiles, names: Sequence[str], changed: Sequence[WeightGroup], patches: Mapping[str, Patch]
) -> dict[str, Tensor]:
    tensors = files.read(names)
    for unit in changed:
        present = [name for name in unit.sources if name in tensors]
        if present:
            elsewhere = files.read(unit.sources.keys() - tensors.keys())
            parameters = unit.to_parameters(tensors | elsewhere)
            merged = {name: patches[name](value) if name in patches else value for name, value in parameters.items()}
            del elsewhere, parameters
            restored = unit.to_sources(merged)
            for name in present:  # a view would keep the whole tensor in memory, and can't be written
                tensors[name] = restored[name] if unit.converter is None else restored[name].clone()
                if not tensors[name].isfinite().all():
                    raise ModelError(f"{name} is not finite after merging: the adapter or the base is broken")
    return tensors


def _describe(files: ModelFiles, adapter: Path, precision: str) -> str:
    base = {file: [(status := (files.folder / file).stat()).st_size, status.st_mtime_ns] for file in files.by_file}
    adapter_digests = {
        path.name: xxhash.xxh3_128(path.read_bytes()).hexdigest() for path in sorted(adapter.glob("adapter_*"))
    }
    return json.dumps(
        {"base": str(files.folder.resolve()), "files": base, "adapter": adapter_digests, "precision": precision},
        indent=2,
    )


def _open_output(output: Path, plan: str) -> Path:
    """Return the folder to write in: that of an interrupted merge with the same plan, or a new one."""
    folder = writing_path(output)
    if not (folder / PLAN).exists() or (folder / PLAN).read_text() != plan:
        begin_folder(output)
        write_whole(folder / PLAN, plan)
    return folder


def _copy_other_files(files: ModelFiles, adapter: Path, folder: Path) -> None:
    """Copy the tokenizer, config and other files unchanged, and write a new index."""
    tokenizer_files = {path.name: path for path in adapter.iterdir() if _matches(path, TOKENIZER + CHAT_TEMPLATES)}
    left_out = WEIGHTS + _replaced_files(adapter)
    other_files = {path.name: path for path in files.folder.iterdir() if not _matches(path, left_out)}
    for path in (other_files | tokenizer_files).values():
        if folder.resolve().is_relative_to(path.resolve()):
            continue  # the output lies in the base's folder
        if path.is_dir():
            if not path.name.startswith("."):  # such as .git and .cache
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)
        else:
            shutil.copy2(path, folder)
    if len(files.by_file) > 1:
        index = {
            "metadata": {"total_size": sum(data_bytes(folder / file) for file in files.by_file)},
            "weight_map": {name: file for file, names in files.by_file.items() for name in names},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _replaced_files(adapter: Path) -> tuple[str, ...]:
    """Return patterns of the base's files that would change the adapter's own tokenizer or chat template."""
    paths, config = list(adapter.iterdir()), adapter / TOKENIZER_CONFIG
    has_tokenizer = config.exists() and any(_matches(path, VOCABULARY) for path in paths)
    has_template = bool(read_json(config).get("chat_template")) or any(_matches(path, CHAT_TEMPLATES) for path in paths)
    return (TOKENIZER if has_tokenizer else ()) + (CHAT_TEMPLATES if has_template else ())


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(path.match(pattern) for pattern in patterns)
