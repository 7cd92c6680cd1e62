"""The workloads of docs/performance.md can be made from a seed, and a model of their shape runs them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from workloads import SHAPES, WORKLOADS, sum_of, write_model

from vasuki.base.job_file import parse_job
from vasuki.runs.options import RunOptions
from vasuki.runs.run import run_job


@pytest.mark.parametrize(
    ("name", "rows", "tokens"),
    [("sum", 64, (25_296, 2_849)), ("trans", 64, (8_602, 10_053)), ("mixed", 96, (26_350, 8_006))],
)
def test_workloads_are_those_of_the_page(name: str, rows: int, tokens: tuple[int, int]) -> None:
    table = WORKLOADS[name].table()
    assert table.num_rows == rows
    assert sum_of(table) == tokens
    assert table.equals(WORKLOADS[name].table())
    assert not table.equals(WORKLOADS[name].table(seed=7))


def test_a_model_of_that_kind_runs_them(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", SHAPES["tiny"])
    table = WORKLOADS["trans"].table().slice(0, 2)
    pq.write_table(table, tmp_path / "trans.parquet")
    job = {
        "model": {"path": str(tmp_path / "tiny")},
        "input": {"path": str(tmp_path / "trans.parquet"), "id": "id", "prompt_token_ids": "prompt_token_ids"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_tokens": {"column": "max_tokens"}, "ignore_eos": True},
        "engine": {"compile": "off"},
    }
    tokens = run_job(parse_job(job), RunOptions(quiet=True)).manifest.tokens
    assert (tokens.prompt, tokens.output) == sum_of(table)
