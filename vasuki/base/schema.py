"""What is wrong with a job file or a hardware profile, in one phrase for each mistake."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from pydantic import BaseModel

from vasuki.base.errors import did_you_mean


def explain(error: pydantic.ValidationError, schema: type[BaseModel]) -> Iterator[str]:
    """The mistakes that pydantic found, with the nearest known key of the schema where one is unknown."""
    # By the key and what it holds: a message for each type that it may have.
    wrong: dict[tuple[str, str], list[str]] = {}
    for detail in error.errors(include_url=False):
        keys = [part for part in detail["loc"] if not _is_tag(part)]
        where = ".".join(map(str, keys))
        if detail["type"] == "extra_forbidden":
            yield f"unknown key '{where}'{did_you_mean(str(keys[-1]), _known_keys(schema, keys[:-1]))}"
        elif detail["type"] == "missing":
            yield f"'{where}' is missing"
        else:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
            given = "" if isinstance(detail["input"], (Mapping, BaseModel)) else f", not {detail['input']!r}"
            wrong.setdefault((where, given), []).append(message)
    for (where, given), [message, *others] in wrong.items():
        message = " or ".join([message, *(other.removeprefix("should be ") for other in others)])
        if "should" not in message:  # words of our own, which say what was given
            given = ""
        yield f"{where}: {message}{given}" if where else f"{message}{given}"


def _is_tag(part: int | str) -> bool:
    """Whether a part of an error's place, as pydantic says it, is no key but one of several types of a value."""
    tags = ("<", "function-", "constrained-", "literal[")
    return isinstance(part, str) and (part in ("float", "int") or part.startswith(tags))


def _known_keys(schema: type[BaseModel], section: list[int | str]) -> list[str]:
    model: type[BaseModel] | None = schema
    for part in section:
        if model is not None and isinstance(part, str):
            field = model.model_fields.get(part)
            model = next(_models_in(field.annotation), None) if field else None
    return list(model.model_fields) if model else []


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
