"""Times of single operators, run as the engine runs them: eager torch, its own kernels, weights that are cold.

A step reads every weight once, so a weight is out of the caches when its turn comes again. Each product therefore goes
through as many copies of its weight as it takes to push them out, or as the model has layers if all of them fit.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.functional import embedding, gelu, linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.hf.attention.chunks import AttentionKernels, TileKernel
from vasuki.hf.attention.inputs import StepInputs, build_inputs
from vasuki.hf.attention.plain_attention import Variant
from vasuki.hf.attention.ragged_attention import attend, store
from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels
from vasuki.hf.cpu.packed_linear import DTYPES, Format, LinearKernel, PackedLinear, PackedMatrix
from vasuki.hf.device.device import available_bytes, cache_bytes
from vasuki.hf.fused import by_torch
from vasuki.hf.kernels.varlen import preferred_block_tokens
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.loading.triton_kernels import small_kernels
from vasuki.hf.profiler.rows import row_at
from vasuki.hf.profiler.timing import Call, Clock, Effort, HostClock, affordable, clock_for, measure, measure_timed
from vasuki.machines.measured_points import (
    AttentionPoint,
    AttentionPoints,
    ElementwiseOperator,
    ElementwisePoints,
    MatmulPoints,
)
from vasuki.models.shape import ModelShape

BLOCK_TOKENS = 32  # where any size is as good
_COLD = 4  # times the last cache: data of this size is read from memory
MEMORY_SHARE = 0.25  # of what is free may be taken for weights or KV
_TILES = (256, 128, 64)
_KV_LAYERS = 4
_MOST_SAMPLES = 512
_POOL_BYTES = 2**26  # of a layer, to see what first touches of its memory cost
_TOUCHED_BYTES = 2**22


def cold_bytes(device: torch.device) -> int:
    """Data of that size is read from memory, not from a cache."""
    return _COLD * cache_bytes(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name as profiles spell it: `float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Bench:
    """The device, type and clock with which operators are measured."""

    device: torch.device
    dtype: torch.dtype
    shape: ModelShape
    effort: Effort
    clock: Clock
    saved: torch.dtype  # that the weights were saved in: packed weights stay as narrow as that
    kernels: CPUKernels | None  # that a model of this type would be given here

    @classmethod
    def on(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        shape: ModelShape,
        effort: Effort,
        saved: torch.dtype | None = None,
    ) -> Bench:
        """A bench on a device, for weights saved in the type that it computes in unless said otherwise."""
        kernels = load_cpu_kernels() if device.type == "cpu" and dtype in DTYPES else None
        return cls(device, dtype, shape, effort, clock_for(device), saved or dtype, kernels)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block as runs choose them: attention is measured in blocks that its kernel walks itself."""
        return preferred_block_tokens(self.dtype, self.device, self.shape.head_dim) or BLOCK_TOKENS

    @property
    def between(self) -> torch.dtype:
        """The type that operators take and give: float32 for compiled kernels, whatever they multiply in."""
        return torch.float32 if self.kernels else self.dtype

    def tensor(self, *size: int) -> torch.Tensor:
        """Random numbers of ordinary size, as one operator hands them to the next."""
        return torch.randn(size, device=self.device).to(self.between)

    def num_copies(self, num_bytes: int) -> int:
        """Copies of a weight that are used in turn, so that it is as cold as in the model."""
        cold = cold_bytes(self.device)
        if self.shape.weight_bytes < cold:
            return self.shape.num_layers
        most = int(MEMORY_SHARE * available_bytes(self.device) / num_bytes)
        return max(1, min(math.ceil(cold / num_bytes) + 1, most))


# --- matrix products -------------------------------------------------------------------------------------------------


