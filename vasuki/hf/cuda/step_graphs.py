"""Steps on a GPU, recorded once for each of a few sizes, and replayed.

A step is some hundred kernels, and launching them one by one takes the host longer than few tokens take the device. A
CUDA graph launches all of them at once. It reads and writes where it did when it was recorded, so what a step brings is
copied there, all at once, and its tokens are padded to the next size:

    5 decodes                            a7 | b12 | c3 | d9 | e1
    in a graph of 8                      a7 | b12 | c3 | d9 | e1 | - | - | -

    2 decodes and a prompt               a7 | b12 | c0 c1 c2 c3
    in a graph of 8 tokens, 4 sampled    a7 | b12 | c0 c1 c2 c3 | - | -

A token of padding is at position 0 and sees itself alone, in a block that belongs to nobody.

Rows that carry a state have the first slots, and padding those behind them: such a graph serves steps in which all rows
that run decode.

Where layers' KV streams, a step is a graph for each stretch between its copies, which the host issues in between:

    in a graph    layers 0, 1, up to   | attention of 2 |   up to attention of 4   | attention of 4 | ...
    between                       fetched              stored                  fetched           stored

A size is recorded once it has come up a few times, and used if it then answers what the same padded tokens are answered
without a graph. The largest one comes before all others, whose kernels then find room in its memory.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vasuki.hf.attention.chunks import AttentionKernels, Chunks, PlacedChunks, Reserve
from vasuki.hf.attention.inputs import LaidOut, Passing, StepInputs
from vasuki.hf.kernels.transfer import Shapes, Staged
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import KVMover
from vasuki.hf.recurrent.states import StateCache
from vasuki.machines.cost_model import LEAST_RECORDED_TOKENS, MOST_RECORDED_ROWS

log = logging.getLogger(__name__)

Answers = tuple[torch.Tensor, ...]  # each `[num_samples, ...]`; the first are logits, or some of them
Compute = Callable[[StepInputs], Answers]
Replay = Callable[[], object]
Pause = Callable[[Replay], object]  # told what the host does between two stretches
# Something that computes, and pauses -> what computes it again, from and to the same memory.
Record = Callable[[Callable[[Pause], object]], Replay]

# Tokens; padding is at most half of them. The most rows that decode side by side are one more size.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# Steps of a size: recording one, some 40 ms, takes what five launched steps take longer than recorded ones (a model of
# 1B on an H200), and does not pay for one that comes up rarely.
RECORD_AFTER = 4
# Of the largest number that is answered: the same kernels may add in another order, and round to 16 bits in between.
_CLOSE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class GraphSize(NamedTuple):
    """What a graph has room for."""

    tokens: int
    samples: int
    single: bool  # each token is of a row of its own, and samples


class StepGraphs:
    """Recorded steps of one model and one cache.

    Args:
        cache: its last block is for padding.
        kernels: those that attend.
        max_context: most tokens of a sequence in a recorded step.
        most_rows: that decode side by side.
        record: how a computation is recorded; `record_on_device` on CUDA.
        record_after: steps of a size before it is recorded.
        most_tokens: of a step with prompts, see `recorded_steps`.
        states: of recurrent layers, where there are such.
        streaming: moves the KV of layers that stream, where there are such.
    """

    def __init__(
        self,
        cache: KVCache,
        kernels: AttentionKernels,
        max_context: int,
        most_rows: int,
        record: Record,
        record_after: int = RECORD_AFTER,
        most_tokens: int = LEAST_RECORDED_TOKENS,
        states: StateCache | None = None,
        streaming: KVMover | None = None,
    ) -> None:
        self._states, self._streaming = states, streaming
        self._cache, self._kernels, self._record, self._record_after = cache, kernels, record, record_after
        self._width = min(-(-max_context // cache.block_tokens), cache.num_blocks)
        self._rows = (_sizes if states is None else _near_sizes)(min(most_rows, MOST_RECORDED_ROWS))
        # Steps with prompts are padded for ours alone, and pass recurrent layers in groups of any length.
        self._tokens = _sizes(most_tokens) if kernels.ours and kernels.choice != "packed" and not states else []
        self._seen: Counter[tuple[Compute, GraphSize]] = Counter()
        self._recorded: dict[tuple[Compute, GraphSize], _Recorded] = {}
        self._tried: set[tuple[Compute, GraphSize]] = set()
        self._kept: dict[Compute, Answers] = {}  # where graphs of any size leave what they answer
        # Zero, and what the step before sampled.
        self._late = torch.zeros(1 + most_rows, dtype=torch.int64, device=cache.device)
        self.replayed_steps = 0

    def __call__(self, step: LaidOut, compute: Compute) -> Answers:
        """What `compute` answers a step; valid until the next call."""
        size = self._size_of(step)
        if size is None:
            return compute(step.on_device())
        self._seen[compute, size] += 1
        recorded = self._recorded.get((compute, size))
        is_due = self._seen[compute, size] == self._record_after
        if step.offload is not None and (recorded or is_due):
            step.offload.before_all_layers()
        if recorded:
            self.replayed_steps += 1
            return recorded(step)
        if is_due:
            self._record_for(step, compute, size)
        return compute(step.on_device())

    def _size_of(self, step: LaidOut) -> GraphSize | None:
        """The smallest graph that has room for a step; None if none has."""
        single = step.chunks.are_single
        if self._states is not None and not step.passes_as_one:
            return None
        tokens, samples = len(step.token_ids), max(1, len(step.wanted))
        sizes = self._rows if single else self._tokens
        if not sizes or tokens > sizes[-1] or samples > self._rows[-1] or step.chunks.width > self._width:
            return None
        return GraphSize(_room(sizes, tokens), _room(self._rows, samples), single)

    def _record_for(self, step: LaidOut, compute: Compute, size: GraphSize) -> None:
        most = (self._rows if size.single else self._tokens)[-1]
        largest = GraphSize(most, _room(self._rows, min(most, self._rows[-1])), size.single)
        for each in dict.fromkeys((largest, size)):
            if (compute, each) not in self._tried:
                self._tried.add((compute, each))
                self._try(step, compute, each)

    def _try(self, step: LaidOut, compute: Compute, size: GraphSize) -> None:
        """Record a size, and use it if it answers a step as the same tokens are answered without a graph."""
        try:
            parts = self._cache, self._kernels, compute, self._record, self._kept.get(compute), self._late
            with self._several_times(size.tokens) as begin_again:
                recorded = _Recorded(size, self._width, *parts, self._states is not None, self._streaming)
                apart = recorded.apart(step, begin_again)
        except Exception as error:  # such as a layer that looks at what the device has computed, or one of Triton's own
            reason = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("steps of %d tokens are launched kernel by kernel: %s", size.tokens, reason[0])
            return
        if not apart <= 1:  # nor is what is no number
            log.warning(
                "steps of %d tokens are launched kernel by kernel: a recorded one answers something else, by %.2g "
                "times what rounding explains",
                size.tokens,
                apart,
            )
            return
        self._kept[compute], self._recorded[compute, size] = recorded.kept, recorded

    def _several_times(self, rows: int) -> AbstractContextManager[Callable[[], None]]:
        """A context in which a step is computed several times; what is yielded is called before each."""
        if self._states is not None:
            return self._states.unchanged(rows)
        return nullcontext(_nothing) if self._streaming is None else self._streaming.computing_again()


def _nothing() -> None:
    """Begin again where nothing changes."""


class _Between:
    """In place of the mover while a step is recorded: what it does at a layer that streams comes between two
    stretches."""

    def __init__(self, mover: KVMover, pause: Pause) -> None:
        self._mover, self._pause = mover, pause

    def before_layer(self, layer: int) -> None:
        if self._mover.streams(layer):
            self._pause(partial(self._mover.before_layer, layer))

    def after_layer(self, layer: int) -> None:
        if self._mover.streams(layer):
            self._pause(partial(self._mover.after_layer, layer))


def _sizes(most: int) -> list[int]:
    """Sizes up to that one, which is the last of them."""
    return [*(size for size in SIZES if size < most), most]


def _near_sizes(most: int) -> list[int]:
    """Sizes an eighth apart at most: rows of padding have states, too, which take as long as those of others."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 8)))
    return sizes


