"""Weights that stay on the host and visit the device, for models larger than it.

Decoder layers run in order, step after step, so what comes next is always known: while one layer computes, the next
streamed ones are fetched, across the step's end too.

    layer      0   1   2   3   4   5   0   1 ...     resident: 0 1 3    streamed: 2 4 5, two buffers
    compute   [0] [1] [2] [3] [4] [5] [0] [1]
    buffer A   2-------|   5------------|   2 ...
    buffer B   4---------------|            4 ...

A layer's parameters lie in one flat tensor, so a fetch is one copy; in the buffer they are views of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from vasuki.hf.kv.kv_cache import pinned_zeros
from vasuki.hf.kv.kv_mover import CopyEngine, Done, StreamedLayers, copy_engine
from vasuki.hf.loading.loaded_model import LoadedModel


class _FlatLayer:
    """A layer's parameters and buffers in one flat host tensor, and the module's slots that point to them."""

    def __init__(self, module: torch.nn.Module, pinned: bool) -> None:
        self.tensors = tensors = [*module.parameters(), *module.buffers()]
        # Every tensor starts at a multiple of 64 bytes, as kernels expect of weights.
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.numel() * tensor.element_size() // 64) * 64
        self.host = (pinned_zeros if pinned else torch.empty)((size,), dtype=torch.uint8)
        self._slots = list(zip(tensors, offsets, strict=True))
        for tensor, offset in self._slots:
            self._view(self.host, tensor, offset).copy_(tensor.data)
        self.point_to(self.host)

    def point_to(self, flat: torch.Tensor) -> None:
        """Make the module's parameters views of this tensor."""
        for tensor, offset in self._slots:
            tensor.data = self._view(flat, tensor, offset)

    @staticmethod
    def _view(flat: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        end = offset + tensor.numel() * tensor.element_size()
        return flat[offset:end].view(tensor.dtype).view(tensor.shape)


class WeightStream:
    """Keeps some decoder layers' weights on the host and fetches each just before its turn.

    Args:
        layers: the model's decoder layers, in the order in which they run.
        streamed: which of them live on the host, and the buffers they visit.
        device: where they compute; resident layers are moved there.
        engine: runs the copies while layers compute.
    """

    def __init__(
        self, layers: torch.nn.ModuleList, streamed: StreamedLayers, device: torch.device, engine: CopyEngine
    ) -> None:
        self.engine = engine
        self._buffer_of = streamed.buffer_of
        self._flat: dict[int, _FlatLayer] = {}
        self._fetched: dict[int, Done] = {}
        pinned = device.type == "cuda"
        for index, layer in enumerate(layers):
            if index in self._buffer_of:
                self._flat[index] = _FlatLayer(layer, pinned)
                layer.register_forward_pre_hook(self._before(index))
                layer.register_forward_hook(self._after(index))
            else:
                layer.to(device)
        size = max((flat.host.numel() for flat in self._flat.values()), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(streamed.num_buffers)]
        engine.keep(self._buffers)
        # Who visits each buffer, in order; the first is the next.
        self._visitors = [
            deque(layer for layer, b in self._buffer_of.items() if b == i) for i in range(len(self._buffers))
        ]
        for buffer in range(len(self._buffers)):
            self._fetch_next(buffer)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or buffer of the model visits the device instead of living there."""
        return any(tensor is held for flat in self._flat.values() for held in flat.tensors)

    @property
    def device_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def _before(self, index: int) -> Any:
        def fetch_is_over(module: torch.nn.Module, inputs: Any) -> None:
            self.engine.require(self._fetched.pop(index))
            self._flat[index].point_to(self._buffers[self._buffer_of[index]])

        return fetch_is_over

    def _after(self, index: int) -> Any:
        def hand_on(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._fetch_next(self._buffer_of[index])

        return hand_on

    def _fetch_next(self, buffer: int) -> None:
        visitors = self._visitors[buffer]
        index = visitors[0]
        visitors.rotate(-1)
        host = self._flat[index].host
        target = self._buffers[buffer][: host.numel()]

        def copy() -> int:
            target.copy_(host, non_blocking=True)
            return host.numel()

        self._fetched[index] = self.engine.submit(False, copy, [self.engine.computed()])


def place_weights(loaded: LoadedModel, host_layers: int, engine: CopyEngine | None = None) -> LoadedModel:
    """Move a model's weights to where they live while it runs: `host_layers` layers' on the host, all else on the
    device.

    Returns the model with the engine that brings those layers, if there are any; the device's own if none is given.
    """
    model, device = loaded.model, loaded.device
    if not host_layers:
        model.to(device)
        return loaded
    engine = engine or copy_engine(device)
    layers = decoder_layers(model, loaded.kv_layout.num_layers)
    stream = WeightStream(layers, StreamedLayers.spread(len(layers), host_layers), device, engine)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not stream.holds(tensor):
            tensor.data = tensor.data.to(device)
    return replace(loaded, copies=engine)


def decoder_layers(model: Any, num_layers: int) -> torch.nn.ModuleList:
    """The model's stack of decoder layers: its only module list of that length."""
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if len(stacks) != 1:
        raise LookupError(f"{type(model).__name__} has {len(stacks)} stacks of {num_layers} layers")
    return stacks[0]
