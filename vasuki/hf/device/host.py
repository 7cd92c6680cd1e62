"""Settings of the process. Before torch is loaded: how threads wait for work, that freed memory is kept, and that none
of a GPU's is lost in pieces. While steps are launched: that nobody keeps the interpreter for long."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vasuki.machines.here.pressure import BUSY, cpu_pressure

# Of libgomp: rounds that an idle thread spins, some tenths of a millisecond, as long as what lies between two kernels.
SPINS = 10_000
TURN_S = 1e-4  # in which a thread hands the interpreter on: a step of 1 ms waits for it several times
# Of glibc's malloc.h: blocks up to the first size come from the heap, and the heap is not handed back.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 2**30, _TOP_PAD: 64 * 2**20}


def prepare() -> None:
    """Set all of it up. What the environment sets already stays."""
    # Threads that spin for long lose whole time slices on a shared machine, tenfold in a job with a small model, and
    # threads that go to sleep at once cost a sixth of every step on a machine of one's own.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0" if cpu_pressure() > BUSY else str(SPINS))
    keep_freed_memory()
    set_up_allocator()


@contextmanager
def quick_turns() -> Iterator[None]:
    """Let threads take turns in the interpreter more often than every 5 ms: while one prepares rows, the one that
    launches a GPU's steps would wait for so long whenever it comes back from the device."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def keep_freed_memory() -> None:
    """Let malloc reuse the blocks of a step's activations, instead of faulting their pages in again in every step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    for parameter, value in _SETTINGS.items():
        mallopt(parameter, value)


def set_up_allocator() -> None:
    """Let torch take a GPU's memory in segments that grow: steps differ in size, and pieces that one frees may be too
    small for the next. Plans leave no room for them."""
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
