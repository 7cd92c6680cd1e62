"""Numbers as people read them. Every formatter that takes None, for what is not known, writes a dash."""

from __future__ import annotations

import math
import re

UNKNOWN = "-"
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_TIME = re.compile(rf"(?:{_NUMBER}d)?\s*(?:{_NUMBER}h)?\s*(?:{_NUMBER}m(?:in)?)?\s*(?:{_NUMBER}s?)?")


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 05 s`, `2 h 07 min`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def seconds_of(text: str) -> float:
    """`"5h45m"`, `"1.5 min"`, `"1d 12h"` or `"30"` -> seconds. Raises ValueError for anything else."""
    match = _TIME.fullmatch(text.strip())
    if not match or not any(match.groups()):
        raise ValueError(f"{text!r} is not a time; write it like 5h45m, 90m or 30s")
    days, hours, minutes, seconds = (float(number or 0) for number in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def time_text(seconds: float | None) -> str:
    """`0.052 s`, `3.2 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.2g} s" if 0 < seconds < 1 else duration(seconds)


def time_range(low_s: float, high_s: float) -> str:
    """`3.2 to 4.1 s`, `13 to 19 min`, `1.2 to 1.9 h`: in the unit of the larger one."""
    unit_s, unit = (3600, "h") if high_s >= 3600 else (60, "min") if high_s >= 60 else (1, "s")
    low, high = low_s / unit_s, high_s / unit_s
    decimals = 0 if low >= 10 else 1 if high >= 1 else 2
    return f"{low:,.{decimals}f} to {high:,.{decimals}f} {unit}"


def significant(value: float) -> str:
    """Three significant digits, without powers of ten: `0.0828`, `1,550`."""
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{decimals}f}"


def money_text(amount: float | None, currency: str = "") -> str:
    """Three significant digits, cents at least: `0.0512 USD`, `0.75 USD`, `12.30 USD`."""
    if amount is None:
        return UNKNOWN
    decimals = 2 if amount == 0 else max(2, 2 - math.floor(math.log10(abs(amount))))
    text = f"{amount:,.{decimals}f}"
    while decimals > 2 and text.endswith("0"):
        text, decimals = text[:-1], decimals - 1
    return f"{text} {currency}".strip()


def count_text(number: float | None) -> str:
    """Exact up to a hundred thousand, then `1.23 million`."""
    if number is None:
        return UNKNOWN
    if abs(number) >= 1e9:
        return f"{number / 1e9:.2f} billion"
    return f"{number / 1e6:.2f} million" if abs(number) >= 1e5 else f"{number:,.0f}"


def bytes_text(num_bytes: float | None) -> str:
    """`512 B`, `1.5 GiB`."""
    if num_bytes is None:
        return UNKNOWN
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def percent_text(share: float | None, signed: bool = False) -> str:
    """`4 %`, `0.4 %`; signed: `+4 %`, and `0 %` without a sign."""
    if share is None:
        return UNKNOWN
    percent = round(100 * share, 1) or 0.0  # never a negative zero
    digits = 1 if abs(percent) < 0.95 and percent else 0
    return f"{percent:{'+' if signed and percent else ''},.{digits}f} %"


def longer_text(change: float) -> str:
    """`4 % longer`, `0.4 % shorter`; `unchanged` where it would read 0 %."""
    size = percent_text(abs(change))
    return "unchanged" if size == percent_text(0.0) else f"{size} {'longer' if change > 0 else 'shorter'}"


def only_longer_text(change: float) -> str:
    """The same of what is no reason for a change: `only 0.4 % shorter`."""
    text = longer_text(change)
    return f"only {text}" if text.endswith("shorter") else text


def plural(number: int, noun: str, nouns: str = "") -> str:
    """`1 row`, `2,000 rows`; `nouns` is given where it does not end in an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def listing(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
