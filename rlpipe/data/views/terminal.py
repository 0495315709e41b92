"""Rows in a terminal, with trained tokens highlighted, or between brackets if there are no colours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from rlpipe.data.views.pieces import TextPiece
from rlpipe.data.views.row_view import ShownRow

BRACKETS = (("⟦", "⟧"), ("⟪", "⟫"), ("⦃", "⦄"), ("<<<", ">>>"))
"""Pairs of brackets; the first pair that occurs in no row is used."""
TRAINED, TITLE = "black on green", "bold"
SPECIAL, SPECIAL_TRAINED = "cyan", "bold blue on green"
STYLES = {(False, False): "", (False, True): SPECIAL, (True, False): TRAINED, (True, True): SPECIAL_TRAINED}
"""Styles by whether a piece is trained on, and whether it is a special token."""


def print_rows(rows: Sequence[ShownRow], notes: Sequence[str], *, trains: bool) -> None:
    """Print rows to standard output; ``trains`` is whether their tokens can be trained on."""
    console = Console(highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and not console.no_color and console.color_system is not None
    brackets = None if has_colours else _choose_brackets(rows)
    for note in notes:
        console.print(Text(note))
    if not trains:
        console.print(Text("these are prompts: nothing of them is trained, the policy writes what comes next"))
    elif brackets is not None:
        console.print(Text(f"trained tokens stand between {brackets[0]} and {brackets[1]}"))
    else:
        console.print(Text.assemble(("trained tokens", TRAINED), " and ", ("special tokens", SPECIAL)))
    for row in rows:
        console.print(Text(f"\n{row.title}", TITLE))
        if row.pieces:
            console.print(_colour(row.pieces) if brackets is None else Text(_bracket(row.pieces, brackets)))


def _choose_brackets(rows: Sequence[ShownRow]) -> tuple[str, str]:
    texts = [piece.text for row in rows for piece in row.pieces]
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
