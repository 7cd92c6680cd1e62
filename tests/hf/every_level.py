"""The CPU's kernels at every level of instructions: real where this processor executes it, emulated where not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch

from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels
from vasuki.hf.kernels import native
from vasuki.hf.kernels.levels import AMX, ARM, AVX2, AVX512, AVX512_BF16, NONE, X86, Level, executable
from vasuki.hf.kernels.paged_attention import PagedKernel, load_kernel

T = TypeVar("T")
_FOLDER = Path(__file__).parent / "cpu"
HERE = executable()
FOREIGN = () if HERE[-1] in ARM else ARM[1:]  # by another machine
EMULATES = HERE[-1] in X86
LEVELS = [level for level in (X86 if EMULATES else HERE) if level is not NONE]


class AtLevel(NamedTuple):
    """Kernels are loaded at a level.

    Attributes:
        level: which.
        load: in the place of `native.load`.
    """

    level: Level
    load: Callable[..., Any]

    def cpu_kernels(self) -> CPUKernels:
        with mock.patch.object(native, "load", self.load):
            return _found(load_cpu_kernels(self.level))

    def paged_kernel(
        self, head_dims: Iterable[int], dtype: torch.dtype, kv_dtype: torch.dtype | None = None, rounds: bool = False
    ) -> PagedKernel:
        with mock.patch.object(native, "load", self.load):
            return _found(load_kernel(head_dims, dtype, kv_dtype, rounds, self.level))


def at_level(level: Level) -> AtLevel:
    """A level of this kind of processors, emulated if it must be."""
    return AtLevel(level if level in HERE else _emulated(level), native.load)


def _emulated(level: Level) -> Level:
    """The level by instructions of this processor: what they lack is computed in software."""
    lacks = [each for each in X86[: X86.index(level) + 1] if each not in HERE]
    flags = [flag for each in lacks for flag in _EMULATIONS[each]()]
    # Optimising what is so long takes a compiler much longer than tests would gain.
    return Level(level.name, (*HERE[-1].flags, *flags, "-O1", "-Wno-psabi"))


def _included(name: str) -> tuple[str, ...]:
    version = hashlib.sha256((_FOLDER / name).read_bytes()).hexdigest()[:16]
    return f"--include={_FOLDER / name}", f"-DEMULATED_0x{version}"


# Of vectors as such, the sources ask nothing but how wide they are.
_EMULATIONS: dict[Level, Callable[[], tuple[str, ...]]] = {
    AVX2: lambda: ("-D__AVX2__",),
    AVX512: lambda: _included("emulated_vectors.hpp"),
    AVX512_BF16: lambda: _included("emulated_avx512.hpp"),
    AMX: lambda: _included("emulated_tiles.hpp"),
}


def _found(kernels: T | None) -> T:
    assert kernels is not None
    return kernels
