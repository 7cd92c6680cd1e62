"""KV that moves between device and host while the step computes.

Two ways of moving share one mechanism, copies that are ordered layer by layer and never wait for the whole device:

    park     whole sequences leave and return, as the scheduler's swaps say. Blocks that leave layer l are read before
             the step writes to layer l; blocks that return to it are there before the next step attends to it.
    stream   some layers live on the host. Before such a layer runs, the blocks its batch reads are fetched into a
             device buffer, which the layer shares with others; afterwards only the blocks with new tokens travel back,
             because KV is append-only and the rest of the host's copy is still valid.

        layer      0   1   2   3   4   5   6   7          resident: 0 1 3 5 7    streamed: 2 4 6, two buffers
        compute   [0] [1] [2] [3] [4] [5] [6] [7]
        fetch     2----4--|        |6--|                  6 waits until 2 has left its buffer
        store                 2       4       6           blocks with new tokens

A `CopyEngine` runs the copies: CUDA streams and events on a GPU; on a CPU two threads, one for each direction, over a
link that can be slowed down, so that overlap, order and races are real without a GPU.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.hf.kv.block_copies import NO_RUNS, Runs, copy_of, runs_of
from vasuki.hf.kv.kv_cache import KVCache, pinned_zeros
from vasuki.models.layout import spread_buffers

Done = Any  # what later copies and the compute can wait for: a CUDA event, or a flag that a copy thread raises


class CopyEngine(Protocol):
    """Runs copies while layers compute."""

    exposed_s: float  # compute waited for copies

    @property
    def busy_s(self) -> float:
        """Seconds that copies took."""
        ...

    def computed(self) -> Done:
        """All compute that was issued so far."""
        ...

    def submit(self, to_host: bool, copy: Callable[[], int], after: list[Done]) -> Done:
        """Queue a copy behind `after` and behind earlier ones of its direction. `copy` returns the bytes it moved."""
        ...

    def require(self, done: Done) -> None:
        """Compute issued from now on starts when `done` is."""
        ...

    def wait(self, done: Done) -> None:
        """The host itself goes on when `done` is."""
        ...

    def keep(self, memory: Iterable[torch.Tensor]) -> None:
        """Copies will use this memory of the device: once freed, it waits for those under way before others get it."""
        ...

    def settle(self) -> None:
        """Bring `exposed_s` and `busy_s` up to date. Called between steps, when the compute has ended."""
        ...


def copy_engine(device: torch.device) -> CopyEngine:
    """The engine for a device."""
    return CudaCopyEngine(device) if device.type == "cuda" else ThreadCopyEngine()


class _Flag(threading.Event):
    error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        if self.error is not None:
            raise self.error
        return True


class ThreadCopyEngine:
    """Two threads, one a direction.

    `bytes_per_s` slows each direction down to the speed of a link; without it, copies run as fast as they go.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.exposed_s = 0.0
        self._busy_s = [0.0, 0.0]  # of each thread
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        for direction, waiting in enumerate(self._queues):
            # Threads know nothing of the engine, so that they end with it.
            arguments = (waiting, bytes_per_s, self._busy_s, direction)
            threading.Thread(target=_copy_by_turns, args=arguments, daemon=True).start()
            weakref.finalize(self, waiting.put, None)

    @property
    def busy_s(self) -> float:
        """Seconds that copies took, in both directions."""
        return sum(self._busy_s)

    def computed(self) -> Done:
        flag = _Flag()  # compute on a CPU is synchronous: what was issued is done
        flag.set()
        return flag

    def submit(self, to_host: bool, copy: Callable[[], int], after: list[Done]) -> Done:
        flag = _Flag()
        self._queues[to_host].put((copy, after, flag))
        return flag

    def require(self, done: Done) -> None:
        started_s = time.perf_counter()
        done.wait()
        self.exposed_s += time.perf_counter() - started_s

    def wait(self, done: Done) -> None:
        self.require(done)  # the host is what computes

    def keep(self, memory: Iterable[torch.Tensor]) -> None:
        """Copies that wait hold on to their tensors."""

    def settle(self) -> None:
        """The threads count as they go."""


def _copy_by_turns(
    waiting: queue.SimpleQueue[Any], bytes_per_s: float | None, busy_s: list[float], direction: int
) -> None:
    """A thread's work, until it is given None."""
    while (turn := waiting.get()) is not None:
        copy, after, flag = turn
        try:
            for done in after:
                done.wait()
            started_s = time.perf_counter()
            num_bytes = copy()
            if bytes_per_s is not None:
                time.sleep(max(0.0, num_bytes / bytes_per_s - (time.perf_counter() - started_s)))
            busy_s[direction] += time.perf_counter() - started_s
        except BaseException as error:
            flag.error = error
        flag.set()
        del turn, copy, after, flag  # and with them tensors, while there is nothing to do


