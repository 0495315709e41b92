"""The images in a row's messages and its column of images, as encoded bytes."""

from __future__ import annotations

import base64
import binascii
import io
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlpipe.common.imports import describe_error
from rlpipe.data.row import UnusableRow
from rlpipe.types import ChatMessages

TEXT, IMAGE = "text", "image"
MARK = "<image>"
"""The mark in a text, as in LLaVA's rows, where an image of the column belongs."""
IMAGE_TYPES = {IMAGE, "image_url"}
IMAGE_KEYS = ("bytes", "base64", "image", "image_url", "url", "path")
"""Keys of a part that has its own image; the first one counts, since a path beside bytes only gives their origin."""
PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA"}

FileState = dict[str, Any]
_files: ContextVar[dict[str, FileState] | None] = ContextVar("files", default=None)


@contextmanager
def noted_files() -> Iterator[dict[str, FileState]]:
    """Record, while the context is open, the files that images are read from: by path, the state before the read."""
    files: dict[str, FileState] = {}
    token = _files.set(files)
    try:
        yield files
    finally:
        _files.reset(token)


def file_state(path: str) -> FileState:
    """Return a file's path, size and modification time, to detect a change; both numbers are -1 if it is missing."""
    try:
        stats = os.stat(path)
    except OSError:
        return {"path": path, "size": -1, "changed": -1}
    return {"path": path, "size": stats.st_size, "changed": stats.st_mtime_ns}


def take_images(messages: ChatMessages, column: Any, folder: Path) -> tuple[ChatMessages, list[bytes]]:
    """Return the messages with a bare ``{"type": "image"}`` for each image, and the images in that order.

    A part without an image of its own, or ``<image>`` within a text, stands for the next image of the ``column``, which
    holds one image or a list. If the messages have neither, the column's images go before the user's first text.
    Relative paths start at ``folder``. Raises ``UnusableRow`` if images are missing or left over, or if one can't be
    read.
    """
    column_images = _as_list(column)
    if not column_images and not any(isinstance(message.get("content"), list) for message in messages):
        return messages, []
    spread = [_with_parts(message, has_marks=bool(column_images)) for message in messages]
    if column_images and not any(_is_image(part) for message in spread for part in _parts(message)):
        spread = _led_by(spread, len(column_images))
    waiting = iter(column_images)
    images: list[bytes] = []
    for message in spread:
        for part in _parts(message):
            if _is_image(part):
                embedded = _embedded_image(part)
                images.append(
                    read_image(next(waiting, None) if embedded is None else embedded, folder, len(images) + 1)
                )
    if num_unused := len(list(waiting)):
        raise UnusableRow(
            f"it has {len(column_images)} images, but its messages have no placeholders for {num_unused} of them"
        )
    return [_bare(message) for message in spread], images


def count_images(messages: ChatMessages) -> int:
    return sum(_is_image(part) for message in messages for part in _parts(message))


def read_image(value: Any, folder: Path, number: int) -> bytes:
    """Return the encoded image of a path, bytes, a ``data:`` URL, a PIL image, or a dict with bytes or a path.

    Raises ``UnusableRow`` if it is none of these or can't be read.
    """
    if value is None:
        raise UnusableRow(f"its messages refer to image {number}, which is missing")
    try:
        content = _read(value, folder)
        image_size(content)
        return content
    except (OSError, ValueError, RuntimeError) as error:  # the last of ~name, if nobody has that name
        raise UnusableRow(f"image {number} can't be read ({describe_error(error)})") from None


def open_image(content: bytes) -> Any:
    """Decode to a PIL image, in RGB and upright; raise ``OSError`` or ``ValueError`` if it can't be read."""
    from PIL import ImageOps

    with _opened(content) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def image_size(content: bytes) -> str:
    """Return the stored width and height in pixels, such as ``640x480``; raise as ``open_image`` does."""
    with _opened(content) as image:
        return f"{image.width}x{image.height}"


def thumbnail(content: bytes, side: int) -> bytes:
    """Return the image as PNG, at most ``side`` pixels high and wide."""
    image = open_image(content)
    image.thumbnail((side, side))
    return as_png(image)


def as_png(image: Any) -> bytes:
    """Encode a PIL image as PNG."""
    buffer = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(buffer, "PNG")
    return buffer.getvalue()


@contextmanager
def _opened(content: bytes) -> Iterator[Any]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except UnidentifiedImageError:
        raise ValueError("PIL does not know its image format") from None
    except (Image.DecompressionBombError, SyntaxError, EOFError, struct.error) as error:
        raise ValueError(str(error)) from None


def _read(value: Any, folder: Path) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        inner = _embedded_image(value)
        if inner is None:
            raise ValueError(f"no bytes and no path in {dict(value)!r:.80}")
        return _read(inner, folder)
    if isinstance(value, str | Path):
        return _read_address(str(value), folder)
    if hasattr(value, "save"):
        return as_png(value)
    raise ValueError(f"{type(value).__name__} is not an image, path or bytes")


def _read_address(address: str, folder: Path) -> bytes:
    scheme, _, encoded = address.partition(",")
    if scheme.startswith("data:"):
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"its data URL is not base64: {error}") from None
    if address.startswith(("http://", "https://")):
        raise ValueError(f"{address:.80} is a URL: download the images, and set their paths")
    if address.startswith("file://"):
        address = unquote(urlsplit(address).path)
    file = folder / Path(address).expanduser()
    if (noted := _files.get()) is not None:
        noted.setdefault(str(file), file_state(str(file)))
    return file.read_bytes()


def _as_list(column: Any) -> list[Any]:
    if column is None:
        return []
    return list(column) if isinstance(column, list | tuple) else [column]


def _with_parts(message: Mapping[str, Any], *, has_marks: bool) -> dict[str, Any]:
    """Return the message with its ``<image>`` marks, if ``has_marks``, as parts."""
    content = message.get("content")
    if isinstance(content, str) and has_marks and MARK in content:
        return {**message, "content": list(_split(content))}
    if isinstance(content, list):
        return {**message, "content": [part for entry in content for part in _checked(entry, has_marks)]}
    return dict(message)


def _split(text: str) -> Iterator[dict[str, Any]]:
    for index, piece in enumerate(text.split(MARK)):
        if index:
            yield {"type": IMAGE}
        if piece:
            yield {"type": TEXT, TEXT: piece}


def _checked(part: Mapping[str, Any], has_marks: bool) -> Iterator[Mapping[str, Any]]:
    if part["type"] == TEXT:
        yield from _split(part[TEXT]) if has_marks and MARK in part[TEXT] else [part]
    elif part["type"] in IMAGE_TYPES:
        yield part
    else:
        raise UnusableRow(f"a message part has the type {part['type']!r:.40}; only text and images can be rendered")


def _led_by(messages: ChatMessages, count: int) -> ChatMessages:
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise UnusableRow("it has images, but no user message to put them in")
    user = messages[first]
    content = user["content"]
    parts = list(content) if isinstance(content, list) else [{"type": TEXT, TEXT: content}]
    led = {**user, "content": [*({"type": IMAGE} for _ in range(count)), *parts]}
    return [*messages[:first], led, *messages[first + 1 :]]


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in IMAGE_TYPES


def _embedded_image(part: Mapping[str, Any]) -> Any:
    key = next((key for key in IMAGE_KEYS if part.get(key) is not None), None)
    if key is None:
        return None
    return f"data:image;base64,{part[key]}" if key == "base64" else part[key]


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    if not _parts(message):
        return message
    return {**message, "content": [{"type": IMAGE} if _is_image(part) else part for part in _parts(message)]}
