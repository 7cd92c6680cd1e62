"""Ceilings of the card, attention kernels against their plain twin, and the hardware profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from gpu_sections.setting import Ceilings, Finding, Setting
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.hf.attention.chunks import AttentionKernels, TileKernel
from vasuki.hf.attention.inputs import lay_out
from vasuki.hf.attention.plain_attention import Variant, attend_eagerly
from vasuki.hf.attention.ragged_attention import Unsupported, attend
from vasuki.hf.fused.float8_linear import Float8Linear, refuse_untried
from vasuki.hf.kernels.float8 import FLOAT8
from vasuki.hf.kernels.paged_attention import load_kernel
from vasuki.hf.kernels.varlen import PAGE_TOKENS, PagedVarlen, can_page, why_unavailable
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.loading.triton_kernels import small_kernels, tile_attention
from vasuki.hf.profiler import profile_machine
from vasuki.hf.profiler.rows import row_at
from vasuki.hf.profiler.timing import QUICK, clock_for, measure
from vasuki.hf.profiler.whole_steps import SIZES
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_writing import write_profile

_TORCH = AttentionKernels(None, "paged")  # neither of the kernels
_TOLERANCE = 2e-2  # of bfloat16 against float64, by norms


def ceilings(setting: Setting, share_s: float) -> Finding:
    """The best that a large matmul and a long copy reach: what other sections measure themselves by."""
    size = 256 if setting.toy else 8192
    length = 2**20 if setting.toy else 2**30
    left, right = (torch.randn(size, size, device=setting.device).to(setting.dtype) for _ in range(2))
    source = torch.randn(length, device=setting.device)
    target = torch.empty_like(source)
    clock = clock_for(setting.device)
    matmul_s, copy_s = measure([lambda: left @ right, lambda: target.copy_(source)], clock, QUICK)
    found = Ceilings(2 * size**3 / matmul_s, 2 * source.numel() * 4 / copy_s)
    setting.ceilings = found
    dtype = str(setting.dtype).removeprefix("torch.")
    return Finding(
        rows=[
            {"ceiling": f"{dtype} matmul of {size} x {size}", "measured": f"{found.flops_per_s / 1e12:.4g} TFLOP/s"},
            {"ceiling": f"copy of {length * 4 >> 20} MiB", "measured": f"{found.bytes_per_s / 1e9:.4g} GB/s"},
        ],
        notes=[f"profile until measured: {setting.profile.name}", *_products(setting)],
    )


def _products(setting: Setting) -> Iterator[str]:
    """What a large layer's product takes in 8 bits, rounding included, by what it takes in the model's type."""
    try:
        refuse_untried(setting.device)
    except Unsupported as reason:
        yield f"no products of 8 bits: {reason}"
        return
    k, n = (64, 128) if setting.toy else (4096, 28672)
    linear = torch.nn.Linear(k, n, bias=False, device=setting.device, dtype=torch.bfloat16)
    rounded = Float8Linear(linear, small_kernels(setting.device) if setting.on_gpu else None)
    for rows in (16, 64) if setting.toy else (16, 256, 2048):
        x = torch.randn(rows, k, device=setting.device).to(torch.bfloat16)
        with torch.inference_mode():
            wide_s, narrow_s = measure([partial(linear, x), partial(rounded, x)], clock_for(setting.device), QUICK)
        rate = 2 * rows * k * n / narrow_s / 1e12
        yield f"product of {rows} rows in 8 bits: {rate:.3g} TFLOP/s, {narrow_s / wide_s:.2f} of bfloat16's time"


def profile(setting: Setting, share_s: float) -> Finding:
    """What `vasuki profile` measures; the sections after this one predict with it."""
    measured = profile_machine(
        setting.device.type, setting.shape(setting.large), name="this-machine", quick=setting.toy or share_s < 150
    )
    write_profile(measured, setting.out / "this-machine.yaml")
    setting.profile = measured
    curve = measured.link.curve
    return Finding(
        rows=[
            *_steps(CostModel(setting.shape(setting.large), measured)),
            *(
                {"figure": f"copies of {point.bytes >> 10} KiB to / from the device, GB/s",
                 "measured": f"{point.h2d:.3g} / {point.d2h:.3g}"}
                for point in curve[:: max(1, len(curve) // 4)]
            ),
        ],
        notes=["the whole profile is in this-machine.yaml, in this report's folder"],
    )  # fmt: skip


def _steps(cost: CostModel) -> Iterator[dict[str, object]]:
    """What whole steps took, and which shares of the card's bandwidth and of its peak that is."""
    profile = cost.profile
    for size in SIZES:
        step = cost.step(size.work(cost))
        what = f"a chunk of {size.chunk}" if size.chunk else f"{size.decodes} decodes"
        bandwidth = step.memory_bytes / step.device_s / profile.memory_bytes_per_s
        peak = step.flops / step.device_s / profile.peak_flops(cost.shape.dtype)
        yield {
            "figure": f"step of {what} at {size.context}, ms, share of bandwidth, of peak",
            "measured": f"{1e3 * step.device_s:.3g}, {bandwidth:.0%}, {peak:.0%}",
        }


