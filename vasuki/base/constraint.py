"""What every answer of a job has to look like: a JSON schema, a regular expression, or one of some choices.

The short form of a schema names fields and their types:

    answer: {category: [invoice, letter, other], amount: number, items: [string], due: date?}

A list of values is an enumeration, a list of one type an array of it, a mapping an object, and `?` allows null. Every
field is there in every answer, so that rows are columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vasuki.base.errors import JobFileError, one_line

MOST_BYTES = 2**16  # of a schema, an expression, or all choices together
MOST_NESTING = 32  # of a schema
# More than a little white space between two tokens of JSON is how models fill up all of `max_tokens`.
WHITE_SPACE = r"[ \n]{1,8}"

_TYPES: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "date": {"type": "string", "format": "date"},
    "datetime": {"type": "string", "format": "date-time"},
}


Kind = Literal["schema", "regex", "choices"]
CONSTRAINTS: tuple[Kind, ...] = ("schema", "regex", "choices")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form of an answer.

    Args:
        kind: what `text` is.
        text: a JSON schema, an expression, or a JSON list of texts.
        key: of the job, or the part of a row, that says so.
        strict: whether only what is enforced to the letter is taken, so that whole answers need not be checked.
    """

    kind: Kind
    text: str
    key: str
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema; empty where it is none."""
        return dict(json.loads(self.text)) if self.kind == "schema" else {}

    @property
    def choices(self) -> list[str]:
        """The choices; empty where there are none."""
        return list(json.loads(self.text)) if self.kind == "choices" else []

    @property
    def grammar(self) -> str:
        """What `llguidance` takes: whitespace bounded, and, unless it is strict, "oneOf" read as "anyOf", so that
        answers are checked again when they are whole."""
        from llguidance import LLMatcher  # a job without constraints need not load it

        if self.kind == "schema":
            return LLMatcher.grammar_from_json_schema(
                self.text, overrides={"whitespace_pattern": WHITE_SPACE, "coerce_one_of": not self.strict}
            )
        expression = self.text if self.kind == "regex" else "|".join(map(re.escape, self.choices))
        return LLMatcher.grammar_from_regex(expression)

    def refuse(self) -> None:
        """Raises JobFileError for what cannot be honoured in full, whatever the model."""
        if why := self._why_not():
            raise JobFileError(f"{self.key}: {why}")

    def _why_not(self) -> str:
        if len(self.text.encode()) > MOST_BYTES:
            return f"has more than {MOST_BYTES // 1024} KiB"
        if self.kind == "choices":
            if not (choices := self.choices):
                return "there are none to choose from"
            if len(set(choices)) < len(choices) or "" in choices:
                return "each has to be a text of its own"
        if self.kind == "schema":
            if _nesting(self.schema) > MOST_NESTING:
                return f"is nested more than {MOST_NESTING} deep"
            if why := _malformed(self.schema):
                return why
        from llguidance import LLMatcher, LLTokenizer

        tokens = LLTokenizer("byte")
        if why := LLMatcher.validate_grammar(self.grammar, tokens):
            return f"cannot be honoured: {one_line(Exception(str(why).strip()))}"
        matcher = LLMatcher(tokens, self.grammar, log_level=0)
        if matcher.is_error() or not any(matcher.compute_bitmask()):
            return "no answer can be like that"
        return ""


def schema_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of the short form. Raises ValueError for what is no type."""
    if not answer:
        raise ValueError("names no field")
    return _object(answer)


def is_array(kind: list[Any]) -> bool:
    """Whether a list of the short form is an array of one type, and no enumeration."""
    return len(kind) == 1 and (isinstance(kind[0], Mapping | list) or str(kind[0]).removesuffix("?") in _TYPES)


def _object(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {str(name): _type(name, kind) for name, kind in fields.items()},
        "required": [str(name) for name in fields],
        "additionalProperties": False,
    }


def _type(name: str, kind: Any) -> dict[str, Any]:
    if isinstance(kind, Mapping):
        return _object(kind)
    if isinstance(kind, list):
        if is_array(kind):
            return {"type": "array", "items": _type(name, kind[0])}
        if not kind or not all(isinstance(value, str | int | float | bool) for value in kind):
            raise ValueError(f"{name}: a list is [type] for an array, or the values of an enumeration")
        return {"enum": kind}
    word = str(kind)
    known = _TYPES.get(word.removesuffix("?"))
    if known is None:
        raise ValueError(f"{name}: '{kind}' is no type; there are {', '.join(_TYPES)}, [type], [value, value], and ?")
    return {**known, "type": [known["type"], "null"]} if word.endswith("?") else dict(known)


def _nesting(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_nesting, inner), default=0)


def _malformed(schema: Mapping[str, Any]) -> str:
    """Why this is no JSON schema, or one whose references go in a circle; empty if it is one."""
    import jsonschema
    from referencing import Registry

    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
        validator(schema, registry=Registry()).is_valid(None)  # of nothing: references stay within the schema
    except jsonschema.exceptions.SchemaError as error:
        where = "".join(f".{part}" for part in error.absolute_path)
        return f"is no JSON schema{f' at {where[1:]}' if where else ''}: {one_line(Exception(error.message))}"
    except RecursionError:
        return "has references that go in a circle"
    except Exception as error:  # a reference that leads nowhere
        return f"cannot be resolved: {one_line(error)}"
    return ""
