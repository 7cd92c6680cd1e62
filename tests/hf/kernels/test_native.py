"""The compiler of the C++ kernels, as the environment names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vasuki.hf.kernels import native


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_may_be_named_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++ -DNAMED_WITH_ARGUMENTS")
    source = tmp_path / "trial.cpp"
    source.write_text("#ifndef NAMED_WITH_ARGUMENTS\n#error\n#endif\n")
    native._call(native.find_compiler() or "", "-c", str(source), "-o", str(tmp_path / "trial.o"))
    assert (tmp_path / "trial.o").exists()
