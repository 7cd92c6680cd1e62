"""The CUDA path of attention against its plain twin; the arrays it hands to the kernel are checked without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from plain_varlen import plain_varlen

from vasuki.hf.attention.plain_attention import Variant, attend_eagerly
from vasuki.hf.kernels.varlen import PAGE_TOKENS, PagedVarlen, can_page, preferred_block_tokens, why_unavailable
from vasuki.hf.kv.kv_cache import KVCache, KVLayout

CPU = torch.device("cpu")
CHUNKS = {
    "decodes": ([1, 1, 1, 1], [1, 700, 33, 257]),
    "chunks": ([5, 300, 64], [5, 611, 64]),
    "mixed": ([1, 1, 1, 40, 1, 200], [513, 9, 256, 700, 4, 200]),
    "one": ([1], [300]),
}
VARIANTS = {
    "causal": Variant(scaling=0.11),
    "window": Variant(scaling=0.2, window=37),
    "window of one": Variant(scaling=0.2, window=1),
}


def example(
    lengths: list[int], ends: list[int], block_tokens: int, dtype: torch.dtype, device: torch.device, head_dim: int = 16
) -> tuple[torch.Tensor, KVCache, np.ndarray]:
    """Random queries, a cache full of random numbers, and tables of scattered blocks."""
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    widths = [-(-end // block_tokens) for end in ends]
    generator = torch.Generator().manual_seed(sum(ends))
    cache = KVCache(layout, sum(widths) + 3, block_tokens, device)
    cache.layers[0].copy_(torch.randn(cache.layers[0].shape, generator=generator))
    blocks = torch.randperm(cache.num_blocks, generator=generator).numpy()
    tables = np.zeros((len(ends), max(widths)), dtype=np.int64)
    for row, width in enumerate(widths):
        tables[row, :width], blocks = blocks[:width], blocks[width:]
    query = torch.randn(sum(lengths), 6, head_dim, generator=generator).to(device, dtype)
    return query, cache, tables


def expected(query: torch.Tensor, cache: KVCache, tables: np.ndarray, case: str, variant: Variant) -> torch.Tensor:
    """Chunk by chunk, in float64 on the CPU."""
    lengths, ends = CHUNKS[case]
    outputs, first = [], 0
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        blocks = torch.from_numpy(tables[row, : -(-end // cache.block_tokens)]).to(query.device)
        keys, values = (tensor[:end].cpu().double() for tensor in cache.gather(0, blocks))
        outputs.append(attend_eagerly(query[first : first + length].cpu().double(), keys, values, variant))
        first += length
    return torch.cat(outputs)


@pytest.mark.parametrize(("block_tokens", "paged"), [(16, False), (PAGE_TOKENS, True), (PAGE_TOKENS, False)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CHUNKS)
def test_the_kernel_is_told_what_the_chunks_see(case: str, variant: str, block_tokens: int, paged: bool) -> None:
    lengths, ends = CHUNKS[case]
    query, cache, tables = example(lengths, ends, block_tokens, torch.float32, CPU)
    attend = PagedVarlen(np.array(lengths), np.array(ends), tables, block_tokens, CPU, paged, plain_varlen)
    asked = VARIANTS[variant]
    output = attend(query, cache.layers[0], asked.scaling, asked.window)
    reference = expected(query, cache, tables, case, VARIANTS[variant])
    torch.testing.assert_close(output.double(), reference, rtol=1e-4, atol=1e-5)


def test_leading_decodes_are_a_call_of_their_own() -> None:
    sizes: list[tuple[int, int, tuple[int, int]]] = []

    @functools.wraps(plain_varlen)
    def watched(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append((len(query), args[4], kwargs["window_size"]))
        return plain_varlen(query, *args, **kwargs)

    lengths, ends = CHUNKS["mixed"]
    query, cache, tables = example(lengths, ends, 16, torch.float32, CPU)
    attend = PagedVarlen(np.array(lengths), np.array(ends), tables, 16, CPU, False, watched)
    attend(query, cache.layers[0], scaling=0.11)
    assert sizes == [(3, 1, (-1, -1)), (241, 200, (-1, 0))]


def test_what_the_kernel_lacks_is_said() -> None:
    assert "not on cpu" in why_unavailable(torch.bfloat16, CPU, 64)
    assert not can_page(PAGE_TOKENS + 16)
    assert preferred_block_tokens(torch.bfloat16, CPU, 64) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    """The kernel itself."""

    def test_what_it_does_not_take(self) -> None:
        device = torch.device("cuda")
        assert "float32" in why_unavailable(torch.float32, device, 64)
        assert "not 100" in why_unavailable(torch.bfloat16, device, 100)

    @pytest.mark.parametrize("paged", [False, True], ids=["gathered", "paged"])
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("case", CHUNKS)
    def test_it_equals_its_plain_twin(
        self, case: str, variant: str, dtype: torch.dtype, head_dim: int, paged: bool
    ) -> None:
        device = torch.device("cuda")
        if reason := why_unavailable(dtype, device, head_dim):
            pytest.skip(reason)
        if paged and not can_page(PAGE_TOKENS):
            pytest.skip(f"torch {torch.__version__} does not page")
        block_tokens = PAGE_TOKENS if paged else 16
        lengths, ends = CHUNKS[case]
        query, cache, tables = example(lengths, ends, block_tokens, dtype, device, head_dim)
        attend = PagedVarlen(np.array(lengths), np.array(ends), tables, block_tokens, device, paged)
        asked = VARIANTS[variant]
        output = attend(query, cache.layers[0], asked.scaling, asked.window).cpu().double()
        reference = expected(query, cache, tables, case, VARIANTS[variant])
        assert output.isfinite().all()
        assert (output - reference).norm() / reference.norm() < 1e-2

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        device = torch.device("cuda")
        if reason := why_unavailable(torch.bfloat16, device, 64):
            pytest.skip(reason)
        lengths, ends = CHUNKS["decodes"]
        query, cache, tables = example(lengths, ends, PAGE_TOKENS, torch.bfloat16, device, 64)
        together = PagedVarlen(np.array(lengths), np.array(ends), tables, PAGE_TOKENS, device)
        alone = PagedVarlen(np.array(lengths[1:2]), np.array(ends[1:2]), tables[1:2], PAGE_TOKENS, device)
        layer = cache.layers[0]
        assert torch.equal(together(query, layer, scaling=0.11)[1:2], alone(query[1:2], layer, scaling=0.11))
