"""What is written for processors with tile registers (AMX) against its plain twins. Where there are none, they are
emulated."""

from __future__ import annotations

import copy

import pytest
import torch
from every_level import EMULATES, at_level
from tiny_models import answers_in_bfloat16
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.packed_linear import Format, PackedLinear
from vasuki.hf.kernels.levels import AMX

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(not EMULATES, reason="not an x86-64 processor, by which tile registers are emulated"),
]


@pytest.fixture(scope="module")
def kernels(compiler: str) -> CPUKernels:
    at = at_level(AMX)
    library = at.load("decoder.cpp", at.level)
    assert library.vasuki_has_tile_registers()
    return CPUKernels.of(library)


def rounded_layer(in_features: int, out_features: int, bias: bool, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(in_features, out_features, bias=bias).bfloat16()


def expected(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return linear(x.bfloat16().float(), layer.weight.float(), bias)


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 129])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 1), (64, 32), (96, 33), (160, 70), (34, 40)])
@torch.inference_mode()
def test_multiplies_like_its_plain_twin(kernels: CPUKernels, rows: int, in_features: int, out_features: int) -> None:
    x = torch.randn(rows, in_features)
    layer, gate = (rounded_layer(in_features, out_features, bias, seed) for bias, seed in ((True, 1), (False, 2)))
    packed, packed_gate = (PackedLinear(copy.deepcopy(each), kernels.linear) for each in (layer, gate))
    assert packed.format is Format.ROUNDED
    torch.testing.assert_close(packed(x), expected(x, layer), rtol=1e-4, atol=1e-5)
    gated = expected(x, layer) * silu(expected(x, gate))
    torch.testing.assert_close(kernels.linear.gated(x, packed.matrix, packed_gate.matrix), gated, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("two_threads")
@torch.inference_mode()
def test_many_rows_on_two_threads(kernels: CPUKernels) -> None:
    layer = rounded_layer(320, 500, True)
    x = torch.randn(450, 320)
    torch.testing.assert_close(
        PackedLinear(copy.deepcopy(layer), kernels.linear)(x), expected(x, layer), rtol=1e-4, atol=1e-4
    )


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours(kernels: CPUKernels) -> None:
    packed = PackedLinear(rounded_layer(320, 100, False), kernels.linear)
    x = torch.randn(70, 320)
    together = packed(x)
    for count in (1, 2, 5, 16, 17, 32, 40):
        assert torch.equal(packed(x[3 : 3 + count]), together[3 : 3 + count])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_answers_the_same(name: str, kernels: CPUKernels) -> None:
    ours, twin = answers_in_bfloat16(name, kernels)
    assert ours == twin


class Chunks:
    """Chunks of one token and more, each with keys and values of its own, in blocks of a shuffled cache."""

    def __init__(
        self, spans: list[tuple[int, int]], head_dim: int, kv_dtype: torch.dtype, block_tokens: int = 16
    ) -> None:
        torch.manual_seed(0)
        self.head_dim, self.kv_heads = head_dim, 2
        width = -(-max(start + count for start, count in spans) // block_tokens)
        self.tables = torch.randperm(len(spans) * width).view(len(spans), width)
        shape = (self.tables.numel(), 2, block_tokens, self.kv_heads, head_dim)
        self.cache = torch.full(shape, torch.nan, dtype=kv_dtype)
        self.kept = torch.randn(len(spans), 2, width * block_tokens, self.kv_heads, head_dim).to(kv_dtype)
        for row, (start, count) in enumerate(spans):
            for at in range(start + count):
                self.cache[self.tables[row, at // block_tokens], :, at % block_tokens] = self.kept[row, :, at]
        starts, counts = torch.tensor(spans).T
        firsts = counts.cumsum(0) - counts
        rows = torch.arange(len(spans))
        self.tiles = torch.stack([firsts, counts, starts, rows, (counts == 1).long()], dim=1).contiguous()
        self.longest = int(counts.max())

    def attend(self, query: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """By the kernel."""
        kernel = at_level(AMX).paged_kernel((self.head_dim,), torch.float32, self.cache.dtype, rounds=True)
        out = torch.empty_like(query)
        scaling = self.head_dim**-0.5
        kernel(query, self.cache, self.tiles, self.longest, self.tables, None, window, scaling, None, out)
        return out


@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(32, torch.float32), (64, torch.bfloat16), (40, torch.bfloat16)])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("two_threads", "kernels")
@torch.inference_mode()
def test_chunks_attend_like_their_plain_twin(
    head_dim: int, kv_dtype: torch.dtype, group: int, window: int | None
) -> None:
    """Chunks at the beginning of a prompt and far behind it, one of them of two tokens."""
    chunks = Chunks([(0, 32), (32, 9), (120, 32), (199, 2), (63, 1)], head_dim, kv_dtype)
    query = torch.randn(76, chunks.kv_heads * group, head_dim)
    out = chunks.attend(query, window)
    for first, count, start, row, _ in chunks.tiles.tolist():
        keys, values = (part[: start + count].float().repeat_interleave(group, dim=1) for part in chunks.kept[row])
        distance = torch.arange(start, start + count)[:, None] - torch.arange(start + count)
        seen = (distance >= 0) & (distance < (window or 1 << 30))
        own = query[first : first + count].transpose(0, 1)
        answer = scaled_dot_product_attention(own, keys.transpose(0, 1), values.transpose(0, 1), seen).transpose(0, 1)
        torch.testing.assert_close(out[first : first + count], answer, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_a_sequence_that_overflows_leaves_others_alone() -> None:
    """Its values are no numbers, and more than the next one has, which are computed in the same scratch memory."""
    chunks = Chunks([(32, 32), (0, 5)], 64, torch.float32)
    chunks.cache[chunks.tables[0], 1] = torch.nan
    out = chunks.attend(torch.randn(37, 2, 64))
    assert out[:32].isnan().all()
    assert out[32:].isfinite().all()
