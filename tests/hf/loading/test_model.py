"""What cannot be served is refused by name, and types are chosen by what the device does well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import ARCHITECTURES, NoTokenizer, load, random_config

from vasuki.base.errors import ModelError
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.loading.load_model import resolve_device, resolve_dtype
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.machines.here import control_group
from vasuki.models.config_json import shape_from_config

SMALL: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LATENT: dict[str, Any] = dict(
    **dict(intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2),
    **dict(n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8),
    **dict(qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=9, num_key_value_heads=4),
)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "alibi": (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "Bloom"),
    "no interface": (
        lambda: transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        "GPTJ",
    ),
    "wide values": (
        lambda: transformers.DeepseekV3Config(**SMALL, **LATENT),
        "value heads have 9 dimensions and its keys 8",
    ),
    "not causal": (
        lambda: transformers.BertConfig(**SMALL, intermediate_size=32),
        "attend to those behind them",
    ),
    "window in the mask": (
        lambda: transformers.PhimoeConfig(**SMALL, intermediate_size=32, num_local_experts=4, sliding_window=9),
        "window of its attention is in its mask",
    ),
    "two attentions in a layer": (lambda: transformers.DiffLlamaConfig(**SMALL), "more than once in a layer"),
    "no way for a step": (
        lambda: transformers.NemotronConfig(**SMALL, intermediate_size=32, num_key_value_heads=4),
        "does not hand keyword arguments on",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_feature_that_is_missing_is_named(name: str) -> None:
    make_config, words = REFUSED[name]
    model = transformers.AutoModelForCausalLM.from_config(make_config())
    with pytest.raises(ModelError, match=words):
        _prepare(model)


def test_a_window_that_holds_all_positions_is_none() -> None:
    config = transformers.PhimoeConfig(
        **SMALL, intermediate_size=32, num_local_experts=4, sliding_window=128, max_position_embeddings=128
    )
    _prepare(transformers.AutoModelForCausalLM.from_config(config))


def test_rows_end_before_rotary_embeddings_would_change(caplog: pytest.LogCaptureFixture) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    loaded = _prepare(transformers.AutoModelForCausalLM.from_config(random_config("llama", rope_parameters=dynamic)))
    assert loaded.max_context == 256, "which change beyond the model's positions"
    assert "rows of over 256 tokens" in caplog.text
    loaded = _prepare(transformers.AutoModelForCausalLM.from_config(random_config("phi3")))
    assert loaded.max_context == 80, "which change beyond the first training's"
    assert "rows of over 80 tokens" in caplog.text


@pytest.mark.parametrize(
    ("eos", "words"),
    [
        (2, "its tokenizer"),
        ([2, 3], "end with <pad> or !, as"),
        ([2, 1], ""),
        (1, ""),
    ],
)
def test_an_end_token_that_ends_no_answer_is_named(
    tiny_model: Path, eos: int | list[int], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(random_config("llama"), attn_implementation="vasuki_ragged")
    prepare(model.eval(), Tokenizer(str(tiny_model)), transformers.GenerationConfig(eos_token_id=eos), "tiny")
    assert ("name that in sampling.stop" in caplog.text) == bool(words)
    assert words in caplog.text


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt_neox"])  # knows no num_key_value_heads
def test_its_shape_is_read_off_its_config(name: str) -> None:
    """What is planned with is what is stored, and loaded."""
    loaded = load(name)
    shape = shape_from_config(loaded.config.to_dict(), name).with_dtype("float32")
    stored = loaded.kv_layout.bytes_per_token
    assert stored <= shape.kv_bytes_per_token < stored + 8 * shape.num_layers, "rounded up to whole numbers a layer"
    roughly = 0.08 if name == "gemma4" else 0  # layers that have no values of their own, or no keys either
    assert shape.num_parameters == pytest.approx(loaded.model.num_parameters(), rel=roughly)


def _prepare(model: Any) -> LoadedModel:
    try:
        model.set_attn_implementation("vasuki_ragged")
    except Exception as error:  # models outside the interface may say so themselves
        raise ModelError(f"{type(model).__name__}: {error}") from None
    return prepare(model.eval(), NoTokenizer(), model.generation_config, type(model).__name__)


def test_bfloat16_is_kept_where_the_processor_has_it() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert resolve_dtype("auto", torch.bfloat16, cpu, None) is (torch.bfloat16 if fast else torch.float32)
    if kernels := load_cpu_kernels():
        fast = kernels.linear.multiplies_bfloat16
        assert resolve_dtype("auto", torch.bfloat16, cpu, kernels) is (torch.bfloat16 if fast else torch.float32)
    assert resolve_dtype("auto", torch.float16, cpu, None) is torch.float32
    assert resolve_dtype("auto", torch.bfloat16, cuda, None) is torch.bfloat16
    assert resolve_dtype("bfloat16", torch.float32, cpu, None) is torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device("cuda")


def test_a_quota_keeps_torch_to_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(control_group, "processor_quota", lambda: 1.6)
    try:
        torch.set_num_threads(4)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")  # somebody knows better
        assert (resolve_device("cpu").type, torch.get_num_threads()) == ("cpu", 4)
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert (resolve_device("cpu").type, torch.get_num_threads()) == ("cpu", 1)
        assert os.environ["OMP_NUM_THREADS"] == "1", "which kernels read that are loaded later"
    finally:
        torch.set_num_threads(before)
        monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is put back