def products(shape: ModelShape, is_fused: bool = False) -> dict[tuple[int, int], tuple[int, ...]]:
    """The matrices `[k, n]` of a model, and the widths that n is split into: by transformers' models, or by what takes
    the place of their attention layers."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    asked = (2 if shape.gated_attention else 1) * query
    recurrent = shape.recurrent.matrices if shape.recurrent else ()
    widths: dict[tuple[int, int], tuple[int, ...]] = {}
    for matrix in (*shape.attention_matrices, *recurrent, *shape.dense_matrices, *shape.expert_matrices):
        split: tuple[int, ...] = (matrix.n,)
        if matrix.name == "qkv" and not is_fused:
            split = (asked, key, key)
        elif matrix.name in ("up", "shared_up") and matrix.copies == 1 and shape.gated_mlp:
            split = (matrix.n // 2, matrix.n // 2)
        widths.setdefault((matrix.k, matrix.n), split)
    widths.setdefault((shape.hidden_size, shape.vocab_size), (shape.vocab_size,))
    return widths


class Product:
    """`[tokens, k] x [k, n]`, with weights that are cold."""

    def __init__(self, bench: Bench, k: int, widths: tuple[int, ...]) -> None:
        self._bench = bench
        self._k = k
        weight = (bench.tensor(sum(widths), k) * k**-0.5).to(bench.saved).to(bench.dtype)
        kernel = bench.kernels.linear if bench.kernels else None
        parts = [_Linear(part, kernel) for part in weight.split(list(widths))]
        copies = bench.num_copies(sum(part.num_bytes for part in parts))
        self._turns = itertools.cycle([[part.copy() for part in parts] for _ in range(copies)])

    def call(self, tokens: int) -> Call:
        """The product for `tokens` tokens."""
        rows = self._bench.tensor(1, tokens, self._k)

        def call() -> None:
            for part in next(self._turns):
                part(rows)

        return call


class _Linear:
    """A linear layer as `load_model` leaves it: packed, on a CPU in float32 that has the kernel for it."""

    def __init__(self, weight: torch.Tensor, kernel: LinearKernel | None) -> None:
        self._kernel = kernel
        self._features = len(weight)
        self._format = Format.WIDE
        if kernel:
            weight, self._format = kernel.pack(weight)
        self._place(weight)

    def _place(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._matrix = PackedMatrix.of(weight, None, self._features, self._format) if self._kernel else None

    @property
    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def copy(self) -> _Linear:
        """Copy the weights to another place in memory."""
        other = copy(self)
        other._place(self._weight.clone())
        return other

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._kernel is None or self._matrix is None:
            return linear(rows, self._weight)
        return self._kernel(rows[0], self._matrix).unsqueeze(0)


def measure_matmul(bench: Bench, k: int, n: int, widths: tuple[int, ...], samples_only: bool = False) -> MatmulPoints:
    """`[tokens, k] x [k, n]` for the effort's numbers of tokens; for sampled ones alone if the matrix is the head."""
    product = Product(bench, k, widths)
    tokens = [count for count in bench.effort.tokens if not samples_only or count <= _MOST_SAMPLES]
    calls = affordable([product.call(count) for count in tokens], bench.clock, bench.effort)
    seconds = measure(calls, bench.clock, bench.effort)
    return MatmulPoints(
        k=k, n=n, dtype=dtype_name(bench.dtype), tokens=tuple(tokens[: len(calls)]), us=microseconds(seconds)
    )


def peak_rate(bench: Bench, sizes: Seq[int]) -> float:
    """FLOP/s of the largest of some square products that does not take too long: near the best of this type."""

    def product(size: int) -> Call:
        left, right = (bench.tensor(size, size).to(bench.dtype) for _ in range(2))
        return partial(torch.matmul, left, right)

    calls = affordable([product(size) for size in sizes], bench.clock, bench.effort)
    largest = sizes[len(calls) - 1]
    best = [calls[-1], Product(bench, largest, (largest,)).call(largest)] if bench.kernels else calls[-1:]
    return 2 * largest**3 / min(measure(best, bench.clock, bench.effort))


def measure_tile_rows(bench: Bench, processors: int, default: int) -> int:
    """Rows of the matmul tile, read off the steps in which time rises with tokens.

    The product is as wide as to give each processor one tile for every row of tiles.
    """
    tokens = list(range(512 + 32, 1024 + 1, 32))
    weight = bench.tensor(128 * processors, 4096) * 4096**-0.5
    inputs = [bench.tensor(count, 4096) for count in tokens]
    calls: list[Call] = [partial(linear, rows, weight) for rows in inputs]
    return tile_of(tokens, measure(calls, bench.clock, bench.effort), default)


