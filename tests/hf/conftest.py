from __future__ import annotations

import pytest

from vasuki.hf.cpu_kernels import CPUKernels, load_cpu_kernels


@pytest.fixture(scope="session")
def kernels() -> CPUKernels:
    """Of a machine with a compiler: tests that ask for them are skipped where there is none."""
    kernels = load_cpu_kernels()
    assert kernels is not None
    return kernels
