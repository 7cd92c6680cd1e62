from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels
from vasuki.hf.kernels import native

_EMULATED = Path(__file__).parent / "cpu" / "emulated_avx512.hpp"


@pytest.fixture(scope="session")
def kernels() -> CPUKernels:
    """Of a machine with a compiler: tests that ask for them are skipped where there is none."""
    kernels = load_cpu_kernels()
    assert kernels is not None
    return kernels


@pytest.fixture(scope="session")
def rounding_kernels() -> CPUKernels:
    """Those of a processor that multiplies bfloat16, which is emulated where this one does not."""
    version = hashlib.sha256(_EMULATED.read_bytes()).hexdigest()[:16]
    flags = ("-O1", "-Wno-psabi", "-include", str(_EMULATED), f"-DEMULATED_0x{version}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(native, "_COMPILE", (*native._COMPILE, *flags))
        kernels = load_cpu_kernels()
    assert kernels is not None
    assert kernels.linear.multiplies_bfloat16
    return kernels


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Tests run on one thread otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
