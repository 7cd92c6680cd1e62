"""docs/reproduction.md holds the figures of docs/data/reproduction.json, and those are what the experiments give."""

from __future__ import annotations

import pytest
import reproduce
import write_page
from reproduce_table import Options

MEASURED = {"baton-on-cpu", "milp-on-cpu", "packing-on-cpu", "prepacking-on-cpu"}
WITHIN_A_SECOND = (
    "vasuki-layers",
    "sarathi-decode",
    "sarathi-ratio",
    "sarathi-saturation",
    "sarathi-tiles",
    "sarathi-decode-speedup",
    "sarathi-peak",
    "sarathi-matmuls",
    "sarathi-fit",
    "sarathi-orca",
    "sarathi-chunks",
    "sarathi-batch",
    "prepacking-rows",
    "baton-mix",
    "baton-short",
)


def test_the_page_holds_the_figures() -> None:
    assert write_page.PAGE.read_text(encoding="utf-8") == write_page.page(write_page.read()), (
        "run scripts/reproduce/write_page.py"
    )


def test_every_experiment_has_its_figures() -> None:
    assert write_page.read().keys() == reproduce.CLAIMS.keys() | MEASURED


@pytest.mark.parametrize("name", [*WITHIN_A_SECOND, "packing-control"])  # which takes some seconds
def test_an_experiment_gives_its_figures_again(name: str) -> None:
    found, stored = reproduce.CLAIMS[name](Options()).figures, write_page.read()[name]
    assert len(found) == len(stored)
    for row, expected in zip(found, stored, strict=True):
        assert row.keys() == expected.keys()
        numbers = {key: value for key, value in expected.items() if not isinstance(value, str)}
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-3)


def test_a_figure_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="sarathi-peak"):
        write_page.page(write_page.read() | {"sarathi-peak": []})
