"""Recorded steps. What is replayed here is the recorded computation itself, with torch's own operators: a
graph of a device does the same by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from plain_varlen import as_it_is, paged_varlen, plain_varlen
from tiny_models import RECURRENT, Rows, hopeful, load, prompts, reference, requests_of
from versions import OTHER_MODELS, PAGES

from vasuki.engine.loop import drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf import ragged_executor
from vasuki.hf.attention import chunks, inputs
from vasuki.hf.attention.chunks import AttentionKernels, PagedTiles
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cuda import step_graphs
from vasuki.hf.cuda.recordable import can_record
from vasuki.hf.cuda.step_graphs import SIZES, Answers, GraphSize, Pause, Record, Replay, StepGraphs, _Recorded
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.varlen import PAGE_TOKENS, PagedVarlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import Done
from vasuki.hf.ragged_executor import RaggedExecutor, build_executor
from vasuki.hf.recurrent.states import StateCache
from vasuki.machines.cost_model import LEAST_RECORDED_TOKENS, CostModel
from vasuki.machines.memory_budget import recorded_bytes
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config


@pytest.fixture(autouse=True)
def _paged_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU attend as on CUDA."""

    monkeypatch.setattr(chunks, "_varlen", paged_varlen)


def _run(
    name: str,
    record: Record,
    max_num_seqs: int = 9,
    record_after: int = 1,
    kernels: AttentionKernels | None = None,
    chunk_tokens: int = 64,
    steps_ahead: int = 0,
    **sampling: Any,
) -> tuple[Rows, StepGraphs]:
    """In memory full of poison, but for the block of padding, whose first tokens are written before they are read."""
    loaded, num_blocks = load(name), 12
    limits = Limits(chunk_tokens, max_num_seqs)
    scheduler = Scheduler(EngineSettings(POLICIES["vasuki"], limits, num_blocks, PAGE_TOKENS))
    cache = KVCache(loaded.kv_layout, num_blocks + 1, PAGE_TOKENS, loaded.device)
    for layer in cache.layers:
        layer.fill_(1e4)
    states = StateCache(loaded.recurrent, max_num_seqs, loaded.device) if loaded.recurrent else None
    for state in itertools.chain(*states.tensors) if states else []:
        state.fill_(float("nan"))
    executor = RaggedExecutor(loaded, cache, want_logprobs=True, attention=kernels, states=states)
    executor.most_ahead = steps_ahead
    most = loaded.max_context, max_num_seqs
    executor.graphs = StepGraphs(cache, executor.attention, *most, record, record_after, states=states)
    rows = Rows()
    drain(requests_of(prompts(), **sampling), scheduler, executor, rows)
    return rows, executor.graphs


class Watched:
    """Records as it is, and keeps what was recorded."""

    def __init__(self) -> None:
        self.recorded: list[Replay] = []

    def __call__(self, compute: Callable[[Pause], object]) -> Replay:
        compute(lambda between: None)
        self.recorded.append(as_it_is(compute))
        return self.recorded[-1]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("max_num_seqs", [3, 9])