def _room(sizes: list[int], count: int) -> int:
    """The smallest size that has room."""
    return sizes[bisect_left(sizes, count)]


class _Recorded:
    """Steps of up to a size, each of whose sequences has a table of up to `width` blocks.

    Args:
        late: int64, zero and then the tokens of the step before, see `LastTokens`.
        carries: whether layers carry a state of each row.
        streaming: see `StepGraphs`.

    Attributes:
        kept: where it leaves its answers: those that were given, if they have room.
    """

    def __init__(
        self,
        size: GraphSize,
        width: int,
        cache: KVCache,
        kernels: AttentionKernels,
        compute: Compute,
        record: Record,
        kept: Answers | None,
        late: torch.Tensor,
        carries: bool = False,
        streaming: KVMover | None = None,
    ) -> None:
        device, block_tokens = cache.device, cache.block_tokens
        self._late, self._padding_block = late, cache.num_blocks - 1
        # Where the key and value of its first token go.
        self._padding_rows = cache.rows_of_slots(np.array([self._padding_block * block_tokens]))
        tokens, ones = np.arange(size.tokens), np.ones(size.tokens, np.int64)
        tables = np.full((size.tokens, width), self._padding_block)
        tile_tokens = 1
        if not size.single and kernels.ours is not None:
            tile_tokens = kernels.ours.tile_tokens
            kernels = replace(kernels, choice="paged")
        # Recording computes too: each token sees itself, though kernels are told of the longest contexts that can come.
        room = Reserve(width * block_tokens, tile_tokens)
        placed = PlacedChunks(tokens, ones, 0 * ones, 0 * ones)
        chunks = Chunks(placed, np.arange(len(ones)), tables, cache, kernels, room)
        padding = LaidOut(
            token_ids=0 * tokens,
            late=0 * tokens,
            positions=0 * tokens,
            slots=np.full(size.tokens, self._padding_block * block_tokens),
            wanted=np.arange(size.samples),
            cache=cache,
            offload=None,
            chunks=chunks,
            passing=(Passing(tokens, slice(0, size.tokens), False),) * carries,
        )
        alone = padding.on_device()
        self._compute = compute
        answers = compute(alone)  # which lays the chunks out for those kernels that attend
        if kept is None or len(kept[0]) < size.samples:
            kept = tuple(torch.empty_like(answer) for answer in answers)
        self.kept = kept
        self._own = tuple(each[: size.samples] for each in kept)
        del answers

        shapes: Shapes = dict.fromkeys(("token_ids", "late", "positions"), ((size.tokens,), np.int64))
        shapes |= {"rows": ((2, size.tokens), np.int64), "samples": ((size.samples,), np.int64)}
        if carries:
            shapes["by_slot"] = (size.tokens,), np.int64
        self._staged = Staged(device, shapes | chunks.shapes())
        there = self._staged.there
        chunks.move_to(there, self._padding_block)
        self._step = replace(
            alone,
            position_ids=there["positions"][None],
            rows=there["rows"],
            sample_positions=there["samples"],
            offload=streaming,
            groups=tuple(rows._replace(tokens=there["by_slot"]) for rows in alone.groups),
        )
        self._send(padding)

        def leave(pause: Pause) -> None:
            torch.add(there["token_ids"], late[there["late"]], out=self._step.input_ids[0])
            step = self._step if streaming is None else replace(self._step, offload=_Between(streaming, pause))
            for mine, answer in zip(self._own, compute(step), strict=True):
                mine.copy_(answer)

        self._replay = record(leave)

    def __call__(self, step: LaidOut) -> Answers:
        """What a step is answered, valid until the next call."""
        self._send(step)
        self._replay()
        return tuple(each[: len(step.wanted)] for each in self._own)

    def apart(self, step: LaidOut, begin_again: Callable[[], None]) -> float:
        """How far a step's logits are from the same padded tokens' without the graph, as a multiple of what
        sums in another order explain. Both begin with the same states, and with layers that stream on their way."""
        begin_again()
        self(step)
        count = len(step.wanted)  # padding may go on from a state that is no number
        answer = self._own[0][:count].clone()
        begin_again()
        expected = self._compute(self._step)[0][:count]
        return float((answer - expected).abs().max() / (_CLOSE[answer.dtype] * expected.abs().max()))

    def _send(self, step: LaidOut) -> None:
        """Bring a step to where the graph reads it."""
        here, tokens, samples = self._staged.here(), len(step.token_ids), len(step.wanted)
        here["token_ids"][:tokens], here["late"][:tokens] = step.token_ids, step.late
        here["positions"][:tokens], here["rows"][:, :tokens] = step.positions, step.rows
        here["samples"][:samples] = step.wanted
        for name in ("token_ids", "late", "positions"):
            here[name][tokens:] = 0
        here["rows"][:, tokens:], here["samples"][samples:] = self._padding_rows, 0
        for rows in step.passing:
            here["by_slot"][:tokens], here["by_slot"][tokens:] = rows.tokens, np.arange(tokens, len(here["by_slot"]))
        if step.last_tokens is not None and step.late.any():
            sampled = step.last_tokens.token_ids
            torch.clamp(sampled, min=0, out=self._late[1 : 1 + len(sampled)])  # a row without a token ends
        self._staged.send(self._step.chunks.write(here, step.chunks, self._padding_block))


def record_on_device() -> Record:
    """Record by CUDA graphs that share a pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    # One for all: torch keeps a workspace of up to 32 MiB for each stream on which it has multiplied matrices.
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(compute: Callable[[Pause], object]) -> Replay:
        nonlocal pool
        # What kernels set up when they are first called cannot be recorded.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute(lambda between: None)
        torch.cuda.current_stream().wait_stream(side)
        parts: list[Replay] = []  # stretches, and what comes between them

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            capture.enter_context(torch.cuda.graph(graph, pool=pool))
            parts.append(graph.replay)

        def pause(between: Replay) -> None:
            capture.close()
            parts.append(between)
            begin()

        try:
            # A capture that fails does not always give the stream back by itself.
            with torch.cuda.stream(torch.cuda.current_stream()), ExitStack() as capture:
                begin()
                compute(pause)
        except Exception:
            pool = torch.cuda.graph_pool_handle()  # that one takes no other graph now
            raise

        def replay() -> None:
            for part in parts:
                part()

        return replay

    return record
