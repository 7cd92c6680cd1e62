"""docs/planner.md holds the figures of docs/data/bounds.json, and the script gives such figures."""

from __future__ import annotations

import bound_table


def test_the_page_holds_the_figures() -> None:
    lines = bound_table.read()
    assert bound_table.data(lines) == bound_table.DATA.read_text(encoding="utf-8")
    text = bound_table.PAGE.read_text(encoding="utf-8")
    assert bound_table.page(lines) == text, "run scripts/reproduce/bound_table.py --write"
    changed = bound_table.page([lines[0] | {"known": 0.999}, *lines[1:]])
    assert len(changed.splitlines()) == len(text.splitlines())
    assert [new for new, old in zip(changed.splitlines(), text.splitlines(), strict=True) if new != old] == [
        next(line for line in changed.splitlines() if "99.9 %" in line)
    ]


def test_a_line_is_measured() -> None:
    line = bound_table.measure(bound_table.TRANSLATIONS, draws=1)
    stored = bound_table.read()[-1]
    assert line.keys() == stored.keys()
    assert [line[name] for name in ("rows", "machine", "offload")] == ["64 short translations", "CPU", "none"]
    assert 0 < line["known"] < line["learned"] < 0.5
