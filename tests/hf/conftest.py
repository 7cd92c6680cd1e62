from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels


@pytest.fixture(scope="session")
def kernels() -> CPUKernels:
    """Of a machine with a compiler: tests that ask for them are skipped where there is none."""
    kernels = load_cpu_kernels()
    assert kernels is not None
    return kernels


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Tests run on one thread otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
