"""Packed linear layers against `torch.nn.functional.linear`, their plain twin."""

from __future__ import annotations

import copy
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import load
from transformers.integrations.moe import grouped_mm_experts_forward

from vasuki.hf.cpu.cpu_kernels import CPUKernels
from vasuki.hf.cpu.packed_experts import are_experts, packed_experts
from vasuki.hf.cpu.packed_linear import Format, GatedMLP, LinearKernel, PackedLinear, pack_linear_layers
from vasuki.hf.cpu.rms_norm import FusedNorm

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def kernel(each_kernels: CPUKernels) -> LinearKernel:
    return each_kernels.linear


def _layer(in_features: int, out_features: int, bias: bool, saved_as: torch.dtype, seed: int = 0) -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(saved_as))
    return layer


@given(
    rows=st.integers(1, 130),
    in_features=st.integers(1, 70),
    out_features=st.integers(1, 70),
    bias=st.booleans(),
    saved_as=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_equals_linear(
    kernel: LinearKernel,
    rows: int,
    in_features: int,
    out_features: int,
    bias: bool,
    saved_as: torch.dtype,
    seed: int,
) -> None:
    layer = _layer(in_features, out_features, bias, saved_as, seed)
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        packed = PackedLinear(layer, kernel)
        torch.testing.assert_close(packed(x), layer(x), rtol=1e-4, atol=1e-4)
        assert torch.equal(packed.weight, layer.weight)
        fits = bool((layer.weight.bfloat16().float() == layer.weight).all())
        assert packed.format is (Format.NARROW if fits else Format.WIDE)


@given(rows=st.integers(0, 130), half_in=st.integers(1, 35), out_features=st.integers(1, 70), seed=st.integers(0, 99))
def test_a_layer_in_bfloat16_rounds_what_it_takes(
    rounding_kernels: CPUKernels, rows: int, half_in: int, out_features: int, seed: int
) -> None:
    kernel = rounding_kernels.linear
    layer = _layer(2 * half_in, out_features, True, torch.bfloat16, seed)
    x = torch.randn(rows, 2 * half_in, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        packed = PackedLinear(copy.deepcopy(layer).bfloat16(), kernel)
        assert packed.format is Format.ROUNDED
        torch.testing.assert_close(packed(x), layer(x.bfloat16().float()), rtol=1e-4, atol=1e-4)
        assert torch.equal(packed.weight, layer.weight), "a model's own code computes in float32"
        assert packed.unpacked().dtype is torch.bfloat16


@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("two_threads")
def test_many_rows_on_two_threads(kernel: LinearKernel, saved_as: torch.dtype) -> None:
    layer = _layer(300, 700, True, saved_as)
    x = torch.randn(2, 150, 300, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(layer, kernel)(x), layer(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16])
def test_no_rows_at_all(kernel: LinearKernel, saved_as: torch.dtype) -> None:
    packed = PackedLinear(_layer(30, 70, True, saved_as), kernel)
    assert packed(torch.empty(1, 0, 30)).shape == (1, 0, 70)
    assert kernel.gated(torch.empty(0, 30), packed.matrix, packed.matrix).shape == (0, 70)


@pytest.mark.parametrize(("in_features", "dtype"), [(333, torch.float32), (334, torch.bfloat16)])
def test_a_row_does_not_depend_on_its_neighbours(kernel: LinearKernel, in_features: int, dtype: torch.dtype) -> None:
    packed = PackedLinear(_layer(in_features, 100, False, torch.bfloat16).to(dtype), kernel)
    x = torch.randn(40, in_features, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = packed(x)
        for count in (1, 2, 5, 7, 12):
            assert torch.equal(packed(x[3 : 3 + count]), together[3 : 3 + count])


@given(
    rows=st.integers(1, 130),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    bias=st.booleans(),
    saved_as=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_gated_equals_its_parts(
    kernel: LinearKernel, rows: int, sizes: tuple[int, int], bias: bool, saved_as: torch.dtype, seed: int
) -> None:
    up, gate = (PackedLinear(_layer(*sizes, bias, saved_as, seed + which), kernel) for which in (0, 1))
    x = torch.randn(rows, sizes[0], generator=torch.Generator().manual_seed(seed))
    if up.format is not gate.format:  # tiny float32 weights may happen to fit bfloat16
        return
    with torch.inference_mode():
        expected = torch.nn.functional.silu(gate(x)) * up(x)
        torch.testing.assert_close(kernel.gated(x, up.matrix, gate.matrix), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_another_type_are_taken_as_float32(kernels: CPUKernels) -> None:
    """As of models that bring rows to the type of a layer's weights: the kernels read and write float32 alone."""
    model = copy.deepcopy(load("llama").model)
    kernels.install(model)
    rows = torch.randn(1, 3, 32).bfloat16()
    modules = [module for module in model.modules() if isinstance(module, PackedLinear | GatedMLP | FusedNorm)]
    taken = [module for module in modules if not isinstance(module, PackedLinear) or module.in_features == 32]
    assert {type(module) for module in taken} == {PackedLinear, GatedMLP, FusedNorm}
    for module in taken:
        answer = module(rows)
        assert answer.dtype is torch.float32
        assert torch.equal(answer, module(rows.float()))


def test_mlps_are_replaced_where_they_are_what_they_seem(kernels: CPUKernels) -> None:
    def gated_layers(name: str) -> list[torch.nn.Module]:
        model = copy.deepcopy(load(name).model)
        pack_linear_layers(model, kernels.linear)
        return [module for module in model.modules() if isinstance(module, GatedMLP)]

    assert len(gated_layers("llama")) == 3
    assert not gated_layers("gemma2"), "its activation is another"
    assert not gated_layers("gpt_neox"), "it has no gate"


def test_matrices_that_are_no_linear_layers_keep_a_model_as_it_is(kernels: CPUKernels) -> None:
    model = copy.deepcopy(load("llama").model).bfloat16()
    model.table = torch.nn.Parameter(torch.zeros(60, 60, 60, dtype=torch.bfloat16))
    kernels.install(model)
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_experts_are_packed_and_lose_what_they_were(kernels: CPUKernels) -> None:
    model = copy.deepcopy(load("qwen3_moe").model)
    experts = next(module for module in model.modules() if are_experts(module))
    x, chosen, shares = (
        torch.randn(9, experts.down_proj.shape[1]),
        torch.randint(0, experts.num_experts, (9, 2)),
        torch.rand(9, 2),
    )
    expected = grouped_mm_experts_forward(experts, x, chosen, shares)
    kernels.install(model)
    assert not any(parameter.dim() > 2 for parameter in model.parameters())
    torch.testing.assert_close(packed_experts(experts, x, chosen, shares), expected, rtol=1e-4, atol=1e-5)


def test_layers_that_are_replaced_leave_memory(kernels: CPUKernels) -> None:
    kernel = kernels.linear
    model = torch.nn.Sequential(*(torch.nn.Sequential(_layer(30, 50, False, torch.bfloat16)) for _ in range(3)))
    alive = [weakref.ref(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    left = []
    pack = kernel.pack

    def watch(weight: torch.Tensor) -> tuple[torch.Tensor, Format]:
        left.append(sum(reference() is not None for reference in alive))
        return pack(weight)

    with mock.patch.object(kernel, "pack", watch):
        pack_linear_layers(model, kernel)
    assert left == [3, 2, 1]
