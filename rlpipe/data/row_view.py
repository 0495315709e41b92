"""A rendered row with its tokens and loss mask, shown in a terminal or as an HTML page.

Shapes: T tokens of one row.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlpipe.data.prompts import PromptSource, SequenceSource
from rlpipe.data.render.images import image_size, thumbnail
from rlpipe.data.row import UnusableRow
from rlpipe.data.sources.row_source import Cursor, RowRef
from rlpipe.types import BoolArray, Images, IntArray, PlacedImage, Prompt, Rollout, RolloutStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def first_rows(source: PromptSource | SequenceSource, num_rows: int) -> Iterator[RowRef]:
    """Yield the first rows, at most ``num_rows``."""
    refs = (find_row(source, number) for number in range(num_rows))
    yield from (ref for ref in takewhile(bool, refs) if ref is not None)


def find_row(source: PromptSource | SequenceSource, number: int) -> RowRef | None:
    """Return the row of this number, from 0, or None after the last row; a mix has no last row."""
    if source.is_mix:
        return source.at(Cursor(position=number))
    return RowRef(0, number) if source.parts[0].has(number) else None


def all_rows(source: PromptSource | SequenceSource) -> Iterator[RowRef]:
    """Yield every row once; for a mix, source by source."""
    for index in range(len(source.parts)):
        yield from (RowRef(index, row) for row in takewhile(source.parts[index].has, count()))


MAX_REPEATS = 8
"""Longest run of equal special tokens, such as an image's, that is not joined to one piece."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoding of bytes that are not yet a whole character."""
MAX_PIECE = 16
"""Tokens of a piece: a character has few bytes, and a text that stays broken would be decoded again and again."""
CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡"}
PICTURES = CONTROLS | {ord("\n"): "⏎\n", ord("\t"): "⇥"}


@dataclass(kw_only=True, slots=True, frozen=True)
class TextPiece:
    """A piece of a row's text, all of whose tokens are shown alike."""

    token_ids: tuple[int, ...]
    text: str
    is_trained: bool
    """Whether any of the tokens is trained on."""
    is_special: bool
    """Whether the piece is a token that was added to the vocabulary."""
    repeats: int = 1
    """Number of times that the text is repeated; for an image, its number of tokens."""
    image: bytes | None = None
    """Encoded image, if the tokens stand for one; the text then gives its size."""

    @property
    def visible(self) -> str:
        """The text, with line breaks and other control characters made visible."""
        return self.text.translate(PICTURES)


