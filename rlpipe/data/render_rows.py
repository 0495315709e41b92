"""Rendering of all rows of a run once, in several processes, to files that appear whole or not at all.

A worker process gets row numbers, and returns a record batch. Only as many batches are in flight as workers need, and
the file is written as they arrive.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlpipe.common.atomic_io import held, writing_path
from rlpipe.configs.data_sources import all_sources
from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.cached_rows import (
    NAME,
    NOTES,
    SCHEMA,
    PreparedRows,
    Rendering,
    Settings,
    cache_root,
    prompt_settings,
    rendering_digest,
    sequence_settings,
    source_digest,
)
from rlpipe.data.prompts import AnyRenderer, ebft_with_reward, preference_of, processor_of, sequence_renderer
from rlpipe.data.render.images import noted_files
from rlpipe.data.render.processor import ImageProcessor
from rlpipe.data.row import RowLocation, Rows, UnusableRow, dump_values
from rlpipe.data.row_renderer import GroundTruthRenderer, PromptRenderer
from rlpipe.data.sources.open_rows import (
    held_out_data,
    named_errors,
    open_held_out_source,
    open_source_rows,
    with_own_images,
)
from rlpipe.errors import DataError, RunError
from rlpipe.types import Images, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

CHUNK_ROWS = 64
BATCH_BYTES = 16 * 2**20
"""Minimum size of a record batch of the file; the last one may be smaller."""

PROMPT_VALUES = [entry.name for entry in fields(Prompt) if entry.name not in ("prompt_id", "epoch", "token_ids")]
"""Fields of a prompt other than its row and its tokens."""

Record = dict[str, Any]
Render = Callable[[Rows, int], Record]
MASKS = "rlpipe.data.masks"
USER_LOGGERS = (MASKS, "rlpipe.data.cached_rows", "rlpipe.data.render_rows")
"""Loggers whose INFO messages are for users, too."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prepared:
    """A file of prepared rows."""

    rows: PreparedRows
    file: Path
    is_new: bool
    """Whether the file has just been written."""


def prepare_rows(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, workers: int, report: Callable[[int, int], None]
) -> Iterator[Prepared]:
    """Yield a file of training rows for each source, and one of the held-out rows if these have a source of their own.

    ``report`` is called with the number of rows rendered so far, and of all rows. Raises ``DataError`` if the data
    can't be used or stored, or is a stream; streams within a mix are skipped with a warning.
    """
    data = config.data
    if config.algorithm.kind == "rl" and config.environment.takes_rows:
        raise DataError("environment: rows go to the environment as they are, and need no preparing")
    sources = all_sources(data)
    streams = [source for source in sources if source.data.streaming]
    if len(streams) == len(sources):
        raise DataError("data.streaming: a stream is rendered as it is read, and not prepared; set it to false")
    for source in streams:
        logger.warning("data.sources.%s is a stream, which is rendered as it is read, and not prepared", source.name)
    processor = processor_of(config.algorithm, config.model)

    def recipe(source: DataConfig) -> _Prompts | _Sequences:
        if config.algorithm.kind == "rl":
            return _Prompts(source, tokenizer, processor, ebft_with_reward(config.algorithm))
        preference = preference_of(config.algorithm)
        renderer = sequence_renderer(tokenizer, source, max_tokens=2**31, processor=processor, preference=preference)
        return _Sequences(renderer, sequence_settings(data, preference))

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=recipe(sources[0].data).settings)
    writer = _Writer(rendering, workers=workers, report=report, seed=config.seed)
    for source in sources:
        if not source.data.streaming:
            open_rows = partial(open_source_rows, source, tokenizer, seed=config.seed)
            with named_errors(source):
                yield writer.write(source.data, source.data, recipe(source.data), open_rows, name=source.name)
    if (data.held_out.path is not None or data.held_out.split is not None) and not data.streaming:
        held_out = with_own_images(data)
        open_rows = partial(open_held_out_source, data, tokenizer)
        yield writer.write(held_out, held_out_data(data), recipe(held_out), open_rows, name="")


