"""The tool schemas of a row, which the chat template shows to the policy."""

from __future__ import annotations

import json
from typing import Any

from rlpipe.data.render.messages import without_nulls
from rlpipe.data.row import Row, UnusableRow


def row_tools(row: Row, column: str | None) -> list[Any] | None:
    """Return the schemas in a column, a list or its JSON; None if the row does not set its tools.

    An empty list, or an empty text, means a row without tools. Raises ``UnusableRow`` for anything else.
    """
    value = None if column is None else row.get(column)
    try:
        return _read(value)
    except UnusableRow as problem:
        hint = "set data.tools_column=null if it holds something else"
        raise UnusableRow(f"column {column!r}{problem.reason}; {hint}") from None


def _read(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _parse(value)
    elif value is not None:
        value = without_nulls(value)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise UnusableRow(f": expected a list of tools, or its JSON, found {type(value).__name__}")
    return [_schema(tool, f", tool {number}") for number, tool in enumerate(value, start=1)]


def _parse(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        raise UnusableRow(f": not JSON ({error}): {text!r:.80}") from None


def _schema(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise UnusableRow(f"{name}: a JSON schema with a name was expected, found {tool!r:.80}")
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise UnusableRow(f"{name}: its key 'function' is {function!r:.80}, not a schema")
    if not isinstance(function.get("name"), str):
        raise UnusableRow(f"{name}: its key 'name' is {function.get('name')!r:.80}, not a text")
    return tool
