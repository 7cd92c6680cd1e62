"""Conversions between Arrow and Python: the values of a column, and a value as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from vasuki.io.plain import holds_maps, mapped, plain


def python_values(column: Any) -> list[Any]:
    """The values of an Arrow array: maps as dicts, float32 with its own digits, see `vasuki.io.plain`."""
    return plain_values(plain(column))


def plain_values(column: Any) -> list[Any]:
    """The values of an array that is plain already. Those that Python cannot hold exactly stay Arrow scalars.

    Nanosecond times, years past 9999 and text that is not UTF-8 are such values; carried to the output they are
    unchanged, and only a row that needs them as text can fail.
    """
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):
        values = [_python_value(scalar) for scalar in column]
    return [*map(mapped(column.type), values)] if holds_maps(column.type) else values


def _python_value(scalar: Any) -> Any:
    """The value of a scalar, or itself where Python has none like it, at any depth."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        if isinstance(scalar, pa.StructScalar):
            return {name: _python_value(scalar[name]) for name in scalar}
        if isinstance(scalar, pa.ListScalar):  # of which maps are
            parts = [_python_value(each) for each in scalar.values]
            return [(part["key"], part["value"]) for part in parts] if isinstance(scalar, pa.MapScalar) else parts
        return scalar


def as_text(value: Any) -> str:
    """A value as it appears in a prompt or a text column: text as it stands, decimals without an exponent, lists,
    structs and maps as JSON.

    Raises:
        ValueError: bytes that are not UTF-8, lists in lists without end, or a value that has no text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("its bytes are no UTF-8 text; write them as text, as hex() in SQL") from None
    if isinstance(value, (dict, list, bool)):
        return json_text(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, pa.Scalar):
        try:
            return str(value.cast(pa.string()).as_py())
        except pa.ArrowException as error:
            raise ValueError(f"{value.type} has no text") from error
    return str(value)


def json_text(value: Any, text_of: Callable[[Any], str] = as_text) -> str:
    """A value as JSON (RFC 8259), which has no NaN and no infinity: they are null. What else JSON lacks, such as
    dates, is written by `text_of`.

    Raises:
        ValueError: lists in lists without end, or a value that has no text.
    """
    try:
        try:
            return json.dumps(value, ensure_ascii=False, default=text_of, allow_nan=False)
        except (ValueError, TypeError):  # a number, or a key, that JSON lacks
            return json.dumps(_finite(value), ensure_ascii=False, default=text_of)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {as_text(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def value_bytes(value: Any) -> int:
    """About how much memory a value takes."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(value_bytes, value.values())) + 64
    return sum(map(value_bytes, value)) + 56 if isinstance(value, list) else 32
