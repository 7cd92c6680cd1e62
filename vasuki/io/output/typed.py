"""Answers as values: the Arrow type of a JSON schema, and an answer's text read by it.

string, number, integer, boolean   string, double, int64, bool
enumeration of texts               a dictionary
array, object                      list, struct
date, date-time                    text, or on request date32 and timestamp[us, UTC]
anything else                      its JSON as text: Parquet has no type for it
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import date, datetime
from functools import lru_cache, partial
from typing import Any

import jsonschema
import pyarrow as pa
from referencing import Registry

from vasuki.base.config import JobConfig
from vasuki.base.constraint import Constraint, Kind
from vasuki.base.errors import JobFileError
from vasuki.io.output.check import Check

_SCALARS = {"string": pa.string(), "number": pa.float64(), "integer": pa.int64(), "boolean": pa.bool_()}
_DATES = {"date": pa.date32(), "date-time": pa.timestamp("us", "UTC")}
_LARGEST = 2**63 - 1
_REMEMBERED = 1024  # constraints of rows


class AnswerReader:
    """Reads the answers of a job by its constraint.

    Args:
        constraint: of the job.
        types_dates: whether dates are values of their own.
        check: a condition that answers have to meet besides, see `vasuki.io.output.check`.
        as_json: whether they are kept as JSON, whatever their schema says.

    Raises:
        JobFileError: that is no condition.

    Attributes:
        type: of the column `answer`.
        as_text: paths of fields that are kept as JSON, since no type holds all that they may be.
    """

    def __init__(
        self, constraint: Constraint, types_dates: bool = False, check: str = "", as_json: bool = False
    ) -> None:
        self._types_dates = types_dates
        self.as_text: list[str] = []
        if constraint.kind == "schema":
            schema = constraint.schema
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            self._validator = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
            self.type = _JSON if as_json else self._type(schema, "answer", schema, 0)
        else:
            self.type = pa.dictionary(pa.int32(), pa.string()) if constraint.kind == "choices" else pa.string()
        self._choices = frozenset(constraint.choices)
        self._matcher = _matcher(constraint) if constraint.kind == "regex" else None
        fields = list(self.type) if pa.types.is_struct(self.type) else [pa.field("answer", self.type)]
        self._check = Check(check, fields) if check else None

    def read(self, text: str, was_cut: bool, constraint: Constraint | None = None) -> tuple[Any, str | None]:
        """The value of an answer, None unless it is right, and `ok`, `truncated` or `invalid`."""
        value, is_right = self._value(text)
        if is_right and self._check is not None and not self._check.holds(value):
            return None, "invalid"
        if is_right:
            return value, "ok"
        return None, "truncated" if was_cut else "invalid"

    def _value(self, text: str) -> tuple[Any, bool]:
        if self._choices:
            return text, text in self._choices
        if self._matcher is not None:
            self._matcher.reset()
            return text, bool(self._matcher.consume_tokens(list(text.encode())) and self._matcher.is_accepting())
        try:
            value = json.loads(text)
            self._validator.validate(value)
            return _stored(value, self.type), True
        except (ValueError, OverflowError, RecursionError, jsonschema.exceptions.ValidationError):
            return None, False

    def _type(self, schema: Any, path: str, root: Mapping[str, Any], depth: int) -> pa.DataType:
        """The type of a part of the schema; text where there is none."""
        schema = _resolved(schema, root)
        if isinstance(schema, Mapping) and depth < 64:
            if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
                return self._enumeration([value for value in values if value is not None], path)
            options = [each for each in schema.get("anyOf", []) if not _is_null(_resolved(each, root))]
            if len(options) == 1 and len(options) < len(schema.get("anyOf", [])):
                return self._type(options[0], path, root, depth + 1)
            kinds = schema.get("type")
            kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
            if kinds == ["string"] and self._types_dates and schema.get("format") in _DATES:
                return _DATES[schema["format"]]
            if len(kinds) == 1 and kinds[0] in _SCALARS:
                return _SCALARS[kinds[0]]
            if kinds == ["array"] and isinstance(schema.get("items"), Mapping):
                return pa.list_(self._type(schema["items"], f"{path}[]", root, depth + 1))
            properties = schema.get("properties")
            if kinds == ["object"] and properties and schema.get("additionalProperties") is False:
                fields = properties.items()
                return pa.struct([(name, self._type(part, f"{path}.{name}", root, depth + 1)) for name, part in fields])
        self.as_text.append(path)
        return _JSON

    def _enumeration(self, values: list[Any], path: str) -> pa.DataType:
        if all(isinstance(value, str) for value in values):
            return pa.dictionary(pa.int32(), pa.string())
        if all(isinstance(value, bool) for value in values):
            return pa.bool_()
        if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            return pa.int64()
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return pa.float64()
        self.as_text.append(path)
        return _JSON


class ReaderByRow:
    """Reads answers of which each row says what they look like. Those that follow a schema are kept as JSON.

    Args:
        kind: of the rows' constraints.
        check: see `AnswerReader`; over `answer`.

    Attributes:
        type: of the column `answer`.
        as_text: see `AnswerReader`.
    """

    as_text: Collection[str] = ()

    def __init__(self, kind: Kind, check: str = "") -> None:
        types = {"schema": _JSON, "regex": pa.string(), "choices": pa.dictionary(pa.int32(), pa.string())}
        self.type = types[kind]
        self._reader = lru_cache(_REMEMBERED)(partial(AnswerReader, as_json=True))
        self._check = Check(check, [pa.field("answer", self.type)]) if check else None

    def read(self, text: str, was_cut: bool, constraint: Constraint | None) -> tuple[Any, str | None]:
        """As `AnswerReader` has it; nothing of a row without a constraint."""
        if constraint is None:
            return None, None
        _, status = self._reader(constraint).read(text, was_cut)
        if status == "ok" and self._check is not None and not self._check.holds(text):
            status = "invalid"
        return text if status == "ok" else None, status


def reader_of(job: JobConfig) -> AnswerReader | ReaderByRow | None:
    """What reads a job's answers; None where it does not say what they look like."""
    constraint, output = job.constraint, job.output
    if by_column := job.constraint_column:
        return ReaderByRow(by_column[0], output.check)
    return AnswerReader(constraint, output.dates == "typed", output.check) if constraint else None


