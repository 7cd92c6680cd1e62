"""Whole steps on a CUDA device without a card: shapes, types and devices are checked, and nothing may wait for it."""

from __future__ import annotations

import copy
import dataclasses
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
    FakeTensor,
    unset_fake_temporarily,
)

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.blocks import BlockTable
from vasuki.engine.sequence import Request, Sequence
from vasuki.hf.attention import inputs
from vasuki.hf.attention.inputs import build_inputs
from vasuki.hf.cuda.decode_graphs import Replay, _Recorded, attends_by_varlen, can_record
from vasuki.hf.fused.by_torch import SmallKernels, fuse_modules
from vasuki.hf.kernels import experts, varlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.loading.load_model import LoadedModel, prepare
from vasuki.hf.ragged_executor import RaggedExecutor
from vasuki.machines.cost_model import launches_of
from vasuki.machines.cost_model.stages import MOST_ROWS_OF_ALL_EXPERTS
from vasuki.models.config_json import shape_from_config

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # a sigmoid far out

# Kernels that a step of three layers launches: decodes, and decodes beside prompts. They may only go down.
MOST_KERNELS = {"decodes": 65, "mixed": 75}
MOST_BESIDE_OURS = {"decodes": 50, "mixed": 60}  # with Triton's


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


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> SmallKernels:
    """Triton's kernels, of which a launch is counted, and computes nothing."""
    pytest.importorskip("triton")
    from vasuki.hf.kernels.by_triton import attention, layer

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors):
            kernel[grid](*arguments, **sizes)  # while modules are compared
            return
        assert {each.device for each in tensors} == {CUDA}
        assert all(size > 0 for size in grid)
        tensors[0].neg()

    for module in (attention, layer):
        monkeypatch.setattr(module, "launch", launch)
    return SmallKernels(layer.turn_and_store, layer.gated)


def _model(name: str, kernels: SmallKernels | None = None, **changed: Any) -> LoadedModel:
    with unset_fake_temporarily():  # modules are compared by what they answer, and fake ones answer nothing
        config = random_config(name, **changed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="vasuki_ragged"
        ).eval()
        fuse_modules(model, kernels)
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA))
    experts.install_experts(model, CUDA)
    loaded = prepare(model, NoTokenizer(), transformers.GenerationConfig(eos_token_id=2), name, uses_kernels=False)
    if kernels is None:
        return loaded
    from vasuki.hf.kernels.by_triton.attention import TileAttention

    return dataclasses.replace(loaded, kernel=TileAttention(4, torch.bfloat16))


def _batches() -> dict[str, Batch]:
    def sequence(row: int, tokens: int, computed: int) -> Sequence:
        request = Request(row, row, tokens, 8, np.arange(tokens, dtype=np.int32) + 3)
        return Sequence(request, num_computed_tokens=computed, block_table=BlockTable(device=[row]))

    decodes, prompts = [sequence(row, 40, 39) for row in (0, 1)], [sequence(row, 20, 0) for row in (2, 3)]
    chunks = [ScheduledChunk(prompts[0], 0, 20, True), ScheduledChunk(prompts[1], 0, 7, False)]
    return {"decodes": Batch(decodes, [39, 39], [], []), "mixed": Batch(decodes, [39, 39], chunks, [])}


def _steps(loaded: LoadedModel) -> dict[str, Kernels]:
    cache = KVCache(loaded.kv_layout, 4, 256, CUDA)
    kernel = None if attends_by_varlen(loaded, 256) else loaded.kernel
    executor, counted = RaggedExecutor(loaded, cache, kernel=kernel), {}
    for title, batch in _batches().items():
        with Kernels() as counted[title], torch.inference_mode():
            logits = executor.forward(build_inputs(batch, cache, CUDA, kernel))
        assert logits.shape == (len(batch.decodes) + (title == "mixed"), loaded.vocab_size)
        assert (logits.device, logits.dtype) == (CUDA, torch.bfloat16)
    return counted


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_of_every_architecture_stay_on_the_card(name: str, fake: None) -> None:
    _steps(_model(name))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_steps_by_our_kernels_stay_on_the_card(name: str, ours: SmallKernels, fake: None) -> None:
    _steps(_model(name, ours))


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


def test_ours_take_the_place_of_several(ours: SmallKernels, fake: None) -> None:
    counts = {title: kernels.total for title, kernels in _steps(_model("llama", ours)).items()}
    assert counts == MOST_BESIDE_OURS


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cost_model_counts_what_a_step_launches(name: str, ours: SmallKernels, fake: None) -> None:
    """Beside what samples a token and fetches it."""
    loaded = _model(name, ours)
    shape = shape_from_config(loaded.config.to_dict(), name)
    launches = launches_of(shape, "gpu")
    foreseen = launches.layer * shape.num_layers + launches.outside - 2
    assert abs(_steps(loaded)["mixed"].total - foreseen) <= shape.num_layers / 2


def _recorded(loaded: LoadedModel) -> torch.Tensor:
    """Logits of decodes in a graph of four rows, which is recorded for them."""
    cache = KVCache(loaded.kv_layout, 5, 256, CUDA)
    kernel = None if attends_by_varlen(loaded, 256) else loaded.kernel
    forward = RaggedExecutor(loaded, cache, kernel=kernel).forward

    def record(compute: Replay) -> Replay:
        with Recording():
            logits = compute()
        return lambda: logits

    with torch.inference_mode():
        return _Recorded(4, 1, cache, forward, record, None, kernel)(
            build_inputs(_batches()["decodes"], cache, CUDA, kernel)
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decodes_are_recorded_without_a_copy(name: str, ours: SmallKernels, fake: None) -> None:
    loaded = _model(name, ours)
    assert can_record(loaded, 256)
    assert _recorded(loaded).shape == (2, loaded.vocab_size)


def test_without_ours_soft_caps_are_not_recorded(fake: None) -> None:
    """Attention by torch's operators depends on the lengths of contexts."""
    assert not can_record(_model("gemma2"), 256)
    assert can_record(_model("llama"), 256)


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
    assert bool(kernels.counts["_grouped_mm"]) == (rows > MOST_ROWS_OF_ALL_EXPERTS)
