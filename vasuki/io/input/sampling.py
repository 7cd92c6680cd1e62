"""The sampling settings of a row: from the job, from its columns, or from its openai-batch body, in rising order."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pydantic

from vasuki.base.config import OutputConfig, SamplingConfig
from vasuki.base.config_values import Column
from vasuki.base.constraint import CONSTRAINTS, Constraint, Kind
from vasuki.base.errors import JobFileError, one_line
from vasuki.engine.sequence import SamplingParams
from vasuki.io.input.row_error import RowError

_REMEMBERED = 1024  # constraints of rows, with what is wrong with them


class SamplingReader:
    """Reads rows' settings, checked by the same rules as the job file's.

    Args:
        config: of the job.
        vocab_size: ids of tokens must lie below it.
        output: of the job: what is kept of the output's text.
        constraint: of every answer.

    Raises:
        JobFileError: the job names a token that the model does not have.
    """

    def __init__(
        self,
        config: SamplingConfig,
        vocab_size: int,
        output: OutputConfig,
        constraint: Constraint | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._settings: dict[str, Any] = {
            "special_tokens": output.special_tokens,
            "reasoning": output.reasoning,
            "constraint": constraint,
        }
        self._columns: dict[str, str] = {}
        self._constraint: tuple[Kind, str] | None = None  # its kind, and the column that has it
        for name, value in config:
            if name in CONSTRAINTS:
                if isinstance(value, Column):
                    self._constraint = name, value.column
                continue
            if isinstance(value, Column):
                self._columns[name] = value.column
                value = SamplingConfig.model_fields[name].default
            self._settings[name] = value
        if why := self._missing_token(self._settings):
            raise JobFileError(f"sampling.{why}")
        self._of_the_job = SamplingParams(**self._settings)

    def read(self, values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> SamplingParams:
        """The settings of one row.

        Args:
            values: the row, by column. A null (in text formats also an empty cell) means the setting's default.
            overrides: settings that go before the job's; null leaves the job's.

        Raises:
            RowError: a value is of the wrong type or out of range.
        """
        if not self._columns and not overrides and not self._constraint:
            return self._of_the_job
        given = {name: values[column] for name, column in self._columns.items()} | dict(overrides or {})
        settings = {name: _checked(name, value) for name, value in given.items() if value not in (None, "")}
        if self._constraint:
            kind, column = self._constraint
            if (value := values[column]) not in (None, ""):
                settings["constraint"] = constraint_of(kind, value, f"column '{column}'")
        settings = self._settings | settings
        if why := self._missing_token(settings):
            raise RowError(why)
        constraint = settings["constraint"]
        if constraint and (settings["ignore_eos"] or settings["min_tokens"]):
            name = "ignore_eos" if settings["ignore_eos"] else "min_tokens"
            raise RowError(f"{name}: an answer is as long as {constraint.key} says; leave it out")
        return SamplingParams(**settings)

    def _missing_token(self, settings: Mapping[str, Any]) -> str:
        """What names a token that the model does not have; empty if nothing does."""
        for name in ("logit_bias", "stop_token_ids"):
            if (largest := max(settings[name], default=0)) >= self._vocab_size:
                return f"{name} names token {largest}, outside the model's vocabulary of {self._vocab_size} tokens"
        return ""


def constraint_of(kind: Kind, value: Any, key: str, strict: bool = False) -> Constraint:
    """What a row says that its answer has to look like. Raises RowError where that cannot be honoured in full.

    Args:
        kind: of constraint.
        value: what the row has: a schema as an object or as JSON, an expression, or a list of choices.
        key: where.
        strict: see `Constraint`.
    """
    if kind == "schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"{key} is not JSON") from None
    wanted = {"schema": dict, "regex": str, "choices": list}[kind]
    is_right = isinstance(value, wanted) and (kind != "choices" or all(isinstance(each, str) for each in value))
    if not is_right or not value:
        raise RowError(f"{key} is no {'list of texts' if kind == 'choices' else kind}")
    text = value
    if kind != "regex":
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(f"{key} is no JSON schema: {one_line(error)}") from None
    constraint = Constraint(kind, text, key, strict)
    if why := _why_refused(constraint):
        raise RowError(why)
    return constraint


@lru_cache(_REMEMBERED)
def _why_refused(constraint: Constraint) -> str:
    try:
        constraint.refuse()
    except JobFileError as error:
        return str(error)
    return ""


def _checked(name: str, value: Any) -> Any:
    """`value` as the setting's type. Text is read as a number where the setting is one."""
    if isinstance(value, pa.Scalar):
        raise RowError(f"{name} cannot be read from a {value.type} that Python does not hold")
    if isinstance(value, Decimal):
        value = float(value)
    if name in ("stop", "bad_words") and isinstance(value, str):
        value = (value,)
    if isinstance(value, Constraint):
        return value
    if (isinstance(value, Mapping) and name != "logit_bias") or (isinstance(value, float) and not math.isfinite(value)):
        raise RowError(f"{name} cannot be {value!r}")
    try:
        return getattr(SamplingConfig.model_validate({name: value}), name)
    except pydantic.ValidationError as error:
        detail = error.errors(include_url=False)[0]
        problem = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
        given = f", not {value!r}" if "should" in problem else ""
        raise RowError(f"{name} {problem}{given}") from None
