"""The sampling settings of a row: from the job, from its columns, or from its openai-batch body, in rising order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pydantic

from vasuki.base.config import Column, SamplingConfig
from vasuki.base.constraint import Constraint
from vasuki.engine.sequence import SamplingParams
from vasuki.io.input.row_error import RowError

OF_ALL_ROWS = ("schema", "regex", "choices")  # see `base.constraint`


class SamplingReader:
    """Reads rows' settings, checked by the same rules as the job file's.

    Args:
        config: of the job.
        special_tokens: whether they stay in the output's text.
        constraint: of every answer.
    """

    def __init__(
        self, config: SamplingConfig, special_tokens: bool = False, constraint: Constraint | None = None
    ) -> None:
        self._settings: dict[str, Any] = {"special_tokens": special_tokens, "constraint": constraint}
        self._columns: dict[str, str] = {}
        for name, value in config:
            if name in OF_ALL_ROWS:
                continue
            if isinstance(value, Column):
                self._columns[name] = value.column
                value = SamplingConfig.model_fields[name].default
            self._settings[name] = value
        self._of_the_job = SamplingParams(**self._settings)

    def read(self, values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> SamplingParams:
        """The settings of one row.

        Args:
            values: the row, by column. A null (in text formats also an empty cell) means the setting's default.
            overrides: settings that go before the job's; null leaves the job's.

        Raises:
            RowError: a value is of the wrong type or out of range.
        """
        if not self._columns and not overrides:
            return self._of_the_job
        given = {name: values[column] for name, column in self._columns.items()} | dict(overrides or {})
        settings = {name: _checked(name, value) for name, value in given.items() if value not in (None, "")}
        return SamplingParams(**(self._settings | settings))


def _checked(name: str, value: Any) -> Any:
    """`value` as the setting's type. Text is read as a number where the setting is one."""
    if isinstance(value, pa.Scalar):
        raise RowError(f"{name} cannot be read from a {value.type} that Python does not hold")
    if isinstance(value, Decimal):
        value = float(value)
    if name == "stop" and isinstance(value, str):
        value = (value,)
    if isinstance(value, Mapping) or (isinstance(value, float) and not math.isfinite(value)):
        raise RowError(f"{name} cannot be {value!r}")
    try:
        return getattr(SamplingConfig.model_validate({name: value}), name)
    except pydantic.ValidationError as error:
        detail = error.errors(include_url=False)[0]
        problem = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
        given = f", not {value!r}" if "should" in problem else ""
        raise RowError(f"{name} {problem}{given}") from None
