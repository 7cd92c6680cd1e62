"""`"Translate: {text}"`: a prompt made of an input row's columns.

Doubled braces stand for themselves. All that stands in braces is the name of a column, `{q.text}` that of "q.text": a
prompt is data and must never reach into objects.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vasuki.base.errors import JobFileError
from vasuki.io.input.row_error import RowError
from vasuki.io.values import as_text

Mark = Callable[[str, Sequence[tuple[int, int]]], str]  # see `tokenised.PromptEncoder.marked`

_DOUBLE = "double the braces that stand for themselves"


def as_it_is(text: str, own: Sequence[tuple[int, int]] = ()) -> str:
    """The text without a mark."""
    return text


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

    def render(self, values: Mapping[str, Any], mark: Mark = as_it_is) -> str:
        """The prompt of a row. Raises RowError where a column is null or cannot be written as text.

        Args:
            values: the row, by column.
            mark: gets the text, and where the job's own words are in it.
        """
        out, own, length = [], [], 0
        for literal, name in self.pieces:
            out.append(literal)
            own.append((length, length := length + len(literal)))
            if name is not None:
                value = values[name]
                if value is None:
                    raise RowError(f"column '{name}' is null")
                try:
                    out.append(as_text(value))
                except ValueError as error:
                    raise RowError(f"column '{name}' cannot be written as text: {error}") from None
                length += len(out[-1])
        return mark("".join(out), own)
