"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 05 s`, `2 h 07 min`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def money(amount: float | None, currency: str = "") -> str:
    """`12.40 USD`, `0.0123 USD`; `-` where nothing is known."""
    return "-" if amount is None else f"{amount:.{2 if amount >= 1 else 4}f} {currency}".strip()
