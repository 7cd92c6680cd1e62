"""The CPU's paged attention kernel, compiled once for a model's head size and type, and kept on disk.

Where there is no C++ compiler, or it fails, `load_kernel` returns None and attention runs on torch operators alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16"}
_COMPILE = ["-c", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-std=c++17", "-fPIC", "-fopenmp"]
# Linked apart, and without -ffast-math: with it, loading the library would flush denormals in the whole process.
_LINK = ["-shared", "-fopenmp"]


class PagedKernel:
    """Calls `vasuki_paged_attention` of a compiled library on torch tensors."""

    def __init__(self, library: Path) -> None:
        self._function = ctypes.CDLL(str(library)).vasuki_paged_attention
        self._function.restype = None
        self._function.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 6 + [ctypes.c_float] * 2

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        table_of: torch.Tensor,
        tables: torch.Tensor,
        sinks: torch.Tensor | None,
        window: int | None,
        scaling: float,
        softcap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Serve `tokens` of the packed `query`, writing their rows of `out`. Shapes as in paged_attention.cpp.

        All tensors are contiguous; sinks are float32, indices int64.
        """
        _, _, block_tokens, num_kv_heads, _ = cache.shape
        self._function(
            query.data_ptr(),
            cache.data_ptr(),
            tokens.data_ptr(),
            positions.data_ptr(),
            table_of.data_ptr(),
            tables.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            len(tokens),
            tables.shape[1],
            block_tokens,
            query.shape[1],
            num_kv_heads,
            window or 0,
            scaling,
            softcap or 0.0,
        )


def load_kernel(head_dim: int, dtype: torch.dtype) -> PagedKernel | None:
    """The kernel for this head size and type, compiled if it is not on disk yet; None if it cannot be had."""
    element = _ELEMENTS.get(dtype)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if element is None or compiler is None or head_dim % 4:
        return None
    source = resources.files("vasuki.hf").joinpath("paged_attention.cpp").read_bytes()
    flags = [*_COMPILE, f"-DHEAD_DIM={head_dim}", f"-DELEMENT={element}"]
    # `-march=native` ties the library to the processor, and a cache folder may be shared between machines.
    recipe = "\0".join([source.decode(), *flags, *_LINK, compiler, _processor()])
    library = _cache_folder() / f"paged_attention-{hashlib.sha256(recipe.encode()).hexdigest()[:20]}.so"
    try:
        if not library.exists():
            _compile(compiler, flags, source, library)
        return PagedKernel(library)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no compiled attention kernel, the slower one is used: %s", error)
        return None


def _compile(compiler: str, flags: list[str], source: bytes, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, compiled, built = (Path(folder, f"kernel.{suffix}") for suffix in ("cpp", "o", "so"))
        code.write_bytes(source)
        for command in (
            [compiler, *flags, str(code), "-o", str(compiled)],
            [compiler, *_LINK, str(compiled), "-o", str(built)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise OSError(f"{compiler}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
        os.replace(built, library)  # whole or absent, also with several processes at it


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "vasuki")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
