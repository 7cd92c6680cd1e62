"""docs/reproduction.md holds the figures of docs/data/reproduction.json, and those are what the experiments give: the
quick ones whole, the others with few requests."""

from __future__ import annotations

from typing import Any

import pytest
import reproduce
import write_page
from reproduce_table import Options

MEASURED = {"baton-on-cpu", "baton-on-cpu-gains", "milp-on-cpu", "packing-on-cpu", "prepacking-on-cpu"}
WITHIN_A_SECOND = {
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
    "baton-time",
}


def test_the_page_holds_the_figures() -> None:
    assert write_page.PAGE.read_text(encoding="utf-8") == write_page.page(write_page.read()), (
        "run scripts/reproduce/write_page.py"
    )


def test_every_experiment_has_its_figures() -> None:
    assert write_page.read().keys() == reproduce.CLAIMS.keys() | MEASURED


@pytest.mark.parametrize("name", sorted({*WITHIN_A_SECOND, "packing-control"}))  # which takes some seconds
def test_an_experiment_gives_its_figures_again(name: str) -> None:
    same(reproduce.CLAIMS[name](Options()).figures, write_page.read()[name])


@pytest.mark.parametrize("name", sorted(reproduce.CLAIMS.keys() - WITHIN_A_SECOND))
def test_a_long_experiment_gives_its_figures_again_with_few_requests(name: str) -> None:
    """Where it does not, `scripts/reproduce/reproduce.py NAME --data DIR --write` has to run."""
    same(reproduce.CLAIMS[name](reproduce.SMALL).figures, write_page.read(write_page.SMALL)[name])


def same(found: list[dict[str, float | str]], stored: list[dict[str, Any]]) -> None:
    assert len(found) == len(stored)
    for row, expected in zip(found, stored, strict=True):
        assert row.keys() == expected.keys()
        numbers = {key: value for key, value in expected.items() if not isinstance(value, str)}
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-3)


def test_a_figure_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="sarathi-peak"):
        write_page.page(write_page.read() | {"sarathi-peak": []})


def test_words_that_figures_no_longer_bear_out_are_refused() -> None:
    assert write_page.where("smaller", write_page.are([0.5, 0.9], most=1)) == "smaller"
    with pytest.raises(ValueError, match="no longer true to say 'smaller'"):
        write_page.where("smaller", write_page.are([0.5, 1.1], most=1))
    changed = {row["batch"]: row | {"static": 2 * row["static"]} for row in write_page.read()["baton-mix"]}
    with pytest.raises(ValueError, match="no longer true to say"):
        write_page.page(write_page.read() | {"baton-mix": list(changed.values())})
