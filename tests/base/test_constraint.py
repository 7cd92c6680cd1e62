"""What answers are to look like, or why that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vasuki.base.constraint import MOST_BYTES, Constraint, schema_of
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.base.yaml_text import read_yaml
from vasuki.runs.ignored import refuse_ignored

TREE: dict[str, Any] = {"model": {"path": "x"}, "input": {"path": "x", "prompt": "x"}, "output": {"path": "x"}}


def constraint_of(**changes: Any) -> Constraint | None:
    return parse_job({**TREE, **changes}).constraint


def test_the_short_form_is_a_schema() -> None:
    short = read_yaml("{category: [invoice, letter], amount: number, items: [string], due: date?, of: {n: integer}}")
    assert schema_of(short) == {
        "type": "object",
        "properties": {
            "category": {"enum": ["invoice", "letter"]},
            "amount": {"type": "number"},
            "items": {"type": "array", "items": {"type": "string"}},
            "due": {"type": ["string", "null"], "format": "date"},
            "of": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
        "required": ["category", "amount", "items", "due", "of"],
        "additionalProperties": False,
    }
    constraint = constraint_of(answer=short)
    assert constraint is not None
    constraint.refuse()
    assert constraint.schema == schema_of(short)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"a": "strin"}, "a: 'strin' is no type"),
        ({"a": []}, r"a: a list is \[type\]"),
        ({"a": [{"b": "number"}, "c"]}, r"a: a list is \[type\]"),
        ({"a": 3}, "a: '3' is no type"),
    ],
)
def test_what_is_no_type_is_refused(answer: dict[str, Any], why: str) -> None:
    with pytest.raises(JobFileError, match=rf"answer: {why}"):
        constraint_of(answer=answer)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"schema": {"type": "strin"}}, "sampling.schema: is no JSON schema at type"),
        ({"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "sampling.schema: .*circle"),
        ({"schema": {"$ref": "#/$defs/none"}}, "sampling.schema: cannot be resolved"),
        ({"schema": {"$ref": "http://localhost:1/x.json"}}, "sampling.schema: cannot be resolved"),
        ({"schema": {"enum": []}}, "sampling.schema: "),
        ({"schema": {"not": {"type": "string"}}}, r"sampling.schema: cannot be honoured: .*not"),
        ({"schema": {"type": "string", "pattern": "a" * MOST_BYTES}}, "sampling.schema: has more than 64 KiB"),
        ({"schema": json.loads('{"items":' * 40 + "{}" + "}" * 40)}, "sampling.schema: is nested more than 32 deep"),
        ({"schema": "/nowhere/schema.json"}, "sampling.schema: cannot read /nowhere/schema.json: No such file"),
        ({"regex": "(a"}, "sampling.regex: cannot be honoured: .*unclosed group"),
        ({"regex": "(?=a)b"}, "sampling.regex: cannot be honoured"),
        ({"choices": ["a", "a"]}, "sampling.choices: each has to be a text of its own"),
        ({"choices": ["a", ""]}, "sampling.choices: each has to be a text of its own"),
        ({"choices": ["a"], "regex": "a"}, "sampling.regex and sampling.choices both say"),
        ({"choices": ["a"], "min_tokens": 3}, "sampling.min_tokens: an answer is as long as sampling.choices says"),
        ({"choices": ["a"], "ignore_eos": True}, "sampling.ignore_eos: an answer ends when it is"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(sampling: dict[str, Any], why: str) -> None:
    with pytest.raises(JobFileError, match=why):
        refuse_ignored(parse_job({**TREE, "sampling": sampling}))


def test_two_forms_at_once_are_refused() -> None:
    with pytest.raises(JobFileError, match=r"sampling.schema and answer both say"):
        constraint_of(answer={"a": "string"}, sampling={"schema": {"type": "object"}})


def test_a_job_without_constraints_has_the_hash_that_it_had() -> None:
    plain = parse_job(TREE)
    assert plain.constraint is None
    assert plain.config_hash("m") == parse_job({**TREE, "sampling": {"choices": []}}).config_hash("m")
    hashes = {
        parse_job({**TREE, "sampling": {"choices": choices}}).config_hash("m") for choices in ([], ["a"], ["a", "b"])
    }
    assert len(hashes) == 3


def test_choices_may_begin_alike_and_hold_any_character() -> None:
    constraint = Constraint("choices", json.dumps(["a", "ab", "a|b", "é (x)*", '"', "\\"]), "sampling.choices")
    constraint.refuse()


def test_a_schema_file_is_read_once(tmp_path: Path) -> None:
    """A replica on another machine has the job, and no such file."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    config = parse_job({**TREE, "sampling": {"schema": str(file)}})
    file.unlink()
    elsewhere = parse_job(config.model_dump(mode="json"))
    assert elsewhere.constraint == config.constraint == Constraint("schema", '{"type": "integer"}', "sampling.schema")
