"""The merge of a LoRA adapter into its base model's files (``rlpipe merge``), with one file in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from huggingface_hub import snapshot_download
from peft import PeftConfig
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rlpipe.common.atomic_io import begin_folder, complete_folder, write_whole, writing_path
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.tokenizer import load_tokenizer
from rlpipe.errors import DataError, ModelError, RunError
from rlpipe.learner.merge.adapter_patches import (
    Patch,
    hollow_base,
    is_made_for,
    load_adapter,
    over_nf4,
    over_scaled,
    tensor_names,
)
from rlpipe.learner.merge.merge_error import Gap, Texts, fill_up
from rlpipe.learner.merge.model_files import ModelFiles, data_bytes, open_files, write_file
from rlpipe.learner.merge.streaming import Streamed
from rlpipe.learner.policy import find_source
from rlpipe.models.adapter_metadata import read_record
from rlpipe.models.hf_weight_map import WeightGroup, plan_units
from rlpipe.models.nf4 import nf4_parameters

PLAN = "merge.json"
"""File in an unfinished output folder that describes the merge, so that only the same merge continues it."""
MAX_TEXTS, MAX_TEXT_TOKENS = 64, 512
"""Limits on the texts read from a file to measure on."""
DRAWN_TEXTS, DRAWN_TOKENS = 32, 24
"""Number of texts sampled to measure on, and tokens of each; every token costs a pass over the files."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
"""Tokenizer files, which the adapter's folder may hold as it was trained with them; they replace the base's."""


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


def merge(request: MergeRequest) -> Iterator[str]:
    """Write the merged model in the format of ``from_pretrained`` and ``vllm serve``; yield progress messages.

    Files that an interrupted merge wrote are kept. Raises ``InputError`` if the inputs do not fit together or can't be
    merged exactly, and ``RunError`` if the output can't be written.
    """
    if request.output.exists():
        raise ModelError(f"{request.output} exists: choose another folder for the merged model, or delete it")
    adapter = _find_folder(request.adapter, "adapter")
    base = _find_folder(request.base or named_base(adapter), "--base")
    files, model, tensors = open_files(base), hollow_base(base), tensor_names(adapter)
    if not is_made_for(model, tensors) and is_made_for(other := hollow_base(base, as_named=True), tensors):
        model = other
    units = plan_units(model, [name for names in files.by_file.values() for name in names])
    quantized, weights = nf4_parameters(model), Streamed(model, files, units)
    record = read_record(adapter)
    adapted, patches = load_adapter(model, adapter, tensors)
    patches = over_scaled(patches, record.weight_scales)
    merges = {"full": patches, "nf4": over_nf4(patches, quantized)}
    trained_on = request.trained_on or record.base_precision
    chosen = request.base_precision or trained_on
    if request.text is not None and trained_on != "nf4":
        raise ModelError("--text: the adapter was trained on the base as it is, and nothing is measured: leave it out")
    if trained_on == "nf4":
        gap = Gap(model, adapted, weights, live=over_nf4({}, quantized))
        texts = _read_texts(request.text, base) if request.text is not None else _draw_texts(gap, base)
        gaps = gap.measure(texts, merges)
        yield from (f"base in {name}: log-probs differ by {nats:.3g} nats on average" for name, nats in gaps.items())
        chosen = request.base_precision or min(gaps, key=gaps.__getitem__)
    plan = _describe(files, adapter, chosen)
    write_merged(files, units, merges[chosen], adapter, request.output, plan)
    yield f"merged into the base in {chosen}: {request.output}"


def _find_folder(path: str, what: str) -> Path:
    """Return the local folder, downloaded from the hub if ``path`` is not a folder."""
    source = Path(find_source(path, what))
    return source if source.is_dir() else Path(snapshot_download(path))


def named_base(adapter: Path) -> str:
    try:
        base = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    except (OSError, ValueError) as error:
        raise ModelError(f"{adapter} holds no PEFT adapter: {describe_error(error)}") from None
    if base is None:
        raise ModelError(f"the adapter {adapter} does not name its base: give it with --base")
    return base


