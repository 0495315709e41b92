"""Statistics of a run's rows, by source: lengths, trained and skipped counts, and how full micro batches get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlpipe.data.prompts import PromptSource, SequenceSource
from rlpipe.data.row import UnusableRow
from rlpipe.data.sources.row_source import RowRef
from rlpipe.types import BoolArray, Images, Prompt, Rollout, RolloutStatus, TrainBatch

NUM_BINS = 10
NUM_EXAMPLES = 3
"""Skipped rows of each kind that are listed."""
BAR = 40
"""Characters of the longest bar."""

Pack = Callable[[Sequence[Rollout]], Sequence[TrainBatch]]


@dataclass(kw_only=True, slots=True)
class Lengths:
    """Statistics of the rows' lengths, in tokens."""

    total: int
    min: int
    median: float
    mean: float
    p95: float
    max: int
    histogram: list[tuple[int, int, int]]
    """Shortest, longest and number of rows, for bins of equal width."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        array = np.array(lengths)
        width = (int(array.max()) - int(array.min())) // NUM_BINS + 1
        edges = range(int(array.min()), int(array.max()) + 1, width)
        bins = [(low, low + width - 1, int(np.sum((array >= low) & (array < low + width)))) for low in edges]
        return cls(
            total=int(array.sum()),
            min=int(array.min()),
            median=float(np.median(array)),
            mean=float(array.mean()),
            p95=float(np.percentile(array, 95)),
            max=int(array.max()),
            histogram=bins,
        )


@dataclass(kw_only=True, slots=True)
class Skipped:
    """The number of rows skipped for one kind of reason, with examples."""

    count: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class ImageCounts:
    """Counts of the images in rows, and of their tokens."""

    num_rows: int = 0
    """Rows with images."""
    num_images: int = 0
    num_tokens: int = 0
    """Tokens that stand for images."""

    def add(self, images: Images) -> None:
        self.num_rows += bool(images)
        self.num_images += len(images)
        self.num_tokens += sum(image.num_tokens for image in images)


@dataclass(kw_only=True, slots=True)
class MicroBatches:
    """The number of micro batches of a run, with the sizes that it follows from."""

    count: int = 0
    max_tokens: int
    groups_per_step: int


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Statistics of a source's rows: counts, lengths and skipped rows."""

    source: str
    num_rows: int
    """Number of rows, skipped ones included."""
    num_used: int
    tokens: Lengths | None
    """Tokens per row, of both completions of a pair; None if all rows are skipped."""
    prompt_tokens: Lengths | None
    """Tokens before the first trained one; None for prompts, which have no trained tokens."""
    num_trained_tokens: int | None
    num_trained_spans: int | None
    """Runs of consecutive trained tokens, such as a turn's; like the number of tokens, None for prompts."""
    num_cut: int
    """Texts that are cut to a window."""
    num_repeated: int
    """Rows that equal an earlier one, token for token."""
    skipped: dict[str, Skipped]
    """Skipped rows by ``SkipKind``."""
    images: ImageCounts
    micro_batches: MicroBatches | None = None
    """Micro batches of all steps and ranks; None for prompts, and if a mix's rows are counted source by source."""
    sources: dict[str, Statistics] = field(default_factory=dict)
    """Statistics of each source of a mix, without micro batches."""


