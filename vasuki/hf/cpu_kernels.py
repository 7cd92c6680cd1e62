"""The compiled kernels that a model's modules give way to on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vasuki.hf import fused_attention, fused_layer, packed_linear, rms_norm


class CPUKernels(NamedTuple):
    """Those that can be had on this machine."""

    linear: packed_linear.LinearKernel | None
    norm: rms_norm.Kernel | None
    rotate: fused_attention.Rotary | None
    layer: fused_layer.LayerKernel | None

    def take_over(self, model: torch.nn.Module) -> None:
        """Let a model's float32 layers compute by them."""
        if self.linear:
            packed_linear.pack_linear_layers(model, self.linear)
        if self.norm:
            rms_norm.fuse_norms(model, self.norm)
        if self.linear and self.rotate:
            fused_attention.fuse_attention(model, self.linear, self.rotate)
        if self.layer:
            fused_layer.fuse_layers(model, self.layer)


def load_cpu_kernels() -> CPUKernels:
    """Compile what is not on disk yet."""
    return CPUKernels(
        packed_linear.load_kernel(), rms_norm.load_kernel(), fused_attention.load_kernel(), fused_layer.load_kernel()
    )
