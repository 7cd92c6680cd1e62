"""The compiled kernels that a model's modules give way to on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vasuki.hf import native
from vasuki.hf.fused_attention import Rotary, fuse_attention
from vasuki.hf.fused_layer import LayerKernel, fuse_layers
from vasuki.hf.packed_linear import LinearKernel, pack_linear_layers
from vasuki.hf.rms_norm import NormKernel, fuse_norms


class CPUKernels(NamedTuple):
    """Those of one compiled library: all of them, or none."""

    linear: LinearKernel
    norm: NormKernel
    rotate: Rotary
    layer: LayerKernel

    def take_over(self, model: torch.nn.Module) -> None:
        """Let a model's float32 layers compute by them."""
        pack_linear_layers(model, self.linear)
        fuse_norms(model, self.norm)
        fuse_attention(model, self.linear, self.rotate)
        fuse_layers(model, self.layer)


def load_cpu_kernels() -> CPUKernels | None:
    """Those for this processor, compiled if they are not on disk yet; None if they cannot be had."""
    library = native.load("decoder_layer.cpp")
    if library is None:
        return None
    return CPUKernels(LinearKernel(library), NormKernel(library), Rotary(library), LayerKernel(library))
