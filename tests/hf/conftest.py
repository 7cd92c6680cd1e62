from __future__ import annotations

from collections.abc import Iterator

import foreign
import pytest
import torch
from every_level import FOREIGN, LEVELS, AtLevel, at_level

from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels
from vasuki.hf.kernels.levels import AVX512_BF16, Level
from vasuki.hf.kernels.native import find_compiler


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C++ compiler of this machine: tests that need one are skipped where there is none."""
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="session")
def kernels(compiler: str) -> CPUKernels:
    """Those that a model is given on this machine."""
    kernels = load_cpu_kernels()
    assert kernels is not None
    return kernels


@pytest.fixture(scope="session")
def rounding_kernels(compiler: str) -> CPUKernels:
    """Kernels for a processor that multiplies bfloat16, which is emulated where this one does not."""
    kernels = at_level(AVX512_BF16).cpu_kernels()
    assert kernels.linear.multiplies_bfloat16
    return kernels


@pytest.fixture(scope="session", params=[*LEVELS, *FOREIGN], ids=lambda level: level.name)
def each_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtLevel]:
    """Every level, one after the other."""
    level: Level = request.param
    if level not in FOREIGN:
        request.getfixturevalue("compiler")
        yield at_level(level)
    elif foreign.MISSING:
        pytest.skip(f"no {' and no '.join(foreign.MISSING)}")
    else:
        machine = foreign.Machine(tmp_path_factory.mktemp("foreign"))
        yield AtLevel(level, machine.load)
        machine.close()


@pytest.fixture(scope="session")
def each_kernels(each_level: AtLevel) -> CPUKernels:
    """The kernels of every level, one after the other."""
    return each_level.cpu_kernels()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Tests run on one thread otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
