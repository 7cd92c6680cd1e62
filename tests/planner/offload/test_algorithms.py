"""Streaming decisions: against brute force, against the paper's literal pseudocode, and against a clock."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vasuki.machines.link import Link, LinkPoint
from vasuki.machines.profile_files import find_profile
from vasuki.planner.offload.algorithms import (
    LayerTraffic,
    StreamPlan,
    choose_stream,
    max_layers_first_last,
    ring_layers,
    spread_layers,
)

LAYERS = 32
RATE_GB_PER_S = 20.0


def link(latency_us: float = 0.0, copy_engines: int = 2) -> Link:
    """Constant rate plus a fixed time for a copy."""
    points = []
    for size in (2**12, 2**16, 2**20, 2**24, 2**28):
        seconds = latency_us * 1e-6 + size / (RATE_GB_PER_S * 1e9)
        rate = size / seconds / 1e9
        points.append(LinkPoint(bytes=size, h2d=rate, d2h=rate, both=rate))
    return Link(kind="test", copy_engines=copy_engines, curve=tuple(points), source="test")


def traffic(back_s: float, out_s: float = 0.0, overhead_s: float = 0.0) -> LayerTraffic:
    """A layer whose KV takes `back_s` to come back over `link()`."""
    rate = RATE_GB_PER_S * 1e9
    return LayerTraffic(back_bytes=back_s * rate, out_bytes=out_s * rate, overhead_s=overhead_s)


def paper_algorithm_1(num_layers: int, exec_time: float, offload_time_of_one: float) -> int:
    """Algorithm 1 as printed, with a linear offload time."""
    left, right = 0, num_layers // 2
    while left < right:
        mid = (left + right) // 2
        if offload_time_of_one * mid <= exec_time * (num_layers - 2 * mid):
            left = mid + 1
        else:
            right = mid - 1
    return left - 1


def paper_algorithm_2(num_layers: int, exec_time: float, offload_time: float, offload_latency: float) -> int:
    """Algorithm 2 as printed: layers offloaded."""
    left, right = 0, num_layers // 2
    while left < right:
        mid = (left + right) // 2
        if offload_latency + offload_time * mid <= exec_time * mid:
            right = mid - 1
        else:
            left = mid + 1
    return num_layers - (left + 1) * 2


layer_counts = st.integers(2, 100)
milliseconds = st.floats(0.01, 20.0).map(lambda value: value * 1e-3)


@given(layer_counts, milliseconds, milliseconds, st.floats(0, 2000))
def test_searches_find_what_brute_force_finds(layers: int, layer_s: float, back_s: float, latency_us: float) -> None:
    wire, moved = link(latency_us), traffic(back_s, out_s=back_s / 100)

    def transfer_s(count: int) -> float:
        return moved.transfer_s(wire, count)

    layers_s = [transfer_s(m) / layer_s for m in range(1, layers + 1)]
    assume(all(abs(ratio - round(ratio)) > 1e-9 for ratio in layers_s))  # ties turn on the last bit
    assume(all(abs(transfer_s(1) * s - layer_s * layers) > 1e-9 * layer_s for s in range(1, layers + 1)))

    hidden = [m for m in range(1, layers // 2 + 1) if transfer_s(m) <= layer_s * (layers - 2 * m)]
    largest = max(hidden, default=0)
    returns = largest and transfer_s(largest) <= layer_s * (2 * largest - 2)
    assert max_layers_first_last(layers, layer_s, moved, wire) == (largest if returns else 0)
    rings = [m for m in range(1, (layers - 1) // 2 + 1) if transfer_s(m) <= layer_s * m]
    assert ring_layers(layers, layer_s, moved, wire) == (layers - 2 * min(rings) if rings else 0)
    spread = [s for s in range(1, layers + 1) if transfer_s(1) * s <= layer_s * layers]
    assert spread_layers(layers, layer_s, moved, wire)[0] == max(spread, default=0)


def test_paper_algorithm_1_skips_candidates() -> None:
    """As printed it returns untested values: too few layers here, and -1 where nothing can leave."""
    differences = set()
    for ratio in (0.1, 0.5, 1.0, 1.5, 2.0, 4.0):
        wanted = max(m for m in range(LAYERS // 2 + 1) if ratio * m <= LAYERS - 2 * m)
        differences.add(wanted - paper_algorithm_1(LAYERS, 1.0, ratio))
    assert differences - {0}, "the literal version agrees everywhere; the correction would be pointless"
    assert paper_algorithm_1(LAYERS, 1.0, 1000.0) == -1
    assert max_layers_first_last(LAYERS, 1e-3, traffic(1.0), link()) == 0


def test_paper_algorithm_2_offloads_where_nothing_hides() -> None:
    """As printed it never notices that no ring satisfies the condition."""
    assert paper_algorithm_2(LAYERS, exec_time=1.0, offload_time=50.0, offload_latency=0.0) == -2
    assert ring_layers(LAYERS, 1e-3, traffic(50e-3), link()) == 0


def test_paper_algorithm_2_keeps_more_layers_than_needed() -> None:
    """A fixed 0.9 ms for a copy and 0.5 ms a layer against 1 ms a layer: two buffers each way are enough."""
    assert paper_algorithm_2(LAYERS, exec_time=1.0, offload_time=0.5, offload_latency=0.9) == 26
    assert ring_layers(LAYERS, 1e-3, traffic(0.5e-3), link(latency_us=900)) == 28


def test_overhead_and_one_copy_engine_count() -> None:
    moved = traffic(0.6e-3, out_s=0.6e-3)
    assert ring_layers(LAYERS, 1e-3, moved, link(copy_engines=2)) == 30  # the directions overlap
    assert ring_layers(LAYERS, 1e-3, moved, link(copy_engines=1)) == 0  # they take turns: 1.2 ms a layer
    assert ring_layers(LAYERS, 1e-3, traffic(0.6e-3, overhead_s=0.5e-3), link()) == 0


def step_times_s(layers: int, layer_s: float, back_s: float, streamed: list[int], buffers: int) -> list[float]:
    """Durations of steps on a clock: one copy engine fills buffers in order, a streamed layer waits for its copy, and a
    buffer is free again when the layer that read it has run."""
    now = engine_free = 0.0
    buffer_free = [0.0] * buffers
    loaded = 0
    starts = []
    for step in range(20):
        starts.append(now)
        for layer in range(layers):
            if layer in streamed:
                slot = loaded % buffers
                engine_free = max(engine_free, buffer_free[slot]) + back_s
                now = max(now, engine_free) + layer_s
                buffer_free[slot] = now
                loaded += 1
            else:
                now += layer_s
        assert loaded == (step + 1) * len(streamed)
    return [after - before for before, after in itertools.pairwise(starts)]


@given(st.integers(4, 80), st.floats(0.05, 4.0))
def test_spread_layers_never_stall_once_the_pipeline_is_full(layers: int, ratio: float) -> None:
    layer_s = 1e-3
    streamed, buffers = spread_layers(layers, layer_s, traffic(ratio * layer_s), link())
    assume(streamed > buffers)  # else they take no room off the device, and none is streamed
    positions = [math.ceil(j * layers / streamed) - 1 for j in range(1, streamed + 1)]
    times = step_times_s(layers, layer_s, ratio * layer_s, positions, buffers)
    assert times[-1] == pytest.approx(layers * layer_s, rel=1e-6)


@given(st.floats(0.05, 0.999), st.integers(4, 80))
def test_ring_layers_never_stall(ratio: float, layers: int) -> None:
    layer_s = 1e-3
    offloaded = ring_layers(layers, layer_s, traffic(ratio * layer_s), link())
    assert offloaded == layers - 2
    times = step_times_s(layers, layer_s, ratio * layer_s, list(range(layers)), layers - offloaded)
    assert times[-1] == pytest.approx(layers * layer_s, rel=1e-6)


@given(st.integers(6, 80), st.floats(0.05, 4.0))
def test_first_last_never_stalls(layers: int, ratio: float) -> None:
    layer_s = 1e-3
    shared = max_layers_first_last(layers, layer_s, traffic(ratio * layer_s), link())
    assume(shared)
    streamed = [*range(shared), *range(layers - shared, layers)]
    times = step_times_s(layers, layer_s, ratio * layer_s, streamed, buffers=shared)
    assert times[-1] == pytest.approx(layers * layer_s, rel=1e-6)


def test_choice_takes_most_layers_off_the_device() -> None:
    fast = choose_stream(LAYERS, 1e-3, traffic(0.5e-3), link())
    assert (fast.offloaded_layers, fast.streamed_layers) == (30, 32)
    middling = choose_stream(LAYERS, 1e-3, traffic(1.5e-3), link())
    assert (middling.mode, middling.offloaded_layers, middling.streamed_layers) == ("spread", 18, 21)
    slow = choose_stream(LAYERS, 1e-3, traffic(1.0), link())
    assert slow == StreamPlan("none", 0, 0)


def test_streaming_pays_on_fast_links_and_in_mixed_steps() -> None:
    """8B model, 40k tokens of KV (160 MiB a layer): a decode step of 0.85 ms a layer against 3.4 ms with a chunk."""
    moved = LayerTraffic(back_bytes=40_000 * 4096, out_bytes=64 * 4096, copy_bytes=2**22)
    pcie, c2c = find_profile("a10").link, find_profile("gh200").link
    decode = choose_stream(LAYERS, 0.85e-3, moved, pcie)
    mixed = choose_stream(LAYERS, 3.4e-3, moved, pcie)
    coherent = choose_stream(LAYERS, 0.85e-3, moved, c2c)
    assert decode.offloaded_layers < mixed.offloaded_layers < coherent.offloaded_layers == LAYERS - 2
