"""The executor between scheduler and model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import load, prompts, requests_of, run

from vasuki.base.errors import Interrupted, JobFileError
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.kv.kv_mover import KVMover
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.hf.sampler import sample


def test_memory_that_runs_out_stops_the_run_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy_for_memory(self: Any, batch: Any) -> torch.Tensor:
        return torch.empty(2**60)

    monkeypatch.setattr(RaggedExecutor, "_logits", greedy_for_memory)
    with pytest.raises(Interrupted, match="memory ran out"):
        run(load("llama"), requests_of(prompts()))


def test_a_pool_that_the_system_does_not_give_is_named() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    with pytest.raises(JobFileError, match=r"kv\.device_memory"):
        KVCache(layout, 2**50, 16, torch.device("cpu"))


def test_memory_that_runs_out_while_blocks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: Any, batch: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(KVMover, "begin_step", no_room)
    with pytest.raises(Interrupted, match="memory ran out"):
        run(load("llama"), requests_of(prompts()), host_blocks=8)


def test_other_failures_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, batch: Any) -> torch.Tensor:
        return torch.ones(2, 3) @ torch.ones(2, 3)

    monkeypatch.setattr(RaggedExecutor, "_logits", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run(load("llama"), requests_of(prompts()))


def test_only_tokens_that_need_a_logit_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watch(logits: torch.Tensor, sequences: list[Any], want_logprobs: bool = False) -> Any:
        sizes.append((logits.shape[0], len(sequences)))
        return sample(logits, sequences, want_logprobs)

    monkeypatch.setattr("vasuki.hf.ragged_executor.sample", watch)
    rows, _, stats = run(load("llama"), requests_of(prompts()), chunk_tokens=7)
    assert all(logits == wanted for logits, wanted in sizes)
    assert sum(logits for logits, _ in sizes) == sum(map(len, rows.outputs))
    assert len(sizes) == stats.steps
