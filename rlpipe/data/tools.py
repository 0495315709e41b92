"""Reads the tools of a row: schemas that the chat template shows to the policy."""

from __future__ import annotations

import json
from typing import Any

from rlpipe.data.rows import Row, UnusableRow


def row_tools(row: Row, column: str | None) -> list[Any] | None:
    """The schemas in a column, a list of them or its JSON; None where the row has none of its own.

    An empty list, or an empty text, is a row without any. Raises ``UnusableRow``.
    """
    value = None if column is None else row.get(column)
    if isinstance(value, str):
        value = _parse(value, f"column {column!r}")
    elif value is not None:
        value = _without_nulls(value)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise UnusableRow(f"column {column!r}: expected a list of tools, or its JSON, found {type(value).__name__}")
    return [_schema(tool, f"column {column!r}, tool {number}") for number, tool in enumerate(value, start=1)]


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        raise UnusableRow(f"{name}: not JSON ({error}): {text!r:.80}") from None


def _schema(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise UnusableRow(f"{name}: a JSON schema with a name was expected, found {tool!r:.80}")
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise UnusableRow(f"{name}: its key 'function' is {function!r:.80}, not a schema")
    if not isinstance(function.get("name"), str):
        raise UnusableRow(f"{name}: its key 'name' is {function.get('name')!r:.80}, not a text")
    return tool


def _without_nulls(value: Any) -> Any:
    """Tables give every schema the keys of all others, filled up with None."""
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list | tuple) else value
