"""Copies that run while layers compute are in order, by the events that streams wait for: of KV blocks, of weights that
visit the device, and of recurrent states. A wait that is dropped is found."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from plain_varlen import as_it_is, paged_varlen
from tiny_models import Rows, hopeful, load, prompts, reference, requests_of
from vector_clocks import Stream, Streams

from vasuki.engine.batch import Batch
from vasuki.engine.depth import Depth, depths
from vasuki.engine.loop import drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf import ragged_executor
from vasuki.hf.attention import chunks
from vasuki.hf.kv.depth_mover import DepthMover
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import CudaCopyEngine, KVMover, StreamedLayers
from vasuki.hf.loading.weights import WeightStream, decoder_layers
from vasuki.hf.ragged_executor import build_executor
from vasuki.hf.recurrent.states import StateCache

CPU = torch.device("cpu")
MODES = {
    "park": OffloadPlan(host_blocks=60),
    "stream": OffloadPlan(streamed_layers=2),
    "park and stream": OffloadPlan(host_blocks=60, streamed_layers=2),
}


@dataclasses.dataclass
class InTurn:
    """Every depth of a model of three layers, one a batch; as a `DepthRule`."""

    num_layers: int = 3
    is_lazy: bool = False
    batches: int = 0

    def __call__(self, batch: Batch) -> Depth:
        self.batches += 1
        every = list(depths(self.num_layers))
        return every[self.batches % len(every)]

    @property
    def deepest(self) -> Depth:
        return Depth(self.num_layers, "ring", 2)

    def most_blocks(self, num_blocks: int) -> int:
        return num_blocks * self.num_layers // 2


class ToHost:
    """Tokens that the host waits for, as `vasuki.hf.kernels.transfer` has it on a card."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors, self._arrived = tensors, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._arrived.synchronize()
        return self._tensors


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)  # of memory that the device reuses
    monkeypatch.setattr(ragged_executor, "copy_engine", CudaCopyEngine)
    monkeypatch.setattr(ragged_executor, "ToHost", ToHost)
    return Streams(monkeypatch)


def _races(streams: Streams, name: str, offload: OffloadPlan, weights_visit: bool = False) -> set[str]:
    """Run rows, each step launched before the last one's tokens are known."""
    loaded = dataclasses.replace(load(name), kernel=None)  # whose writes could not be watched
    if weights_visit:
        engine = CudaCopyEngine(CPU)
        loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model), copies=engine)
        stack = decoder_layers(loaded.model, loaded.kv_layout.num_layers)
        with streams:
            weights = WeightStream(stack, StreamedLayers.spread(len(stack), 2), CPU, engine)
        streams.watch(weights._buffers)
        streams.watch((flat.host for flat in weights._flat.values()), on_host=True)
    shares = loaded.recurrent is None and offload.depth is None
    policy = dataclasses.replace(POLICIES["vasuki"], shares_prefixes=shares)
    settings = EngineSettings(policy, Limits(16, 9), 24 if offload.host_blocks else 200, 4, offload)
    executor, scheduler, rows = build_executor(loaded, settings, record_after=1), Scheduler(settings), Rows()
    executor.most_ahead = 1
    streams.watch(executor.cache.layers)
    streams.watch(itertools.chain(*executor.states.tensors) if executor.states else ())
    if isinstance(executor.offload, DepthMover):
        streams.watch(executor.offload._homes.values(), on_host=True)
    elif executor.offload:
        there = [*executor.offload._homes.values(), *(executor.offload.host.layers if executor.offload.host else ())]
        streams.watch(there, on_host=True)
    requests = requests_of(prompts())
    with streams:
        drain(hopeful(requests) if offload.host_blocks else requests, scheduler, executor, rows)
    assert executor.replayed_steps or executor.graphs is None
    assert rows.outputs == reference(name)  # whatever is missing: everything is computed at once here
    assert bool(scheduler.queues.counters.preemptions_swap) == bool(offload.host_blocks)
    return streams.races


