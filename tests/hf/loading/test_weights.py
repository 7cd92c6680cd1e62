"""Streamed weights change nothing but where they are."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tiny_models import ARCHITECTURES, load, prompts, reference, requests_of, run

from vasuki.hf.kv.kv_mover import StreamedLayers, ThreadCopyEngine
from vasuki.hf.loading.weights import WeightStream, decoder_layers

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streamed_weights_change_nothing(name: str) -> None:
    loaded = load(name)
    model = copy.deepcopy(loaded.model)
    stack = decoder_layers(model, loaded.kv_layout.num_layers)
    engine = ThreadCopyEngine(bytes_per_s=2e8)
    stream = WeightStream(stack, StreamedLayers.spread(3, 2), CPU, engine)
    for buffer in stream._buffers:
        assert buffer.numel() % 64 == 0
    streamed = dataclasses.replace(loaded, model=model)
    rows, _, _ = run(streamed, requests_of(prompts()), chunk_tokens=16)
    assert rows.outputs == reference(name)
    assert engine.busy_s > 0


def test_the_device_holds_two_buffers_instead_of_the_streamed_layers() -> None:
    model = copy.deepcopy(load("llama").model)
    stack = decoder_layers(model, 3)
    layer_bytes = sum(p.numel() * p.element_size() for p in stack[1].parameters())
    stream = WeightStream(stack, StreamedLayers.spread(3, 2), CPU, ThreadCopyEngine())
    assert layer_bytes <= stream.device_bytes / 2 <= layer_bytes * 1.05


def test_a_model_without_a_stack_is_told_apart() -> None:
    with pytest.raises(LookupError, match="0 stacks of 5"):
        decoder_layers(load("llama").model, 5)
