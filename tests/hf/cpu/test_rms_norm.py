"""Fused norms against the models' own."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.rms_norm import FusedNorm, NormKernel, fuse_norms

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def kernel(each_kernels: CPUKernels) -> NormKernel:
    return each_kernels.norm


@given(st.integers(1, 200), st.integers(1, 700), st.sampled_from([LlamaRMSNorm, Gemma2RMSNorm]), st.integers(0, 99))
def test_equals_the_model(kernel: NormKernel, rows: int, width: int, norm: type, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    own = norm(width, eps=1e-5)
    torch.nn.init.normal_(own.weight, 1.0, 0.3, generator=generator)
    model = torch.nn.Sequential(copy.deepcopy(own))
    fuse_norms(model, kernel)
    assert isinstance(model[0], FusedNorm)
    x = torch.randn(1, rows, width, generator=generator) * 10
    with torch.inference_mode():
        torch.testing.assert_close(model(x), own(x), rtol=1e-5, atol=1e-5)


def test_what_only_looks_like_one_is_left_alone(kernel: NormKernel) -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            shifted: torch.Tensor = super().forward(hidden_states) + 0.01
            return shifted

    model = torch.nn.Sequential(ShiftedRMSNorm(16), LlamaRMSNorm(16).bfloat16(), torch.nn.LayerNorm(16))
    before = list(model)
    fuse_norms(model, kernel)
    assert list(model) == before
