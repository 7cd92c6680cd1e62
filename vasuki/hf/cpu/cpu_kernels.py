"""The compiled kernels that a model's modules give way to on a CPU."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from vasuki.hf.cpu.elementwise import SameAnywhere
from vasuki.hf.cpu.fused_attention import Rotary, fuse_packed_attention
from vasuki.hf.cpu.fused_decoder import DecoderKernel, fuse_decoder
from vasuki.hf.cpu.fused_layer import LayerKernel, fuse_layers
from vasuki.hf.cpu.fused_recurrence import fuse_recurrences
from vasuki.hf.cpu.packed_experts import are_experts, pack_experts
from vasuki.hf.cpu.packed_linear import LinearKernel, PackedLinear, pack_linear_layers
from vasuki.hf.cpu.recurrences import Recurrences
from vasuki.hf.cpu.rms_norm import NormKernel, fuse_norms
from vasuki.hf.kernels import levels, native
from vasuki.hf.kernels.levels import Level

_FEW = 0.02  # of a model's weights, such as Mamba's decays


class CPUKernels(NamedTuple):
    """The kernels of one compiled library."""

    linear: LinearKernel
    norm: NormKernel
    rotate: Rotary
    layer: LayerKernel
    decoder: DecoderKernel
    recurrences: Recurrences
    same_anywhere: SameAnywhere

    @classmethod
    def of(cls, library: ctypes.CDLL) -> CPUKernels:
        """Bind the kernels of a library made from decoder.cpp."""
        linear = LinearKernel(library)
        return cls(
            linear,
            NormKernel(library),
            Rotary(library),
            LayerKernel(library),
            DecoderKernel(library),
            Recurrences(library),
            SameAnywhere(library, linear),
        )

    def install(self, model: torch.nn.Module) -> None:
        """Let a model's layers compute by these kernels.

        Of a model in bfloat16, products are in bfloat16, and everything between them is in float32 from now on. A
        model with matrices outside linear layers and experts stays as it is: they would become twice as large.
        """
        if not self.install_products(model):
            return
        fuse_norms(model, self.norm)
        fuse_recurrences(model, self.recurrences)
        fuse_packed_attention(model, self.linear, self.rotate)
        fuse_layers(model, self.layer)
        fuse_decoder(model, self.decoder)

    def install_products(self, model: torch.nn.Module) -> bool:
        """Let linear layers compute by these kernels, of whatever model. Returns whether they do."""
        if _has_other_matrices(model):
            return False
        pack_experts(model, lambda linear: PackedLinear(linear, self.linear))
        pack_linear_layers(model, self.linear)
        for parameter in model.parameters():
            if parameter.dtype is torch.bfloat16:
                parameter.data = parameter.data.float()
        return True


def _has_other_matrices(model: torch.nn.Module) -> bool:
    """Whether layers that are none of linear, embedding, short convolution and experts hold matrices in bfloat16 that
    count."""
    others = sum(
        parameter.numel()
        for module in model.modules()
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding | torch.nn.Conv1d) and not are_experts(module)
        for parameter in module.parameters(recurse=False)
        if parameter.dtype is torch.bfloat16 and parameter.dim() > 1
    )
    return others > _FEW * sum(parameter.numel() for parameter in model.parameters())


def load_cpu_kernels(level: Level | None = None) -> CPUKernels | None:
    """Load the kernels for this processor, compiled if they are not on disk yet; None if that is not possible.

    Args:
        level: of instructions; that of the environment if None.

    Raises:
        JobFileError: the environment asks for one that cannot be had.
    """
    library = native.load("decoder.cpp", level or levels.chosen())
    return None if library is None else CPUKernels.of(library)
