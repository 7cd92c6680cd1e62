from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vasuki.hf.cpu import native
from vasuki.hf.cpu.kernels import CPUKernels, load_cpu_kernels

EMULATED = Path(__file__).parent / "cpu/emulated_tiles.hpp"


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


@pytest.fixture
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are loaded in a test are those of a processor with tile registers, which are emulated."""
    version = hashlib.sha256(EMULATED.read_bytes()).hexdigest()[:16]
    flags = ("-include", str(EMULATED), f"-DEMULATED_0x{version}")
    monkeypatch.setattr(native, "_COMPILE", (*native._COMPILE, *flags))
