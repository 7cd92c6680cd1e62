from __future__ import annotations

import os

import pytest
from many_rows import measure

ROWS = int(os.environ.get("VASUKI_ROWS", "1000"))


def test_a_run_holds_no_more_towards_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and files are given back, and rows that have ended hold no memory."""
    from vasuki.hf import ragged_executor

    monkeypatch.setattr(ragged_executor, "build_executor", ragged_executor.build_executor)  # which `measure` replaces
    found = measure(ROWS, tokens=33, seqs=8)
    assert found["rows"] == ROWS
    assert found["steps"] >= 4 * ROWS
    early, *_, late = (held for held in found["while"] if held["rows"] > ROWS / 4)
    assert late["rss_mb"] - early["rss_mb"] < 40
    assert late["threads"] <= early["threads"]
    assert late["files"] <= early["files"]
    assert (found["after"]["threads"], found["after"]["files"]) == (
        found["before"]["threads"],
        found["before"]["files"],
    )
