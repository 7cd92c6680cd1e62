"""The compiled kernel as a library."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch

from vasuki.hf import paged_attention
from vasuki.hf.kv_cache import KVCache, KVLayout

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


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_stores_like_its_plain_twin(dtype: torch.dtype, kv_dtype: torch.dtype, tokens: int) -> None:
    kernel = paged_attention.load_kernel(12, dtype, kv_dtype)
    assert kernel is not None
    caches = [KVCache(KVLayout(1, 3, 12, kv_dtype), 80, 16, torch.device("cpu")) for _ in range(2)]
    torch.manual_seed(0)
    rows = caches[0].rows_of_slots(torch.randperm(80 * 16)[:tokens])
    keys = torch.randn(tokens, 3, 12).to(dtype)
    values = torch.randn(3, tokens, 24).to(dtype)[..., :12].transpose(0, 1)  # heads apart from each other
    caches[0].write(0, keys, values, rows)
    kernel.write(keys, values, rows, caches[1].layers[0])
    assert torch.equal(caches[0].layers[0], caches[1].layers[0])
