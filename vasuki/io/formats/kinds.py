"""The type that a column of a text file has, by the Python values of its rows."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

_INT64 = range(-(2**63), 2**63)
_ARROW_TYPES = {
    type(None): pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(),
    datetime.date: pa.date32(), datetime.datetime: pa.timestamp("us"),
}  # fmt: skip


class Kinds:
    """What kinds of values some columns have, and between which integers they lie."""

    def __init__(self, columns: Collection[str]) -> None:
        self.columns: dict[str, set[type]] = {name: set() for name in columns}
        self.integers: dict[str, tuple[int, int]] = {}  # the least and the greatest

    def see(self, values: Mapping[str, Any]) -> None:
        """Note a row. A column that it lacks is null."""
        for name, seen in self.columns.items():
            value: Any = values.get(name)
            kind = _kind(value)
            seen.add(kind)
            if kind is int:
                low, high = self.integers.get(name, (value, value))
                self.integers[name] = min(low, value), max(high, value)

    def type_of(self, name: str) -> Any:
        """The Arrow type of a column; null if it is none of these."""
        arrow_type = pa.null()
        for kind in self.columns.get(name, ()):
            arrow_type = common_type(arrow_type, _ARROW_TYPES.get(kind, pa.string()))
        return arrow_type


def common_type(one: Any, other: Any) -> Any:
    """The type that holds the values of both: null < integer < number, and text for all else."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _kind(value: Any) -> type:
    """The value's type; `object` for what only text can hold."""
    return object if type(value) is int and value not in _INT64 else type(value)
