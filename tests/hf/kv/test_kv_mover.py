"""Copies between the tiers: byte for byte, in order, and never lost."""

from __future__ import annotations

import inspect
import itertools
import math
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import NoTokenizer, load, prompts, random_config, requests_of, run

from vasuki.base.errors import JobFileError
from vasuki.engine.batch import Batch, ScheduledChunk, Swap
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.kv import kv_cache
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.kv.kv_mover import CudaCopyEngine, Done, KVMover, StreamedLayers, ThreadCopyEngine
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.ragged_executor import build_executor

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
CPU = torch.device("cpu")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_round_trip_into_poisoned_memory_is_byte_exact() -> None:
    device, host = (KVCache(LAYOUT, num_blocks, 5, CPU) for num_blocks in (8, 6))
    torch.manual_seed(0)
    for blocks in device.layers:
        blocks.copy_(torch.randn_like(blocks))
        blocks[3, 0, 0, 0, 0] = float("nan")  # bit patterns survive, whatever they mean
    for blocks in host.layers:
        blocks.fill_(float("inf"))
    before = [layer.clone() for layer in device.layers]
    offload = KVMover(device, ThreadCopyEngine(bytes_per_s=1e5), host)
    sequence = Sequence(Request(0, 0, 1, 1))

    offload.begin_step(Batch([], [], [], [Swap(sequence, True, [1, 2, 3, 7], [5, 0, 1, 2])]))
    for layer in range(3):
        offload.before_layer(layer)  # from here on the step may overwrite the blocks
        device.layers[layer][[1, 2, 3, 7]] = float("inf")
    offload.begin_step(Batch([], [], [], [Swap(sequence, False, [0, 4, 5, 6], [5, 0, 1, 2])]))
    offload.begin_step(Batch([], [], [], []))
    for layer in range(3):
        offload.before_layer(layer)
        assert torch.equal(bits(device.layers[layer][[0, 4, 5, 6]]), bits(before[layer][[1, 2, 3, 7]]))
    assert offload.copied_bytes == 2 * 4 * device.block_bytes


def test_layers_leave_one_by_one() -> None:
    """The first layer's compute waits for its own copy, not for later layers' copies."""
    device, host = (KVCache(LAYOUT, 4, 5, CPU) for _ in range(2))
    engine = ThreadCopyEngine()
    second_layer_may_leave = threading.Event()
    first_copy = engine.submit

    def submit(to_host: bool, copy: Callable[[], int], after: list[Any]) -> Any:
        held = [second_layer_may_leave] if submitted else []
        submitted.append(1)
        return first_copy(to_host, copy, [*after, *held])

    submitted: list[int] = []
    engine.submit = submit  # type: ignore[method-assign]
    offload = KVMover(device, engine, host)
    offload.begin_step(Batch([], [], [], [Swap(Sequence(Request(0, 0, 1, 1)), True, [0], [0])]))
    offload.before_layer(0)
    second_layer_may_leave.set()
    offload.before_layer(1)
    offload.before_layer(2)


def test_copies_run_beside_compute_in_both_directions() -> None:
    """Neither copy ends before both are under way and the compute has gone on."""
    engine, goes_on = ThreadCopyEngine(), threading.Barrier(3)

    def copy() -> int:
        goes_on.wait(timeout=60)
        return 100_000

    copies = [engine.submit(to_host, copy, []) for to_host in (True, False)]
    goes_on.wait(timeout=60)  # a submission or a direction that waited for the other would never come here
    for done in copies:
        engine.require(done)
    assert engine.busy_s > 0


def test_a_link_is_as_slow_as_it_is_told_to_be() -> None:
    engine = ThreadCopyEngine(bytes_per_s=1e6)
    engine.require(engine.submit(True, lambda: 50_000, []))
    assert engine.busy_s >= 0.05
    assert engine.exposed_s > 0


def test_a_failing_copy_reaches_the_compute() -> None:
    engine = ThreadCopyEngine()

    def fail() -> int:
        raise OSError("link down")

    with pytest.raises(OSError, match="link down"):
        engine.require(engine.submit(True, fail, []))


class CudaError(RuntimeError):
    """What torch raises for an error of CUDA's runtime."""


