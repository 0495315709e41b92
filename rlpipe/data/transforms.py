"""Applies a user's row transform, written as axolotl and TRL users know it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rlpipe.configs.schema import DataConfig
from rlpipe.data.rows import Row, Rows, UnusableRow
from rlpipe.errors import DataError, InputError
from rlpipe.imports import USER_CODE_ERRORS, describe_error, import_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALL_COLUMNS = "__all__"


class TransformConfig(dict[str, Any]):
    """The ``cfg`` of a transform: the data config and ``transform_args``, by key or attribute, None where unset."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __missing__(self, key: str) -> None:
        return None


class TransformedRows:
    """Rows after a transform: a row's columns, less the removed ones, plus those that ``map_row`` returns.

    ``remove`` names columns, or is ``"__all__"`` for all of the original row. A row on which ``map_row`` raises is
    unusable.
    """

    def __init__(self, rows: Rows, map_row: Callable[[dict[str, Any]], Any], remove: Collection[str] | str) -> None:
        self.name = rows.name
        self._rows = rows
        self._map_row = map_row
        self._remove = remove

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        try:
            new = self._map_row(dict(row))
        except USER_CODE_ERRORS as error:
            if isinstance(error, InputError):
                raise
            raise UnusableRow(f"data.transform raised {describe_error(error)}") from error
        if not isinstance(new, Mapping):
            raise DataError(f"{self.location(index)}: data.transform returned {type(new).__name__} instead of a dict")
        removed = row.keys() if self._remove == ALL_COLUMNS else self._remove
        return {**{name: value for name, value in row.items() if name not in removed}, **new}

    def location(self, index: int) -> str:
        return self._rows.location(index)


def apply_transform(rows: Rows, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """``rows`` behind ``data.transform``, or as they are without one.

    The transform is called as ``transform(cfg)`` and returns ``map_fn`` or ``(map_fn, {"remove_columns": [...]})``;
    ``map_fn(row)`` returns the new row's columns and is given the ``tokenizer`` if it has a parameter of that name.
    Raises ``DataError`` if the transform can't be imported or returns something else.
    """
    if data.transform is None:
        return rows
    transform = import_object(data.transform, what="data.transform", error=DataError)
    settings = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    try:
        result = transform(TransformConfig(settings | data.transform_args))
    except USER_CODE_ERRORS as error:
        raise DataError(f"data.transform {data.transform!r} raised {describe_error(error)}") from error
    map_row, options = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not callable(map_row) or not isinstance(options, Mapping):
        raise DataError(f"data.transform {data.transform!r} must return (map_fn, {{'remove_columns': [...]}})")
    unknown = options.keys() - {"remove_columns"}
    if unknown:
        raise DataError(f"data.transform {data.transform!r}: only remove_columns is known, not {', '.join(unknown)}")
    if "tokenizer" in inspect.signature(map_row).parameters:
        map_row = partial(map_row, tokenizer=tokenizer)
    return TransformedRows(rows, map_row, _removed_columns(options.get("remove_columns")))


def _removed_columns(value: Any) -> Collection[str] | str:
    if isinstance(value, str) and value != ALL_COLUMNS:
        return [value]
    return value or ()
