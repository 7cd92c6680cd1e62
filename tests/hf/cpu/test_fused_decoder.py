"""All layers in one call against layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, FUSED, hopeful, load, prompts, reference, requests_of, run, with_kernels
from transformers.models.llama.modeling_llama import LlamaModel

from vasuki.engine.batch import Batch
from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.fused_decoder import DecoderKernel, FusedDecoder
from vasuki.hf.kv.kv_mover import KVMover

pytestmark = pytest.mark.usefixtures("compiler")


def _decoder(model: torch.nn.Module) -> FusedDecoder | None:
    return next((module for module in model.modules() if isinstance(module, FusedDecoder)), None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every call for all layers."""
    tokens: list[int] = []
    own = DecoderKernel.__call__

    def count(self: DecoderKernel, layers: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        tokens.append(len(x))
        return own(self, layers, x, *args)

    monkeypatch.setattr(DecoderKernel, "__call__", count)
    return tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_decoders_and_no_others_are_replaced(name: str, kernels: CPUKernels) -> None:
    assert (_decoder(with_kernels(name, kernels)) is not None) == (name in FUSED)


@pytest.mark.parametrize("chunk_tokens", [3, 64])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("two_threads")
def test_one_call_and_layer_by_layer(name: str, chunk_tokens: int, kernels: CPUKernels, calls: list[int]) -> None:
    """Also in steps in which nothing is sampled."""
    model = with_kernels(name, kernels)
    loaded = dataclasses.replace(load(name), model=model)
    rows, _, stats = run(loaded, requests_of(prompts()), chunk_tokens=chunk_tokens, native=True)
    assert rows.outputs == reference(name)
    assert len(calls) == stats.steps

    decoder = _decoder(model)
    assert decoder is not None
    seen: list[int] = []
    decoder.layers[1].register_forward_hook(lambda layer, args, output: seen.append(output.shape[1]))
    rows, _, _ = run(loaded, requests_of(prompts()), chunk_tokens=chunk_tokens, native=True)
    assert rows.outputs == reference(name)
    assert seen == calls, "who hooks a layer sees it called, and nothing else is"


@pytest.mark.parametrize("way", [{"native": False}, {"native": True, "num_streamed": 1}])
def test_layers_that_something_waits_between_are_called_one_by_one(
    way: dict[str, Any], kernels: CPUKernels, calls: list[int]
) -> None:
    loaded = dataclasses.replace(load("llama"), model=with_kernels("llama", kernels))
    rows, _, _ = run(loaded, requests_of(prompts()), **way)
    assert rows.outputs == reference("llama")
    assert not calls


def test_steps_in_which_no_row_moves_are_one_call(
    kernels: CPUKernels, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those in which one leaves, and those after one has begun to return."""
    batches: list[Batch] = []
    begin = KVMover.begin_step

    def watched(self: KVMover, batch: Batch) -> None:
        batches.append(batch)
        begin(self, batch)

    monkeypatch.setattr(KVMover, "begin_step", watched)
    loaded = dataclasses.replace(load("llama"), model=with_kernels("llama", kernels))
    rows, _, _ = run(loaded, hopeful(requests_of(prompts())), num_blocks=24, host_blocks=60, native=True)
    assert rows.outputs == reference("llama")
    leaves, returns = ([any(swap.to_host is way for swap in batch.swaps) for batch in batches] for way in (True, False))
    moves = [any(pair) for pair in zip(leaves, [False, *returns], strict=False)]
    assert any(leaves)
    assert any(returns)
    computed = [batch.num_tokens for batch, moving in zip(batches, moves, strict=True) if batch.chunks and not moving]
    assert calls == computed


def test_what_only_looks_like_one_is_left_alone(kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.last_hidden_state = 1.1 * output.last_hidden_state
        return output

    monkeypatch.setattr(LlamaModel, "forward", forward)
    assert _decoder(with_kernels("llama", kernels)) is None
