"""C++ kernels of this package, compiled once for a level of instructions and kept on disk.

Where there is no C++ compiler, or it fails, there is no kernel, and torch operators do its work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from vasuki.base.errors import one_line
from vasuki.hf.kernels.levels import NONE, Level

log = logging.getLogger(__name__)

# Nobody reads errno or the flags of floating-point exceptions; without them, rounding and exp vectorise.
_NO_TRAPS = ("-fno-math-errno", "-fno-trapping-math")
_COMPILE = ("-c", "-O3", "-std=c++17", "-fPIC", *_NO_TRAPS)
# Which some compilers do not know: Apple's have no OpenMP, and several cannot tune for the processor they run on.
_WHERE_KNOWN = ("-fopenmp", "-mtune=native")
_TRIAL = """
#ifdef _OPENMP
#include <omp.h>
int threads() { return omp_get_max_threads(); }
#endif
"""


def load(source_name: str, level: Level, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The library made from a source of this package, compiled if it is not on disk yet; None if it cannot be had."""
    if level is NONE:
        return None
    compiler = find_compiler()
    if compiler is None:
        _say_once("there is no C++ compiler (g++, clang++, or what CXX names)")
        return None
    try:
        return ctypes.CDLL(str(build(source_name, level, flags, compiler)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a quote in CXX that is not closed
        _say_once(f"kernels were not compiled: {one_line(error)}")
        return None


@functools.cache
def _say_once(reason: str) -> None:
    """Log once why kernels are absent: they have several sources, and one reason."""
    log.warning("%s; torch's operators compute in place of kernels, which took 1.6 times as long on SmolLM2", reason)


def find_compiler() -> str | None:
    """The compiler that the environment names, or the first that is found."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def build(source_name: str, level: Level, flags: tuple[str, ...], compiler: str) -> Path:
    """The file of such a library. Raises OSError or SubprocessError if it is not there and cannot be made."""
    folder = Path(str(resources.files(__package__)), "cpp")
    sources = [file.read_text() for file in (folder / source_name, *sorted(folder.glob("*.hpp")))]
    # A cache folder may be shared between machines.
    wanted = (*_COMPILE, *_WHERE_KNOWN, *level.flags, *flags)
    recipe = "\0".join([*sources, *wanted, compiler, level.name, platform.machine()])
    name = f"{Path(source_name).stem}-{level.name}-{_digest(recipe.encode())}"
    for library in _cache_folder().glob(f"{name}-*.so"):
        if library.stem == f"{name}-{_digest(library.read_bytes())}":
            return library
        log.warning("%s is damaged, which would end the process once it is used: it is compiled again", library)
        library.unlink(missing_ok=True)
    return _compile(compiler, level, flags, folder / source_name, name)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _compile(compiler: str, level: Level, flags: tuple[str, ...], source: Path, name: str) -> Path:
    """Make a library, whose name ends in a digest of its content."""
    cache = _cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        compiled, built = (Path(folder, f"kernel.{suffix}") for suffix in ("o", "so"))
        known = _known_flags(compiler, (*_WHERE_KNOWN, *level.flags), Path(folder))
        _call(compiler, *_COMPILE, *known, *flags, str(source), "-o", str(compiled))
        # Linked apart, never with -ffast-math: with it, loading the library would flush denormals in the whole process.
        _call(compiler, "-shared", *(flag for flag in known if flag == "-fopenmp"), str(compiled), "-o", str(built))
        library = cache / f"{name}-{_digest(built.read_bytes())}.so"
        os.replace(built, library)  # whole or absent, also with several processes at it
    return library


def _known_flags(compiler: str, flags: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Return the flags that a compiler takes; the sources do without the others."""
    trial = folder / "trial.cpp"
    trial.write_text(_TRIAL)

    def takes(some: Iterable[str]) -> bool:
        try:
            _call(compiler, "-fPIC", "-shared", *some, str(trial), "-o", str(folder / "trial.so"))
        except OSError:
            return False
        return True

    return flags if takes(flags) else tuple(flag for flag in flags if takes([flag]))


def _call(compiler: str, *arguments: str) -> None:
    """Run a compiler, which CXX may name with arguments of its own."""
    done = subprocess.run([*shlex.split(compiler), *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["failed"]
        raise OSError(f"{compiler}: {next((line for line in lines if 'error' in line), lines[0])}")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "vasuki")
