"""Answers as values, as pyarrow, DuckDB-style readers and pandas see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vasuki.base.constraint import Constraint, schema_of
from vasuki.io.output.typed import AnswerReader

SHORT = {
    "category": ["invoice", "letter"],
    "amount": "number",
    "count": "integer",
    "paid": "boolean",
    "items": ["string"],
    "due": "date?",
    "by": {"name": "string", "of": [{"n": "integer?"}]},
    "level": [1, 2],
}
VALUE = {
    "category": "letter",
    "amount": 3,
    "count": 2**62,
    "paid": True,
    "items": ["é", ""],
    "due": None,
    "by": {"name": "x", "of": [{"n": 1}, {"n": None}]},
    "level": 2,
}


def reader(schema: dict[str, Any]) -> AnswerReader:
    return AnswerReader(Constraint("schema", json.dumps(schema), "sampling.schema"))


def test_a_value_goes_through_parquet_as_it_is(tmp_path: Path) -> None:
    typed = reader(schema_of(SHORT))
    value, status = typed.read(json.dumps(VALUE), was_cut=False)
    assert status == "ok"
    assert not typed.as_text
    pq.write_table(pa.table({"answer": pa.array([value, None], typed.type)}), tmp_path / "a.parquet")
    read = pq.read_table(tmp_path / "a.parquet")
    assert read["answer"].to_pylist() == [VALUE, None]
    fields = {field.name: field.type for field in read.schema.field("answer").type}
    assert fields["category"] == pa.dictionary(pa.int32(), pa.string())
    assert (fields["amount"], fields["count"], fields["paid"]) == (pa.float64(), pa.int64(), pa.bool_())
    assert fields["level"] == pa.int64()
    assert pd.read_parquet(tmp_path / "a.parquet")["answer"][0]["by"]["name"] == "x"


@pytest.mark.parametrize(
    ("text", "was_cut", "status"),
    [
        ('{"a": 1}', False, "ok"),
        (' {"a" : 1 }', False, "ok"),
        ('{"a": 1}', True, "ok"),
        ('{"a": 1', True, "truncated"),
        ('{"a": 1', False, "invalid"),
        ('{"a": "1"}', False, "invalid"),
        ('{"a": 1, "b": 2}', False, "invalid"),
        ("", True, "truncated"),
        (f'{{"a": {2**63}}}', False, "invalid"),
        ("[" * 100_000, False, "invalid"),
    ],
)
def test_only_right_answers_have_values(text: str, was_cut: bool, status: str) -> None:
    value, found = reader(schema_of({"a": "integer"})).read(text, was_cut)
    assert found == status
    assert (value == {"a": 1}) == (status == "ok")


def test_one_of_is_checked_when_the_answer_is_whole() -> None:
    typed = reader({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]})
    assert typed.read("3", was_cut=False) == ("3", "ok")
    assert typed.read("7", was_cut=False) == (None, "invalid")
    assert typed.as_text == ["answer"]


def test_formats_are_checked_when_the_answer_is_whole() -> None:
    typed = reader(schema_of({"due": "date"}))
    assert typed.read('{"due": "2024-02-29"}', was_cut=False)[1] == "ok"
    assert typed.read('{"due": "2023-02-29"}', was_cut=False)[1] == "invalid"


def test_what_no_type_holds_is_json_as_text() -> None:
    schema = {
        "type": "object",
        "properties": {
            "x": {"type": ["string", "integer"]},
            "y": {},
            "z": {"$ref": "#/$defs/z"},
            "a": {"anyOf": [True]},
        },
        "required": ["x", "y", "z"],
        "additionalProperties": False,
        "$defs": {
            "z": {"type": "array", "items": {"$ref": "#/$defs/w"}},
            "w": {"anyOf": [{"type": "null"}, {"const": 1}]},
        },
    }
    typed = reader(schema)
    assert typed.as_text == ["answer.x", "answer.y", "answer.a"]
    value, status = typed.read('{"x": 1, "y": {"é": [null]}, "z": [1, null]}', was_cut=False)
    assert (value, status) == ({"x": "1", "y": '{"é": [null]}', "z": [1, None]}, "ok")
    assert pa.array([value], typed.type).to_pylist() == [value | {"a": None}]


def test_schemas_that_refer_to_themselves_end() -> None:
    tree = {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}
    typed = reader(tree)
    assert len(typed.as_text) == 1
    assert typed.read('{"n": {"n": {}}}', was_cut=False)[1] == "ok"


def test_choices_and_expressions() -> None:
    choices = AnswerReader(Constraint("choices", '["a", "ab"]', "sampling.choices"))
    assert [choices.read(text, False) for text in ("ab", "b")] == [("ab", "ok"), (None, "invalid")]
    expression = AnswerReader(Constraint("regex", r"\p{L}{2}|\d+", "sampling.regex"))
    assert [expression.read(text, True)[1] for text in ("éa", "é", "12", "1a")] == [
        "ok",
        "truncated",
        "ok",
        "truncated",
    ]


def test_an_integer_of_any_size_is_json() -> None:
    whole = Constraint("schema", '{"type": "integer"}', "column 's'")
    assert AnswerReader(whole).read("9" * 30, False) == (None, "invalid")
    assert AnswerReader(whole, as_json=True).read("9" * 30, False) == ("9" * 30, "ok")
