"""Attention by torch operators: what it writes down on the way, and which of torch's kernels it asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda, install_guard
from torch.utils._python_dispatch import TorchDispatchMode

from vasuki.hf.attention import plain_attention
from vasuki.hf.attention.plain_attention import Variant, attend_eagerly


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements of a tensor that an operator returns, but for views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, output.numel())
        return output


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_sliced_queries_see_what_they_saw_together(
    window: int | None, softcap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(33, 4, 8), torch.randn(70, 2, 8), torch.randn(70, 2, 8)
    variant = Variant(0.3, window, softcap, torch.randn(4) if has_sinks else None)
    whole = attend_eagerly(query, keys, values, variant)
    monkeypatch.setattr(plain_attention, "_SCORES", 4 * 70 * 5)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        sliced = attend_eagerly(query, keys, values, variant)
    torch.testing.assert_close(sliced, whole)
    most_seen = 70 if window is None else min(70, window + 4)
    # The keys of all heads are the most that is left.
    assert largest.elements <= max(query.numel(), 4 * most_seen * 8, 4 * 5 * (most_seen + has_sinks))
    assert largest.elements < 4 * 33 * most_seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_on_cuda_is_given_a_kv_head_for_each_head(
    dtype: torch.dtype, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that takes masks and float32 takes no heads that share keys: torch would write all scores down."""
    install_guard(compiler)
    asked: list[tuple[int, int, bool]] = []

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append((query.shape[1], key.shape[1], options["enable_gqa"]))
        assert key.shape == value.shape
        return torch.empty_like(query)

    monkeypatch.setattr(plain_attention, "scaled_dot_product_attention", fused)
    with fake_cuda(), torch.device(CUDA):
        query, keys = torch.empty(5, 8, 16, dtype=dtype), torch.empty(9, 2, 16, dtype=dtype)
        output = plain_attention._sdpa(query, keys, keys, Variant(0.25))
    assert asked == [(8, 8, False)]
    assert output.shape == (5, 8, 16)
