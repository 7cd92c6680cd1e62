"""Layers that carry a state give the tokens of `model.generate`, however the engine cuts and packs the work."""

from __future__ import annotations

import shutil

import pytest
import torch

from models import RECURRENT, hopeful, load, prompts, random_model, reference, requests_of, run
from vasuki.hf.cuda.recurrences import missing_packages
from vasuki.model_config import shape_from_config

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


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
    assert scheduler.counters.preemptions_recompute > 0
    assert rows.outputs == reference(name)


def test_stalled_rows_keep_their_state() -> None:
    rows, _, _ = run(load("qwen3_5"), requests_of(prompts()), chunk_tokens=16, num_blocks=40, stalled_share=0.8)
    assert rows.outputs == reference("qwen3_5")


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_slots_pass_from_row_to_row(max_num_seqs: int) -> None:
    rows, _, stats = run(load("lfm2"), requests_of(prompts()), chunk_tokens=16, max_num_seqs=max_num_seqs)
    assert stats.max_seqs == max_num_seqs
    assert rows.outputs == reference("lfm2")


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
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


def test_outside_of_steps_a_layer_is_as_its_authors_wrote_it() -> None:
    ids = torch.tensor([prompts()[1]])
    model = random_model("qwen3_next")
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        before = model(input_ids=ids, use_cache=False).logits
        load("qwen3_next")
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before, rtol=0, atol=0)
