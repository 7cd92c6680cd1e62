"""The jobs that compare an A10 with an A40."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from vasuki.base.job_file import load_job
from vasuki.planner.lengths import read_lengths

JOBS = Path(__file__).resolve().parents[2] / "jobs" / "compare"


@pytest.mark.parametrize("name", ["summarise", "translate"])
def test_lengths_are_those_that_the_script_writes(name: str) -> None:
    expected = runpy.run_path(str(JOBS / "make_lengths.py"))["lengths"](name)
    lengths = read_lengths(JOBS / f"{name}.csv")
    assert list(zip(lengths.prompt_tokens, lengths.output_tokens, strict=True)) == expected
    job = load_job(JOBS / f"{name}.yaml")
    assert job.model.shape == "llama-3-8b"
    assert (JOBS.parents[1] / job.input.path).samefile(JOBS / f"{name}.csv")
    assert isinstance(job.sampling.max_tokens, int)
    assert lengths.output_tokens.max() <= job.sampling.max_tokens
    assert (lengths.prompt_tokens + lengths.output_tokens).max() <= 4096


def test_they_have_the_shape_that_they_claim() -> None:
    papers, passages = (read_lengths(JOBS / f"{name}.csv") for name in ("summarise", "translate"))
    assert np.median(papers.prompt_tokens) == pytest.approx(2582, abs=1)
    assert np.median(papers.output_tokens) == pytest.approx(164, abs=1)
    assert np.median(passages.output_tokens / passages.prompt_tokens) == pytest.approx(1.5, rel=0.02)