class _Prompts:
    """The rendering of rows to records of prompts."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ImageProcessor | None,
        ebft: EbftConfig | None,
    ) -> None:
        self.renderer = PromptRenderer(tokenizer, data, processor)
        self.settings: Settings = prompt_settings(ebft)
        self._truth = None if ebft is None else GroundTruthRenderer(tokenizer, data, ebft)

    def render(self, rows: Rows, index: int) -> Record:
        at = RowLocation(row=index, epoch=0, location=rows.location(index))
        try:
            prompt = self.renderer.render(rows[index], at)
            if self._truth is not None:
                prompt = self._truth.prepare(prompt)
        except UnusableRow as problem:
            return {"kind": problem.kind.value, "reason": problem.reason}
        values = dump_values({name: getattr(prompt, name) for name in PROMPT_VALUES}, at.location)
        return {"token_ids": prompt.token_ids, "values": values}


class _Sequences:
    """The rendering of rows to records of uncut training sequences, with prompts if rows are held out by these."""

    def __init__(self, renderer: AnyRenderer, settings: Settings) -> None:
        self.renderer = renderer
        self.settings = settings

    def render(self, rows: Rows, index: int) -> Record:
        at = RowLocation(row=index, epoch=0, location=rows.location(index))
        record: Record = {}
        values: dict[str, Any] = {"task": None, "images": (), "rejected_images": (), "prompt_images": ()}
        try:
            row = rows[index]
        except UnusableRow as problem:
            skip = {"kind": problem.kind.value, "reason": problem.reason}
            return skip | {f"prompt_{name}": value for name, value in skip.items()}
        try:
            rendered = self.renderer.whole(row, at)
            values |= {"task": rendered.task, "images": rendered.encoded.images}
            record |= {
                "token_ids": rendered.encoded.token_ids,
                "loss_mask": rendered.loss_mask,
                "is_good": rendered.is_good,
            }
            if rendered.rejected is not None:
                values["rejected_images"] = _shared(rendered.rejected.encoded.images, values["images"])
                record["rejected_ids"] = rendered.rejected.encoded.token_ids
                record["rejected_loss_mask"] = rendered.rejected.loss_mask
        except UnusableRow as problem:
            record |= {"kind": problem.kind.value, "reason": problem.reason}
        if self.settings["prompts"]:
            try:
                prompt = self.renderer.prompt(row, at)
                values["prompt_images"] = _shared(prompt.images, values["images"])
                record["prompt_ids"] = prompt.token_ids
            except UnusableRow as problem:
                record |= {"prompt_kind": problem.kind.value, "prompt_reason": problem.reason}
        return {**record, "values": dump_values(values, at.location)}


def _shared(images: Images, stored: Images) -> Images:
    """Return ``images`` with the bytes objects of equal ``stored`` ones, so that pickle stores them once."""
    stored_contents = {image.content: image.content for image in stored}
    return tuple(replace(image, content=stored_contents.get(image.content, image.content)) for image in images)


@dataclass(slots=True, frozen=True)
class _Chunk:
    """A few rendered rows."""

    batch: pa.RecordBatch
    notes: list[str]
    """Messages on the loss mask while they were rendered; the first row that needs the mask causes them."""


class _Writer:
    """A writer of the files of one rendering."""

    def __init__(self, rendering: Rendering, *, workers: int, report: Callable[[int, int], None], seed: int) -> None:
        self._rendering = rendering
        self._workers = workers
        self._report = report
        self._seed = seed

    def write(
        self,
        data: DataConfig,
        source: DataConfig,
        recipe: _Prompts | _Sequences,
        open_rows: Callable[..., Rows],
        *,
        name: str,
    ) -> Prepared:
        """Return the file of a source's rows; if it does not exist yet, open the rows and write it."""
        digest = source_digest(source, self._seed)  # before the rows are opened, so that a later change is noticed
        folder = cache_root(data) / rendering_digest(data, self._rendering, name)
        file = folder / f"{digest}.arrow"
        if (existing := _read(file)) is not None:
            return Prepared(rows=existing, file=file, is_new=False)
        rows = open_rows(check=recipe.renderer.check)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with held(folder) as alone:
                if not alone:
                    raise RunError(f"another rlpipe data prepare is writing to {folder}: wait until it ends")
                try:
                    self._write(rows, recipe.render, writing_path(file))
                    if source_digest(source, self._seed) != digest:
                        raise DataError(f"{rows.name} changed while it was being read: prepare it again")
                    writing_path(file).replace(file)
                finally:
                    writing_path(file).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"prepared rows can't be written to {folder} ({error}); set data.cache") from None
        return Prepared(rows=PreparedRows(file), file=file, is_new=True)

    def _write(self, rows: Rows, render: Render, path: Path) -> None:
        chunks = [range(start, min(start + CHUNK_ROWS, len(rows))) for start in range(0, len(rows), CHUNK_ROWS)]
        first = _render_chunk(render, rows, chunks[0])  # in this process, so that workers inherit what it loads
        num_done = 0
        with path.open("wb") as file:
            with pa.ipc.new_file(file, SCHEMA.with_metadata({NAME: rows.name})) as writer:
                waiting: list[_Chunk] = []
                for chunk in chain([first], self._rendered(rows, render, chunks[1:])):
                    waiting.append(chunk)
                    if sum(entry.batch.nbytes for entry in waiting) >= BATCH_BYTES:
                        _write_joined(writer, waiting)
                        waiting = []
                    num_done += chunk.batch.num_rows
                    self._report(num_done, len(rows))
                if waiting:
                    _write_joined(writer, waiting)
            file.flush()
            os.fsync(file.fileno())

    def _rendered(self, rows: Rows, render: Render, chunks: Sequence[range]) -> Iterator[_Chunk]:
        """Yield the rendered chunks in order, with at most two per worker in flight."""
        if self._workers == 1 or not chunks:
            yield from (_render_chunk(render, rows, chunk) for chunk in chunks)
            return
        under_way: deque[Future[_Chunk]] = deque()
        # Forked processes inherit the opened rows, so that nothing is read or counted again.
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(self._workers, fork, initializer=_enter_worker, initargs=(render, rows)) as pool:
            try:
                for chunk in chunks:
                    under_way.append(pool.submit(_render_in_worker, chunk))
                    if len(under_way) > 2 * self._workers:
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            except BrokenProcessPool:
                raise RunError("a worker of rlpipe data prepare died; --workers 1 runs without workers") from None
            finally:
                pool.shutdown(cancel_futures=True)


