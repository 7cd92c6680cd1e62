"""The compiled kernel as a library."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch

from vasuki.hf import paged_attention

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def test_loading_it_leaves_denormals_alone() -> None:
    assert paged_attention.load_kernel(8, torch.float32) is not None
    assert sys.float_info.min / 2 > 0


def test_a_failing_compiler_means_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paged_attention.load_kernel(8, torch.float32) is None
    assert not list(tmp_path.rglob("*.so"))


def test_types_without_a_kernel() -> None:
    assert paged_attention.load_kernel(8, torch.float16) is None
