"""``rlpipe data``: preview, count or prepare the rows of a run, as the run renders them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.commands.arguments import Commands, OneLineParser, add_command, add_run_arguments, at_least
from rlpipe.errors import InputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlpipe.configs.schema.root_config import Config
    from rlpipe.data.sources.row_source import RowRef

PREVIEW_NOTES = """\
Rows come in the order of the source, and rows of a mix in the order of the run. Only the tokenizer and, for images, the
model's processor are loaded.

examples:
  rlpipe data preview my_run.yaml
  rlpipe data preview my_run.yaml --row 17 data.train_on_eos=last
  rlpipe data preview my_run.yaml --num 50 --html rows.html
"""


STATS_NOTES = """\
examples:
  rlpipe data stats my_run.yaml
  rlpipe data stats my_run.yaml --num 10000 --json learner.max_tokens_per_microbatch=16384
"""


PREPARE_NOTES = """\
Runs find the prepared rows automatically. They render them again if the data, an option that changes what is rendered,
the tokenizer, its chat template, or the transform's file has changed.

examples:
  rlpipe data prepare my_run.yaml
  rlpipe data prepare my_run.yaml --workers 16 data.cache=/shared/rows
  rlpipe data prepare my_run.yaml algorithm.preference.precompute_ref_log_probs=true