def split_row(
    token_ids: IntArray, trained: BoolArray, tokenizer: PreTrainedTokenizerBase, images: Images = ()
) -> list[TextPiece]:
    """Split ``token_ids`` ``[T]`` into pieces whose texts, joined, are the row's; ``trained`` is a mask ``[T]``.

    All tokens of an image are one piece, whose text gives the image's size instead.
    """
    special = set(tokenizer.get_added_vocab().values())
    ids = token_ids.tolist()

    def decode(piece_ids: Sequence[int]) -> str:
        return str(tokenizer.decode([*piece_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    pictures = {image.start: _picture(image, ids) for image in images}
    covered = {index for image in images for index in range(image.start, image.start + image.num_tokens)}
    pieces = [
        TextPiece(
            token_ids=tuple(ids[start:stop]),
            text=text,
            is_trained=bool(trained[start:stop].any()),
            is_special=stop - start == 1 and ids[start] in special,
        )
        if start not in pictures
        else pictures[start]
        for start, stop, text in _split(ids, special, decode)
        if start not in covered or start in pictures
    ]
    return [*_join_repeats(pieces)]


def _picture(image: PlacedImage, ids: Sequence[int]) -> TextPiece:
    return TextPiece(
        token_ids=tuple(ids[image.start : image.start + image.num_tokens]),
        text=f"<image {image_size(image.content)}>",
        is_trained=False,
        is_special=True,
        repeats=image.num_tokens,
        image=image.content,
    )


def _split(
    ids: Sequence[int], special: Collection[int], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[int, int, str]]:
    """Yield the first token, the one after the last, and the text of each piece.

    Tokens are decoded together with those of the piece before, since some tokenizers drop a blank at the start of a
    text.
    """
    before = start = 0
    for stop in range(1, len(ids) + 1):
        text = decode(ids[before:stop])[len(decode(ids[before:start])) :]
        is_unfinished = text.endswith(UNFINISHED) and stop - start < MAX_PIECE
        if is_unfinished and stop < len(ids) and ids[stop] not in special:
            continue
        yield start, stop, text
        before, start = start, stop


def _join_repeats(pieces: Sequence[TextPiece]) -> Iterator[TextPiece]:
    for piece, group in groupby(pieces):
        equal = [*group]
        if piece.image is None and piece.is_special and len(equal) > MAX_REPEATS:
            yield replace(piece, repeats=len(equal))
        else:
            yield from equal


@dataclass(kw_only=True, slots=True, frozen=True)
class ShownRow:
    """A row as it is shown to people: a name, a summary and its text."""

    name: str
    """The row's number and location."""
    summary: str
    """The row's token counts, or the reason why it is skipped."""
    pieces: list[TextPiece]
    """The row's text; empty for a skipped row."""
    rejected: list[TextPiece] = field(default_factory=list)
    """The text with the rejected completion, if the row is a pair."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.summary}"


def show_rows(
    source: PromptSource | SequenceSource, tokenizer: PreTrainedTokenizerBase, refs: Iterable[RowRef]
) -> Iterator[ShownRow]:
    """Yield the given rows, as the source renders them."""
    for ref in refs:
        part = source.parts[ref.part]
        origin = f" of {part.name}" if part.name else ""
        name = f"row {ref.row}{origin} ({part.rows.location(ref.row)})"
        try:
            item = source.render(ref)
        except UnusableRow as problem:
            yield ShownRow(name=name, summary=f"skipped, {problem.kind}: {problem.reason}", pieces=[])
            continue
        trained = np.zeros(len(item.token_ids), np.bool_) if isinstance(item, Prompt) else item.loss_mask
        pieces = split_row(item.token_ids, trained, tokenizer, item.images)
        worse = item.rejected if isinstance(item, Rollout) else None
        rejected = [] if worse is None else split_row(worse.token_ids, worse.loss_mask, tokenizer, worse.images)
        yield ShownRow(name=name, summary=_summary(item), pieces=pieces, rejected=rejected)


def _summary(item: Prompt | Rollout) -> str:
    images = f", {len(item.images)} image{'s' if len(item.images) > 1 else ''}" if item.images else ""
    if isinstance(item, Prompt):
        return f"a prompt of {len(item.token_ids)} tokens{images}"
    cut = ", a window of a longer text" if item.status is RolloutStatus.TRUNCATED else ""
    if item.rejected is not None:
        return f"chosen with {_counts(item)}, rejected with {_counts(item.rejected)}{images}"
    return f"{'labelled bad, ' if _is_bad(item) else ''}{_counts(item)}{images}{cut}"


def _counts(item: Rollout) -> str:
    return f"{item.num_loss_tokens} of {len(item.token_ids)} tokens trained"


def _is_bad(item: Rollout) -> bool:
    """Return whether a row's completion is one that the policy should avoid."""
    return item.advantages is not None and bool((item.advantages < 0).any())


BRACKETS = (("⟦", "⟧"), ("⟪", "⟫"), ("⦃", "⦄"), ("<<<", ">>>"))
"""Pairs of brackets; the first pair that occurs in no row is used."""
TRAINED, TITLE = "black on green", "bold"
SPECIAL, SPECIAL_TRAINED = "cyan", "bold blue on green"
STYLES = {(False, False): "", (False, True): SPECIAL, (True, False): TRAINED, (True, True): SPECIAL_TRAINED}
"""Styles by whether a piece is trained on, and whether it is a special token."""
PAIR_WIDTH = 80
"""Columns of a terminal in which the completions of a pair are shown side by side."""


def print_rows(rows: Sequence[ShownRow], notes: Sequence[str], *, trains: bool) -> None:
    """Print rows to standard output; ``trains`` is whether their tokens can be trained on."""
    console = Console(highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and not console.no_color and console.color_system is not None
    brackets = None if has_colours else _choose_brackets(rows)
    for note in notes:
        console.print(Text(note))
    if not trains:
        console.print(Text("prompts only: no token is trained; the policy writes the completions"))
    elif brackets is not None:
        console.print(Text(f"trained tokens are between {brackets[0]} and {brackets[1]}"))
    else:
        console.print(Text.assemble(("trained tokens", TRAINED), " and ", ("special tokens", SPECIAL)))
    for row in rows:
        console.print(Text(f"\n{row.title}", TITLE))
        _print_columns(console, row, brackets)


def _print_columns(console: Console, row: ShownRow, brackets: tuple[str, str] | None) -> None:
    """Print a row's text, or the completions of a pair: side by side in a wide terminal, else one after the other."""
    columns = {
        heading: _colour(pieces) if brackets is None else Text(_bracket(pieces, brackets))
        for heading, pieces in _columns(row)
    }
    if row.rejected and console.is_terminal and console.width >= PAIR_WIDTH:
        pair = Table(*(Column(Text(heading, TITLE), ratio=1, overflow="fold") for heading in columns), expand=True)
        pair.add_row(*columns.values())
        console.print(pair, soft_wrap=False)
        return
    for heading, text in columns.items():
        if heading:
            console.print(Text(heading, TITLE))
        console.print(text)


def _columns(row: ShownRow) -> list[tuple[str, list[TextPiece]]]:
    """Return what is shown of a row, with a heading over each completion of a pair."""
    if row.rejected:
        return [("chosen:", row.pieces), ("rejected:", row.rejected)]
    return [("", row.pieces)] if row.pieces else []


def _choose_brackets(rows: Sequence[ShownRow]) -> tuple[str, str]:
    texts = [piece.text for row in rows for piece in (*row.pieces, *row.rejected)]
    free = (pair for pair in BRACKETS if not any(mark in text for mark in pair for text in texts))
    return next(free, BRACKETS[0])


def _bracket(pieces: Sequence[TextPiece], brackets: tuple[str, str]) -> str:
    texts = []
    for trained, group in groupby(pieces, lambda piece: piece.is_trained):
        text = "".join(map(_with_repeats, group))
        texts.append(f"{brackets[0]}{text}{brackets[1]}" if trained else text)
    return "".join(texts)


def _colour(pieces: Sequence[TextPiece]) -> Text:
    styled = groupby(pieces, lambda piece: STYLES[piece.is_trained, piece.is_special])
    return Text.assemble(*(("".join(map(_with_repeats, group)), style) for style, group in styled))


def _with_repeats(piece: TextPiece) -> str:
    return piece.visible if piece.repeats == 1 else f"{piece.visible} ×{piece.repeats} "


IMAGE_SIDE = 192
"""Maximum height and width of a shown image, in pixels."""
STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1b1b; --faint: #667; --line: #dde; --trained: #b6ecc0;
  --special: #0b6e99; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e6e6e6; --faint: #99a; --line: #334;
  --trained: #1e5b30; --special: #6cc7ee; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h2 { border-top: 1px solid var(--line); font-size: 1rem; margin: 2rem 0 .5rem; padding-top: 1rem; }
p { color: var(--faint); overflow-wrap: anywhere; }
pre { font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
.trained { background: var(--trained); }
.special { color: var(--special); }
.pair { display: grid; gap: 1rem; grid-template-columns: 1fr 1fr; }
pre img { display: block; margin: .3rem 0; }
pre span:hover { outline: 1px solid var(--faint); }
"""


def make_page(title: str, rows: Sequence[ShownRow], notes: Sequence[str], *, trains: bool) -> str:
    """Return the HTML page of these rows; ``trains`` is whether their tokens can be trained on."""
    legend = (
        '<span class="trained">trained tokens</span>, <span class="special">special tokens</span>'
        if trains
        else "Prompts only: no token is trained; the policy writes the completions."
    )
    lines = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in notes),
        f"<p>{legend}</p>",
    ]
    for row in rows:
        lines.append(f"<h2>{escape(row.title)}</h2>")
        columns = [f"<pre>{heading}{''.join(map(_span, pieces))}</pre>" for heading, pieces in _columns(row)]
        lines.append(f'<div class="pair">{"".join(columns)}</div>' if row.rejected else "".join(columns))
    return "\n".join([*lines, "</body></html>\n"])


def _span(piece: TextPiece) -> str:
    classes = [name for name, on in (("trained", piece.is_trained), ("special", piece.is_special)) if on]
    name = f' class="{" ".join(classes)}"' if classes else ""
    repeats = "" if piece.repeats == 1 else f" ×{piece.repeats} "
    text = f"{escape(piece.visible)}{repeats}{'' if piece.image is None else _picture_element(piece.image)}"
    return f'<span{name} title="{" ".join(map(str, piece.token_ids))}">{text}</span>'


def _picture_element(image: bytes) -> str:
    """Return the HTML of an image, encoded anew, so that the page holds nothing of the file but its pixels."""
    png = b64encode(thumbnail(image, IMAGE_SIDE)).decode()
    return f'<img alt="" src="data:image/png;base64,{png}">'
