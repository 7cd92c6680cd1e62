"""Rows of the workloads that Llama-3-8B is compared on: summaries of a trace, and translated chapters, made up.

As nobody knows how long an output will be, only that a row has at most 4,096 tokens, this is what rows are limited to.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vasuki.planner.lengths import Lengths, read_lengths

CONTEXT = 4096


def books(rows: int, seed: int = 0) -> Lengths:
    """Chapters to translate, `[rows]`: prompts log-normal around 900 tokens (sigma 0.5, 50 to 2,500), outputs 1.5 times
    as long, give or take 15 % (log-normal)."""
    random = np.random.default_rng(seed)
    prompts = np.clip(random.lognormal(np.log(900), 0.5, rows), 50, 2500).astype(np.int64)
    outputs = np.clip(prompts * 1.5 * random.lognormal(0, 0.15, rows), 1, CONTEXT - prompts).astype(np.int64)
    return _limited(Lengths(prompts, outputs))


def summaries(path: Path, rows: int, seed: int = 0) -> Lengths:
    """Random rows of a trace, `[rows]`."""
    lengths = read_lengths(path)
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:rows]
    return _limited(lengths.take(np.sort(chosen)))


def _limited(lengths: Lengths) -> Lengths:
    limits = np.maximum(1, CONTEXT - lengths.prompt_tokens)
    return Lengths(lengths.prompt_tokens, np.minimum(lengths.output_tokens, limits), None, limits)