def tile_of(tokens: list[int], seconds: list[float], default: int) -> int:
    """The tile whose row count, `ceil(tokens / tile)`, explains the times best by a straight line.

    The default stands unless a tile leaves less than half of what a line over the tokens themselves leaves.
    """

    def left_over(sizes: np.ndarray) -> float:
        line = np.vander(sizes, 2)
        return float(
            np.sum((np.asarray(seconds) - line @ np.linalg.lstsq(line, np.asarray(seconds), rcond=None)[0]) ** 2)
        )

    rows = np.asarray(tokens, dtype=float)
    by_tile = {tile: left_over(np.ceil(rows / tile)) for tile in _TILES}
    best = min(by_tile, key=lambda tile: by_tile[tile])
    return best if by_tile[best] < 0.5 * left_over(rows) else default


# --- elementwise operators -------------------------------------------------------------------------------------------


def measure_elementwise(bench: Bench, paged: TileKernel | None) -> list[ElementwisePoints]:
    """Memory-bound operators as models run them, each by its number of tokens."""
    shape, item = bench.shape, bench.dtype.itemsize
    hidden, head_dim = shape.hidden_size, shape.head_dim
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    width = mlp_width(shape)
    table = bench.tensor(shape.vocab_size, hidden)
    norm = torch.nn.Sequential(
        LlamaRMSNorm(hidden) if shape.gated_mlp else torch.nn.LayerNorm(hidden)  # MLPs without a gate came with it
    ).to(bench.device, bench.between)
    if bench.kernels:
        bench.kernels.install(norm)
    if bench.device.type == "cuda":
        by_torch.fuse_modules(norm)
    small = small_kernels(bench.device) if bench.device.type == "cuda" else None
    cache = KVCache(
        KVLayout.uniform(_KV_LAYERS, kv_heads, head_dim, bench.dtype), 256, bench.block_tokens, bench.device
    )
    layers = itertools.cycle(range(_KV_LAYERS))

    def norm_call(tokens: int) -> Call:
        rows = bench.tensor(1, tokens, hidden)
        return lambda: norm(rows)

    def rows_of(tokens: int) -> torch.Tensor:
        slots = torch.randperm(cache.num_blocks * cache.block_tokens, device=bench.device)[:tokens]
        return cache.rows_of_slots(slots.sort().values)

    def rope_call(tokens: int) -> Call:
        """Rotation and the KV write, in as many kernels as a run has for them."""
        if small is not None:
            joined, angles = bench.tensor(tokens, heads + 2 * kv_heads, head_dim), bench.tensor(tokens, head_dim)
            turn, rows = small.turn_and_store, rows_of(tokens)
            return lambda: turn(joined, heads, angles, angles, rows, cache.layers[next(layers)], head_dim, None)
        rotate, write = rotate_call(tokens), kv_write_call(tokens)
        return lambda: (rotate(), write())

    def rotate_call(tokens: int) -> Call:
        if bench.kernels or bench.device.type == "cuda":
            rotate = bench.kernels.rotate if bench.kernels else by_torch.rotate
            joined, angles = bench.tensor(tokens, heads + 2 * kv_heads, head_dim), bench.tensor(tokens, head_dim)
            return lambda: rotate(joined, heads + kv_heads, angles, angles)
        query = bench.tensor(1, tokens, heads, head_dim).transpose(1, 2)
        key = bench.tensor(1, tokens, kv_heads, head_dim).transpose(1, 2)
        cos, sin = bench.tensor(1, tokens, head_dim), bench.tensor(1, tokens, head_dim)
        return lambda: apply_rotary_pos_emb(query, key, cos, sin)

    def kv_write_call(tokens: int) -> Call:
        keys, values = bench.tensor(tokens, kv_heads, head_dim), bench.tensor(tokens, kv_heads, head_dim)
        rows = rows_of(tokens)
        if paged is not None:
            return lambda: paged.write(keys, values, rows, cache.layers[next(layers)])
        return lambda: cache.write(next(layers), keys, values, rows)

    def activation_call(tokens: int) -> Call:
        if shape.gated_mlp and bench.kernels:
            kernel = bench.kernels.linear
            # What joins the two products of an MLP, with almost nothing to multiply.
            layers = [PackedLinear(torch.nn.Linear(1, width, bias=False), kernel) for _ in range(2)]
            rows = bench.tensor(tokens, 1)
            return lambda: kernel.gated(rows, *[layer.matrix for layer in layers])
        gate_up = bench.tensor(1, tokens, 2 * width)
        if shape.gated_mlp and small is not None:
            gated = small.gated
            return lambda: gated(gate_up, "silu")
        gate, up = gate_up.chunk(2, dim=-1)
        return (lambda: silu(gate) * up) if shape.gated_mlp else (lambda: gelu(gate))

    def residual_call(tokens: int) -> Call:
        rows, added = bench.tensor(1, tokens, hidden), bench.tensor(1, tokens, hidden)
        return lambda: rows + added

    def embedding_call(tokens: int) -> Call:
        ids = torch.randint(shape.vocab_size, (1, tokens), device=bench.device)
        return lambda: embedding(ids, table)

    operators: dict[ElementwiseOperator, tuple[Callable[[int], Call], int]] = {
        "norm": (norm_call, 2 * hidden * item),
        "rope": (rope_call, 2 * (heads + 3 * kv_heads) * head_dim * item),
        "activation": (activation_call, (3 if shape.gated_mlp else 2) * width * item),
        "residual": (residual_call, 3 * hidden * item),
        "embedding": (embedding_call, 2 * hidden * item),
    }
    series = []
    for operator, (call_of, bytes_per_token) in operators.items():
        calls = affordable([call_of(count) for count in bench.effort.elementwise_tokens], bench.clock, bench.effort)
        series.append((operator, bytes_per_token, calls))
    seconds = iter(measure([call for *_, calls in series for call in calls], bench.clock, bench.effort))
    return [
        ElementwisePoints(
            operator=operator,
            bytes_per_token=bytes_per_token,
            tokens=bench.effort.elementwise_tokens[: len(calls)],
            us=microseconds([next(seconds) for _ in calls]),
        )
        for operator, bytes_per_token, calls in series
    ]