def attention(setting: Setting, share_s: float) -> Finding:
    """One layer's attention of a batch of decodes, of a prompt chunk, and of both, by every way that there is."""
    shape, finding = setting.shape(setting.large), Finding()
    decodes, context, chunk = (4, 48, 16) if setting.toy else (64, 1024, 512)
    batches = {
        f"{decodes} decodes at {context}": ([1] * decodes, [context] * decodes),
        f"chunk of {chunk} at {context}": ([chunk], [context]),
        "both": ([1] * decodes + [chunk], [context] * (decodes + 1)),
    }
    for title, (lengths, ends) in batches.items():
        for block_tokens in (32, PAGE_TOKENS):
            compare(setting, finding, title, lengths, ends, block_tokens)
        compare(setting, finding, f"{title}, KV of 8 bits", lengths, ends, 32, FLOAT8)
    if reason := why_unavailable(setting.dtype, setting.device, shape.head_dim):
        finding.notes.append(f"no packed kernel: {reason}")
    elif not can_page(PAGE_TOKENS):
        finding.notes.append(f"the packed kernel of torch {torch.__version__} does not walk block tables")
    return finding


def compare(
    setting: Setting,
    finding: Finding,
    title: str,
    lengths: list[int],
    ends: list[int],
    block_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Time every way for one batch and check it against float64."""
    shape, device, kv_dtype = setting.shape(setting.large), setting.device, kv_dtype or setting.dtype
    layout = KVLayout.uniform(1, shape.num_kv_heads, shape.head_dim, kv_dtype)
    width = -(-max(ends) // block_tokens)
    cache = KVCache(layout, width * len(ends), block_tokens, device)
    cache.layers[0].copy_(torch.randn(cache.layers[0].shape, device=device))
    blocks = torch.randperm(cache.num_blocks).numpy().reshape(len(ends), width)
    batch = batch_of(lengths, ends, blocks)
    total = sum(lengths)
    query = torch.randn(total, shape.num_heads, shape.head_dim, device=device).to(setting.dtype)
    key, value = (torch.randn(total, shape.num_kv_heads, shape.head_dim, device=device).to(setting.dtype)
                  for _ in range(2))  # fmt: skip
    variant = Variant(scaling=shape.head_dim**-0.5)
    kernel: TileKernel | None
    if setting.on_gpu:
        kernel = tile_attention(layout, shape.num_heads // shape.num_kv_heads, setting.dtype, device)
    else:
        kernel = load_kernel((shape.head_dim,), setting.dtype, kv_dtype)
    step, plain = lay_out(batch, cache, AttentionKernels(kernel)).on_device(), lay_out(batch, cache, _TORCH).on_device()
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "engine": lambda: attend(query, key, value, 0, step, variant),
        "torch operators": lambda: attend(query, key, value, 0, plain, variant),
    }
    if setting.on_gpu and kernel is not None:
        ours = lay_out(batch, cache, AttentionKernels(kernel, "paged")).on_device()
        ways["Triton's kernel"] = lambda: attend(query, key, value, 0, ours, variant)
    if kv_dtype is setting.dtype and not why_unavailable(setting.dtype, device, shape.head_dim):
        for paged in (False, True) if can_page(block_tokens) else (False,):
            packed = PagedVarlen(np.array(lengths), np.array(ends), blocks, block_tokens, device, paged)
            ways["paged kernel" if paged else "gathered kernel"] = partial(
                packed, query, cache.layers[0], variant.scaling
            )
    with torch.inference_mode():
        ways["engine"]()  # writes the step's keys and values, which all ways read
        reference = _reference(query, cache, lengths, ends, blocks, variant)
        seconds = measure(list(ways.values()), clock_for(device), QUICK)
        for (way, call), took_s in zip(ways.items(), seconds, strict=True):
            error = float((call().double() - reference).norm() / reference.norm())
            if not error < _TOLERANCE:
                finding.failures.append(f"{way}, {title}, blocks of {block_tokens}: error {error:.3g}")
            read_bytes = sum(ends) * layout.bytes_per_token
            finding.rows.append(
                {
                    "batch": title,
                    "block": block_tokens,
                    "way": way,
                    "us": round(took_s * 1e6, 1),
                    "KV GB/s": round(read_bytes / took_s / 1e9, 1),
                    "error": float(f"{error:.2g}"),
                }
            )


def batch_of(lengths: list[int], ends: list[int], blocks: np.ndarray) -> Batch:
    sequences = [
        row_at(row, np.zeros(end, np.int64), end - length, blocks[row].tolist())
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    decodes = [sequence for sequence, length in zip(sequences, lengths, strict=True) if length == 1]
    prefills = [
        ScheduledChunk(sequence, sequence.num_computed_tokens, length, True)
        for sequence, length in zip(sequences, lengths, strict=True)
        if length > 1
    ]
    return Batch(decodes, [sequence.num_computed_tokens for sequence in decodes], prefills, [])


def _reference(
    query: torch.Tensor, cache: KVCache, lengths: list[int], ends: list[int], blocks: np.ndarray, variant: Variant
) -> torch.Tensor:
    """In float64, chunk by chunk."""
    outputs, first = [], 0
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        keys, values = cache.gather(0, torch.from_numpy(blocks[row]).to(query.device), torch.float64)
        outputs.append(attend_eagerly(query[first : first + length].double(), keys[:end], values[:end], variant))
        first += length
    return torch.cat(outputs)
