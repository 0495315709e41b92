"""A self-contained HTML page of rows, with token ids in the tooltips."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

from rlpipe.data.render.images import thumbnail
from rlpipe.data.views.pieces import TextPiece
from rlpipe.data.views.row_view import ShownRow

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
pre img { display: block; margin: .3rem 0; }
pre span:hover { outline: 1px solid var(--faint); }
"""


def make_page(title: str, rows: Sequence[ShownRow], notes: Sequence[str], *, trains: bool) -> str:
    """Return the HTML page of these rows; ``trains`` is whether their tokens can be trained on."""
    legend = (
        '<span class="trained">trained tokens</span>, <span class="special">special tokens</span>'
        if trains
        else "These are prompts: nothing of them is trained, the policy writes what comes next."
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
        if row.pieces:
            lines.append(f"<pre>{''.join(map(_span, row.pieces))}</pre>")
    return "\n".join([*lines, "</body></html>\n"])


def _span(piece: TextPiece) -> str:
    classes = [name for name, on in (("trained", piece.is_trained), ("special", piece.is_special)) if on]
    name = f' class="{" ".join(classes)}"' if classes else ""
    repeats = "" if piece.repeats == 1 else f" ×{piece.repeats} "
    text = f"{escape(piece.visible)}{repeats}{'' if piece.image is None else _picture(piece.image)}"
    return f'<span{name} title="{" ".join(map(str, piece.token_ids))}">{text}</span>'


def _picture(image: bytes) -> str:
    """Return the HTML of an image, encoded anew, so that the page holds nothing of the file but its pixels."""
    png = b64encode(thumbnail(image, IMAGE_SIDE)).decode()
    return f'<img alt="" src="data:image/png;base64,{png}">'
