"""KV and weights on the link between device and host, and how much of them kernels hide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape

if TYPE_CHECKING:
    from vasuki.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class Copies:
    """What a step moves between device and host, per device."""

    to_device_bytes: float = 0.0
    to_host_bytes: float = 0.0
    copy_bytes: float = 0.0  # size of one contiguous copy; 0 for one copy in each direction
    overlapped: bool = True  # behind the whole step; else layers wait for their own part, a recorded step for all of it


class HostTraffic:
    """What streaming, swapping and weights on the host move in a step, and what of it the step waits for.

    Attributes:
        weights: those that come from the host in every step, one copy for a layer.
    """

    def __init__(self, shape: ModelShape, profile: HardwareProfile, layout: Layout) -> None:
        self._link = profile.link
        self._num_layers = shape.num_layers
        self._kv_bytes = shape.kv_bytes_per_token_per_layer  # of a token and layer, on all devices together
        self._kv_share = shape.kv_share(layout.tensor_parallel)
        self._pipeline_parallel = layout.pipeline_parallel
        layer_bytes = shape.layer_weight_bytes / layout.tensor_parallel
        host_layers = layout.host_layers / layout.pipeline_parallel
        self.weights = (Copies(host_layers * layer_bytes, 0.0, layer_bytes),) if host_layers else ()

    def streamed_bytes(
        self, layers: int, context_tokens: int, new_tokens: int, copy_bytes: float = 0, sequences: int = 0
    ) -> tuple[float, float]:
        """Bytes that streaming the KV of `layers` layers moves in a step to each device, and from it to the host.

        Everything comes back in every step; only blocks with new tokens go out, since KV is append-only. A copy is a
        whole block: the last one of a sequence is half full on average, and n tokens in a row lie in as many blocks as
        n - 1 tokens fill, and one more.
        """
        block_tokens = max(1.0, copy_bytes / self._kv_bytes)
        back, out = context_tokens + sequences * (block_tokens - 1) / 2, new_tokens + sequences * (block_tokens - 1)
        per_token = layers * self._kv_bytes * self._kv_share
        return back * per_token, out * per_token

    def swapped(self, batch: Batch, block_tokens: int) -> tuple[Copies, ...]:
        """What a batch's swaps move on each device, and layers that change place, one copy for a block of a layer.

        Blocks that leave a layer are copied before it writes to their place, which for all layers of a recorded step is
        before it begins; those that return have a step's time.
        """
        layer_block_bytes = block_tokens * self._kv_bytes * self._kv_share
        block_bytes = layer_block_bytes * self._num_layers / self._pipeline_parallel
        out = block_bytes * sum(len(swap.device) for swap in batch.swaps if swap.to_host)
        back = block_bytes * sum(len(swap.device) for swap in batch.swaps if not swap.to_host)
        if batch.depth is not None and batch.depth.held:
            held_bytes = layer_block_bytes * len(batch.depth.held)
            out += held_bytes * len(batch.depth.leaving)
            back += held_bytes * len(batch.depth.returning)
        copies = (Copies(0.0, out, layer_block_bytes, overlapped=False), Copies(back, 0.0, layer_block_bytes))
        return tuple(copy for copy in copies if copy.to_host_bytes or copy.to_device_bytes)

    def moves(self, step_copies: Iterable[Copies]) -> list[tuple[float, bool]]:
        """Seconds of the link for weights and for a step's own copies, and whether the whole step may hide them."""
        return [(self.alone_s(each), each.overlapped) for each in (*self.weights, *step_copies)]

    def alone_s(self, copies: Copies) -> float:
        """Seconds of the link for these copies in isolation."""
        return self._link.transfer_s(copies.to_device_bytes, copies.to_host_bytes, copies.copy_bytes)

    def hidden_and_exposed_s(
        self, moves: Iterable[tuple[float, bool]], busy_s: float, is_recorded: bool
    ) -> tuple[float, float]:
        """Hidden and exposed seconds of a step's copies, which share the time that kernels leave them.

        Where layers wait for their own part, that of the first hides behind nothing: of L layers with copies of c and
        kernels of e seconds, a step waits c if c <= e, and else L c - (L - 1) e. One that is recorded waits L c:
        nothing of it starts before the last of them has left.
        """
        hidden_s = exposed_s = 0.0
        for copy_s, overlapped in moves:
            behind_s = min(copy_s, busy_s - hidden_s)
            if not overlapped:
                behind_s *= 0 if is_recorded else 1 - 1 / self._num_layers
            hidden_s += behind_s
            exposed_s += copy_s - behind_s
        return hidden_s, exposed_s
