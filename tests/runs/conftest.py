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


@pytest.fixture
def deep_model(tmp_path: Path, tiny_model: Path) -> Path:
    """Eight layers of 2.3 MiB, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "deep"
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder
