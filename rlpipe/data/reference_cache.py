"""Cache of a reference's log-probs on disk, by the model that they are of and by the sequence.

A sequence is known by its tokens, its loss mask and its images, so that rows keep their log-probs in whatever order,
split or mix they are read, and a change of the data costs the log-probs of the rows that are new.

Shapes: N tokens of a micro batch, K loss tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b, sha256
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from rlpipe.common.hub import absolute_source
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.cached_rows import cache_root
from rlpipe.data.render.images import file_state
from rlpipe.errors import RunError
from rlpipe.types import FloatArray, MicroBatch, MiniBatch, TrainBatch

FORMAT = 2
"""Version of the file format."""
KEY_BYTES = 16
FLUSH_BYTES = 64 * 2**20
FLUSH_S = 120.0
"""Bytes of log-probs, and seconds, after which what is in memory is written."""
SCHEMA = pa.schema({"key": pa.binary(KEY_BYTES), "logprobs": pa.list_(pa.float32())})
WEIGHTS = ("*.json", "*.safetensors", "*.bin", "*.py")
"""Files of a folder that determine a model."""
READ = ("revision", "dtype", "attention", "images", "processor_kwargs", "trust_remote_code", "normalize_weight_scales")
"""Options of ``model`` that log-probs of the base model depend on."""


def reference_folder(data: DataConfig, model: ModelConfig) -> Path:
    """Return the folder of the log-probs of a model, whose ``dtype`` is settled.

    Its name depends on the model, its files or its revision, its dtype, the adapter that it begins from, and whether it
    is quantized. Raises ``ConfigError`` if ``data.cache`` can't be a folder.
    """
    adapter = model.adapter.path
    inputs = {
        "format": FORMAT,
        "path": absolute_source(model.path),
        "model": {name: value for name, value in dataclasses.asdict(model).items() if name in READ},
        "files": _state(model.path, model.revision),
        "quantized": model.adapter.kind == "qlora",
        "adapter": [adapter and absolute_source(adapter), _state(adapter, None, "adapter_config.json")],
        "libraries": {name: version(name) for name in ("transformers", "torch")},
    }
    return cache_root(data) / "reference" / sha256(json.dumps(inputs, default=repr).encode()).hexdigest()[:32]


def _state(path: str | None, revision: str | None, config: str = "config.json") -> Any:
    """Return sizes and times of a folder's files, or the commit of a hub model in the hub's cache."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return [file_state(str(file)) for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]
    try:
        cached = try_to_load_from_cache(path, config, revision=revision)
    except HFValidationError:
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def keyed_sequences(micro_batch: MicroBatch) -> Iterator[tuple[bytes, slice]]:
    """Yield the key and the slice of each sequence that has loss tokens."""
    for start, stop in pairwise(micro_batch.sequence_starts.tolist()):
        mask = micro_batch.loss_mask[start:stop]
        if not mask.any():
            continue
        digest = blake2b(digest_size=KEY_BYTES)
        digest.update(micro_batch.token_ids[start:stop].astype(np.int32).tobytes())
        digest.update(mask.tobytes())
        for image in micro_batch.images:
            if start <= image.start < stop:
                digest.update(f"{image.start - start} {image.num_tokens} {len(image.content)} ".encode())
                digest.update(image.content)
        yield digest.digest(), slice(start, stop)


def all_micro_batches(mini_batches: Iterable[MiniBatch]) -> Iterator[MicroBatch]:
    """Yield the micro batches of mini batches, and those of their mismatched completions."""
    for mini_batch in mini_batches:
        yield from mini_batch.micro_batches
        if mini_batch.mismatched is not None:
            yield from mini_batch.mismatched.micro_batches


class ReferenceCache:
    """The log-probs ``[K]`` of sequences, in memory and in the files of a folder.

    Raises ``RunError`` if the files can't be written; files that can't be read are ignored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[bytes, FloatArray] = {}
        self._new: dict[bytes, FloatArray] = {}
        self._promised: set[bytes] = set()
        self._flushed_at = time.monotonic()
        for file in sorted(folder.glob("*.arrow")):
            self._known |= _read(file)

    def __len__(self) -> int:
        return len(self._known)

    def is_due(self, batches: Sequence[TrainBatch]) -> bool:
        """Return whether a batch has a sequence without log-probs that was never requested; each is requested once."""
        mini_batches = (mini_batch for batch in batches for mini_batch in batch.mini_batches)
        keys = {key for micro in all_micro_batches(mini_batches) for key, _ in keyed_sequences(micro)}
        is_due = any(key not in self._known and key not in self._promised for key in keys)
        if is_due:
            self._promised |= keys
        return is_due

    def forget_due(self) -> None:
        """Forget which sequences were requested, because nothing computes their log-probs any more."""
        self._promised.clear()

    def add(self, logprobs: Mapping[bytes, FloatArray]) -> None:
        """Keep log-probs by the keys of their sequences, and write them once there are many, or after minutes."""
        new = {key: values for key, values in logprobs.items() if key not in self._known}
        self._known |= new
        self._new |= new
        is_large = sum(values.nbytes for values in self._new.values()) >= FLUSH_BYTES
        if is_large or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> int:
        """Write the new log-probs to a file, and return their number."""
        self._flushed_at = time.monotonic()
        if not self._new:
            return 0
        count, table = len(self._new), {"key": [*self._new], "logprobs": [*self._new.values()]}
        file = self.folder / f"{sha256(b''.join(self._new)).hexdigest()[:32]}.arrow"
        temporary = file.with_suffix(f".{socket.gethostname()}-{os.getpid()}.writing")  # other runs may write it, too
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with pa.ipc.new_file(str(temporary), SCHEMA) as writer:
                writer.write_batch(pa.RecordBatch.from_pydict(table, SCHEMA))
            temporary.replace(file)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RunError(f"log-probs can't be written to {self.folder} ({error}); set data.cache") from None
        self._new = {}
        return count

    def fill(self, batches: Iterable[TrainBatch]) -> None:
        """Set the ``ref_logprobs`` ``[N]`` of all micro batches, whose sequences must be known."""
        for micro_batch in all_micro_batches(mini for batch in batches for mini in batch.mini_batches):
            micro_batch.ref_logprobs = np.zeros(micro_batch.num_tokens, np.float32)
            for key, span in keyed_sequences(micro_batch):
                if key not in self._known:
                    raise RunError(
                        "a row has other tokens than when its reference's log-probs were computed: let data.transform "
                        "return the same each time, or prepare the rows beforehand (rlpipe data prepare)"
                    )
                micro_batch.ref_logprobs[span][micro_batch.loss_mask[span]] = self._known[key]


def _read(file: Path) -> dict[bytes, FloatArray]:
    try:
        with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
            table = reader.read_all()
    except (OSError, pa.ArrowException):
        return {}
    values = (np.array(entry.values.to_numpy(zero_copy_only=False)) for entry in table.column("logprobs"))
    return dict(zip(table.column("key").to_pylist(), values, strict=True))
