"""Whole blocks from one tensor to another, in as few pieces as they lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.hf.kernels.batched_copies import batched_copies


class Runs(NamedTuple):
    """Stretches of blocks that are contiguous on both sides, `[num_runs]` of each."""

    sources: Ints  # first block of each
    targets: Ints
    counts: Ints  # blocks

    @property
    def num_blocks(self) -> int:
        return int(self.counts.sum())


NO_RUNS = Runs(*(np.empty(0, np.int64) for _ in Runs._fields))


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> Runs:
    """Merge pairs of blocks that are neighbours on both sides, in whatever order they are given."""
    if not sources:
        return NO_RUNS
    order = np.argsort(sources, kind="stable")
    from_, to = np.asarray(sources)[order], np.asarray(targets)[order]
    firsts = np.concatenate([[0], 1 + np.flatnonzero((np.diff(from_) != 1) | (np.diff(to) != 1))])
    return Runs(from_[firsts], to[firsts], np.diff(firsts, append=len(from_)))


def copy_of(source: torch.Tensor, target: torch.Tensor, runs: Runs) -> tuple[int, Callable[[], int]]:
    """The bytes of a copy of blocks from one tensor `[num_blocks, ...]` to another, and the copy itself, which an
    engine runs on its stream or thread and which returns the bytes."""
    block_bytes = source[0].numel() * source.element_size()
    num_bytes = runs.num_blocks * block_bytes
    device = source.device if source.is_cuda else target.device
    batch = batched_copies(device)

    def one_by_one() -> int:
        for first, other, count in zip(*(each.tolist() for each in runs), strict=True):
            target[other : other + count].copy_(source[first : first + count], non_blocking=True)
        return num_bytes

    def at_once() -> int:
        assert batch is not None
        to, from_ = target.data_ptr() + runs.targets * block_bytes, source.data_ptr() + runs.sources * block_bytes
        batch(to, from_, runs.counts * block_bytes, torch.cuda.current_stream(device).cuda_stream)
        return num_bytes

    return num_bytes, one_by_one if batch is None or source.device == target.device else at_once
