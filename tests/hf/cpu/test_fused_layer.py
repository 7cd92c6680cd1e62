"""Decoder layers computed from kernel to kernel against the models' own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, FUSED, load, prompts, reference, requests_of, run, with_kernels
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.fused_layer import FusedLayer
from vasuki.hf.kv.kv_mover import StreamedLayers, ThreadCopyEngine
from vasuki.hf.loading.weights import WeightStream, decoder_layers

pytestmark = pytest.mark.usefixtures("compiler")


def _fused(model: torch.nn.Module) -> list[FusedLayer]:
    return [module for module in model.modules() if isinstance(module, FusedLayer)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_layers_and_no_others_are_replaced(name: str, kernels: CPUKernels) -> None:
    fused = _fused(with_kernels(name, kernels))
    assert len(fused) == (load(name).kv_layout.num_layers if name in FUSED else 0)


@pytest.mark.parametrize("streamed", [0, 2])
@pytest.mark.parametrize("name", FUSED)
def test_greedy_equals_generate(name: str, streamed: int, kernels: CPUKernels) -> None:
    """Also where the weights of layers visit buffers in turn, and so move."""
    loaded = load(name)
    model = with_kernels(name, kernels)
    if streamed:
        stack = decoder_layers(model, loaded.kv_layout.num_layers)
        WeightStream(stack, StreamedLayers.spread(3, streamed), torch.device("cpu"), ThreadCopyEngine(bytes_per_s=2e8))
    rows, _, _ = run(dataclasses.replace(loaded, model=model), requests_of(prompts()), chunk_tokens=20, native=True)
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("two_threads")
def test_so_many_rows_that_threads_take_slabs_of_them(name: str, kernels: CPUKernels) -> None:
    loaded = load(name)
    requests = requests_of(prompts(longest=230))
    models = (loaded.model, with_kernels(name, kernels))
    plain, fused = (
        run(dataclasses.replace(loaded, model=model), requests, chunk_tokens=230, num_blocks=400)[0].outputs
        for model in models
    )
    assert fused == plain


def test_what_only_looks_like_one_is_left_alone(kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaDecoderLayer.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states, *args, **kwargs) + 0.1 * hidden_states

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    assert not _fused(with_kernels("llama", kernels))
