"""Arrow arrays in plain types: converted once, where rows are read, so that nobody behind has to know the others.

    views, large views         text, bytes and lists
    dictionaries, run ends     their values
    extensions (json, bool8)   their storage; a uuid stays one, and is copied as its 16 bytes
    float16, float32           float64 of the same shortest digits: 0.1 stays 0.1
    lists of one length        lists

At any depth: a list of such values is a list of plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def plain(array: Any) -> Any:
    """The same values in a plain type. Raises ArrowException for what Arrow itself cannot convert."""
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([plain(chunk) for chunk in array.chunks] or [plain(array.combine_chunks())])
    kind = array.type
    if isinstance(kind, pa.UuidType):
        return array  # whose bytes are no text; its Python values have one
    if isinstance(kind, pa.BaseExtensionType):
        return plain(array.storage)
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary).take(array.indices)
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array))
    if pa.types.is_float32(kind):
        return array.cast(pa.string()).cast(pa.float64())
    if pa.types.is_float16(kind):  # whose cast writes all digits, 0.0999755859375
        return pa.array([None if half is None else _digits(half) for half in array.to_pylist()], pa.float64())
    if pa.types.is_struct(kind):
        fields = [plain(field) for field in array.flatten()]
        return pa.StructArray.from_arrays(fields, names=[field.name for field in kind], mask=array.is_null())
    if _is_list(kind):
        return pa.LargeListArray.from_arrays(_offsets(array), plain(array.flatten()), mask=array.is_null())
    if pa.types.is_map(kind):
        nulls, begins = array.is_null(), pa.array(array.offsets.to_numpy())
        keys, items = (pa.ListArray.from_arrays(begins, side, mask=nulls) for side in (array.keys, array.items))
        offsets = pc.if_else(pa.concat_arrays([nulls, pa.array([False])]), None, _offsets(keys).cast(pa.int32()))
        return pa.MapArray.from_arrays(offsets, plain(keys.flatten()), plain(items.flatten()))
    stored = plain_type(kind)
    return array if stored == kind else array.cast(stored)


def plain_type(kind: Any) -> Any:
    """The type in which a column of this type is copied to the output: plain, with numbers as wide, and lists as long,
    as they were."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if _is_list(kind):
        make = pa.large_list if pa.types.is_large_list(kind) or _is_large_view(kind) else pa.list_
        return make(kind.value_field.with_type(plain_type(kind.value_type)))
    return kind


def holds_maps(kind: Any) -> bool:
    """Whether values of a plain type hold maps, which Arrow gives as lists of pairs."""
    if pa.types.is_map(kind):
        return True
    if pa.types.is_struct(kind):
        return any(holds_maps(field.type) for field in kind)
    return _is_list(kind) and holds_maps(kind.value_type)


def mapped(kind: Any) -> Callable[[Any], Any]:
    """A function that turns the maps in a value of this plain type into dicts. One that repeats a key stays pairs."""
    if not holds_maps(kind):
        return lambda value: value
    if pa.types.is_struct(kind):
        of_field = {field.name: mapped(field.type) for field in kind}
        return lambda value: value and {name: of_field[name](part) for name, part in value.items()}
    if pa.types.is_map(kind):
        of_key, of_item = mapped(kind.key_type), mapped(kind.item_type)

        def as_dict(pairs: Any) -> Any:
            if pairs is None:
                return None
            pairs = [(of_key(key), of_item(item)) for key, item in pairs]
            try:
                found = dict(pairs)
            except TypeError:  # a key that has no hash
                return pairs
            return found if len(found) == len(pairs) else pairs

        return as_dict
    of_value = mapped(kind.value_type)
    return lambda values: values and [of_value(value) for value in values]


def _digits(half: float) -> float:
    return half if half.is_integer() else float(str(np.float16(half)))


def _offsets(array: Any) -> Any:
    """Where each list begins within the values of all lists that are not null. int64 [len(array) + 1]."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    return pa.array(np.append(0, np.cumsum(np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.int64))))


def _is_large_view(kind: Any) -> bool:
    return bool(pa.types.is_large_list_view(kind))


def _is_list(kind: Any) -> bool:
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(check(kind) for check in (*checks, pa.types.is_list_view, pa.types.is_large_list_view))
