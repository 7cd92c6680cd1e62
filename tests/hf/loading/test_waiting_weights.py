"""Weights that wait on the host: kernels belong to the device that computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.hf.fused.by_torch import SmallKernels
from vasuki.hf.kernels import paged_attention
from vasuki.hf.loading import load_model as loading
from vasuki.hf.loading import prepare, quantized

CUDA = torch.device("cuda")


def refuses_host_tensors(*tensors: Any, **others: Any) -> Any:
    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


def test_a_model_that_waits_gets_no_kernels_of_the_host(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_device = object()
    asked: list[torch.device] = []

    def attention(layout: Any, sharing: int, dtype: torch.dtype, device: torch.device) -> Any:
        asked.append(device)
        return on_device

    def of_the_cpu(*how: Any) -> Any:
        raise AssertionError("a kernel for the CPU's memory would be given pointers of the GPU's")

    triton = SmallKernels(*[refuses_host_tensors] * 4)
    monkeypatch.setattr(loading, "resolve_device", lambda name: CUDA)
    monkeypatch.setattr(loading, "small_kernels", lambda device: triton)
    monkeypatch.setattr(prepare, "tile_attention", attention)
    for needs_a_card in ("give_back", "install_experts"):
        monkeypatch.setattr(loading, needs_a_card, lambda *how: None)
    monkeypatch.setattr(paged_attention, "load_kernel", of_the_cpu)
    loaded = loading.load_model(ModelConfig(path=str(tiny_model), dtype="float32"), stays_on_host=lambda *asked: True)
    assert (loaded.device, loaded.kernel, asked) == (CUDA, on_device, [CUDA])
    assert not loaded.is_on_device
    assert not caplog.messages


@pytest.mark.parametrize(("backend", "reason"), [("auto", "joined layers on a GPU"), ("padded", "packed attention")])
def test_what_does_not_round_products_refuses_to(tiny_model: Path, backend: Any, reason: str) -> None:
    model = ModelConfig(path=str(tiny_model), quantization="float8")
    with pytest.raises(ModelError, match=f"model.quantization: float8 is for {reason}"):
        loading.load_model(model, "cpu", backend=backend)


def test_a_model_that_fits_in_8_bits_moves_to_its_device(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gets the kernels of that device."""
    moved: list[float] = []
    triton = SmallKernels(*[refuses_host_tensors] * 4)

    class OnCard:
        device = CUDA

        def __init__(self, model: Any) -> None:
            self.model = model

    def on_device(self: Any, model: Any) -> Any:
        moved.append(sum(each.numel() * each.element_size() for each in model.parameters()))
        return model if len(moved) == 1 else OnCard(model)

    class Reached(Exception):
        pass

    def gets(model: Any, name: str, kernels: Any) -> None:
        assert (type(model), name, kernels) == (OnCard, str(tiny_model), triton)
        raise Reached

    monkeypatch.setattr(loading, "resolve_device", lambda name: CUDA)
    monkeypatch.setattr(quantized, "refuse_untried", lambda device: None)
    monkeypatch.setattr(loading._Loading, "_on_device", on_device)
    monkeypatch.setattr(loading, "small_kernels", lambda device: triton)
    monkeypatch.setattr(loading, "install_experts", lambda *how: None)
    monkeypatch.setattr(loading, "on_its_device", gets)
    with pytest.raises(Reached):
        loading.load_model(ModelConfig(path=str(tiny_model), dtype="bfloat16", quantization="float8"))
    assert moved[1] < 0.9 * moved[0]


def test_layers_that_are_not_fused_are_said(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "resolve_device", lambda name: CUDA)
    monkeypatch.setattr(prepare, "tile_attention", lambda *how: None)
    for needs_a_card in ("give_back", "install_experts"):
        monkeypatch.setattr(loading, needs_a_card, lambda *how: None)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 1.01 * self.down_proj(self.up_proj(x)))
    with caplog.at_level("INFO", "vasuki"):
        loading.load_model(ModelConfig(path=str(tiny_model), dtype="float32"), stays_on_host=lambda *asked: True)
    said = "the MLP of 2 of 2 layers launch every operator by itself: small steps take longer"
    assert caplog.messages == [f"{tiny_model}: {said}"]