class Runtime:
    """CUDA's runtime, as far as it locks memory: up to a number of bytes, by address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
        self.locked: dict[int, int] = {}
        self._most_bytes = most_bytes
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "CudaError", CudaError)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    @staticmethod
    def check(code: int) -> None:
        if code:
            raise CudaError("out of memory (2)\nand a long explanation")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if sum(self.locked.values()) + num_bytes > self._most_bytes:
            return 2
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.mark.parametrize("large_pages", [True, False])
def test_as_much_is_pinned_as_is_asked_for_until_nobody_wants_it(
    large_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not large_pages:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    runtime = Runtime(monkeypatch, 2**30)
    cache = KVCache(LAYOUT, 4, 5, CPU, pinned=True)
    views = [layer[1:] for layer in cache.layers]
    assert runtime.locked == {layer.data_ptr(): layer.nbytes for layer in cache.layers}
    assert not any(layer.any() for layer in cache.layers)
    del cache
    assert len(runtime.locked) == len(views)
    del views
    assert not runtime.locked


def test_memory_that_cannot_be_pinned_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, forgotten = Runtime(monkeypatch, 2000), []
    monkeypatch.setattr(kv_cache, "_forget_error", lambda: forgotten.append(True))
    with pytest.raises(
        JobFileError, match=r"^kv.host_memory: .* pin that much memory \(out of memory \(2\)\); lower it$"
    ):
        KVCache(LAYOUT, 4, 5, CPU, pinned=True)
    assert not runtime.locked
    assert forgotten, "the next kernel would be blamed"


@pytest.mark.parametrize(("num_layers", "num_streamed"), [(32, 1), (32, 8), (32, 31), (3, 2)])
def test_streamed_layers_are_spread_and_the_first_stays(num_layers: int, num_streamed: int) -> None:
    streamed = StreamedLayers.spread(num_layers, num_streamed)
    layers = list(streamed.buffer_of)
    assert len(layers) == num_streamed
    assert layers == sorted(set(layers))
    assert 0 not in layers
    gaps = [after - before for before, after in itertools.pairwise(layers)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert streamed.device_layers(num_layers) == num_layers - num_streamed + {1: 1, 31: 3}.get(num_streamed, 2)


def test_layers_that_share_a_buffer_wait_for_each_other() -> None:
    """Over a slow link the last layer's store of one step is still under way when the next step begins."""
    torch.manual_seed(0)
    config = random_config("llama", num_hidden_layers=8)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="vasuki_ragged").eval()
    loaded = prepare(model, NoTokenizer(), model.generation_config, "deep")
    requests = requests_of(prompts(5, 30), max_tokens=6)
    expected = run(loaded, requests, chunk_tokens=16)[0].outputs
    for num_streamed in (3, 5, 7):
        rows, _, stats = run(loaded, requests, chunk_tokens=16, num_streamed=num_streamed, bytes_per_s=2e7)
        assert rows.outputs == expected, num_streamed
        assert stats.copied_bytes > 0


class AtOnceOnTheHost(ThreadCopyEngine):
    """As on CUDA: a copy from host to host runs when it is issued, whatever it should come after. Stores of streamed
    layers are under way until somebody waits for something."""

    hosts: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.stores_end = threading.Event()

    def submit(self, to_host: bool, copy: Any, after: list[Done]) -> Done:
        ends = inspect.getclosurevars(copy).nonlocals
        source, target = (any(ends[end] is tensor for tensor in self.hosts) for end in ("source", "target"))
        if source and target:
            copy()
            return self.computed()
        return super().submit(to_host, copy, [*after, self.stores_end] if target else after)

    def wait(self, done: Done) -> None:
        self.stores_end.set()
        super().wait(done)