class CudaCopyEngine:
    """Copies on one CUDA stream for each direction; order is by events, and nothing ever waits for the whole device."""

    def __init__(self, device: torch.device) -> None:
        self.exposed_s = 0.0
        self.busy_s = 0.0
        self._streams: list[Any] = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._copies: list[tuple[Any, Any]] = []  # begin and end events of copies that may still run
        self._waits: list[tuple[Any, Any]] = []  # the same of the compute's waits for them

    def computed(self) -> Done:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def submit(self, to_host: bool, copy: Callable[[], int], after: list[Done]) -> Done:
        stream = self._streams[to_host]
        for done in after:
            stream.wait_event(done)
        begin, end = self._clock()
        with torch.cuda.stream(stream):
            begin.record()
            copy()
            end.record()
        self._copies.append((begin, end))
        return end

    def require(self, done: Done) -> None:
        begin, end = self._clock()
        begin.record()
        torch.cuda.current_stream().wait_event(done)
        end.record()
        self._waits.append((begin, end))

    def wait(self, done: Done) -> None:
        done.synchronize()

    def keep(self, memory: Iterable[torch.Tensor]) -> None:
        for tensor in memory:
            for stream in self._streams:
                tensor.record_stream(stream)

    def settle(self) -> None:
        self.busy_s += _take_ended(self._copies)
        self.exposed_s += _take_ended(self._waits)

    @staticmethod
    def _clock() -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return begin, end


def _take_ended(timed: list[tuple[Any, Any]]) -> float:
    """Remove the pairs of events that have passed, and return the seconds between them."""
    ended = [end.query() for _, end in timed]  # asked once: an event may pass in between
    passed_s = sum(begin.elapsed_time(end) for (begin, end), over in zip(timed, ended, strict=True) if over) / 1e3
    timed[:] = [pair for pair, over in zip(timed, ended, strict=True) if not over]
    return float(passed_s)