def columns_of(reader: AnswerReader | ReaderByRow, job: JobConfig, others: Collection[str]) -> list[pa.Field]:
    """The columns of typed answers. Raises JobFileError where a field has the name of one of the others."""
    status = pa.field("answer_status", pa.string())
    if not job.output.flatten:
        return [pa.field("answer", reader.type), status]
    if not pa.types.is_struct(reader.type):
        raise JobFileError("output.flatten: answers have no fields here; leave it out")
    for field in reader.type:
        if field.name in (*others, "answer_status"):
            raise JobFileError(f"output.flatten: there is a column '{field.name}' already; leave it out, or rename one")
    return [*reader.type, status]


_JSON = pa.large_string()  # which no other part of a schema becomes


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema, with references within it followed."""
    for _ in range(64):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not (isinstance(reference, str) and reference.startswith("#")):
            return schema
        schema = root
        for name in filter(None, reference[1:].split("/")):
            schema = schema[name.replace("~1", "/").replace("~0", "~")]
    return {}


def _stored(value: Any, kind: pa.DataType) -> Any:
    """A value as its type holds it. Raises OverflowError for an integer that int64 does not hold."""
    if kind == _JSON:
        return json.dumps(value, ensure_ascii=False)
    if pa.types.is_struct(kind) and value is not None:
        return {field.name: _stored(value[field.name], field.type) for field in kind if field.name in value}
    if pa.types.is_list(kind) and value is not None:
        return [_stored(each, kind.value_type) for each in value]
    if pa.types.is_int64(kind) and value is not None:
        if abs(value) > _LARGEST:
            raise OverflowError
        return int(value)
    if pa.types.is_date(kind) and value is not None:
        return date.fromisoformat(value)
    if pa.types.is_timestamp(kind) and value is not None:
        return datetime.fromisoformat(value)
    if pa.types.is_float64(kind) and value is not None:
        return float(value)
    return value


def _matcher(constraint: Constraint) -> Any:
    """What tells of bytes whether they are what an expression says: the engine that enforces it."""
    from llguidance import LLMatcher, LLTokenizer

    return LLMatcher(LLTokenizer("byte"), constraint.grammar, log_level=0)
