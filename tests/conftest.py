from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the machine's cores go to the tests that run side by side, and results do not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# The same examples in every run, however fast the machine is.
settings.register_profile("vasuki", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vasuki")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a context of 128 tokens."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))