@dataclass(frozen=True, slots=True)
class StreamedLayers:
    """The layers that live on the host, and the device buffer that each is fetched into."""

    buffer_of: dict[int, int]  # streamed layer -> buffer, layers in order

    @classmethod
    def spread(cls, num_layers: int, num_streamed: int) -> StreamedLayers:
        """Spread the streamed layers, so that resident ones run while each is fetched. The first one stays resident."""
        if not 0 <= num_streamed < num_layers:
            raise ValueError(f"cannot stream {num_streamed} of {num_layers} layers")
        num_buffers = spread_buffers(num_layers, num_streamed)
        layers = [num_layers - 1 - i * num_layers // num_streamed for i in range(num_streamed)] if num_streamed else []
        return cls({layer: i % num_buffers for i, layer in enumerate(sorted(layers))})

    @property
    def num_buffers(self) -> int:
        return len(set(self.buffer_of.values()))

    def device_layers(self, num_layers: int) -> int:
        """Layers' worth of memory that a block takes on the device."""
        return num_layers - len(self.buffer_of) + self.num_buffers


class KVMover:
    """Moves KV for one executor: parks what the scheduler swaps, and streams the layers that visit the device."""

    def __init__(self, device: KVCache, engine: CopyEngine, host: KVCache | None = None) -> None:
        self.device = device
        self.host = host  # blocks of parked sequences, numbered by the host pool
        self.engine = engine
        self.copied_bytes = 0
        engine.keep(device.layers)
        num_layers = len(device.layers)
        self._due: list[list[Done]] = [[] for _ in range(num_layers)]  # what each layer of this step waits for
        self._later: list[list[Done]] = [[] for _ in range(num_layers)]  # returns that the next step waits for
        self._buffer_of = device.buffer_of
        # Host tensors of streamed layers, blocks numbered as on the device.
        self._homes = {layer: _home(device.layers[layer]) for layer in self._buffer_of}
        self._stored: dict[int, Done] = {}  # last store of each streamed layer
        self._fetched: dict[int, Done] = {}  # this call's fetch of each streamed layer
        self._unfetched: list[int] = []  # streamed layers that still wait for their buffer
        self._read: Runs = NO_RUNS  # blocks with earlier tokens of this call's sequences
        self._written: Runs = NO_RUNS  # blocks that get new tokens in this call

    def begin_step(self, batch: Batch) -> None:
        """Start the copies of sequences that leave or return."""
        for due, later in zip(self._due, self._later, strict=True):
            due += later
            later.clear()
        self._park(batch)

    def begin_call(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Start fetching layers for a call of the model that computes some of the step's chunks: in each call all of
        them pass."""
        if self._homes:
            self._note_blocks(chunks)
            self._begin_fetching()

    @contextmanager
    def computing_again(self) -> Iterator[Callable[[], None]]:
        """A context in which a call is computed several times; what is yielded begins it again, as the end does."""
        try:
            yield self._begin_fetching
        finally:
            self._begin_fetching()

    def streams(self, layer: int) -> bool:
        """Whether a layer's KV visits the device."""
        return layer in self._homes

    @property
    def is_quiet(self) -> bool:
        """Whether no layer of this step has anything to wait for, or sends anything home."""
        return not self._homes and not any(self._due)

    def before_layer(self, layer: int) -> None:
        """Called before a layer's new keys and values are written: afterwards, all that the layer needs is in place."""
        for done in self._due[layer]:
            self.engine.require(done)
        self._due[layer].clear()
        if self.streams(layer):
            self.engine.require(self._fetched.pop(layer))

    def before_all_layers(self) -> None:
        """Called where layers run in one go, but for those that stream: what is due in any of the others is waited for
        first."""
        for layer in range(len(self._due)):
            if not self.streams(layer):
                self.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        """Called after a layer's attention: its new tokens go home, then its buffer goes to the next streamed layer."""
        if self.streams(layer):
            copy = self._copy(self.device.layers[layer], self._homes[layer], self._written)
            self._stored[layer] = self.engine.submit(True, copy, [self.engine.computed()])
            self._fetch_next(self._buffer_of[layer], [self._stored[layer]])

    # --- park --------------------------------------------------------------------------------------------------------

    def _park(self, batch: Batch) -> None:
        if not batch.swaps:
            return
        if self.host is None:
            raise RuntimeError("a sequence was parked, but there is no host cache")
        computed = self.engine.computed()
        # One copy in each direction for a layer, however many sequences go that way.
        leaving, coming = ([swap for swap in batch.swaps if swap.to_host is to_host] for to_host in (True, False))
        out = runs_of(_all(swap.device for swap in leaving), _all(swap.host for swap in leaving))
        back = runs_of(_all(swap.host for swap in coming), _all(swap.device for swap in coming))
        for layer, there in enumerate(self.host.layers):
            here = self._homes.get(layer, self.device.layers[layer])
            # Blocks may still be on their way from the last step, in either direction.
            after = [computed, *self._due[layer], *([self._stored[layer]] if layer in self._stored else [])]
            if self.streams(layer):
                # From host to host no stream copies: torch does it at once, whatever the stream waits for.
                for done in after:
                    self.engine.wait(done)
            left = [self.engine.submit(True, self._copy(here, there, out), after)] if leaving else []
            came = [self.engine.submit(False, self._copy(there, here, back), [*after, *left])] if coming else []
            self._due[layer] += left
            self._later[layer] += came

    # --- stream ------------------------------------------------------------------------------------------------------

    def _note_blocks(self, chunks: Sequence[ScheduledChunk]) -> None:
        read: set[int] = set()
        written: set[int] = set()
        size = self.device.block_tokens
        for chunk in chunks:
            table = chunk.sequence.block_table.device
            read.update(table[: -(-chunk.start // size)])
            written.update(table[chunk.start // size : -(-chunk.end // size)])
        self._read, self._written = (runs_of(blocks, blocks) for blocks in map(list, (read, written)))

    def _begin_fetching(self) -> None:
        self._unfetched = list(self._homes)
        computed = self.engine.computed()
        # What the last call left in a buffer may still be on its way home.
        for buffer, last in {buffer: layer for layer, buffer in self._buffer_of.items()}.items():
            self._fetch_next(buffer, [computed, *([self._stored[last]] if last in self._stored else [])])

    def _fetch_next(self, buffer: int, after: list[Done]) -> None:
        """Fetch the next streamed layer of a buffer that is free after the given work."""
        layer = next((layer for layer in self._unfetched if self._buffer_of[layer] == buffer), None)
        if layer is None:
            return
        self._unfetched.remove(layer)
        if layer in self._stored:
            after = [*after, self._stored[layer]]
        copy = self._copy(self._homes[layer], self.device.layers[layer], self._read)
        self._fetched[layer] = self.engine.submit(False, copy, [*after, *self._due[layer]])

    def _copy(self, source: torch.Tensor, target: torch.Tensor, runs: Runs) -> Callable[[], int]:
        """A copy of whole blocks of one layer, to be run by the engine."""
        num_bytes, copy = copy_of(source, target, runs)
        self.copied_bytes += num_bytes
        return copy


def _home(buffer: torch.Tensor) -> torch.Tensor:
    """Host memory for a layer that visits this buffer."""
    return (pinned_zeros if buffer.is_cuda else torch.zeros)(buffer.shape, dtype=buffer.dtype)


def _all(groups: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(groups))
