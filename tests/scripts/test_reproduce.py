"""Every claim of docs/reproduction.md runs at toy size, and its table and data agree. Figures are not asserted here,
but for those that depend on the cost model alone."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import reproduce
import reproduce_sarathi
import reproduce_vasuki
from reproduce_table import Options, markdown, rounded, title

pytestmark = pytest.mark.whole_search

ROOT = Path(__file__).resolve().parents[2]

TOY = Options(scale=0.001)


# Of these, figures with few requests are compared with stored ones: see `test_reproduction_page`.
LONG = {"vasuki-makespan", "vasuki-plan", "vasuki-cost", "vasuki-batch", "vasuki-offloaded"}


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in reproduce.CLAIMS if name not in LONG])
def test_claim_runs(name: str) -> None:
    rows = rounded(reproduce.CLAIMS[name](TOY))
    assert rows
    assert title(reproduce.CLAIMS[name])
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert rounded(reproduce.CLAIMS[name](TOY)) == rows


def test_rows_are_printed_with_all_that_they_have() -> None:
    rows = rounded([{"card": "a10", "tokens": 2048, "share": 0.123456789}, {"card": "a40", "late": 12345.6}])
    assert rows[0]["share"] == 0.12346
    assert markdown(rows).splitlines() == [
        "| card | tokens | share | late |",
        "| --- | --- | --- | --- |",
        "| a10 | 2,048 | 0.1235 |  |",
        "| a40 |  |  | 12,346 |",
    ]


def test_every_claim_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    missing = [name for name in reproduce.CLAIMS if f"`{name}`" not in page]
    assert not missing


def test_the_script_ends_with_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "sarathi-tiles", "sarathi-decode", "--quick"])
    reproduce.main()
    *tables, last = capsys.readouterr().out.splitlines()
    assert [line for line in tables if line.startswith("`sarathi-tiles`")]
    assert json.loads(last)["claims"].keys() == {"sarathi-tiles", "sarathi-decode"}


def test_a_folder_without_the_trace_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "prepacking-batch", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        reproduce.main()
    assert stopped.value.code == 4
    assert "arxiv_summarization_lengths.csv" in capsys.readouterr().err


def test_one_token_past_a_tile() -> None:
    *_, before, last = reproduce_sarathi.figure_7(TOY)
    assert 1.25 < last["ms"] / before["ms"] < 1.40


def test_a_piggybacked_decode_is_an_order_cheaper() -> None:
    _, alone, mixed = reproduce_sarathi.table_2(TOY)
    assert alone["decode_ms"] > 6 * mixed["decode_ms"]


def test_thirty_layers_hide_behind_a_step_but_not_behind_layers() -> None:
    for row in reproduce_vasuki.layers(TOY):
        assert row["ring_against_step"] == 30
        assert row["ring"] == 0


def test_percentiles_weigh_steps() -> None:
    assert reproduce_vasuki.percentiles([5, 1, 9], [1, 98, 1], (1, 50, 99, 100)) == [1, 1, 5, 9]
