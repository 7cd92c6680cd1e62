"""Recorded steps of decodes. What is replayed here is the recorded computation itself, with torch's own operators: a
graph of a device does the same by itself."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from plain_varlen import plain_varlen
from tiny_models import Rows, hopeful, load, prompts, reference, requests_of

from vasuki.base.arrays import Ints
from vasuki.engine.loop import drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf import ragged_executor
from vasuki.hf.attention import chunks, inputs
from vasuki.hf.attention.chunks import AttentionKernels
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cuda import decode_graphs
from vasuki.hf.cuda.choice import can_record
from vasuki.hf.cuda.decode_graphs import SIZES, DecodeGraphs, Replay
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.varlen import PAGE_TOKENS, PagedVarlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import Done
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor


@pytest.fixture(autouse=True)
def _paged_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU attend as on CUDA."""

    def varlen(lengths: Ints, ends: Ints, seen: Ints, tables: Ints, cache: KVCache) -> PagedVarlen:
        return PagedVarlen(lengths, ends, tables, cache.block_tokens, cache.device, True, plain_varlen, seen)

    monkeypatch.setattr(chunks, "_varlen", varlen)


def _run(
    name: str, record: Any, max_num_seqs: int = 9, record_after: int = 1, kernels: AttentionKernels | None = None
) -> tuple[list[list[int]], DecodeGraphs]:
    """In memory full of poison, but for the block of padding, whose first tokens are written before they are read."""
    loaded, num_blocks = load(name), 12
    scheduler = Scheduler(EngineSettings(POLICIES["vasuki"], Limits(64, max_num_seqs), num_blocks, PAGE_TOKENS))
    cache = KVCache(loaded.kv_layout, num_blocks + 1, PAGE_TOKENS, loaded.device)
    for layer in cache.layers:
        layer.fill_(1e4)
    executor = RaggedExecutor(loaded, cache)
    executor.graphs = DecodeGraphs(
        executor.forward, cache, executor.attention, loaded.max_context, record, record_after
    )
    rows = Rows()
    drain(requests_of(prompts()), scheduler, executor, rows)
    return rows.outputs, executor.graphs


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("max_num_seqs", [3, 9])
def test_greedy_equals_generate(name: str, max_num_seqs: int) -> None:
    """Rows come and go, so every size sees steps of fewer rows after steps of more."""
    recorded: list[int] = []

    def record(compute: Replay) -> Replay:
        recorded.append(len(compute()))
        return compute

    outputs, graphs = _run(name, record, max_num_seqs)
    assert outputs == reference(name)
    assert graphs.replayed_steps
    assert len(set(recorded)) == len(recorded)
    assert set(recorded) <= set(SIZES)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_steps_of_both_kernels_equal_generate(name: str, kernels: CPUKernels) -> None:
    """Ours attends for a row alone, and where windows do not cover the longest context; else torch's packed one."""
    chosen = AttentionKernels(load(name).kernel, "auto", most_split=1)
    outputs, graphs = _run(name, lambda compute: compute, kernels=chosen)
    assert outputs == reference(name)
    assert {1, 8} <= graphs._recorded.keys()


def test_a_size_is_recorded_once_it_has_come_up_often_enough() -> None:
    recorded: list[int] = []

    def record(compute: Replay) -> Replay:
        recorded.append(len(compute()))
        return compute

    outputs, graphs = _run("llama", record, record_after=10**6)
    assert outputs == reference("llama")
    assert not recorded
    assert not graphs.replayed_steps


