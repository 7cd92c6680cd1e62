"""The compiler of the C++ kernels, as the environment names it, and what it leaves on disk."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.kernels import levels, native
from vasuki.hf.kernels.paged_attention import load_kernel


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache in which nothing is yet, of a process that has said nothing yet."""
    native._say_once.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_may_be_named_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++ -DNAMED_WITH_ARGUMENTS")
    source = tmp_path / "trial.cpp"
    source.write_text("#ifndef NAMED_WITH_ARGUMENTS\n#error\n#endif\n")
    native._call(native.find_compiler() or "", "-c", str(source), "-o", str(tmp_path / "trial.o"))
    assert (tmp_path / "trial.o").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PATH", "/nowhere", "there is no C++ compiler"),
        ("CXX", "/nowhere/g++", "No such file or directory: '/nowhere/g++'"),
        ("CXX", "/bin/false", "failed"),
        ("CXX", "g++ 'half", "No closing quotation"),
    ],
)
def test_kernels_that_cannot_be_had_are_one_line_about_speed(
    monkeypatch: pytest.MonkeyPatch,
    fresh: Path,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    assert load_cpu_kernels() is None
    assert load_kernel((8,), torch.float32) is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert words in line
    assert "1.6 times as long" in line


def test_a_library_that_was_cut_is_compiled_again(compiler: str, fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    level = levels.executable()[1]
    assert load_kernel((8,), torch.float32, level=level) is not None
    (library,) = fresh.rglob("*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has it mapped
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        library.write_bytes(whole[:size])
        assert load_kernel((8,), torch.float32, level=level) is not None
        (again,) = fresh.rglob("*.so")
        assert again.read_bytes()[:4] == b"\x7fELF"
        assert os.path.getsize(again) == len(whole)
    assert caplog.text.count("is damaged") == 4
