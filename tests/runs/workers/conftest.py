from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from replicas_job import QUIET, answers, job_into

from vasuki.base.job_file import load_job
from vasuki.runs.run import run_job


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> pa.Table:
    """The answers of a run on one device."""
    job = job_into(tmp_path_factory.mktemp("one") / "job", tiny_model)
    run_job(load_job(str(job)), QUIET)
    return answers(job)
