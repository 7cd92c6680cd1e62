"""`"Translate: {text}"`: a prompt made of an input row's columns.

Doubled braces stand for themselves. All that stands in braces is the name of a column, `{q.text}` that of "q.text": a
prompt is data and must never reach into objects.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vasuki.base.errors import JobFileError
from vasuki.io.input.row_error import RowError
from vasuki.io.values import as_text

_DOUBLE = "double the braces that stand for themselves"


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: `pieces` alternate literal text and the column that follows it, if any."""

    pieces: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str, key: str = "input.prompt", needs_column: bool = True) -> Template:
        """Read a template from the job file's `key`.

        Raises:
            JobFileError: it holds anything but text and `{column}`, or no column although it `needs_column`.
        """
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise JobFileError(f"{key}: {error}; {_DOUBLE}") from None
        for _, name, spec, conversion in parsed:
            if name is None:
                continue
            if not name:
                raise JobFileError(f"{key}: {{}} names no column")
            if spec or conversion:
                raise JobFileError(f"{key}: only a plain column name may stand in braces, not {name!r}; {_DOUBLE}")
        if needs_column and all(name is None for _, name, _, _ in parsed):
            raise JobFileError(f"{key} {text!r} names no column; put a column in braces, such as {{text}}")
        return cls(tuple((literal, name) for literal, name, _, _ in parsed))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns it names, in order, each once."""
        return tuple(dict.fromkeys(name for _, name in self.pieces if name is not None))

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt of a row. Raises RowError where a column is null or cannot be written as text."""
        out = []
        for literal, name in self.pieces:
            out.append(literal)
            if name is not None:
                value = values[name]
                if value is None:
                    raise RowError(f"column '{name}' is null")
                try:
                    out.append(as_text(value))
                except ValueError as error:
                    raise RowError(f"column '{name}' cannot be written as text: {error}") from None
        return "".join(out)
