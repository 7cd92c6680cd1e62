from __future__ import annotations

from collections.abc import Iterator

import pytest
from run_nursery import Nursery, open_nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for all tests: it takes seconds to import what its children need."""
    with open_nursery() as opened:
        yield opened