_worker_jobs: list[tuple[Render, Rows]] = []
"""The renderer of a worker process, and its rows."""


def _enter_worker(render: Render, rows: Rows) -> None:
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler raises, which would print a traceback here
    torch.set_num_threads(1)  # the parent's threads do not survive the fork, and torch would wait for them
    _worker_jobs.append((render, rows))


def _render_in_worker(chunk: range) -> _Chunk:
    render, rows = _worker_jobs[-1]
    return _render_chunk(render, rows, chunk)


def _render_chunk(render: Render, rows: Rows, chunk: range) -> _Chunk:
    records = []
    with mask_notes() as notes:
        for index in chunk:
            with noted_files() as files:
                record = render(rows, index)
            records.append({"location": rows.location(index), "files": [*files.values()], **record})
    batch = pa.RecordBatch.from_pydict({name: [entry.get(name) for entry in records] for name in SCHEMA.names}, SCHEMA)
    return _Chunk(batch, notes)


def _write_joined(writer: pa.ipc.RecordBatchFileWriter, chunks: Sequence[_Chunk]) -> None:
    notes = "\n".join(dict.fromkeys(note for chunk in chunks for note in chunk.notes))
    for batch in pa.Table.from_batches([chunk.batch for chunk in chunks]).combine_chunks().to_batches():
        writer.write_batch(batch, custom_metadata={NOTES: notes})


def _read(file: Path) -> PreparedRows | None:
    """Return the rows of a file, or None if it can't be read or one of its image files has changed."""
    try:
        rows = PreparedRows(file)
    except (OSError, pa.ArrowException, LookupError):
        return None
    return rows if rows.changed_file() is None else None


class _Relay(logging.Handler):
    """A log handler that passes each message on once."""

    def __init__(self, show_message: Callable[[str], None], accepts: Callable[[int], bool]) -> None:
        super().__init__()
        self._show_message, self._seen = show_message, set[str]()
        self.addFilter(lambda record: accepts(record.levelno))

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._seen:
            self._seen.add(message)
            self._show_message(message)


@contextmanager
def forward_logs(
    show_message: Callable[[str], None], *, warnings: bool, loggers: Sequence[str] = USER_LOGGERS
) -> Iterator[None]:
    """Forward INFO messages of ``loggers`` to ``show_message``, and with ``warnings`` those of ``rlpipe.data``."""
    relays = [(name, _Relay(show_message, lambda level: level == logging.INFO)) for name in loggers]
    if warnings:
        relays.append(("rlpipe.data", _Relay(show_message, lambda level: level >= logging.WARNING)))
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.INFO)
    for name, relay in relays:
        logging.getLogger(name).addHandler(relay)
    try:
        yield
    finally:
        for name, relay in relays:
            logging.getLogger(name).removeHandler(relay)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def mask_notes() -> Iterator[list[str]]:
    """Collect the messages on how the loss mask is made while the context is open."""
    notes: list[str] = []
    with forward_logs(notes.append, warnings=False, loggers=[MASKS]):
        yield notes
