"""JSON Lines in: one object a line, with whatever keys it has.

Blank lines are no rows, and a missing key is null. A column that is copied to the output keeps its type when all rows
agree (integers, numbers, text, booleans); anything else is copied as JSON text.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from vasuki.io.formats.kinds import Kinds
from vasuki.io.formats.sources import Survey
from vasuki.io.formats.text import Malformed, Record, TextSource
from vasuki.io.ids import IdHashes

_BOM = b"\xef\xbb\xbf"
_MOST_NAMES = 1000  # ragged rows may have any number of keys; suggestions need only some


class JsonlSource(TextSource):
    """A file of one JSON object a line."""

    def records(self, stream: io.BufferedReader) -> Iterator[Record]:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.isspace():
                yield Record(len(line), number, partial(parse_line, line, number))

    def survey(self, needed: Collection[str], stored: Collection[str], ids: IdHashes | None) -> Survey:
        digest = hashlib.blake2b(digest_size=16)
        known: dict[str, None] = {}  # every key, in order of appearance
        kinds = Kinds(stored)
        unseen = set(needed)
        num_rows = 0
        with self._opened(digest.update) as stream:
            for record in self.records(stream):
                num_rows += 1
                if not (unseen or stored or ids):  # every column is there: the rest need only be counted
                    continue
                values = self.parse(record, ids)
                if values is None:
                    continue
                unseen.difference_update(values)
                if len(known) < _MOST_NAMES:
                    known |= dict.fromkeys(values)
                kinds.see(values)
        known |= dict.fromkeys(name for name in needed if name not in unseen)
        return Survey(num_rows, {name: kinds.type_of(name) for name in known}, digest.digest(), kinds.integers)


def parse_line(line: bytes, number: int) -> dict[str, Any]:
    """The object of a line, whose number is named in what is wrong with it. Raises Malformed."""
    try:
        values = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # "Unterminated string starting at"
        raise Malformed(f"line {number} is not JSON: {what} at column {error.colno}") from None
    except UnicodeError:
        raise Malformed(f"line {number} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"line {number} is not usable JSON: {error}") from None
    return checked(values, b"\\u" in line, f"line {number}")


def checked(values: Any, has_escapes: bool, where: str) -> dict[str, Any]:
    """A row's values, if they are usable. Raises Malformed."""
    if not isinstance(values, dict):
        raise Malformed(f"{where} is not a JSON object")
    if has_escapes and not _is_text(values):
        whole = {name: value for name, value in values.items() if _is_text([name, value])}
        raise Malformed(f"{where} has half a surrogate pair, which no text holds", whole)
    return values


def _is_text(value: Any) -> bool:
    """Whether all of a value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        return False
    return True