class Counter:
    """A counter that takes rows one by one, and keeps their lengths but not the rows."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._prompt_lengths: list[int] = []
        self._num_trained = self._num_spans = self._num_cut = 0
        self._seen: set[int] = set()
        self._images = ImageCounts()
        self._skipped: dict[str, Skipped] = {}

    def add(self, item: Prompt | Rollout) -> None:
        tokens = [item.token_ids] if isinstance(item, Prompt) else [sequence.token_ids for sequence in item.sequences]
        self._lengths.append(sum(map(len, tokens)))
        self._seen.add(hash((*(ids.tobytes() for ids in tokens), *(image.content for image in item.images))))
        self._images.add(item.images)
        if isinstance(item, Prompt):
            return
        self._prompt_lengths.append(int(np.argmax(item.loss_mask)))
        self._num_trained += sum(sequence.num_loss_tokens for sequence in item.sequences)
        self._num_spans += sum(_num_spans(sequence.loss_mask) for sequence in item.sequences)
        self._num_cut += item.status is RolloutStatus.TRUNCATED

    def skip(self, location: str, problem: UnusableRow) -> None:
        skipped = self._skipped.setdefault(problem.kind.value, Skipped())
        skipped.count += 1
        if len(skipped.examples) < NUM_EXAMPLES:
            skipped.examples.append({"location": location, "reason": problem.reason})

    def finish(self, source: str) -> Statistics:
        has_sequences = bool(self._prompt_lengths)
        return Statistics(
            source=source,
            num_rows=len(self._lengths) + sum(skipped.count for skipped in self._skipped.values()),
            num_used=len(self._lengths),
            tokens=Lengths.of(self._lengths) if self._lengths else None,
            prompt_tokens=Lengths.of(self._prompt_lengths) if has_sequences else None,
            num_trained_tokens=self._num_trained if has_sequences else None,
            num_trained_spans=self._num_spans if has_sequences else None,
            num_cut=self._num_cut,
            num_repeated=len(self._lengths) - len(self._seen),
            skipped=dict(sorted(self._skipped.items())),
            images=self._images,
        )


class Packer:
    """A counter that packs sequences step by step, and counts their micro batches."""

    def __init__(self, micro_batches: MicroBatches, pack: Pack) -> None:
        self._micro_batches = micro_batches
        self._pack = pack
        self._step: list[Rollout] = []

    def add(self, sequence: Rollout) -> None:
        self._step.append(sequence)
        if len(self._step) == self._micro_batches.groups_per_step:
            self._pack_step()

    def finish(self) -> MicroBatches | None:
        """Pack the rest, and return the counts, or None without sequences."""
        if self._step:
            self._pack_step()
        return self._micro_batches if self._micro_batches.count else None

    def _pack_step(self) -> None:
        batches = self._pack(self._step)
        self._micro_batches.count += sum(
            len(mini_batch.micro_batches) for batch in batches for mini_batch in batch.mini_batches
        )
        self._step = []


def count_rows(source: PromptSource | SequenceSource, refs: Iterable[RowRef], packer: Packer | None) -> Statistics:
    """Return the statistics of the given rows, of micro batches only with a ``packer``."""
    total, counters = Counter(), [Counter() for _ in source.parts]
    for ref in refs:
        affected = (total, counters[ref.part])
        try:
            item = source.render(ref)
        except UnusableRow as problem:
            for counter in affected:
                counter.skip(source.parts[ref.part].rows.location(ref.row), problem)
            continue
        for counter in affected:
            counter.add(item)
        if packer is not None and isinstance(item, Rollout):
            packer.add(item)
    statistics = total.finish(source.name)
    statistics.micro_batches = None if packer is None else packer.finish()
    if source.is_mix:
        for index, counter in enumerate(counters):
            statistics.sources[source.parts[index].name] = counter.finish(source.parts[index].rows.name)
    return statistics


def describe(found: Statistics) -> list[str]:
    """Return the statistics as lines of text, those of all sources together first."""
    used = f"{found.num_used:,} used" if found.num_used else "none of which a run can use"
    lines = [f"{found.source}: {found.num_rows:,} rows, {used}", *_describe_tokens(found)]
    if found.num_cut:
        lines.append(f"cut            {found.num_cut:,} rows, with one window of each trained")
    if found.images.num_rows:
        images = found.images
        lines.append(
            f"images         {images.num_images:,} in {images.num_rows:,} rows, {images.num_tokens:,} tokens in total"
        )
    lines.append(f"repeated       {found.num_repeated:,} rows equal an earlier one, token for token")
    for kind, skipped in found.skipped.items():
        lines.append(f"skipped        {skipped.count:,} {kind}")
        lines += [f"               {example['location']}: {example['reason']}" for example in skipped.examples]
    if (micro := found.micro_batches) is not None and found.tokens is not None:
        full = found.tokens.total / (micro.count * micro.max_tokens)
        lines.append(
            f"micro batches  {micro.count:,} of at most {micro.max_tokens:,} tokens, {full:.0%} full, "
            f"in steps of {micro.groups_per_step:,} rows"
        )
    for name, source_statistics in found.sources.items():
        first, *rest = describe(source_statistics)
        lines += ["", f"{name}, {first}", *rest]
    return lines


def _describe_tokens(statistics: Statistics) -> list[str]:
    if statistics.tokens is None:
        return []
    lines = [f"tokens         {_in_words(statistics.tokens)}", *_bars(statistics.tokens)]
    if statistics.prompt_tokens is not None:
        lines.append(f"before trained {_in_words(statistics.prompt_tokens)}")
    if statistics.num_trained_tokens is not None:
        share = statistics.num_trained_tokens / statistics.tokens.total
        lines.append(
            f"trained        {statistics.num_trained_tokens:,} tokens ({share:.1%}) in "
            f"{statistics.num_trained_spans:,} spans"
        )
    return lines


def _num_spans(trained: BoolArray) -> int:
    return int(np.count_nonzero(trained[1:] & ~trained[:-1])) + int(trained[:1].sum())


def _in_words(lengths: Lengths) -> str:
    return (
        f"{lengths.total:,}; min {lengths.min:,}, median {lengths.median:,.6g}, mean {lengths.mean:,.1f}, "
        f"p95 {lengths.p95:,.6g}, max {lengths.max:,}"
    )


def _bars(lengths: Lengths) -> list[str]:
    most = max(count for _, _, count in lengths.histogram)
    labels = [f"{low:,} - {high:,}" for low, high, _ in lengths.histogram]
    width = max(map(len, labels))
    return [
        f"               {label:>{width}}  {'█' * -(-BAR * count // most)} {count:,}"
        for label, (_, _, count) in zip(labels, lengths.histogram, strict=True)
    ]
