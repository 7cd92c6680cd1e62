"""What the value of a setting may look like: sizes, times, columns of the input, quantiles, JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    WithJsonSchema,
)

from vasuki.base.errors import one_line
from vasuki.base.files import read_short
from vasuki.base.units import seconds_of
from vasuki.base.urls import without_keys

T = TypeVar("T")

MOST_BYTES = 2**20  # of a job file, and of what it names
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: Any) -> Any:
    """`"8GiB"` -> 8589934592. Numbers pass through."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 512MiB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_seconds(value: Any) -> Any:
    """`"10 min"` -> 600.0. Numbers pass through."""
    return seconds_of(value) if isinstance(value, str) else value


_OR_TEXT = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0), WithJsonSchema(_OR_TEXT)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0), WithJsonSchema(_OR_TEXT)]


def read_schema(value: Any) -> Any:
    """A JSON schema from the file that a job names, once: replicas may have no such file. Others pass through."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(read_short(value, MOST_BYTES)) if value else {}
    except OSError as error:
        raise ValueError(f"cannot read {value}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{value} is not JSON: {one_line(error)}") from None


JsonSchema = Annotated[
    dict[str, Any], BeforeValidator(read_schema), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]


# A path or URL, whose keys are in no file that we write.
Place = Annotated[str, PlainSerializer(without_keys, when_used="json")]


def _without_empty(stops: tuple[str, ...]) -> tuple[str, ...]:
    """An empty string would end every answer before it begins."""
    if "" in stops:
        raise ValueError("holds an empty string")
    return stops


StopStrings = Annotated[tuple[str, ...], AfterValidator(_without_empty)]
MAX_SAMPLES = 16_384  # of a row: they are held until the last is done, and one wrong number must not fill the memory


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Column(Section):
    """A setting taken from a column of the input, row by row."""

    column: str
    """Name of the input column."""


class Quantile(Section):
    """A setting taken from a quantile of a distribution."""

    quantile: Annotated[float, Field(gt=0, le=1)]
    """Between 0 and 1; 0.9 means that nine rows in ten are at most this long."""


def _spelling(value: Any) -> str:
    """Which member of a union a value means, so that a mistake is explained for that member alone."""
    if isinstance(value, Quantile) or (isinstance(value, Mapping) and "quantile" in value):
        return "<quantile>"
    return "<column>" if isinstance(value, (Column, Mapping)) else "<value>"


def _is_column(value: Mapping[str, Any]) -> bool:
    return value.keys() == {"column"} and isinstance(value["column"], str)


# A setting that is either one value for all rows or `{column: name}`.
OrColumn = Annotated[
    Annotated[Column, Tag("<column>")] | Annotated[T, Tag("<value>")],
    Discriminator(lambda value: "<column>" if _spelling(value) == "<quantile>" else _spelling(value)),
]
# The same for a setting that is a mapping itself.
OrInline = Annotated[
    Annotated[Column, Tag("<column>")] | Annotated[T, Tag("<value>")],
    Discriminator(lambda value: _spelling(value) if not isinstance(value, Mapping) or _is_column(value) else "<value>"),
]
OutputLength = Annotated[
    Annotated[Column, Tag("<column>")]
    | Annotated[Quantile, Tag("<quantile>")]
    | Annotated[Literal["max", "auto"], Tag("<value>")],
    Discriminator(_spelling),
]