@pytest.mark.parametrize("fails", ["to be recorded", "to answer the same", "to answer a number"])
def test_what_cannot_be_replayed_is_computed(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    def record(compute: Replay) -> Replay:
        if fails == "to be recorded":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        if fails == "to answer a number":
            return lambda: compute() * float("nan")
        return lambda: compute().flip(-1)

    outputs, graphs = _run("llama", record)
    assert outputs == reference("llama")
    assert not graphs.replayed_steps
    assert len(caplog.messages) == len({said.split(" rows")[0] for said in caplog.messages}) > 1  # once for a size
    assert not any("\n" in said for said in caplog.messages)


def test_a_size_that_cannot_be_recorded_keeps_no_smaller_one_from_being_replayed() -> None:
    """Such as that of more rows than the experts of some cards compute without waiting for them."""

    def record(compute: Replay) -> Replay:
        if len(compute()) > 8:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    outputs, graphs = _run("llama", record)
    assert outputs == reference("llama")
    assert graphs.replayed_steps
    assert max(graphs._recorded) == 8


def test_a_size_that_answers_something_else_keeps_no_other_from_being_replayed() -> None:
    def record(compute: Replay) -> Replay:
        return (lambda: compute().flip(-1)) if len(compute()) == 4 else compute

    outputs, graphs = _run("llama", record)
    assert outputs == reference("llama")
    assert graphs.replayed_steps
    assert 4 not in graphs._recorded


def test_a_capture_that_fails_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself does not where the end of the capture raises."""
    own = mock.Mock()
    current = [own]

    @contextlib.contextmanager
    def stream(other: Any) -> Iterator[None]:
        before, current[0] = current[0], other
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def graph(graph: Any, pool: Any) -> Iterator[None]:
        current[0] = mock.Mock()
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    stand_ins: dict[str, Any] = dict(stream=stream, graph=graph, current_stream=lambda: current[0])
    stand_ins |= dict.fromkeys(["Stream", "CUDAGraph", "graph_pool_handle"], mock.Mock)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="during capture"):
        decode_graphs.record_on_device()(lambda: torch.zeros(1))
    assert current == [own]


def test_padding_reads_and_writes_its_own_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("llama")
    cache = KVCache(loaded.kv_layout, 5, PAGE_TOKENS, loaded.device)
    seen: list[list[list[int]]] = []

    own = PagedVarlen._attend

    def watched(self: PagedVarlen, call: Any, *args: Any) -> torch.Tensor:
        seen.append([call.used_k.tolist(), call.table.flatten().tolist()])
        return own(self, call, *args)

    monkeypatch.setattr(PagedVarlen, "_attend", watched)
    executor = RaggedExecutor(loaded, cache)
    graphs = DecodeGraphs(executor.forward, cache, executor.attention, loaded.max_context, lambda compute: compute, 1)
    with torch.inference_mode():
        graphs(_step(cache, np.array([5, 200, 7, 99]), np.array([[2], [1], [2], [0]])))  # is recorded beside
        for layer in cache.layers:
            layer.fill_(7.0)
        graphs(_step(cache, np.array([5, 200, 7]), np.array([[2], [1], [2]])))
    assert graphs.replayed_steps == 1
    assert seen[-1] == [[6, 201, 8, 1], [2, 1, 2, 4]]
    for layer in cache.layers:
        written = (layer[:, 0] != 7.0).any(dim=-1).any(dim=-1)  # [num_blocks, block_tokens]
        assert torch.equal(written.nonzero(), torch.tensor([[1, 200], [2, 5], [2, 7], [4, 0]]))


def _step(cache: KVCache, positions: np.ndarray, tables: np.ndarray) -> inputs.StepInputs:
    """Single tokens at these positions."""
    count = len(positions)
    blocks = tables[np.arange(count), positions // cache.block_tokens]
    slots = torch.from_numpy(blocks * cache.block_tokens + positions % cache.block_tokens)
    ones = np.ones(count, np.int64)
    return inputs.StepInputs(
        input_ids=torch.arange(3, 3 + count).unsqueeze(0),
        position_ids=torch.from_numpy(positions).unsqueeze(0),
        rows=cache.rows_of_slots(slots),
        sample_positions=torch.arange(count),
        cache=cache,
        offload=None,
        chunks=chunks.Chunks(np.arange(count), ones, positions, ones > 0, tables, cache, AttentionKernels()),
    )


class LatestCopies:
    """Copies as late as they may be: each runs when something waits for it, after those that it waits for itself."""

    exposed_s = busy_s = 0.0

    def __init__(self) -> None:
        self._queues: tuple[deque[Any], deque[Any]] = (deque(), deque())

    def computed(self) -> Done:
        return None  # compute on a CPU is over when it is issued

    def submit(self, to_host: bool, copy: Callable[[], int], after: list[Done]) -> Done:
        queue = self._queues[to_host]
        queue.append((copy, after))
        submitted = queue[-1]
        return lambda: self._run_to(queue, submitted)

    def _run_to(self, queue: deque[Any], last: Any) -> None:
        while any(each is last for each in queue):
            copy, after = queue[0]
            for done in after:
                self.require(done)
            queue.popleft()
            copy()

    def require(self, done: Done) -> None:
        if done is not None:
            done()

    wait = require

    def settle(self) -> None: ...


@pytest.mark.parametrize("streamed_layers", [0, 1])
def test_parked_rows_are_waited_for_before_a_replay(streamed_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked rows keep graphs, streamed layers do not: their copies wait between layers."""
    monkeypatch.setattr("plain_varlen.PAGE_TOKENS", 4)
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: plain_varlen)
    monkeypatch.setattr(ragged_executor, "can_record", lambda *model: True)
    monkeypatch.setattr(ragged_executor, "record_on_device", lambda: lambda compute: compute)
    monkeypatch.setattr(ragged_executor, "copy_engine", lambda device: LatestCopies())
    offload = OffloadPlan(host_blocks=60, streamed_layers=streamed_layers)
    settings = EngineSettings(POLICIES["vasuki"], Limits(16, 9), 24, 4, offload)
    executor, scheduler, rows = build_executor(load("llama"), settings, record_after=1), Scheduler(settings), Rows()
    drain(hopeful(requests_of(prompts())), scheduler, executor, rows)
    assert rows.outputs == reference("llama")
    assert scheduler.queues.counters.preemptions_swap
    assert bool(executor.replayed_steps) == (not streamed_layers)


def test_a_model_on_a_cpu_is_not_recorded() -> None:
    assert not can_record(load("llama"), PAGE_TOKENS)
