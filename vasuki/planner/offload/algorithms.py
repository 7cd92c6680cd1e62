"""How many layers' KV can live in host memory without slowing a step down (Vasuki, 5.1).

A streamed layer comes back from the host in every step, before it runs; KV is append-only, so only the new tokens' KV
goes out again. Three ways to share device buffers between layers of a model of L layers, e seconds each:

    first-last   the first m layers share m buffers with the last m      m layers fewer on the device, 2m streamed
    ring         all layers pass through a ring of 2m buffers            L - 2m layers fewer, L streamed
    spread       s evenly spaced layers pass through 2 or 3 buffers      s - 2 or s - 3 layers fewer, s streamed

First-last and ring are the paper's Algorithms 1 and 2 with these corrections: the search returns the largest (smallest)
m that satisfies the condition rather than its neighbour; e is the time of one layer; the two directions overlap where
the device has two copy engines; and first-last must also bring the first layers back while the last ones run. Spread
is ours: it asks only that the copies of s layers fit into the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vasuki.machines.link import Link
from vasuki.models.layout import spread_buffers

StreamMode = Literal["none", "first-last", "ring", "spread"]


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """What streaming one layer moves in one step, on one device."""

    back_bytes: float  # KV of the batch's whole context
    out_bytes: float  # KV of the step's new tokens
    copy_bytes: float = 0.0  # one contiguous copy, such as one block of a layer; 0 for one copy in each direction
    overhead_s: float = 0.0  # bookkeeping; the paper's (alloc_time + dealloc_time) x num_requests

    def transfer_s(self, link: Link, layers: int) -> float:
        """Seconds that `layers` layers take, both directions together."""
        copies_s = link.transfer_s(layers * self.back_bytes, layers * self.out_bytes, self.copy_bytes)
        return copies_s + layers * self.overhead_s


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Which way to stream, and what each would save."""

    mode: StreamMode
    offloaded_layers: int  # layers' worth of KV that need no place on the device
    streamed_layers: int  # layers that come back from the host in every step
    first_last: int = 0  # layers' worth that Algorithm 1 would take off the device
    ring: int = 0  # the same of Algorithm 2
    spread: int = 0


def max_layers_first_last(num_layers: int, layer_s: float, traffic: LayerTraffic, link: Link) -> int:
    """Algorithm 1: the largest m such that the first m layers can leave and the last m arrive behind the ones between.

    Condition, for m up to L // 2:  transfer(m) <= e (L - 2m).

    In the steady state the first m layers must come back, each into the buffer of a last layer that has run: the j-th
    starts after j last layers and is due m - 1 layers later, which holds if  transfer(m) <= e (2m - 2).  It grows with
    m, so if the largest m fails it, all do, and the answer is 0.
    """

    def hides(layers: int) -> bool:
        return traffic.transfer_s(link, layers) <= layer_s * (num_layers - 2 * layers)

    layers = _largest(hides, num_layers // 2)
    returns_in_time = traffic.transfer_s(link, layers) <= layer_s * (2 * layers - 2)
    return layers if layers and returns_in_time else 0


def ring_layers(num_layers: int, layer_s: float, traffic: LayerTraffic, link: Link) -> int:
    """Algorithm 2: layers that need no place on the device when all pass through the smallest ring that hides copies.

    Condition for a ring of 2m buffers:  transfer(m) <= e m.  Larger copies are faster, so it holds from some m on; the
    smallest such m leaves L - 2m layers off the device. 0 if no ring smaller than the model hides them.
    """

    def hides(buffers: int) -> bool:
        return traffic.transfer_s(link, buffers) <= layer_s * buffers

    largest = (num_layers - 1) // 2  # a ring of all layers saves nothing
    too_small = _largest(lambda buffers: not hides(buffers), largest)
    return num_layers - 2 * (too_small + 1) if too_small < largest else 0


def printed_first_last(num_layers: int, layer_s: float, layer_bytes: float, link: Link) -> int:
    """Algorithm 1 as it is printed, with what it takes for allocating left out: the layers to offload, 0 at least.

    All KV of a layer goes out and comes back, one direction after the other. The search returns a neighbour of the
    largest m, or of some m that it looked at, and the first layers' way back is not counted.
    """
    low, high = 0, num_layers // 2
    while low < high:
        middle = (low + high) // 2
        if _printed_transfer_s(link, layer_bytes * middle) <= layer_s * (num_layers - 2 * middle):
            low = middle + 1
        else:
            high = middle - 1
    return max(0, low - 1)


def printed_ring(num_layers: int, layer_s: float, layer_bytes: float, link: Link) -> int:
    """Algorithm 2 as it is printed, likewise: the layers to offload, whether or not a ring of the others hides its
    copies."""
    low, high = 0, num_layers // 2
    while low < high:
        middle = (low + high) // 2
        if _printed_transfer_s(link, layer_bytes * middle) <= layer_s * middle:
            high = middle - 1
        else:
            low = middle + 1
    return max(0, num_layers - 2 * (low + 1))


def _printed_transfer_s(link: Link, num_bytes: float) -> float:
    return link.copy_s(num_bytes, "d2h") + link.copy_s(num_bytes, "h2d")


def spread_layers(num_layers: int, layer_s: float, traffic: LayerTraffic, link: Link) -> tuple[int, int]:
    """Most layers that can stream if they are evenly spaced, and the buffers they pass through.

    Condition for s streamed layers:  transfer(1) s <= e L,  the j-th of them being layer ceil(j L / s). The buffers are
    counted by `spread_buffers`.
    """

    def hides(streamed: int) -> bool:
        return traffic.transfer_s(link, 1) * streamed <= layer_s * num_layers

    streamed = _largest(hides, num_layers)
    return streamed, spread_buffers(num_layers, streamed)


def choose_stream(num_layers: int, layer_s: float, traffic: LayerTraffic, link: Link) -> StreamPlan:
    """The way that takes most layers off the device with every copy hidden; on a tie the one that streams least.

    Whether the room is worth having is the planner's question: it pays only if a larger batch fits into it.
    """
    first_last = max_layers_first_last(num_layers, layer_s, traffic, link)
    ring = ring_layers(num_layers, layer_s, traffic, link)
    spread, buffers = spread_layers(num_layers, layer_s, traffic, link)
    freed = max(0, spread - buffers)
    candidates: list[tuple[int, int, StreamMode]] = [
        (first_last, 2 * first_last, "first-last"),
        (ring, num_layers, "ring"),
        (freed, spread, "spread"),
    ]
    offloaded, streamed, mode = max(candidates, key=lambda candidate: (candidate[0], -candidate[1]))
    if not offloaded:
        return StreamPlan("none", 0, 0)
    return StreamPlan(mode, offloaded, streamed, first_last, ring, freed)


def _largest(predicate: Callable[[int], bool], high: int) -> int:
    """The largest number up to `high` that satisfies a predicate which holds up to some point and then no more; 0 if
    not even 1 does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if predicate(middle):
            low = middle
        else:
            high = middle - 1
    return low
