"""Storage of the values of a prepared row as bytes; a file of such bytes may come from elsewhere and runs no code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.common.imports import describe_error
from rlpipe.errors import DataError

ALLOWED = {
    ("collections", "OrderedDict"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("rlpipe.data.row_values", "make_array"),
    ("rlpipe.data.row_values", "make_number"),
    ("rlpipe.data.row_values", "make_objects"),
    ("rlpipe.types", "PlacedImage"),
    ("rlpipe.types", "Truth"),
}
"""Classes and functions that values may use beside Python's own; none of them runs code.

NumPy's own are not among them: they take a dtype's flags from the file, and with wrong flags NumPy takes bytes of the
file for addresses of objects.
"""


def dump(value: Any, location: str) -> bytes:
    """Store ``value`` as bytes; raise ``DataError`` if it is, or holds, something that could not be read back."""
    try:
        with io.BytesIO() as file:
            _ValueWriter(file, protocol=5).dump(value)
            stored = file.getvalue()
        _ValueReader(io.BytesIO(stored)).load()
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise DataError(
            f"{location}: its columns can't be stored ({error}); leave out the column with data.transform"
        ) from None
    return stored


def load(stored: bytes) -> Any:
    """Return what ``dump`` stored; raise ``DataError`` if it is damaged, or holds anything else."""
    try:
        return _ValueReader(io.BytesIO(stored)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise any
        raise DataError(
            f"a prepared row can't be read ({describe_error(error)}): delete the prepared rows (data.cache)"
        ) from None


class _ValueWriter(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            return NotImplemented
        if value.dtype.hasobject:
            return make_objects, (value.shape, value.ravel().tolist())
        described = np.lib.format.dtype_to_descr(value.dtype)
        if np.lib.format.descr_to_dtype(described) != value.dtype:
            raise pickle.PicklingError(f"NumPy's type {value.dtype} can't be described")
        make = make_array if isinstance(value, np.ndarray) else make_number
        return make, (described, value.shape, value.tobytes())


def make_array(described: Any, shape: tuple[int, ...], content: bytes) -> NDArray[Any]:
    """Make an array that owns its memory, of a type as ``.npy`` files describe it."""
    dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise pickle.UnpicklingError("objects can't be made from their bytes")
    return np.ndarray(shape, dtype, content).copy()


def make_number(described: Any, shape: tuple[int, ...], content: bytes) -> Any:
    return make_array(described, shape, content)[()]


def make_objects(shape: tuple[int, ...], values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


class _ValueReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
        return super().find_class(module, name)
