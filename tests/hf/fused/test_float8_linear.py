"""Products of 8 bits against float64, against transformers with products that round, and where they are refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import RoundedProducts, load, prompts, random_model, reference, requests_of, run

from vasuki.base.errors import ModelError
from vasuki.hf.attention.ragged_attention import NAME, Unsupported
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.fused.float8_linear import Float8Linear, refuse_untried, round_products
from vasuki.hf.kernels.float8 import LARGEST, rounded_rows
from vasuki.hf.loading.quantized import quantize
from vasuki.machines.here.gpu import torch_version
from vasuki.models.config_json import shape_from_config

CPU = torch.device("cpu")
ROUNDING = 2**-4  # of 3 bits of fraction, to the nearest


@given(
    shape=st.tuples(st.integers(1, 40), st.sampled_from([16, 48, 80]), st.sampled_from([16, 32])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_is_the_product_of_what_was_rounded(
    shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, seed: int
) -> None:
    rows, k, n = shape
    torch.manual_seed(seed)
    linear = torch.nn.Linear(k, n, bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, k).to(dtype) * torch.logspace(-8, 8, rows).to(dtype).unsqueeze(1)
    with torch.inference_mode():
        product = Float8Linear(linear)(x.unsqueeze(0))
    assert (product.shape, product.dtype) == ((1, rows, n), dtype)
    (left, by), (right, columns_by) = ((each.double() for each in rounded_rows(side)) for side in (x, linear.weight))
    added = linear.bias.double() if bias else torch.zeros(n).double()
    expected, size = ((a @ b.T) * by * columns_by.T for a, b in ((left, right), (left.abs(), right.abs())))
    assert ((product[0] - expected - added).abs() <= 2 * torch.finfo(dtype).eps * (size + added.abs())).all()


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch's product on CPUs has no scales of rows")
@pytest.mark.parametrize("bias", [False, True])
def test_both_products_agree(bias: bool) -> None:
    torch.manual_seed(1)
    layer = Float8Linear(torch.nn.Linear(80, 48, bias, dtype=torch.bfloat16))
    rows, scales = rounded_rows(torch.randn(17, 80))
    with torch.inference_mode():
        own, plain = (each(rows, scales, torch.bfloat16) for each in (layer.on_gpu, layer.in_float32))
    torch.testing.assert_close(own, plain)


def test_each_row_is_rounded_by_its_own_largest_number() -> None:
    torch.manual_seed(3)
    rows = torch.randn(5, 64)
    rows[1] *= 1e4  # an outlier among rows costs the others nothing
    rows[2] = 0
    rows[3, 7] = 1e6  # and among a row's numbers costs its neighbours
    numbers, scales = rounded_rows(rows)
    assert (numbers[[0, 1, 3, 4]].float().abs().amax(1) == LARGEST).all()
    off = (numbers.float() * scales - rows).abs() / rows.abs().clamp_min(1e-9)
    in_range = rows.abs() >= rows.abs().amax(1, keepdim=True) / LARGEST / 2**6  # where all have 3 bits of fraction
    assert in_range[[0, 1, 4]].float().mean() > 0.9
    assert off[in_range].max() <= ROUNDING
    assert off[2].max() == 0
    assert off[3].median() > ROUNDING


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "ministral3"])
def test_greedy_equals_generate_with_products_that_round(name: str) -> None:
    loaded = load(name)
    model = copy.deepcopy(loaded.model)  # the tests share the original
    fuse_modules(model)
    round_products(model, loaded.kv_layout.num_layers)
    rows, _, _ = run(dataclasses.replace(loaded, model=model), requests_of(prompts()), chunk_tokens=20)
    assert rows.outputs == reference(name, products=RoundedProducts)
    assert rows.outputs != reference(name)


def test_plans_count_the_bytes_of_what_is_loaded() -> None:
    model = copy.deepcopy(load("llama").model).bfloat16()
    config = model.config.to_dict()
    fuse_modules(model)
    round_products(model, model.config.num_hidden_layers)
    held = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    angles = sum(each.numel() * each.element_size() for name, each in model.named_buffers() if "inv_freq" in name)
    shape = shape_from_config(config, "llama").with_dtype("bfloat16")
    narrow = shape.with_dtype("bfloat16", "auto", "float8")
    assert narrow.weight_bytes == held - angles
    assert narrow.layer_weight_bytes < 0.6 * shape.layer_weight_bytes


def test_other_layers_beside_them_are_refused() -> None:
    model = copy.deepcopy(load("llama").model)
    model.model.layers[1].mlp.register_module("another", torch.nn.Identity())
    fuse_modules(model)
    with pytest.raises(Unsupported, match=r"^the MLP of 1 of 3 layers cannot be joined"):
        round_products(model, 3)


def test_odd_widths_are_refused() -> None:
    shared = load("llama").model
    config = copy.deepcopy(shared.config)
    config.intermediate_size = 72
    model = type(shared)(config)
    model.set_attn_implementation(NAME)
    fuse_modules(model)
    with pytest.raises(Unsupported, match=r"its weights of 72 by 32 are not multiples of 16"):
        round_products(model, 3)


def test_what_a_card_cannot_multiply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_untried(CPU)
    multiply = Float8Linear.in_float32

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling\n`cublasLtMatmulAlgoGetHeuristic`")

    monkeypatch.setattr(Float8Linear, "in_float32", fails)
    with pytest.raises(Unsupported, match=r"cannot here: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling$"):
        refuse_untried(CPU)

    def of_many_rows_none(layer: Float8Linear, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        product = multiply(layer, rows, *others)
        return product if len(rows) < 256 else torch.zeros_like(product)

    monkeypatch.setattr(Float8Linear, "in_float32", of_many_rows_none)
    with pytest.raises(Unsupported, match="multiplies them wrongly here"):
        refuse_untried(CPU)


def test_a_torch_that_hangs_on_ada_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.1+cu130")
    with pytest.raises(Unsupported, match=r"may hang with them on this card; 2\.12 and later do not"):
        refuse_untried(torch.device("cuda"))


def _bfloat16(name: str) -> Any:
    model = random_model.__wrapped__(name).bfloat16()
    fuse_modules(model)
    return model


def test_a_model_says_what_8_bits_change(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        quantize(_bfloat16("llama"), "llama", None, CPU)
    assert "llama: products of 8 bits change the next token's probabilities by 0.0" in caplog.text


def test_a_layer_that_looks_at_the_type_of_its_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _bfloat16("ministral3")
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *others: Any, **named: Any) -> Any:
        return own(self, hidden_states.to(self.q_proj.weight.dtype), *others, **named)

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(ModelError, match=r"^ministral3: model.quantization: float8: .*[Ff]loat8.*; leave it out$"):
        quantize(model, "ministral3", None, CPU)


def test_a_model_that_8_bits_change_too_much_is_refused() -> None:
    """One number of an MLP is so large that nothing is left of the others, though what it gives is small."""
    model = random_model.__wrapped__("llama").bfloat16()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= 40
        layer.mlp.up_proj.weight.data[0] *= 1e5
        layer.mlp.down_proj.weight.data[:, 0] /= 1e5
    model.lm_head.weight.data *= 8
    fuse_modules(model)
    with pytest.raises(ModelError, match=r"^llama: model.quantization: float8 changes .* by [\d.]+ nats, which is"):
        quantize(model, "llama", None, CPU)