MODES["by batch"] = OffloadPlan("by_batch", depth=InTurn())


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("mode", MODES)
def test_kv_is_in_order(mode: str, name: str, streams: Streams) -> None:
    assert not _races(streams, name, MODES[mode])


def test_weights_are_in_order(streams: Streams) -> None:
    assert not _races(streams, "llama", OffloadPlan(), weights_visit=True)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_states_are_in_order(name: str, streams: Streams) -> None:
    assert not _races(streams, name, OffloadPlan())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decodes are replayed, as soon as a size has come up."""

    monkeypatch.setattr("plain_varlen.PAGE_TOKENS", 4)
    monkeypatch.setattr(chunks, "_varlen", paged_varlen)
    monkeypatch.setattr(ragged_executor, "can_record", lambda *model: True)
    monkeypatch.setattr(ragged_executor, "record_on_device", lambda: as_it_is)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("mode", ["park", "stream", "park and stream"])
def test_replays_among_copies_are_in_order(mode: str, name: str, streams: Streams, replays: None) -> None:
    assert not _races(streams, name, MODES[mode])


def test_a_replay_that_waits_for_no_parked_row_is_found(
    streams: Streams, replays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVMover, "before_all_layers", lambda *_: None)
    assert _races(streams, "llama", MODES["park"])


@pytest.mark.parametrize("wait", ["the compute's for copies", "copies' for the compute", "copies' for anything"])
def test_a_wait_that_is_forgotten_between_stretches_is_found(
    wait: str, streams: Streams, replays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget(monkeypatch, wait)
    assert _races(streams, "llama", MODES["stream"])


def _forget(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    own = CudaCopyEngine.submit
    if wait == "the compute's for copies":
        monkeypatch.setattr(CudaCopyEngine, "require", lambda *_: None)
    elif wait == "copies' for anything":
        monkeypatch.setattr(CudaCopyEngine, "submit", lambda self, to_host, copy, after: own(self, to_host, copy, []))
    elif wait == "copies' for the compute":
        monkeypatch.setattr(CudaCopyEngine, "computed", lambda _: torch.cuda.Event())  # type: ignore[no-untyped-call]
    elif wait == "the host's for copies":
        monkeypatch.setattr(CudaCopyEngine, "wait", lambda *_: None)
    else:
        monkeypatch.setattr(KVMover, "before_layer", lambda *_: None)


@pytest.mark.parametrize(
    ("mode", "wait"),
    [
        ("park", "the compute's for copies"),
        ("park", "copies' for the compute"),
        ("park", "copies' for anything"),
        ("park", "a layer's for its blocks"),
        ("stream", "the compute's for copies"),
        ("stream", "copies' for the compute"),
        ("stream", "copies' for anything"),
        ("park and stream", "the host's for copies"),
        ("by batch", "the compute's for copies"),
        ("by batch", "copies' for the compute"),
        ("by batch", "copies' for anything"),
    ],
)
def test_a_wait_that_kv_forgets_is_found(
    mode: str, wait: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget(monkeypatch, wait)
    assert _races(streams, "llama", MODES[mode])


@pytest.mark.parametrize("mode", ["park", "stream"])
def test_kv_that_is_written_in_another_stream_is_found(
    mode: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = KVCache.write, Stream()

    def write(*args: Any) -> None:
        with streams.use(other):
            own(*args)

    monkeypatch.setattr(KVCache, "write", write)
    assert _races(streams, "llama", MODES[mode])


@pytest.mark.parametrize("wait", ["the compute's for copies", "copies' for the compute", "copies' for anything"])
def test_a_wait_that_weights_forget_is_found(wait: str, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch, wait)
    assert _races(streams, "llama", OffloadPlan(), weights_visit=True)


def test_states_that_move_in_another_stream_are_found(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = StateCache._move, Stream()

    def move(*args: Any) -> None:
        with streams.use(other):
            own(*args)

    monkeypatch.setattr(StateCache, "_move", move)
    assert _races(streams, "qwen3_5", OffloadPlan())
