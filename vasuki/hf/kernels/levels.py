"""Instruction sets that kernels are compiled for: the best one that the processor executes, or a lesser one by choice.

VASUKI_CPU_LEVEL=avx2 vasuki run job.yaml     # as on a processor without AVX-512
VASUKI_CPU_LEVEL=none vasuki run job.yaml     # no kernels: torch operators do their work
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Collection
from typing import NamedTuple

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
        """The next level above."""
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


def executable(has: Collection[str] | None = None) -> tuple[Level, ...]:
    """The levels of this processor, from `none` to its best.

    Args:
        has: what it has, in the words of `torch.cpu.get_capabilities`, which is asked otherwise.
    """
    if has is None:
        import torch  # which planning does without

        has = {name for name, is_there in torch.cpu.get_capabilities().items() if is_there}
    return tuple(itertools.takewhile(lambda level: set(level.needs) <= set(has), ladder(platform.machine())))


def chosen(has: Collection[str] | None = None) -> Level:
    """The level that kernels are to use, on a processor with these capabilities.

    Raises:
        JobFileError: the environment asks for one that is unknown here, or more than the processor executes.
    """
    levels, wanted = executable(has), os.environ.get(VARIABLE)
    if not wanted:
        return levels[-1]
    found = next((level for level in levels if level.name == wanted), None)
    if found is None:
        known = ", ".join(level.name for level in ladder(platform.machine()))
        raise JobFileError(
            f"{VARIABLE} is {wanted!r}, but this processor has {', '.join(level.name for level in levels)} "
            f"(of the levels {known})"
        )
    return found
