"""The compiled kernel as a library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from every_level import AtLevel

from vasuki.hf.kernels import paged_attention
from vasuki.hf.kernels.levels import AMX, AVX512_BF16
from vasuki.hf.kv.kv_cache import KVCache, KVLayout

pytestmark = pytest.mark.usefixtures("compiler")


def test_loading_it_leaves_denormals_alone() -> None:
    assert paged_attention.load_kernel((8,), torch.float32) is not None
    assert sys.float_info.min / 2 > 0


def test_a_failing_compiler_means_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paged_attention.load_kernel((8,), torch.float32) is None
    assert not list(tmp_path.rglob("*.so"))


def test_types_without_a_kernel() -> None:
    assert paged_attention.load_kernel((8,), torch.float16) is None


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_stores_like_its_plain_twin(dtype: torch.dtype, kv_dtype: torch.dtype, tokens: int) -> None:
    kernel = paged_attention.load_kernel((24,), dtype, kv_dtype)
    assert kernel is not None
    caches = [KVCache(KVLayout.uniform(1, 3, 24, kv_dtype), 80, 16, torch.device("cpu")) for _ in range(2)]
    torch.manual_seed(0)
    rows = caches[0].rows_of_slots(torch.randperm(80 * 16)[:tokens])
    keys = torch.randn(tokens, 3, 24).to(dtype)
    values = torch.randn(3, tokens, 48).to(dtype)[..., :24].transpose(0, 1)  # heads apart from each other
    caches[0].write(0, keys, values, rows)
    kernel.write(keys, values, rows, caches[1].layers[0])
    assert torch.equal(caches[0].layers[0], caches[1].layers[0])


@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(8, torch.bfloat16), (24, torch.float32), (64, torch.bfloat16)])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("block_tokens", [1, 5, 16, 40])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.usefixtures("two_threads")
def test_attends_like_its_plain_twin(
    each_level: AtLevel, head_dim: int, kv_dtype: torch.dtype, group: int, block_tokens: int, window: int | None
) -> None:
    """Single tokens and a chunk, next to slots whose content nobody may see."""
    rounds = each_level.level.name in (AVX512_BF16.name, AMX.name)
    kernel = each_level.paged_kernel((head_dim,), torch.float32, kv_dtype, rounds)
    torch.manual_seed(0)
    positions, kv_heads, scaling = [0, 3, 15, 16, 77], 2, head_dim**-0.5
    blocks_per_row = 77 // block_tokens + 1
    tables = torch.randperm(len(positions) * blocks_per_row).view(len(positions), blocks_per_row)
    cache = torch.full((tables.numel(), 2, block_tokens, kv_heads, head_dim), torch.nan, dtype=kv_dtype)
    kept = torch.randn(len(positions), 2, 78, kv_heads, head_dim).to(kv_dtype)
    for row, position in enumerate(positions):
        for at in range(position + 1):
            cache[tables[row, at // block_tokens], :, at % block_tokens] = kept[row, :, at]
    chunk = 3  # tokens of the last row
    counts = torch.tensor([1, 1, 1, 1, chunk])
    firsts = counts.cumsum(0) - counts
    starts, rows = torch.tensor(positions) - counts + 1, torch.arange(len(positions))
    tiles = torch.stack([firsts, counts, starts, rows, (counts == 1).long()], dim=1)
    query = torch.randn(int(counts.sum()), kv_heads * group, head_dim)
    out = torch.empty_like(query)
    kernel(query, cache, tiles, chunk, tables, None, window, scaling, None, out)
    for first, count, position, row, _ in tiles.tolist():
        for token in range(count):
            end = position + token + 1
            seen = slice(0 if window is None else max(0, end - window), end)
            keys, values = kept[row, :, seen].float().repeat_interleave(group, dim=2)
            scores = torch.einsum("hd,thd->ht", query[first + token], keys) * scaling
            expected = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
            rtol, atol = (0.02, 0.02) if rounds else (1e-4, 1e-5)  # eight bits of numbers of ordinary size
            torch.testing.assert_close(out[first + token], expected, rtol=rtol, atol=atol)
