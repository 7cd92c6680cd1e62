"""A JSON array of objects in, as Alpaca's and ShareGPT's sets have it; a file of JSON Lines by the same name is read as
such. An element is held at a time, not the array."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

from vasuki.base.errors import InputError
from vasuki.io.formats.content import PIECE_BYTES, whole_read
from vasuki.io.formats.jsonl import JsonlSource, checked
from vasuki.io.formats.text import Malformed, Record

_SPACE = " \t\r\n"
_BEFORE = b"\xef\xbb\xbf" + _SPACE.encode()  # a byte order mark, too
_LITERAL = 16  # characters: what is cut in the midst of a word or an escape ends that close to the end


class JsonArraySource(JsonlSource):
    """A file of one array of objects, or of one object a line."""

    def records(self, stream: io.BufferedReader) -> Iterator[Record]:
        if stream.peek().lstrip(_BEFORE)[:1] != b"[":
            yield from super().records(stream)
            return
        text = _Text(stream)
        text.next()
        text.skip()
        try:
            yield from _elements(text)
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError among them
            what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{self.location} is no JSON array of objects: {what}, at line {text.line}") from None


def _elements(text: _Text) -> Iterator[Record]:
    if text.next() != "]":
        while True:
            value, source = text.value()
            yield Record(len(source), text.line, partial(_row, value, source, text.line))
            if (mark := text.next()) != ",":
                break
            text.skip()
            text.next()
        if mark != "]":
            raise ValueError(f"{'a comma is missing' if mark else 'the file ends'} before the end of the array")
    text.skip()
    if text.next():
        raise ValueError("there is more behind the array")


def _row(value: Any, source: str, line: int) -> dict[str, Any]:
    where = f"the row that ends in line {line}"
    try:
        source.encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed(f"{where} is not UTF-8 text") from None
    return checked(value, "\\u" in source, where)


class _Text:
    """The characters of a stream, from where it was read to.

    Attributes:
        line: that the next character lies in, from 1.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")  # so that a row fails alone
        self._decode = json.JSONDecoder().raw_decode
        self._text = ""
        self._position = 0
        self._has_ended = False
        self.line = 1

    def next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._position < len(self._text):
                character = self._text[self._position]
                if character not in _SPACE:
                    return character
                self.skip()
            if self._has_ended:
                return ""
            self._more()

    def skip(self) -> None:
        """Go beyond a character."""
        self.line += self._text[self._position] == "\n"
        self._position += 1

    def value(self) -> tuple[Any, str]:
        """The JSON value that begins here, and its text."""
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.pos >= len(self._text) - _LITERAL or error.msg.startswith("Unterminated")
                if self._has_ended or not is_cut:
                    self.line += self._text.count("\n", self._position, error.pos)
                    raise
            else:
                if end < len(self._text) or self._has_ended:
                    source = self._text[self._position : end]
                    self._position = end
                    self.line += source.count("\n")
                    return value, source
            self._more()

    def _more(self) -> None:
        """Take in as much again as there is, so that a long value is not parsed for each piece of it."""
        left = self._text[self._position :]
        raw = whole_read(self._stream, max(PIECE_BYTES, len(left)))
        self._has_ended = not raw
        self._text, self._position = left + self._decoder.decode(raw, final=not raw), 0
