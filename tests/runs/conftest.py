from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from resumed_job import answers, job_into
from run_nursery import Nursery, Order, open_nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for all tests: it takes seconds to import what its children need."""
    with open_nursery() as opened:
        yield opened


@pytest.fixture(scope="session")
def expected(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The answers of a run that nobody disturbed."""
    job = job_into(tmp_path_factory.mktemp("undisturbed") / "job", tiny_model)
    assert nursery.run(Order(str(job))) == 0
    return answers(job)
