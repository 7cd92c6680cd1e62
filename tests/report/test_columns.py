"""Tables for terminals of any width."""

from __future__ import annotations

import pytest

from vasuki.report.columns import NAME_WIDTH, blocks
from vasuki.report.table import wrapped


@pytest.mark.parametrize("length", [3, 17, 18, 40])
def test_cells_never_touch(length: int) -> None:
    lines = list(blocks(["a10", "a40"], [("cost", ["1" * length, "2" * length])], width=NAME_WIDTH + 2 * (length + 18)))
    assert lines[-1].split() == ["cost", "1" * length, "2" * length]


def test_sentences_break_between_words_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    words = "typical on-demand list price, rounded, no quote; " * 5
    lines = wrapped(words).splitlines()
    assert max(map(len, lines)) <= 70
    assert " ".join(" ".join(lines).split()) == f"- {words.strip()}"
