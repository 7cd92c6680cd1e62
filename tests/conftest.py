from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the machine's cores go to the tests that run side by side, and results do not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# The same examples in every run, however fast the machine is.
settings.register_profile("vasuki", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vasuki")


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """Commands that run within a test set up logs for their process, which other tests want to look at."""
    logger = logging.getLogger("vasuki")
    handlers, level, propagates = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagates


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a context of 128 tokens."""
    from tiny_job import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))
