"""Whole steps on a CUDA device without a card: shapes, types and devices are checked, and nothing may wait for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fake_cuda import CUDA, Kernels, Recording, fake_cuda, install_guard
from tiny_models import ARCHITECTURES, NoTokenizer, random_config, random_model
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.blocks import BlockTable
from vasuki.engine.sequence import Request, Sequence
from vasuki.hf.attention import inputs
from vasuki.hf.attention.inputs import build_inputs
from vasuki.hf.cuda.decode_graphs import Replay, _Recorded, can_record
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.kernels import experts, varlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.loading.load_model import LoadedModel, prepare
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.machines.cost_model.stages import LAUNCHED_PER_LAYER

# Operators that a step of three layers dispatches: decodes, and decodes beside prompts. They may only go down.
MOST_KERNELS = {"decodes": 65, "mixed": 75}

NOT_RECORDED = {"gemma2", "gpt_oss"}  # whose attention depends on the lengths of contexts


@pytest.fixture(autouse=True)
def _card(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_guard(compiler)

    def on_the_card(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        together = np.concatenate(arrays)
        assert {array.dtype for array in arrays} == {together.dtype}
        on_host = torch.empty(len(together), dtype=torch.from_numpy(together[:0]).dtype)
        return list(torch.split(on_host.to(device), [len(array) for array in arrays]))

    for module in (inputs, varlen):
        monkeypatch.setattr(module, "to_device", on_the_card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.fixture
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


def _model(name: str, **changed: Any) -> LoadedModel:
    with unset_fake_temporarily():  # modules are compared by what they answer, and fake ones answer nothing
        config = random_config(name, **changed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="vasuki_ragged"
        ).eval()
        fuse_modules(model)
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA))
    experts.install_experts(model, CUDA)
    return prepare(model, NoTokenizer(), transformers.GenerationConfig(eos_token_id=2), name)


def _batches() -> dict[str, Batch]:
    def sequence(row: int, tokens: int, computed: int) -> Sequence:
        request = Request(row, row, tokens, 8, np.arange(tokens, dtype=np.int32) + 3)
        return Sequence(request, num_computed_tokens=computed, block_table=BlockTable(device=[row]))

    decodes, prompts = [sequence(row, 40, 39) for row in (0, 1)], [sequence(row, 20, 0) for row in (2, 3)]
    chunks = [ScheduledChunk(prompts[0], 0, 20, True), ScheduledChunk(prompts[1], 0, 7, False)]
    return {"decodes": Batch(decodes, [39, 39], [], []), "mixed": Batch(decodes, [39, 39], chunks, [])}


def _steps(loaded: LoadedModel) -> dict[str, Kernels]:
    cache = KVCache(loaded.kv_layout, 4, 256, CUDA)
    executor, counted = RaggedExecutor(loaded, cache), {}
    for title, batch in _batches().items():
        with Kernels() as counted[title], torch.inference_mode():
            logits = executor.forward(build_inputs(batch, cache, CUDA))
        assert logits.shape == (len(batch.decodes) + (title == "mixed"), loaded.vocab_size)
        assert (logits.device, logits.dtype) == (CUDA, torch.bfloat16)
    return counted


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_of_every_architecture_stay_on_the_card(name: str, fake: None) -> None:
    _steps(_model(name))


def test_a_layer_that_waits_for_the_card_is_found(fake: None) -> None:
    class Waits(torch.nn.SiLU):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows if rows.sum().item() else -rows)

    loaded = _model("llama")
    loaded.model.model.layers[1].mlp.act_fn = Waits()
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        _steps(loaded)


def test_a_tensor_on_the_host_is_found(fake: None) -> None:
    loaded = _model("llama")
    loaded.model.model.norm.weight = torch.nn.Parameter(torch.empty(32, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="device"):
        _steps(loaded)


def test_kernels_of_a_step_only_become_fewer(fake: None) -> None:
    assert {title: kernels.total for title, kernels in _steps(_model("llama")).items()} == MOST_KERNELS


def test_the_cost_model_counts_what_a_layer_launches(fake: None) -> None:
    fewer, more = (_steps(_model("llama", num_hidden_layers=layers))["mixed"].total for layers in (3, 4))
    assert more - fewer == LAUNCHED_PER_LAYER


def _recorded(loaded: LoadedModel) -> torch.Tensor:
    """Logits of decodes in a graph of four rows, which is recorded for them."""
    cache = KVCache(loaded.kv_layout, 5, 256, CUDA)
    forward = RaggedExecutor(loaded, cache).forward

    def record(compute: Replay) -> Replay:
        with Recording():
            logits = compute()
        return lambda: logits

    with torch.inference_mode():
        return _Recorded(4, 1, cache, forward, record, None)(build_inputs(_batches()["decodes"], cache, CUDA))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decodes_are_recorded_without_a_copy(name: str, fake: None) -> None:
    loaded = _model(name)
    assert can_record(loaded, 256) == (name not in NOT_RECORDED)
    if name not in NOT_RECORDED:
        assert _recorded(loaded).shape == (2, loaded.vocab_size)


def test_a_layer_that_brings_something_from_the_host_is_not_recorded(fake: None) -> None:
    class Brings(torch.nn.SiLU):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * torch.ones(rows.shape[-1]).to(rows)

    loaded = _model("llama")
    _recorded(loaded)
    loaded.model.model.layers[1].mlp.act_fn = Brings()
    with pytest.raises(RuntimeError, match="capturing"):
        _recorded(loaded)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.inference_mode()
def test_all_experts_answer_as_those_chosen(name: str) -> None:
    plain = random_model.__wrapped__(name)
    plain.set_attn_implementation("eager")
    ours = copy.deepcopy(plain)
    plain.config._experts_implementation = "eager"
    experts.use_all_experts(ours)
    tokens = torch.arange(3, 43).unsqueeze(0)
    torch.testing.assert_close(ours(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [experts.MOST_ROWS, experts.MOST_ROWS + 1])
def test_few_rows_go_through_all_experts(rows: int) -> None:
    model = random_model.__wrapped__("qwen3_moe")  # of its own: others give theirs our attention
    experts.use_all_experts(model)
    with Kernels() as kernels, torch.inference_mode():
        model(torch.full((1, rows), 5))
    assert bool(kernels.counts["_grouped_mm"]) == (rows > experts.MOST_ROWS)
