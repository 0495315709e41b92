"""Pieces of a row's text, each of whole characters, and their tokens.

Shapes: T tokens of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from rlpipe.data.render.images import image_size
from rlpipe.types import BoolArray, Images, IntArray, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REPEATS = 8
"""Longest run of equal special tokens, such as an image's, that is not joined to one piece."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoding of bytes that are not yet a whole character."""
CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡"}
PICTURES = CONTROLS | {ord("\n"): "⏎\n", ord("\t"): "⇥"}


@dataclass(kw_only=True, slots=True, frozen=True)
class TextPiece:
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

    def decode(part: Sequence[int]) -> str:
        return str(tokenizer.decode([*part], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    pictures = {image.place: _picture(image, ids) for image in images}
    covered = {place for image in images for place in range(image.place, image.place + image.num_tokens)}
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
        token_ids=tuple(ids[image.place : image.place + image.num_tokens]),
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
        if text.endswith(UNFINISHED) and stop < len(ids) and ids[stop] not in special:
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
