"""The executor between scheduler and model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import Rows, load, prompts, requests_of, run

from vasuki.base.errors import JobFileError, OutOfMemory
from vasuki.engine.batch import Batch
from vasuki.engine.loop import drain
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.kv import kv_cache
from vasuki.hf.kv.kv_cache import KVCache, KVLayout, PoolTooLarge
from vasuki.hf.kv.kv_mover import KVMover
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor
from vasuki.hf.sampler import sample


@pytest.fixture
def memory_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """`memory_for(tokens)`: a step that computes more at once finds that out when half of it is done. Returns the sizes
    of steps that were tried."""
    whole = RaggedExecutor._logits

    def limit(most_tokens: int) -> list[int]:
        tried: list[int] = []

        def logits(self: Any, batch: Batch) -> torch.Tensor:
            tried.append(batch.num_tokens)
            computed = whole(self, batch)
            if batch.num_tokens > most_tokens:
                raise torch.OutOfMemoryError if len(tried) % 2 else MemoryError
            return computed

        monkeypatch.setattr(RaggedExecutor, "_logits", logits)
        return tried

    return limit


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {"num_blocks": 24},
    "parked": {"num_blocks": 24, "host_blocks": 40},
    "compiled": {"native": True},
    "launched ahead": {"steps_ahead": 1},
    "log-probabilities": {"want_logprobs": True},
}


@pytest.mark.sweep
@pytest.mark.parametrize("most_tokens", [1, 3, 10])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_shrink_to_the_memory_there_is(
    memory_for: Callable[[int], list[int]], options: str, most_tokens: int
) -> None:
    undisturbed, _, stats = run(load("llama"), requests_of(prompts()), **OPTIONS[options])
    tried = memory_for(most_tokens)
    rows, _, shrunk = run(load("llama"), requests_of(prompts()), **OPTIONS[options])
    assert rows.outputs == undisturbed.outputs
    for row, expected in undisturbed.sequences.items():
        assert rows.sequences[row].logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert shrunk.steps == stats.steps
    too_large = [tokens for tokens in tried if tokens > most_tokens]
    assert too_large
    assert too_large == sorted(set(too_large), reverse=True), "what was too large once is not tried again"


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_memory_that_does_not_suffice_for_one_token_stops_the_run(
    memory_for: Callable[[int], list[int]], name: str
) -> None:
    """So does any that does not suffice for rows with a state, which cannot be computed once more."""
    memory_for(0 if name == "llama" else 5)
    with pytest.raises(OutOfMemory, match="memory ran out"):
        run(load(name), requests_of(prompts()))


def test_a_pool_that_the_system_does_not_give_is_named() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    with pytest.raises(JobFileError, match=r"kv\.device_memory"):
        KVCache(layout, 2**50, 16, torch.device("cpu"))


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_pool_shrinks_to_the_memory_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Half of the memory went to somebody else since the plan was made."""
    loaded, requests = load(name), requests_of(prompts())
    policy = dataclasses.replace(POLICIES["vasuki"], shares_prefixes=not loaded.recurrent)
    settings = EngineSettings(policy, Limits(16, 8), 100, 4)
    layer_bytes = 30 * 4 * loaded.kv_layout.bytes_per_token // sum(heads > 0 for heads, _ in loaded.kv_layout.heads)
    whole = kv_cache._lazy_zeros

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize > layer_bytes:
            raise PoolTooLarge("the system does not give as much")
        return whole(shape, dtype)

    outputs = []
    for limit in (whole, zeros):
        monkeypatch.setattr(kv_cache, "_lazy_zeros", limit)
        executor = build_executor(loaded, settings)
        scheduler, rows = Scheduler(executor.settings), Rows()
        drain(iter(requests), scheduler, executor, rows)
        outputs.append(rows.outputs)
        assert scheduler.queues.pool.num_blocks == executor.settings.num_blocks
    assert outputs[0] == outputs[1]
    assert (executor.settings.num_blocks, executor.settings.lost_blocks) == (25, 75)
    assert "room for the KV of 100 tokens is tried instead of 200" in caplog.text
    needs_more = Request(0, "long", 120, 8)
    with pytest.raises(OutOfMemory, match=r"row 'long' needs KV .* room for 100 instead of 400, since memory"):
        scheduler.add(needs_more)
    needs_most = scheduler.add(Request(0, "longer", 500, 8))
    assert needs_most is not None
    assert "the device has room for 100" in needs_most.error
    monkeypatch.setattr(kv_cache, "_lazy_zeros", lambda shape, dtype: torch.zeros(2**60))
    with pytest.raises(OutOfMemory, match="the model leaves none for KV"):
        build_executor(loaded, settings)


def test_memory_that_runs_out_while_blocks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: Any, batch: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(KVMover, "begin_step", no_room)
    with pytest.raises(OutOfMemory, match="memory ran out"):
        run(load("llama"), requests_of(prompts()), host_blocks=8)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),  # by a kernel's own allocation, an accelerator error of torch's
    ],
    ids=str,
)
def test_a_lack_of_memory_is_known_by_any_of_its_names(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's libraries allocate by themselves, outside torch. Half of the step goes on."""
    whole, failed = RaggedExecutor._logits, list[int]()

    def logits(self: Any, batch: Batch) -> torch.Tensor:
        if not failed:
            failed.append(batch.num_tokens)
            raise error
        return whole(self, batch)

    undisturbed, _, _ = run(load("llama"), requests_of(prompts()))
    monkeypatch.setattr(RaggedExecutor, "_logits", logits)
    rows, _, _ = run(load("llama"), requests_of(prompts()))
    assert failed
    assert rows.outputs == undisturbed.outputs


def test_other_failures_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, batch: Any) -> torch.Tensor:
        return torch.ones(2, 3) @ torch.ones(2, 3)

    monkeypatch.setattr(RaggedExecutor, "_logits", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run(load("llama"), requests_of(prompts()))


def test_only_tokens_that_need_a_logit_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watch(logits: torch.Tensor, sequences: list[Any], *others: Any) -> Any:
        sizes.append((logits.shape[0], len(sequences)))
        return sample(logits, sequences, *others)

    monkeypatch.setattr("vasuki.hf.ragged_executor.sample", watch)
    rows, _, stats = run(load("llama"), requests_of(prompts()), chunk_tokens=7)
    assert all(logits == wanted for logits, wanted in sizes)
    assert sum(logits for logits, _ in sizes) == sum(map(len, rows.outputs))
    assert len(sizes) == stats.steps