@pytest.mark.parametrize("leaves", [True, False])
def test_parking_beside_a_streamed_layer_comes_after_its_stores(leaves: bool) -> None:
    streamed, engine, sequence = 2, AtOnceOnTheHost(), Sequence(Request(0, 0, 5, 1))
    device, host = KVCache(LAYOUT, 4, 5, CPU, buffer_of={streamed: 0}), KVCache(LAYOUT, 4, 5, CPU)
    offload = KVMover(device, engine, host)
    engine.hosts = [*offload._homes.values(), *host.layers]
    host.layers[streamed][3] = 9.0  # parked earlier
    sequence.block_table.device[:] = [1]
    batch = Batch([], [], [ScheduledChunk(sequence, 0, 5, True)], [])
    offload.begin_step(batch)
    offload.begin_call(batch.chunks)
    offload.before_layer(streamed)
    device.layers[streamed][1] = 7.0
    offload.after_layer(streamed)

    offload.begin_step(Batch([], [], [], [Swap(sequence, leaves, [1], [0 if leaves else 3])]))
    offload.begin_call([])
    engine.stores_end.set()
    offload.before_layer(streamed)
    engine.require(offload._stored[streamed])
    if leaves:
        assert (host.layers[streamed][0] == 7.0).all()
    else:
        assert (offload._homes[streamed][1] == 9.0).all()


def test_streamed_layers_take_no_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes.append(math.prod(shape) * dtype.itemsize)
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr("vasuki.hf.kv.kv_cache._lazy_zeros", watched)
    loaded = load("llama")
    offload = OffloadPlan("stream", streamed_layers=2)
    settings = EngineSettings(POLICIES["vasuki"], Limits(16, 16), 200, 4, offload)
    build_executor(loaded, settings)
    layer_bytes = 200 * 4 * loaded.kv_layout.bytes_per_token // 3
    assert sizes == [layer_bytes] * StreamedLayers.spread(3, 2).device_layers(3)


def test_the_threads_of_an_engine_end_with_it() -> None:
    before = set(threading.enumerate())  # threads of earlier engines may still be about to end
    engine = ThreadCopyEngine()
    engine.wait(engine.submit(True, lambda: 8, []))
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del engine
    deadline = time.monotonic() + 10
    while own & set(threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_memory_that_the_device_does_not_have_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand a long explanation")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(
        JobFileError, match=r"^kv.device_memory: that much is not there \(CUDA out of memory.\); lower it$"
    ):
        KVCache(LAYOUT, 4, 5, torch.device("cuda"))


def test_streaming_every_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot stream"):
        StreamedLayers.spread(4, 4)


def test_sequences_that_move_together_are_one_copy_for_each_layer_and_direction() -> None:
    device, host, engine = KVCache(LAYOUT, 8, 5, CPU), KVCache(LAYOUT, 8, 5, CPU), ThreadCopyEngine()
    for layer in range(3):
        device.layers[layer].copy_(torch.arange(8.0).view(-1, 1, 1, 1, 1).expand_as(device.layers[layer]))
        host.layers[layer].copy_(10 + device.layers[layer])
    submitted: list[bool] = []
    submit = engine.submit

    def watched(to_host: bool, copy: Callable[[], int], after: list[Done]) -> Done:
        submitted.append(to_host)
        return submit(to_host, copy, after)

    engine.submit = watched  # type: ignore[method-assign]
    mover, sequence = KVMover(device, engine, host), Sequence(Request(0, 0, 1, 1))
    swaps = [(True, [1, 2], [6, 7]), (False, [0], [3]), (True, [5], [0]), (False, [4, 3], [4, 5])]
    mover.begin_step(Batch([], [], [], [Swap(sequence, *swap) for swap in swaps]))
    mover.begin_step(Batch([], [], [], []))
    for layer in range(3):
        mover.before_layer(layer)
    assert submitted == [True, False] * 3
    for layer in range(3):
        assert host.layers[layer][[6, 7, 0], 0, 0, 0, 0].tolist() == [1, 2, 5]
        assert device.layers[layer][[0, 4, 3], 0, 0, 0, 0].tolist() == [13, 14, 15]
    assert mover.copied_bytes == 6 * device.block_bytes


def test_memory_that_copies_use_is_not_given_to_others_before_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: its allocator is told of both streams."""
    told: list[tuple[int, Any]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append((tensor.data_ptr(), stream)))
    engine = CudaCopyEngine(torch.device("cuda"))
    device = KVCache(LAYOUT, 4, 5, CPU)
    KVMover(device, engine)
    assert {address for address, _ in told} == {layer.data_ptr() for layer in device.layers}
    assert len(told) == 2 * len(device.layers)
    assert len({id(stream) for _, stream in told}) == 2
