"""C++ kernels of this package, compiled once for the processor at hand and kept on disk.

Where there is no C++ compiler, or it fails, there is no kernel, and torch operators do its work.
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

log = logging.getLogger(__name__)

# Nobody reads errno or the flags of floating-point exceptions; without them, rounding and exp vectorise.
_NO_TRAPS = ("-fno-math-errno", "-fno-trapping-math")
_COMPILE = ("-c", "-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", *_NO_TRAPS)
# Linked apart, and never with -ffast-math: with it, loading the library would flush denormals in the whole process.
_LINK = ("-shared", "-fopenmp")


def load(source_name: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The library made from a source of this package, compiled if it is not on disk yet; None if it cannot be had."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    folder = Path(str(resources.files(__package__)), "cpp")
    sources = [file.read_text() for file in (folder / source_name, *sorted(folder.glob("*.hpp")))]
    # `-march=native` ties the library to the processor, and a cache folder may be shared between machines.
    recipe = "\0".join([*sources, *_COMPILE, *flags, *_LINK, compiler, _processor()])
    name = f"{Path(source_name).stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:20]}.so"
    library = _cache_folder() / name
    try:
        if not library.exists():
            _compile(compiler, flags, folder / source_name, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s was not compiled, slower torch operators are used: %s", source_name, error)
        return None


def _compile(compiler: str, flags: tuple[str, ...], source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, built = (Path(folder, f"kernel.{suffix}") for suffix in ("o", "so"))
        for command in (
            [compiler, *_COMPILE, *flags, str(source), "-o", str(compiled)],
            [compiler, *_LINK, str(compiled), "-o", str(built)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["failed"]
                raise OSError(f"{compiler}: {next((line for line in lines if 'error' in line), lines[0])}")
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