"""


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser(
        "data",
        help="show, count or prepare the rows of a run",
        description="Show, count or prepare the rows of a run.",
        allow_abbrev=False,
    )
    subjects = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    preview = add_command(
        subjects,
        "preview",
        run_preview,
        "show rows as the run renders them, with the trained tokens marked",
        epilog=PREVIEW_NOTES,
    )
    add_run_arguments(preview)
    chosen = preview.add_mutually_exclusive_group()
    chosen.add_argument("--num", type=at_least(int, 1), default=3, metavar="N", help="the first N rows; default: 3")
    chosen.add_argument("--row", type=at_least(int, 0), metavar="ROW", help="only this row, counted from 0")
    preview.add_argument("--html", metavar="FILE", help="write the rows to an HTML page instead")
    stats = add_command(
        subjects, "stats", run_stats, "count tokens, trained tokens, skipped rows and micro batches", epilog=STATS_NOTES
    )
    add_run_arguments(stats)
    stats.add_argument("--num", type=at_least(int, 1), metavar="N", help="the first N rows; default: all")
    stats.add_argument("--json", action="store_true", help="print one JSON object")
    prepare = add_command(
        subjects,
        "prepare",
        run_prepare,
        "render all rows once, for all runs that render them the same way",
        epilog=PREPARE_NOTES,
    )
    add_run_arguments(prepare)
    prepare.add_argument(
        "--workers", type=at_least(int, 1), metavar="N", help="processes that render; default: one for each CPU core"
    )


def run_preview(arguments: argparse.Namespace) -> None:
    config, tokenizer = load(arguments)
    from rlpipe.data.prompts import open_source
    from rlpipe.data.render_rows import mask_notes
    from rlpipe.data.row_view import find_row, first_rows, make_page, print_rows, show_rows

    with mask_notes() as notes:
        source = open_source(config, tokenizer)
        if arguments.row is None:
            refs = [*first_rows(source, arguments.num)]
        elif (ref := find_row(source, arguments.row)) is not None:
            refs = [ref]
        else:
            raise InputError(f"--row {arguments.row}: {source.name} has fewer rows, counted from 0")
        rows = list(show_rows(source, tokenizer, refs))
    trains = config.algorithm.kind != "rl"
    if arguments.html is None:
        print_rows(rows, notes, trains=trains)
    else:
        write_page(Path(arguments.html), make_page(source.name, rows, notes, trains=trains))


def run_stats(arguments: argparse.Namespace) -> None:
    config, tokenizer = load(arguments)
    from rlpipe.data.prompts import longest_row, open_source, packing_of
    from rlpipe.data.row_view import all_rows, first_rows
    from rlpipe.data.statistics import MicroBatches, Packer, count_rows, describe

    source = open_source(config, tokenizer)
    refs = all_rows(source) if arguments.num is None else first_rows(source, arguments.num)
    max_tokens = longest_row(config.algorithm, config.learner)
    packer = Packer(
        MicroBatches(max_tokens=max_tokens, groups_per_step=config.algorithm.groups_per_step),
        partial(
            packing_of(config.algorithm),
            step=0,
            num_ranks=config.learner.num_ranks,
            max_tokens=max_tokens,
            num_minibatches=config.algorithm.num_minibatches,
        ),
    )
    has_order = arguments.num is not None or not source.is_mix
    sizes = [part.order.num_rows for part in source.parts] if arguments.num is None else [arguments.num]
    statistics = count_rows(source, with_progress(refs, sizes), packer if has_order else None)
    print(json.dumps(asdict(statistics), ensure_ascii=False) if arguments.json else "\n".join(describe(statistics)))


def run_prepare(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes share the cores
    config, tokenizer = load(arguments)
    from rlpipe.data.render_rows import prepare_rows
    from rlpipe.hardware.cgroup import num_cores

    workers = arguments.workers or num_cores()
    for prepared in prepare_rows(config, tokenizer, workers=workers, report=show_progress):
        verb = "prepared" if prepared.is_new else "already prepared:"
        rows = prepared.rows
        skipped = f", {rows.num_skipped:,} of them skipped" if rows.num_skipped else ""
        print(f"{verb} {len(rows):,} rows of {rows.name}{skipped}: {prepared.file}", flush=True)
    if config.algorithm.precomputes_reference:
        count, folder = precompute_reference(config, tokenizer)
        verb = f"computed the reference's log-probs of {count:,} sequences" if count else "already computed"
        print(f"{verb}: {folder}", flush=True)


def precompute_reference(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, Path]:
    """Compute the reference's log-probs of a run's rows that the cache lacks; return their number and the folder.

    One process computes them, on a GPU if the learner has one, whatever the learner's strategy.
    """
    import torch

    from rlpipe.configs.schema.learner_config import LearnerConfig
    from rlpipe.data.prompts import first_epoch, open_run_sequences, packing_of
    from rlpipe.data.reference_cache import ReferenceCache, reference_folder
    from rlpipe.learner.policy import load_policy, pads_sequences
    from rlpipe.learner.step import Learner
    from rlpipe.models.gguf_models import model_folder
    from rlpipe.models.loading import torch_device, with_dtype

    algorithm, options = config.algorithm, config.learner
    device = torch_device() if options.num_gpus else torch.device("cpu")
    model = with_dtype(replace(config.model, path=model_folder(config.model.path)), device)
    cache = ReferenceCache(reference_folder(config.data, model))
    num_cached = len(cache)
    source, held_out = open_run_sequences(
        config.data,
        model,
        tokenizer,
        algorithm=algorithm,
        learner=options,
        seed=config.seed,
        pads_pairs=partial(pads_sequences, model),
    )
    limits = LearnerConfig(
        max_tokens_per_microbatch=options.max_tokens_per_microbatch, logprob_chunk_tokens=options.logprob_chunk_tokens
    )
    pack = partial(packing_of(algorithm), num_ranks=1, max_tokens=limits.max_tokens_per_microbatch)
    learner: Learner | None = None
    steps = first_epoch(source, config.data, algorithm, start=source.cursor)
    for step in (-1, *steps):
        rows = held_out if step < 0 else source.take(algorithm.groups_per_step)
        batches = pack(rows, step=step) if rows else []
        if cache.is_due(batches):
            if learner is None:
                learner = Learner(load_policy(model, limits, device), limits, algorithm)
            cache.add(learner.reference_logprobs(batches[0].mini_batches))
        show_progress(step + 1, len(steps), "steps")
    cache.flush()
    return len(cache) - num_cached, cache.folder


def show_progress(num_done: int, num_rows: int, what: str = "rows") -> None:
    """Show the progress in one line of the terminal, which is erased at the end."""
    if sys.stderr.isatty():
        text = f"{num_done:,} of {num_rows:,} {what}" if num_done < num_rows else ""
        print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)


def with_progress(refs: Iterable[RowRef], sizes: Sequence[int | None]) -> Iterable[RowRef]:
    """Return ``refs`` with a temporary progress bar on a terminal; ``sizes``: rows of each part, None if unknown."""
    from rich.console import Console
    from rich.progress import track

    total = None if None in sizes else sum(size for size in sizes if size is not None)
    console = Console(stderr=True)
    return track(refs, "rows", total, console=console, transient=True, disable=not sys.stderr.isatty())


def load(arguments: argparse.Namespace) -> tuple[Config, PreTrainedTokenizerBase]:
    """Return the config and the tokenizer; of the config's files, only the data and the tokenizer must exist."""
    from rlpipe.configs.compose import load_config

    config = load_config(arguments.overrides, file=arguments.config, need_files=False)
    model = config.model
    if model.prepare is not None and model.tokenizer is None and not Path(model.path).exists():
        raise ModelError(
            f"model.path: {model.path} is created by model.prepare when the run starts, and does not exist yet; "
            "set model.tokenizer to a folder or hub id with its tokenizer"
        )
    from rlpipe.data.render.processor import load_tokenizer

    return config, load_tokenizer(config.model)


def write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: can't be written ({error.strerror})") from None
    print(f"written to {path}")
