"""A model whose products are to have 8 bits: rounded, or refused where that changes too much of what it says."""

from __future__ import annotations

import logging
from typing import Any

import torch

from vasuki.base.errors import ModelError
from vasuki.hf.attention.probe import likelihoods
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.fused.attention import store_as_they_project
from vasuki.hf.fused.by_torch import SmallKernels
from vasuki.hf.fused.float8_linear import refuse_untried, round_products, use_kernels
from vasuki.hf.loading.defaults import first_line

log = logging.getLogger(__name__)

_MOST_NATS = 0.5  # SmolLM2 135M: 0.08
_MOST_APART = 0.01  # by sums in another order, which now and then round to another of 8 bits


def quantize(model: Any, name: str, kernels: SmallKernels | None, device: torch.device) -> None:
    """Round the products of a model whose layers are joined, where its weights lie.

    Args:
        model: a causal LM that computes in bfloat16.
        name: as errors call it.
        kernels: ours, where there are such.
        device: that computes.

    Raises ModelError by name where the card, this torch or the model does not do, and where the next token's
    probabilities change by more than half a nat (Kullback and Leibler's divergence, mean of a few tokens).
    """
    try:
        refuse_untried(device)
        before = likelihoods(model)
        round_products(model, model.config.get_text_config().num_hidden_layers, kernels)
        after = likelihoods(model)
    except (Unsupported, RuntimeError, ValueError, TypeError) as error:  # of a layer that looks at its weights' type
        raise ModelError(f"{name}: model.quantization: float8: {first_line(error)}; leave it out") from error
    nats = nats_apart(before, after)
    if not nats <= _MOST_NATS:  # nor no number
        raise ModelError(
            f"{name}: model.quantization: float8 changes the next token's probabilities by {nats:.2g} nats, which is "
            f"more than {_MOST_NATS}; leave it out"
        )
    log.info("%s: products of 8 bits change the next token's probabilities by %.2g nats", name, nats)


def on_its_device(model: Any, name: str, kernels: SmallKernels | None) -> None:
    """Give a model that has moved to a device, since in 8 bits it fits there, the kernels of that device; with a
    warning where it would say something else with them."""
    expected = likelihoods(model)
    use_kernels(model, kernels)
    if not (nats_apart(expected, likelihoods(model)) <= _MOST_APART and store_as_they_project(model)):
        log.warning("%s: torch's operators compute its layers, since Triton's kernels answer otherwise", name)
        use_kernels(model, None)


def nats_apart(expected: torch.Tensor, answers: torch.Tensor) -> float:
    """Kullback and Leibler's divergence, mean of some tokens."""
    return float((expected.exp() * (expected - answers)).sum(-1).mean())
