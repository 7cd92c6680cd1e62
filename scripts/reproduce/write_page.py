"""Write docs/reproduction.md: the text of page.md, filled with the figures of docs/data/reproduction.json.

    python scripts/reproduce/write_page.py

In the text `{{ figure("sarathi-peak", "gain", model="LLaMA-13B, A6000") | each("{:.2f}") }}` stands for the `gain` of
all entries of that claim that have this model, one after another; `span` for the least and the largest of them, `by`
for what they are over others. `{{ verdict([1.33], figures, gains=True) }}` compares them with the paper's, and
`{{ "refuted" | where(figures | are(most=1)) }}` says so as long as it is true.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

ROOT = Path(__file__).resolve().parents[2]
TEXT, PAGE = Path(__file__).with_name("page.md"), ROOT / "docs" / "reproduction.md"
DATA = ROOT / "docs" / "data" / "reproduction.json"
NEAR = 0.15  # of the paper's figure: so near ours counts as the same
SMALL = Path(__file__).with_name("small.json")  # the same of experiments that take a second, for tests
Claims = dict[str, list[dict[str, Any]]]


def page(claims: Claims) -> str:
    """The page as Markdown. Raises KeyError for a claim or figure that there is none of."""

    def entries(claim: str, where: dict[str, Any]) -> list[dict[str, Any]]:
        found = [row for row in claims[claim] if all(row[name] in _listed(value) for name, value in where.items())]
        if not found:
            raise KeyError(f"{claim} has no entry with {where}")
        return found

    def figure(claim: str, keys: str | list[str], **where: Any) -> list[float]:
        return [row[key] for row in entries(claim, where) for key in _listed(keys)]

    def over(claim: str, keys: str | list[str], below: str, **where: Any) -> list[float]:
        return [row[key] / row[below] for row in entries(claim, where) for key in _listed(keys)]

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.globals |= {"figure": figure, "over": over, "verdict": verdict}
    environment.filters |= {
        "each": each,
        "span": span,
        "mean": lambda figures: [sum(figures) / len(figures)],
        "ends": lambda figures: [min(figures), max(figures)],
        "saved": lambda shares: [1 - share for share in shares],
        "by": lambda figures, others: [a / b for a, b in zip(figures, others, strict=True)],
        "minus": lambda figures, others: [a - b for a, b in zip(figures, others, strict=True)],
        "are": are,
        "where": where,
    }
    return environment.from_string(TEXT.read_text(encoding="utf-8")).render()


def each(figures: list[float], form: str = "{}") -> str:
    """One after another."""
    return _without_repeated_unit(", ", [_written(form, value) for value in figures])


def span(figures: list[float], form: str = "{}") -> str:
    """From the least to the largest."""
    ends = dict.fromkeys(_written(form, value) for value in (min(figures), max(figures)))
    return _without_repeated_unit(" to ", list(ends))


def are(figures: list[float], least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether all of them are within these limits."""
    return all(least <= value <= most for value in figures)


def where(text: str, is_so: bool) -> str:
    """The text. Raises ValueError if figures no longer bear it out."""
    if not is_so:
        raise ValueError(f"figures have changed: it is no longer true to say {text!r}")
    return text


def verdict(paper: list[float], ours: list[float], gains: bool = False) -> str:
    """Say whether our figures are the paper's; of speed-ups (`gains`), whether what they add to 1 is."""
    one = 1 if gains else 0
    ratios = [(here - one) / (there - one) for there, here in zip(paper, ours, strict=True)]
    if all(ratio < 0 for ratio in ratios):
        return "refuted"
    off = [ratio for ratio in ratios if abs(ratio - 1) > NEAR]
    if not off:
        return "reached"
    which = f"{len(off)} of {len(ratios)} " if len(off) < len(ratios) else ""
    size = "smaller" if max(off) < 1 else "larger" if min(off) > 1 else "larger or smaller"
    opposite = sum(ratio < 0 for ratio in ratios)
    return f"not reached: {which}{size}" + (f", {opposite} refuted" if opposite else "")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _written(form: str, value: Any) -> str:
    return form.format(value).replace("-", "\N{MINUS SIGN}").replace("%", " %")


def _without_repeated_unit(between: str, texts: list[str]) -> str:
    return between.join([*(text.removesuffix(" %") for text in texts[:-1]), texts[-1]])


def read(file: Path = DATA) -> Claims:
    """The figures by claim."""
    claims: Claims = json.loads(file.read_text(encoding="utf-8"))
    return claims


def update(claims: Claims) -> None:
    """Replace the figures of some claims, and write the page."""
    PAGE.write_text(page(store(claims, DATA)), encoding="utf-8")


def store(claims: Claims, file: Path) -> Claims:
    """Replace the figures of some claims; returns all figures."""
    found = read(file) | claims
    write_rows(found, file)
    return found


def write_rows(found: dict[str, Any], file: Path) -> None:
    """As JSON, with a line for each row of a list."""

    def text(value: Any) -> str:
        if not isinstance(value, list):
            return json.dumps(value, ensure_ascii=False)
        return "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n]"

    parts = ",\n".join(f"{json.dumps(name)}: {text(value)}" for name, value in found.items())
    file.write_text(f"{{\n{parts}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    update({})
