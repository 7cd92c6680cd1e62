"""Logits to token ids.

A sampled token is the inverse of the cumulative distribution at a number between 0 and 1 that is a hash of the row's
seed, id, sample index and position. There is no generator whose state neighbours could advance, so a row draws the same
numbers alone, in any batch, and after a restart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels.transfer import to_device

_COLDEST = 1e-30  # temperature up to which a row is greedy: logits divided by less overflow in float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each row of logits, where the logits are."""

    token_ids: torch.Tensor  # int64
    logprobs: torch.Tensor  # float32; empty unless asked for

    @classmethod
    def nothing(cls) -> Sampled:
        """Of a step that only copies."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0))


def sample(logits: torch.Tensor, sequences: list[Sequence], want_logprobs: bool = False) -> Sampled:
    """Choose the next token of each sequence.

    Shapes: logits `[num_sequences, vocab_size]`.
    """
    token_ids = _argmax(logits)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature > _COLDEST]
    if drawn:
        [rows] = to_device(logits.device, np.array(drawn))
        token_ids[rows] = _draw(logits[rows].float(), [sequences[row] for row in drawn])
    logprobs = torch.empty(0)
    if want_logprobs:
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return Sampled(token_ids, logprobs)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Of each row. On a CPU NumPy takes a tenth of torch's time."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def uniform(sequence: Sequence) -> float:
    """The number in [0, 1) that decides the sequence's next token."""
    request = sequence.request
    key = f"{request.sampling.seed}\0{request.id!r}\0{request.sample_index}\0{sequence.num_output_tokens}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    params = [sequence.request.sampling for sequence in sequences]
    device, vocab_size = logits.device, logits.shape[-1]
    temperature, top_p, targets = to_device(
        device,
        np.array([p.temperature for p in params]),
        np.array([p.top_p for p in params]),
        np.array([uniform(sequence) for sequence in sequences]),
    )
    probabilities = torch.softmax(logits / temperature.float().unsqueeze(-1), dim=-1)
    filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if filtered:
        rows, top_k = to_device(
            device, np.array(filtered), np.array([min(params[row].top_k or vocab_size, vocab_size) for row in filtered])
        )
        probabilities[rows] = _keep_top(probabilities[rows], top_k, top_p[rows].float())
    cumulative = probabilities.double().cumsum(dim=-1)
    # Scaled by the total instead of normalised; the last token with any probability absorbs rounding.
    targets = targets.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_(max=vocab_size - 1)


def _keep_top(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the k likeliest tokens, and of those all behind the smallest set that reaches p."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k.unsqueeze(-1), 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    threshold = top_p.unsqueeze(-1) * ordered.sum(dim=-1, keepdim=True)
    ordered = ordered.masked_fill((before >= threshold) & (ranks > 0), 0.0)  # a p of next to nothing keeps one
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered)