def mlp_width(shape: ModelShape) -> int:
    """Columns between the two matrices of an MLP that one token meets, in the mean over layers."""
    dense = shape.num_dense_layers * shape.intermediate_size
    experts = shape.experts_per_token * shape.expert_intermediate_size + shape.shared_intermediate_size
    return max(1, round((dense + shape.num_expert_layers * experts) / shape.num_layers))


# --- attention -------------------------------------------------------------------------------------------------------


def measure_attention(bench: Bench, kernels: AttentionKernels, kv_dtype: torch.dtype) -> AttentionPoints:
    """Measure one layer of attention as the engine runs it, less the KV write, which is an operator of its own."""
    shape = bench.shape
    layout = KVLayout.uniform(_KV_LAYERS, shape.num_kv_heads, shape.head_dim, kv_dtype)
    wanted = [(count, 1, context) for count, context in bench.effort.decodes] + list(bench.effort.chunks)
    wanted = [point for point in wanted if point[2] <= shape.max_context_tokens]
    wanted = wanted or [(1, 1, 16), (1, 16, 16)]
    affordable_tokens = int(MEMORY_SHARE * available_bytes(bench.device) / layout.bytes_per_token)
    most_tokens = min(affordable_tokens, max(count * _padded(bench, context) for count, _, context in wanted))
    cache = KVCache(layout, most_tokens // bench.block_tokens + 1, bench.block_tokens, bench.device)
    for layer in cache.layers:
        layer.normal_()
    points: list[tuple[int, int, int]] = []
    calls: list[Call] = []
    for count, tokens, context in wanted:
        if count * _padded(bench, context) > most_tokens:
            continue
        attention, write = _attention_calls(bench, cache, kernels, count, tokens, context)
        attention()
        if bench.clock.seconds(attention, 1) <= bench.effort.max_call_s:
            points.append((count, tokens, context))
            calls += [attention, write]
    seconds = measure(calls, bench.clock, bench.effort)
    return AttentionPoints(
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype_name(bench.dtype),
        kv_dtype="" if kv_dtype is bench.dtype else dtype_name(kv_dtype),
        points=tuple(
            AttentionPoint(sequences=count, tokens=tokens, context=context, us=microseconds([alone_s])[0])
            for (count, tokens, context), whole_s, write_s in zip(points, seconds[::2], seconds[1::2], strict=True)
            for alone_s in [max(whole_s - write_s, 0.1 * whole_s)]
        ),
    )


def _padded(bench: Bench, context: int) -> int:
    return -(-context // bench.block_tokens) * bench.block_tokens


def _attention_calls(
    bench: Bench, cache: KVCache, kernels: AttentionKernels, count: int, tokens: int, context: int
) -> tuple[Call, Call]:
    """`attend`, and its KV write alone, for `count` sequences that compute `tokens` positions up to `context`."""
    shape = bench.shape
    blocks_each = _padded(bench, context) // bench.block_tokens
    num_variants = max(1, min(16, cache.num_blocks // (count * blocks_each)))
    order = np.random.default_rng(0).permutation(cache.num_blocks)
    blocks = iter(order[: num_variants * count * blocks_each].tolist())
    # Different blocks and layers in turn, as in a step, so that keys and values are not in a cache from the last call.
    steps = [_step(cache, kernels, count, tokens, context, blocks, blocks_each) for _ in range(num_variants)]
    turns = itertools.cycle([(layer, step) for step in steps for layer in range(len(cache.layers))])
    total = count * tokens
    query = bench.tensor(total, shape.num_heads, shape.head_dim)
    key, value = (bench.tensor(total, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    variant = Variant(scaling=shape.head_dim**-0.5)

    def attention() -> None:
        layer, step = next(turns)
        attend(query, key, value, layer, step, variant)

    def write() -> None:
        layer, step = next(turns)
        store(key, value, layer, step)

    return attention, write


def _step(
    cache: KVCache,
    kernels: AttentionKernels,
    count: int,
    tokens: int,
    context: int,
    blocks: Iterator[int],
    blocks_each: int,
) -> StepInputs:
    sequences = [
        row_at(row, np.zeros(context, np.int64), context - tokens, list(itertools.islice(blocks, blocks_each)))
        for row in range(count)
    ]
    if tokens == 1:
        batch = Batch(decodes=sequences, starts=[context - 1] * count, prefills=[], swaps=[])
    else:
        chunks = [ScheduledChunk(sequence, context - tokens, tokens, True) for sequence in sequences]
        batch = Batch(decodes=[], starts=[], prefills=chunks, swaps=[])
    return build_inputs(batch, cache, kernels)


# --- single calls ----------------------------------------------------------------------------------------------------


def shortest_kernel_s(bench: Bench) -> float:
    """Device time of the smallest operator; on a CPU its dispatch is part of it."""
    one = torch.zeros(1, device=bench.device)
    clock = bench.clock if bench.device.type == "cuda" else HostClock()
    (seconds,) = measure([lambda: one.add_(1.0)], clock, bench.effort)
    return seconds


def dispatch_s(bench: Bench) -> float:
    """Host time of one eager operator, whatever the device does meanwhile."""
    one = torch.zeros(1, device=bench.device)
    (seconds,) = measure([lambda: one.add_(1.0)], HostClock(), bench.effort)
    return seconds


def allocation_s(bench: Bench, num_bytes: int = 2**20) -> float:
    """Taking memory from torch's allocator and giving it back."""
    call = partial(torch.empty, num_bytes, dtype=torch.uint8, device=bench.device)
    (seconds,) = measure([call], HostClock(), bench.effort)
    return seconds


def first_touch_s_per_mib(bench: Bench) -> float:
    """Measure what a MiB of a CPU's KV pool costs at its first write beyond later ones: page faults."""
    shape = bench.shape
    layout = KVLayout.uniform(_KV_LAYERS, shape.num_kv_heads, shape.head_dim, bench.dtype)
    block_bytes = bench.block_tokens * layout.bytes_per_token // _KV_LAYERS

    def seconds() -> float:
        # As large as pools are, which malloc takes from the system each time; a part of it is touched, block by block.
        cache = KVCache(layout, math.ceil(_POOL_BYTES / block_bytes), bench.block_tokens, bench.device)
        blocks = [layer[block] for block in range(math.ceil(_TOUCHED_BYTES / block_bytes)) for layer in cache.layers]
        first_s, again_s = (_seconds_to_fill(blocks) for _ in range(2))
        return max(0.0, first_s - again_s) / (len(blocks) * block_bytes) * 2**20

    return measure_timed([seconds], bench.effort, statistics.median)[0]


def _seconds_to_fill(blocks: list[torch.Tensor]) -> float:
    started_s = time.perf_counter()
    for block in blocks:
        block.fill_(1.0)
    return time.perf_counter() - started_s


def microseconds(seconds: list[float]) -> tuple[float, ...]:
    """Rounded to what a measurement can tell: four digits."""
    return tuple(float(f"{max(value * 1e6, 1e-3):.4g}") for value in seconds)
