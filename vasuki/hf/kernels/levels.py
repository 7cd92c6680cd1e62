"""Instruction sets that kernels are compiled for: the best one that the processor executes, or a lesser one by choice.

VASUKI_CPU_LEVEL=avx2 vasuki run job.yaml     # as on a processor without AVX-512
VASUKI_CPU_LEVEL=none vasuki run job.yaml     # no kernels: torch operators do their work
"""

from __future__ import annotations

import itertools
import os
import platform
from typing import NamedTuple

import torch

from vasuki.base.errors import JobFileError

VARIABLE = "VASUKI_CPU_LEVEL"


class Level(NamedTuple):
    """An instruction set, which has all of those before it on its ladder.

    Attributes:
        name: as the environment variable spells it.
        flags: that let a compiler use it.
        needs: what the processor must have, in the words of `torch.cpu.get_capabilities`.
    """

    name: str
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def with_more(self, name: str, flags: str, needs: str) -> Level:
        """The next one above."""
        return Level(name, (*self.flags, *flags.split()), tuple(needs.split()))


NONE = Level("none")  # no kernels at all
GENERIC = Level("generic")  # what every processor of its kind executes
AVX2 = GENERIC.with_more("avx2", "-mavx2 -mfma", "avx2 fma3")
AVX512 = AVX2.with_more(
    "avx512", "-mavx512f -mavx512bw -mavx512dq -mavx512vl", "avx512_f avx512_bw avx512_dq avx512_vl"
)
AVX512_BF16 = AVX512.with_more("avx512_bf16", "-mavx512bf16", "avx512_bf16")  # products of bfloat16
AMX = AVX512_BF16.with_more("amx", "-mamx-tile -mamx-bf16", "amx_tile amx_bf16")  # the same, of tiles
NEON = Level("neon")  # which every 64-bit ARM processor has

X86 = (NONE, GENERIC, AVX2, AVX512, AVX512_BF16, AMX)
ARM = (NONE, NEON)


def ladder(machine: str) -> tuple[Level, ...]:
    """All levels of a kind of processors, as `platform.machine` calls it, each with all that those before it have."""
    return {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(machine.lower(), (NONE, GENERIC))


def executable() -> tuple[Level, ...]:
    """The levels of this processor, from `none` to its best."""
    has = torch.cpu.get_capabilities()
    return tuple(
        itertools.takewhile(lambda level: all(has.get(need) for need in level.needs), ladder(platform.machine()))
    )


def chosen() -> Level:
    """The level that kernels are to use.

    Raises:
        JobFileError: the environment asks for one that is unknown here, or more than the processor executes.
    """
    has, wanted = executable(), os.environ.get(VARIABLE)
    if not wanted:
        return has[-1]
    found = next((level for level in has if level.name == wanted), None)
    if found is None:
        known = ", ".join(level.name for level in ladder(platform.machine()))
        raise JobFileError(
            f"{VARIABLE} is {wanted!r}, but this processor has {', '.join(level.name for level in has)} "
            f"(of the levels {known})"
        )
    return found