def _read_texts(path: Path, base: Path) -> Texts:
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text: {path} can't be read: {describe_error(error)}") from None
    texts = [tokenizer.encode(line)[:MAX_TEXT_TOKENS] for line in lines[:MAX_TEXTS]]
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise DataError(f"--text: {path} has no line of two tokens or more")
    return fill_up(texts)


def _draw_texts(gap: Gap, base: Path) -> Texts:
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    start = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), 0)
    return gap.sample(num=DRAWN_TEXTS, num_tokens=DRAWN_TOKENS, start=start)


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
        folder = _begin(output, plan)
        for file, names in files.by_file.items():
            if not (folder / file).exists():
                write_file(folder / file, _merge_file(files, names, changed, patches))
        _write_rest(files, adapter, folder)
        (folder / PLAN).unlink()
        complete_folder(folder, output)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the merged model can't be written to {output}: {error}; the same command goes on with what is missing"
        ) from error


def _changed_units(units: Sequence[WeightGroup], files: ModelFiles, patches: Mapping[str, Patch]) -> list[WeightGroup]:
    """Return the units that have a patch, after checking on shapes alone that their conversion can be reverted."""
    outlines, left, changed = files.outlines(), set(patches), []
    for unit in units:
        sources = {name: outlines[name] for name in unit.sources}
        parameters = unit.to_parameters(sources)
        if left.isdisjoint(parameters):
            continue
        left -= parameters.keys()
        changed.append(unit)
        try:
            back = unit.to_sources(parameters)
        except ValueError as error:
            raise ModelError(f"{unit.target} can't be merged: {error}") from None
        for name, outline in sources.items():
            if back[name].shape != outline.shape:
                raise ModelError(f"{unit.target} can't be merged: {name} would change its shape")
    if left:
        raise ModelError(f"{files.folder} lacks parameters that the adapter changes: {', '.join(sorted(left))}")
    return changed


def _merge_file(
    files: ModelFiles, names: Sequence[str], changed: Sequence[WeightGroup], patches: Mapping[str, Patch]
) -> dict[str, Tensor]:
    tensors = files.read(names)
    for unit in changed:
        here = [name for name in unit.sources if name in tensors]
        if here:
            elsewhere = files.read(unit.sources.keys() - tensors.keys())
            parameters = unit.to_parameters(tensors | elsewhere)
            merged = {name: patches[name](value) if name in patches else value for name, value in parameters.items()}
            del elsewhere, parameters
            back = unit.to_sources(merged)
            for name in here:  # a view would keep the whole tensor in memory, and can't be written
                tensors[name] = back[name] if unit.converter is None else back[name].clone()
                if not tensors[name].isfinite().all():
                    raise ModelError(f"{name} is not finite once it is merged: the adapter or the base is broken")
    return tensors


def _describe(files: ModelFiles, adapter: Path, precision: str) -> str:
    base = {file: [(status := (files.folder / file).stat()).st_size, status.st_mtime_ns] for file in files.by_file}
    parts = {path.name: xxhash.xxh3_128(path.read_bytes()).hexdigest() for path in sorted(adapter.glob("adapter_*"))}
    return json.dumps(
        {"base": str(files.folder.resolve()), "files": base, "adapter": parts, "precision": precision}, indent=2
    )


def _begin(output: Path, plan: str) -> Path:
    """Return the folder to write in: that of an interrupted merge with the same plan, or a new one."""
    folder = writing_path(output)
    if not (folder / PLAN).exists() or (folder / PLAN).read_text() != plan:
        begin_folder(output)
        write_whole(folder / PLAN, plan)
    return folder


def _write_rest(files: ModelFiles, adapter: Path, folder: Path) -> None:
    """Copy the tokenizer, config and other files unchanged, and write a new index."""
    rest = [path for path in files.folder.iterdir() if not any(path.match(pattern) for pattern in WEIGHTS)]
    trained_with = [path for path in adapter.iterdir() if any(path.match(pattern) for pattern in TOKENIZER)]
    for path in rest + trained_with:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copy2(path, folder)
    if len(files.by_file) > 1:
        index = {
            "metadata": {"total_size": sum(data_bytes(folder / file) for file in files.by_file)},
            "weight_map": {name: file for file, names in files.by_file.items() for name in names},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
