"""A pool whose last blocks lie beyond what 32 bits can number, as the memory of large cards allows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gpu_sections.golden import Tiny, tiny_models
from gpu_sections.kernels import batch_of
from gpu_sections.setting import Finding, Setting
from vasuki.engine.batch import Batch
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.attention.inputs import lay_out
from vasuki.hf.kernels.varlen import PAGE_TOKENS
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.machines.profile import AttentionChoice

_ELEMENTS = 2**31  # of a layer
_PROMPT, _DECODED = 300, 2  # tokens of a row: several blocks
_CLOSE = 1e-5  # of the largest logit: rows of a step are not always summed in the same order


def far_blocks(setting: Setting, share_s: float) -> Finding:
    """A row in the last blocks is answered as the same row in the first, a prompt at once and then token by token, by
    each of the kernels."""
    finding = Finding()
    tiny = tiny_models()
    config = tiny.random_config("llama", max_position_embeddings=1024, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = [3 + place % 50 for place in range(_PROMPT + _DECODED)]
    for dtype in (torch.float32, torch.bfloat16) if setting.on_gpu else (torch.float32,):
        loaded = Tiny(setting, "llama", model, dtype, [prompt]).loaded()
        for block_tokens in (16, PAGE_TOKENS):
            width = -(-len(prompt) // block_tokens)
            num_blocks = -(-_ELEMENTS // (loaded.kv_layout.bytes_per_token // dtype.itemsize * block_tokens)) + width
            tables = np.stack([np.arange(width), np.arange(num_blocks - width, num_blocks)])
            cache = KVCache(loaded.kv_layout, num_blocks, block_tokens, setting.device)
            assert cache.layers[0][: num_blocks - width].numel() >= _ELEMENTS
            choices: list[AttentionChoice] = ["packed", "paged"] if setting.on_gpu else ["packed"]
            for choice in choices:
                kernels = AttentionKernels(loaded.kernel, choice)
                executor = RaggedExecutor(loaded, cache, attention=kernels)
                apart = max(_apart(executor, batch) for batch in _steps(prompt, tables))
                row = {"dtype": str(dtype), "block": block_tokens, "kernel": choice, "apart": float(f"{apart:.2g}")}
                finding.rows.append(row | {"elements": cache.layers[0].numel()})
                if not apart <= _CLOSE:
                    finding.failures.append(f"far blocks: {', '.join(map(str, row.values()))} instead of nothing")
            del cache, executor
            setting.free()
    return finding


def _steps(prompt: list[int], tables: np.ndarray) -> list[Batch]:
    """The prompt of two rows, and tokens behind it, each a step."""
    steps = [([_PROMPT, _PROMPT], _PROMPT), *(([1, 1], _PROMPT + 1 + token) for token in range(_DECODED))]
    batches = [batch_of(lengths, [end, end], tables) for lengths, end in steps]
    for batch in batches:
        for chunk in batch.chunks:
            ids = np.array(prompt[: chunk.end], dtype=np.int32)
            chunk.sequence.request = replace(chunk.sequence.request, prompt_token_ids=ids)
    return batches


def _apart(executor: RaggedExecutor, batch: Batch) -> float:
    """How far two rows' logits are apart, as a share of the largest."""
    with torch.inference_mode():
        first, last = executor.forward(lay_out(batch, executor.cache, executor.attention).on_device()).float()
    return float((first - last).abs().max() / first.abs().max())