def test_greedy_equals_generate(name: str, max_num_seqs: int) -> None:
    """Rows come and go, so every size sees steps of fewer rows after steps of more."""
    watched = Watched()
    rows, graphs = _run(name, watched, max_num_seqs)
    assert rows.outputs == reference(name)
    assert graphs.replayed_steps
    sizes = [size.tokens for _, size in graphs._recorded]
    assert len(watched.recorded) == len(sizes) == len(set(sizes))
    assert sizes[0] == max_num_seqs, "the largest comes first"
    assert set(sizes) <= {*SIZES, max_num_seqs}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("max_num_seqs", [3, 9])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_rows_that_carry_a_state_equal_generate(
    name: str, max_num_seqs: int, steps_ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Recording, which computes too, leaves the states of running rows as they were."""
    watched = Watched()
    rows, graphs = _run(name, watched, max_num_seqs, record_after=2, chunk_tokens=11, steps_ahead=steps_ahead)
    assert rows.outputs == reference(name)
    assert graphs.replayed_steps > (3 if OTHER_MODELS else 4)
    assert {size.single for _, size in graphs._recorded} == {True}
    assert not caplog.messages


def test_rows_of_padding_that_have_a_state_are_few() -> None:
    sizes = step_graphs._near_sizes(1000)
    assert sizes[:10] == list(range(1, 11))
    assert sizes[-1] == 1000
    assert all(after - 1 <= max(before, before * 1.125) for before, after in itertools.pairwise(sizes))
    assert len(sizes) < 60


@PAGES
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_steps_of_both_kernels_equal_generate(name: str, kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours attends to what single tokens see, also in steps with prompts; torch's packed one to what prompts see."""
    apart, packed = [], chunks.Chunks.packed.func  # type: ignore[attr-defined]

    def watched(self: chunks.Chunks) -> Any:
        apart.append((self.apart, len(self._lengths)))
        return packed(self)

    monkeypatch.setattr(chunks.Chunks, "packed", property(watched))
    chosen = AttentionKernels(load(name).kernel, "auto")
    rows, graphs = _run(name, as_it_is, kernels=chosen)
    assert rows.outputs == reference(name)
    assert any(0 < singles < count for singles, count in apart), "some steps have both"
    assert {1, 9} <= {size.tokens for _, size in graphs._recorded if size.single}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gemma4"])
@pytest.mark.parametrize("chunk_tokens", [7, 40])
def test_recorded_prompts_equal_generate(
    name: str, chunk_tokens: int, kernels: CPUKernels, caplog: pytest.LogCaptureFixture
) -> None:
    """With decodes, and cut into chunks: many tokens that few of them sample, tiles of several and of one."""
    chosen = AttentionKernels(load(name).kernel, "auto")
    rows, graphs = _run(name, as_it_is, chunk_tokens=chunk_tokens, kernels=chosen)
    assert rows.outputs == reference(name)
    sizes = {size for _, size in graphs._recorded if not size.single}
    assert any(size.samples < size.tokens for size in sizes)
    assert max(size.tokens for size in sizes) == LEAST_RECORDED_TOKENS, "the largest comes first"
    assert not caplog.messages


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_tokens_that_the_host_has_not_seen_are_taken_from_the_step_before(
    temperature: float, chunk_tokens: int, kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more rows and of fewer, launched and recorded."""
    chosen, late = AttentionKernels(load("llama").kernel, "auto"), []
    send = _Recorded._send

    def watched(self: _Recorded, step: inputs.LaidOut) -> None:
        late.append(step.late.any())
        send(self, step)

    monkeypatch.setattr(_Recorded, "_send", watched)

    def run(record_after: int, steps_ahead: int) -> tuple[Rows, StepGraphs]:
        sampling: dict[str, Any] = {"temperature": temperature, "seed": 3}
        return _run("llama", as_it_is, 9, record_after, chosen, chunk_tokens, steps_ahead, **sampling)

    at_once, _ = run(10**6, 0)
    rows, graphs = run(2, 1)
    assert rows.outputs == at_once.outputs
    assert graphs.replayed_steps > 5
    assert sum(late) > 5


def test_drawn_tokens_and_log_probabilities_are_those_of_launched_steps(kernels: CPUKernels) -> None:
    """Logits are left by graphs of steps that draw, and by no others."""
    chosen = AttentionKernels(load("llama").kernel, "auto")
    settings: list[dict[str, Any]] = [{"temperature": 0.8, "top_p": 0.9}, {}]
    for sampling in settings:
        launched, _ = _run("llama", as_it_is, record_after=10**6, kernels=chosen, **sampling)
        rows, graphs = _run("llama", as_it_is, kernels=chosen, **sampling)
        assert graphs.replayed_steps
        assert rows.outputs == launched.outputs
        for row, sequence in rows.sequences.items():
            assert sequence.logprob == pytest.approx(launched.sequences[row].logprob, abs=1e-4)
        left = [answer for kept in graphs._kept.values() for answer in kept]
        assert any(answer.dim() == 2 for answer in left) == bool(sampling)


def test_a_piece_of_a_step_keeps_what_the_next_one_overwrites(
    kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory has run out once, a step's tokens are sampled by several replays."""
    own = RaggedExecutor.__init__

    def small(self: RaggedExecutor, *arguments: Any, **others: Any) -> None:
        own(self, *arguments, **others)
        self.most_tokens = 2

    monkeypatch.setattr(RaggedExecutor, "__init__", small)
    rows, graphs = _run("llama", as_it_is)
    assert rows.outputs == reference("llama")
    assert graphs.replayed_steps


def test_graphs_hold_on_to_no_more_than_plans_set_aside(kernels: CPUKernels) -> None:
    """In addition to activations: answers of the largest, and each size's inputs."""
    loaded = load("llama")
    _, graphs = _run("llama", as_it_is, kernels=AttentionKernels(loaded.kernel, "auto"), temperature=0.8)
    held: dict[int, int] = {}
    steps = [recorded._step for recorded in graphs._recorded.values()]
    views = [vars(step.chunks).get(view) for step in steps for view in ("packed", "tiles")]
    tables = [view.tables if isinstance(view, PagedTiles) else view._calls[0].table for view in views if view]
    for tensor in itertools.chain(*graphs._kept.values(), tables):
        held[tensor.data_ptr()] = tensor.nbytes
    shape = shape_from_config(loaded.config.to_dict(), "llama").with_dtype("float32", "auto")
    assert {size.single for _, size in graphs._recorded} == {True, False}, "decodes alone, and with prompts"
    assert 9 * loaded.vocab_size * 4 in held.values()
    assert sum(held.values()) <= recorded_bytes(shape, find_profile("a10"), 9, 1)


def test_a_profile_that_names_torchs_kernel_records_no_prompts(kernels: CPUKernels) -> None:
    rows, graphs = _run("llama", as_it_is, kernels=AttentionKernels(load("llama").kernel, "packed"))
    assert rows.outputs == reference("llama")
    assert {size.single for _, size in graphs._recorded} == {True}


def test_rows_that_are_longer_than_was_foreseen_are_launched(kernels: CPUKernels) -> None:
    """Tables of recorded steps have two blocks, and some rows' tables more."""
    loaded, tokens = load("llama"), prompts(longest=60)
    cache = KVCache(loaded.kv_layout, 40, 16, loaded.device)
    executor = RaggedExecutor(loaded, cache, attention=AttentionKernels(loaded.kernel, "paged"))
    executor.graphs = StepGraphs(cache, executor.attention, 32, 3, as_it_is, 1)
    scheduler, rows = Scheduler(EngineSettings(POLICIES["vasuki"], Limits(64, 3), 39, 16)), Rows()
    watched: list[bool] = []
    size_of = executor.graphs._size_of

    def watch(step: inputs.LaidOut) -> GraphSize | None:
        size = size_of(step)
        watched.append(step.chunks.width <= 2)
        assert (size is not None) == watched[-1] or len(step.token_ids) > 64
        return size

    executor.graphs._size_of = watch  # type: ignore[method-assign]
    drain(requests_of(tokens), scheduler, executor, rows)
    assert rows.outputs == reference("llama")
    assert set(watched) == {True, False}
    assert executor.graphs.replayed_steps


def test_a_size_is_recorded_once_it_has_come_up_often_enough() -> None:
    watched = Watched()
    rows, graphs = _run("llama", watched, record_after=10**6)
    assert rows.outputs == reference("llama")
    assert not watched.recorded
    assert not graphs.replayed_steps


@pytest.mark.parametrize("fails", ["to be recorded", "to answer the same", "to answer a number"])
def test_what_cannot_be_replayed_is_computed(
    fails: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = _Recorded.__call__

    def answer(self: _Recorded, step: inputs.LaidOut) -> Answers:
        answers = own(self, step)
        self._own[0].mul_({"to answer a number": float("nan"), "to answer the same": 1.1}.get(fails, 1.0))
        return answers

    def record(compute: Callable[[Pause], object]) -> Replay:
        if fails == "to be recorded":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return as_it_is(compute)

    monkeypatch.setattr(_Recorded, "__call__", answer)
    rows, graphs = _run("llama", record)
    assert rows.outputs == reference("llama")
    assert not graphs.replayed_steps
    assert len(caplog.messages) == len({said.split(" tokens")[0] for said in caplog.messages}) > 1  # once for a size
    assert not any("\n" in said for said in caplog.messages)


@pytest.mark.parametrize("fails", [{9}, {4}])
def test_a_size_that_cannot_be_recorded_keeps_no_other_from_being_replayed(
    fails: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the largest, of more rows than the experts of some cards compute without waiting for them."""

    class Some(_Recorded):
        def __init__(self, size: GraphSize, *others: Any, **more: Any) -> None:
            if size.tokens in fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            super().__init__(size, *others, **more)

    monkeypatch.setattr(step_graphs, "_Recorded", Some)
    rows, graphs = _run("llama", as_it_is, max_num_seqs=9, record_after=2)
    assert rows.outputs == reference("llama")
    assert graphs.replayed_steps
    recorded = {size.tokens for _, size in graphs._recorded}
    assert recorded
    assert not recorded & fails


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
        step_graphs.record_on_device()(lambda pause: None)
    assert current == [own]


def test_what_pauses_is_recorded_stretch_by_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is under way between two of them, and only the replay does what comes there."""
    done: list[str] = []

    class Graph:
        count = 0

        def __init__(self) -> None:
            Graph.count += 1
            self.name = f"stretch {Graph.count}"

        def replay(self) -> None:
            done.append(self.name)

    @contextlib.contextmanager
    def graph(graph: Graph, pool: Any) -> Iterator[None]:
        done.append(f"record {graph.name}")
        yield
        done.append("over")

    def compute(pause: Pause) -> None:
        for layer in (2, 4):
            done.append(f"layers up to {layer}")
            pause(partial(done.append, f"fetch {layer}"))
        done.append("the rest")

    stand_ins: dict[str, Any] = dict(graph=graph, CUDAGraph=Graph, stream=lambda stream: contextlib.nullcontext())
    stand_ins |= dict.fromkeys(["Stream", "current_stream", "graph_pool_handle"], mock.Mock)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    replay = step_graphs.record_on_device()(compute)
    computed = ["layers up to 2", "layers up to 4", "the rest"]
    recorded = [(f"record stretch {number}", what, "over") for number, what in enumerate(computed, 1)]
    assert done == [*computed, *itertools.chain(*recorded)]
    done.clear()
    replay()
    assert done == ["stretch 1", "fetch 2", "stretch 2", "fetch 4", "stretch 3"]


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
    graphs, compute = StepGraphs(cache, executor.attention, loaded.max_context, 4, as_it_is, 1), executor._likeliest
    with torch.inference_mode():
        graphs(_step(cache, np.array([5, 200, 7, 99]), np.array([[2], [1], [2], [0]])), compute)  # is recorded as well
        for layer in cache.layers:
            layer.fill_(7.0)
        graphs(_step(cache, np.array([5, 200, 7]), np.array([[2], [1], [2]])), compute)
    assert graphs.replayed_steps == 1
    assert seen[-1] == [[6, 201, 8, 1], [2, 1, 2, 4]]
    for layer in cache.layers:
        written = (layer[:, 0] != 7.0).any(dim=-1).any(dim=-1)  # [num_blocks, block_tokens]
        assert torch.equal(written.nonzero(), torch.tensor([[1, 200], [2, 5], [2, 7], [4, 0]]))


def _step(cache: KVCache, positions: np.ndarray, tables: np.ndarray) -> inputs.LaidOut:
    """Single tokens at these positions."""
    count = len(positions)
    blocks = tables[np.arange(count), positions // cache.block_tokens]
    ones = np.ones(count, np.int64)
    placed = chunks.PlacedChunks(np.arange(count), ones, positions, 0 * ones)
    return inputs.LaidOut(
        token_ids=np.arange(3, 3 + count),
        late=0 * ones,
        positions=positions,
        slots=blocks * cache.block_tokens + positions % cache.block_tokens,
        wanted=np.arange(count),
        cache=cache,
        offload=None,
        chunks=chunks.Chunks(placed, np.arange(count), tables, cache, AttentionKernels()),
        last_tokens=None,
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

    def keep(self, memory: object) -> None: ...

    def settle(self) -> None: ...


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("streamed_layers", [0, 1, 2])
@pytest.mark.parametrize("by_ours", [False, True])
def test_copies_are_waited_for_before_and_within_a_replay(
    name: str, streamed_layers: int, by_ours: bool, kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of parked rows before it, those of layers that stream between its stretches, also of steps with prompts."""
    monkeypatch.setattr("plain_varlen.PAGE_TOKENS", 4)
    monkeypatch.setattr(varlen, "_torch_varlen", lambda: plain_varlen)
    monkeypatch.setattr(ragged_executor, "can_record", lambda *model: True)
    monkeypatch.setattr(ragged_executor, "record_on_device", lambda: as_it_is)
    monkeypatch.setattr(ragged_executor, "copy_engine", lambda device: LatestCopies())
    offload = OffloadPlan(host_blocks=60, streamed_layers=streamed_layers)
    settings = EngineSettings(POLICIES["vasuki"], Limits(16, 9), 24, 4, offload)
    loaded = load(name)
    shape = shape_from_config(loaded.config.to_dict(), name).with_dtype("float32", "auto")
    cost_model = CostModel(shape, find_profile("a10")) if by_ours else None
    executor = build_executor(loaded, settings, record_after=2, cost_model=cost_model)
    scheduler, rows = Scheduler(settings), Rows()
    drain(hopeful(requests_of(prompts())), scheduler, executor, rows)
    assert rows.outputs == reference(name)
    assert scheduler.queues.counters.preemptions_swap
    assert executor.graphs is not None
    assert executor.replayed_steps > 5
    assert {size.single for _, size in executor.graphs._recorded} == ({True, False} if by_ours else {True})


def test_a_model_on_a_cpu_is_not_recorded() -> None:
    assert not can_record(load("llama"), PAGE_TOKENS)
