"""Conversions between Arrow and Python: the values of a column, and a value as text."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa


def python_values(column: Any) -> list[Any]:
    """The values of an Arrow array. Those that Python cannot hold exactly stay Arrow scalars.

    Nanosecond times, years past 9999 and text that is not UTF-8 are such values; carried to the output they are
    unchanged, and only a row that needs them as text can fail.
    """
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return scalar


def as_text(value: Any) -> str:
    """A value as it appears in a prompt or a text column: text as it stands, lists and structs as JSON.

    Raises:
        ValueError: bytes that are not UTF-8, lists in lists without end, or a value that has no text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, (dict, list, bool)):
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    if isinstance(value, pa.Scalar):
        try:
            return str(value.cast(pa.string()).as_py())
        except pa.ArrowException as error:
            raise ValueError(f"{value.type} has no text") from error
    return str(value)


def storable_type(arrow_type: Any) -> Any:
    """The type in which a column of `arrow_type` is copied to the output. Only types Parquet lacks are changed."""
    if pa.types.is_null(arrow_type):
        return pa.string()
    if isinstance(arrow_type, pa.BaseExtensionType):
        return storable_type(arrow_type.storage_type)
    if pa.types.is_run_end_encoded(arrow_type):
        return storable_type(arrow_type.value_type)
    return arrow_type
