"""The kernels of one step of decodes and of one that also has a prompt, by torch's profiler."""

from __future__ import annotations

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from gpu_sections.kernels import batch_of
from gpu_sections.setting import Finding, Setting
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.kernels.varlen import preferred_block_tokens
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.ragged_executor import RaggedExecutor

_MOST = 20  # kernels of a table


def kernel_table(setting: Setting, share_s: float) -> Finding:
    """Launched one by one, the longest first."""
    loaded, finding = setting.loaded(setting.small), Finding()
    layout, device = loaded.kv_layout, setting.device
    block_tokens = preferred_block_tokens(layout.dtype, device, layout.head_dims[0]) or 16
    decodes, context, chunk = (4, 48, 16) if setting.toy else (64, 1024, 512)
    width = -(-context // block_tokens)
    blocks = np.arange((decodes + 1) * width).reshape(decodes + 1, width)
    cache = KVCache(layout, blocks.size, block_tokens, device)
    executor = RaggedExecutor(loaded, cache, attention=AttentionKernels(loaded.kernel))
    for title, lengths in {"decodes": [1] * decodes, "mixed": [1] * decodes + [chunk]}.items():
        batch = batch_of(lengths, [context] * len(lengths), blocks)
        executor.execute(batch)  # loads kernels
        activity = ProfilerActivity.CUDA if setting.on_gpu else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profiler:
            executor.execute(batch)
            setting.synchronize()
        took = "self_device_time_total" if setting.on_gpu else "self_cpu_time_total"
        found = sorted(profiler.key_averages(), key=lambda each: -getattr(each, took))
        total_us, calls = sum(getattr(each, took) for each in found), sum(each.count for each in found)
        finding.notes.append(f"{title}: {calls} kernels, {total_us / 1e3:.3g} ms")
        for each in found[:_MOST]:
            us = round(getattr(each, took), 1)
            finding.rows.append({"step": title, "kernel": each.key[:80], "calls": each.count, "us": us})
    return finding
