"""Arrow's types, at any depth, as the rest of vasuki meets them: compared with pyarrow's own values and casts."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vasuki.io.plain import plain, plain_type
from vasuki.io.values import as_text, json_text, python_values

TENSOR = pa.fixed_shape_tensor(pa.float64(), [2])
FLAT: dict[str, Any] = {
    "null": pa.nulls(3),
    "bool": pa.array([True, None, False]),
    "int8": pa.array([1, None, 3], pa.int8()),
    "uint64": pa.array([1, None, 2**64 - 1], pa.uint64()),
    "double": pa.array([0.1, None, 1e300]),
    "string": pa.array(["a", None, "é"]),
    "large string": pa.array(["a", None, "b"], pa.large_string()),
    "string view": pa.array(["a", None, "b"], pa.string_view()),
    "binary": pa.array([b"\xff", None, b"b"]),
    "binary view": pa.array([b"a", None, b"b"], pa.binary_view()),
    "fixed binary": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "decimal": pa.array([decimal.Decimal("0E-18"), None, decimal.Decimal("1.5")], pa.decimal128(38, 18)),
    "date": pa.array([datetime.date(2021, 5, 3), None, datetime.date(1, 1, 1)]),
    "timestamp": pa.array([1, None, 2], pa.timestamp("us", "UTC")),
    "time": pa.array([1, None, 2], pa.time64("us")),
    "duration": pa.array([1, None, 2], pa.duration("ms")),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "dictionary of views": pa.DictionaryArray.from_arrays(
        pa.array([1, None, 0], pa.int8()), pa.array(["a", "b"], pa.string_view())
    ),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["x", None])),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None, "1"])),
    "tensor": pa.ExtensionArray.from_storage(
        TENSOR, pa.array([[0.1, 1.0], None, [1.0, 2.0]], pa.list_(pa.float64(), 2))
    ),
}  # fmt: skip


def nested(array: Any) -> Iterator[tuple[str, Any]]:
    """The same three values within each kind of nesting, with empty and null ones among them."""
    ends = pa.array([0, 1, 3, 3], pa.int32())
    holes = pa.array([0, None, 1, 3], pa.int32())
    keys = pa.array(["k", "l", "m"])
    yield "list", pa.ListArray.from_arrays(ends, array)
    yield "list with nulls", pa.ListArray.from_arrays(holes, array)
    yield "large list", pa.LargeListArray.from_arrays(ends.cast(pa.int64()), array)
    yield "fixed list", pa.FixedSizeListArray.from_arrays(array, 1)
    yield "list view", pa.ListViewArray.from_arrays(ends[:3], pa.array([1, 2, 0], pa.int32()), array)
    yield "struct", pa.StructArray.from_arrays([array], names=["f"], mask=pa.array([False, True, False]))
    yield "map", pa.MapArray.from_arrays(ends, keys, array)
    yield "map with nulls", pa.MapArray.from_arrays(holes, keys, array)
    yield "dictionary", pa.DictionaryArray.from_arrays(pa.array([0, None, 2], pa.int8()), array)


def cases() -> Iterator[tuple[str, Any]]:
    for name, array in FLAT.items():
        yield name, array
        for outer, once in nested(array):
            yield f"{outer} of {name}", once
            for outermost, twice in nested(once):
                yield f"{outermost} of {outer} of {name}", twice


def is_plain(kind: Any) -> bool:
    odd = (pa.types.is_dictionary, pa.types.is_run_end_encoded, pa.types.is_string_view, pa.types.is_binary_view)
    if isinstance(kind, pa.BaseExtensionType) or any(check(kind) for check in odd):
        return False
    return all(is_plain(kind.field(index).type) for index in range(kind.num_fields))


def test_every_type_at_any_depth_becomes_plain_and_keeps_its_values() -> None:
    for name, array in cases():
        for piece in (array, array.slice(1, 2), array.slice(3)):
            converted = plain(piece)
            assert is_plain(converted.type), name
            assert is_plain(plain_type(array.type)), name
            assert converted.to_pylist() == piece.to_pylist(), name


def test_what_is_copied_to_the_output_is_made_of_python_values_again() -> None:
    for name, array in cases():
        copied = pa.array(python_values(array), type=plain_type(array.type))
        assert copied.to_pylist() == array.to_pylist(), name


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers_have_the_digits_that_arrow_writes(kind: Any) -> None:
    """Digits by pyarrow's own cast to text, which writes all of a float16: those by numpy. Copied back they are the
    same bits."""
    rng = np.random.default_rng(0)
    numbers = np.concatenate(
        [[0.1, 19.99, 1.0, 65504.0, 6e-8], rng.normal(size=200) * 10.0 ** rng.integers(-3, 4, 200)]
    )
    array = pa.array(numbers.astype(kind.to_pandas_dtype()), kind)
    values = python_values(array)
    if kind == pa.float16():
        assert [value for value in values if value % 1] == [float(str(half)) for half in array.to_numpy() if half % 1]
    else:
        assert [float(text) for text in array.cast(pa.string()).to_pylist()] == values
    assert pa.array(np.array(values).astype(kind.to_pandas_dtype()), kind).equals(array)
    assert as_text(values[0]) == "0.1"
    assert as_text(python_values(pa.array([[0.1]], pa.list_(kind)))[0]) == "[0.1]"


def test_decimals_never_have_an_exponent() -> None:
    values = [decimal.Decimal(text) for text in ("0E-18", "1E+3", "-0.10", "123.4500")]
    array = pa.array(values, pa.decimal128(38, 18))
    assert [as_text(value) for value in python_values(array)] == [format(value, "f") for value in array.to_pylist()]
    assert as_text(values[0]) == "0.000000000000000000"
    assert as_text(decimal.Decimal("1E+3")) == "1000"


def test_maps_are_objects_and_ones_that_repeat_a_key_lose_nothing() -> None:
    maps = pa.array([[("a", 1), ("b", None)], [], None, [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    assert python_values(maps) == [{"a": 1, "b": None}, {}, None, [("a", 1), ("a", 2)]]
    assert as_text(python_values(maps)[0]) == '{"a": 1, "b": null}'
    by_date = pa.array([[(datetime.date(2021, 5, 3), 1)]], pa.map_(pa.date32(), pa.int64()))
    assert json.loads(as_text(python_values(by_date)[0])) == {"2021-05-03": 1}


def test_json_has_no_nan() -> None:
    line = {"a": math.nan, "b": [math.inf, 1.5, {"c": -math.inf}], "d": decimal.Decimal("1.0")}
    assert json.loads(json_text(line), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5, {"c": None}],
        "d": "1.0",
    }


def test_a_uuid_has_its_text_at_any_depth_and_is_copied_as_its_bytes() -> None:
    ids = [uuid.UUID(int=2**127 + number) for number in range(3)]
    array = pa.array([one.bytes for one in ids], pa.uuid())
    assert [as_text(value) for value in python_values(array)] == [str(one) for one in ids]
    for name, outer in nested(array):
        if name != "dictionary":
            texts = "".join(as_text(value) for value in python_values(outer) if value is not None)
            assert str(ids[0]) in texts, name
        copied = pa.array(python_values(outer), type=plain_type(outer.type))
        assert copied.type == plain_type(outer.type), name
    assert pa.array(python_values(array), type=plain_type(array.type)).to_pylist() == [one.bytes for one in ids]
