"""What a cell of a CSV file holds: a number, a date or a truth value, where its text is written like one.

Numbers with leading zeros or a plus sign are text: they name things. An empty cell is null.
"""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?", re.ASCII)
_TRUTH = {word: value for value in (True, False) for word in (str(value), str(value).lower(), str(value).upper())}
_MOST_DIGITS = 400  # of a number; more are text


def cell_value(text: str) -> Any:
    """The value of a cell: None, a bool, int, float, date or datetime, or else the text itself."""
    if not text:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if len(text) > _MOST_DIGITS:
        return text
    if _INTEGER.fullmatch(text) and text != "-0":
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    try:
        if _DATE.fullmatch(text):
            return datetime.date.fromisoformat(text)
        if _TIME.fullmatch(text):
            return datetime.datetime.fromisoformat(text)
    except ValueError:  # such as 30 February
        pass
    return text
