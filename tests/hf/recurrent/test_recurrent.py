"""Layers that carry a state give the tokens of `model.generate`, however the engine cuts and packs the work."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import Kernels
from tiny_models import (
    COMMON,
    RECURRENT,
    NoTokenizer,
    hopeful,
    load,
    prompts,
    random_config,
    random_model,
    reference,
    requests_of,
    run,
)
from transformers import AutoModelForCausalLM, MiniMaxConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from vasuki.base.errors import ModelError
from vasuki.engine.sequence import Request, Sequence, Status
from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.kernels.native import find_compiler
from vasuki.hf.kernels.recurrent_functions import missing_packages
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.recurrent.states import StateCache
from vasuki.models.config_json import shape_from_config

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 10_000])
@pytest.mark.parametrize("name", RECURRENT)
def test_greedy_equals_generate(name: str, chunk_tokens: int) -> None:
    rows, _, _ = run(load(name), requests_of(prompts()), chunk_tokens)
    assert rows.outputs == reference(name)


@needs_compiler
@pytest.mark.parametrize("name", RECURRENT)
def test_compiled_attention_changes_nothing(name: str) -> None:
    rows, _, _ = run(load(name), requests_of(prompts()), chunk_tokens=20, native=True)
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_preempted_rows_begin_again(name: str) -> None:
    rows, scheduler, _ = run(load(name), hopeful(requests_of(prompts())), chunk_tokens=16, num_blocks=24)
    assert scheduler.queues.counters.preemptions_recompute > 0
    assert rows.outputs == reference(name)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_slots_pass_from_row_to_row(max_num_seqs: int) -> None:
    rows, _, stats = run(load("lfm2"), requests_of(prompts()), chunk_tokens=16, max_num_seqs=max_num_seqs)
    assert stats.max_seqs == max_num_seqs
    assert rows.outputs == reference("lfm2")


def test_however_many_rows_end_each_tensor_is_copied_once() -> None:
    recurrent = load("lfm2").recurrent
    assert recurrent is not None
    states = StateCache(recurrent, 12, torch.device("cpu"))
    rows = [Sequence(Request(row, row, 5, 1, np.zeros(5, np.int32)), status=Status.RUNNING) for row in range(12)]
    slot_of = states._slots(rows)
    tensors = [tensor for layer in states.tensors for tensor in layer]
    for tensor in tensors:
        for row in rows:
            tensor[slot_of[row]] = row.request.row
    for ended in (1, 2, 5, 10, 11):
        rows[ended].status = Status.FINISHED
    with Kernels() as kernels:
        slot_of = states._slots([])
    assert sorted(slot_of.values()) == list(range(7))
    assert all(tensor[slot].eq(row.request.row).all() for tensor in tensors for row, slot in slot_of.items())
    assert kernels.counts["index_copy_"] == len(tensors)
    assert kernels.total <= 2 * len(tensors) + 2


def test_steps_launched_ahead_change_nothing() -> None:
    rows, _, _ = run(load("granite_hybrid"), requests_of(prompts()), chunk_tokens=16, steps_ahead=1)
    assert rows.outputs == reference("granite_hybrid")


def test_states_are_counted_as_transformers_keeps_them() -> None:
    """What `generate` holds of one row when it is done."""
    for name in RECURRENT:
        model = random_model(name)
        model.set_attn_implementation("eager")
        cache = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, return_dict_in_generate=True)
        held = 0
        for layer in cache.past_key_values.layers:
            for tensors in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                held += sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
        recurrent = load(name).recurrent
        assert recurrent is not None
        assert recurrent.bytes_per_row == held > 0
        assert shape_from_config(model.config.to_dict(), name).with_dtype("float32").state_bytes == held


def test_a_layer_that_cannot_go_on_with_several_tokens_goes_on_one_by_one() -> None:
    for name in RECURRENT:
        recurrent = load(name).recurrent
        assert recurrent is not None
        assert all(layer.continues == (name != "jamba") for layer in recurrent.layers)


def test_packages_with_kernels_for_cuda_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr("vasuki.hf.kernels.recurrent_functions._is_installed", lambda name: name in installed)
    wanted = {
        "qwen3_5": ["causal-conv1d", "flash-linear-attention"],
        "granite_hybrid": ["causal-conv1d", "mamba-ssm"],
        "jamba": ["causal-conv1d", "mamba-ssm"],
        "lfm2": ["causal-conv1d"],
        "llama": [],
    }
    assert {name: missing_packages(random_model(name)) for name in wanted} == wanted
    installed.add("fla")
    assert missing_packages(random_model("qwen3_5")) == ["causal-conv1d"]


def test_weak_recurrences_of_low_precision_are_told_from_none() -> None:
    """What two tokens leave behind is hardly seen in bfloat16 next to what a token adds by itself."""
    for name in ("jamba", "qwen3_5", "granite_hybrid"):
        torch.manual_seed(0)
        config = random_config(name, initializer_range=0.02)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
        loaded = prepare(model.eval(), NoTokenizer(), model.generation_config, name)
        assert loaded.recurrent is not None
        assert {layer.continues for layer in loaded.recurrent.layers} == {name != "jamba"}


def test_on_a_cpu_layers_compute_by_torch_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuda_alone(*_: object, **__: object) -> None:
        raise AssertionError("called with tensors of a CPU")

    expected = reference("qwen3_5")
    for name in ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule", "causal_conv1d_update"):
        stand_in = functools.wraps(getattr(modeling_qwen3_5, name))(lambda *_, **__: cuda_alone())
        monkeypatch.setattr(modeling_qwen3_5, name, stand_in)
    monkeypatch.setattr("vasuki.hf.kernels.recurrent_functions._is_installed", lambda module: True)
    rows, _, _ = run(load("qwen3_5"), requests_of(prompts()), chunk_tokens=16)
    assert rows.outputs == expected


def test_a_model_that_is_prepared_again_leaves_the_first_one_behind() -> None:
    first, second = load("lfm2"), load("lfm2")
    rows, _, _ = run(second, requests_of(prompts()))
    assert rows.outputs == reference("lfm2")
    with pytest.raises(AssertionError, match="prepared again"):
        run(first, requests_of(prompts()))


def test_many_short_prompts_are_not_filled_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vasuki.hf.recurrent.states._GROUP_TOKENS", 512)  # two prompts
    loaded, seen = load("granite_hybrid"), []
    assert loaded.recurrent is not None
    layer = loaded.recurrent.layers[0]
    compute = layer._compute

    def watched(rows: torch.Tensor, *rest: Any) -> Any:
        seen.append(rows.shape[:2])
        return compute(rows, *rest)

    monkeypatch.setattr(layer, "_compute", watched)
    equal = [prompts()[1][:20]] * 5
    rows, _, _ = run(loaded, requests_of(equal), chunk_tokens=1000)
    assert [shape for shape in seen if shape[1] == 20] == [(2, 20), (2, 20), (1, 20)]
    assert (5, 1) in seen
    assert len({tuple(output) for output in rows.outputs}) == 1


def test_what_keeps_its_state_elsewhere_is_refused_by_name() -> None:
    sizes = {**COMMON, "num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(MiniMaxConfig(**sizes), attn_implementation=NAME).eval()
    with pytest.raises(ModelError, match="MiniMaxForCausalLM: its layers keep their state in a way of their own"):
        prepare(model, NoTokenizer(), model.generation_config, "minimax")


def test_outside_of_steps_a_layer_is_as_its_authors_wrote_it() -> None:
    ids = torch.tensor([prompts()[1]])
    model = random_model("qwen3_next")
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        before = model(input_ids=ids, use_cache=False).logits
        load("qwen3_next")
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before, rtol=0, atol=0)
