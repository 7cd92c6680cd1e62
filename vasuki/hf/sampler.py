"""Logits to token ids.

A sampled token is the inverse of the cumulative distribution at a number between 0 and 1 that is a hash of the row's
seed, id, sample index and position. There is no generator whose state neighbours could advance, so a row draws the same
numbers alone, in any batch, and after a restart.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels.transfer import to_device
from vasuki.machines.memory_budget import DRAWN_LOGITS

_COLDEST = 1e-30  # temperature up to which a row is greedy: logits divided by less overflow in float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each row of logits, where the logits are."""

    token_ids: torch.Tensor  # int64
    logprobs: torch.Tensor  # float32; empty unless asked for

    @classmethod
    def nothing(cls) -> Sampled:
        """The result of a step that only copies."""
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0))

    @classmethod
    def together(cls, pieces: list[Sampled]) -> Sampled:
        """Of pieces of a step, one after another."""
        pieces = [piece for piece in pieces if len(piece.token_ids)]
        if len(pieces) < 2:
            return pieces[0] if pieces else cls.nothing()
        return cls(torch.cat([piece.token_ids for piece in pieces]), torch.cat([piece.logprobs for piece in pieces]))


def sample(logits: torch.Tensor, sequences: list[Sequence], want_logprobs: bool = False) -> Sampled:
    """Choose the next token of each sequence.

    Shapes: logits `[num_sequences, vocab_size]`.
    """
    token_ids = _argmax(logits)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature > _COLDEST]
    for some in _slices(drawn, logits.shape[-1]):
        [rows] = to_device(logits.device, np.array(some))
        token_ids[rows] = _draw(logits[rows].float(), [sequences[row] for row in some])
    logprobs = torch.empty(0)
    if want_logprobs and len(logits):
        every = _slices(list(range(len(logits))), logits.shape[-1])
        logprobs = torch.cat([_logprobs(logits[s[0] : s[-1] + 1], token_ids[s[0] : s[-1] + 1]) for s in every])
    return Sampled(token_ids, logprobs)


def _slices(rows: list[int], vocab_size: int) -> Iterator[list[int]]:
    """Rows a few at a time: what drawing holds beside the logits is several times as large as they are."""
    at_a_time = max(1, DRAWN_LOGITS // vocab_size)
    for first in range(0, len(rows), at_a_time):
        yield rows[first : first + at_a_time]


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each row's token: `[rows, vocab_size]`, `[rows]` -> `[rows]`."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Find each row's largest. On a CPU NumPy takes a tenth of torch's time."""
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
    # By their own k, so that a row's tokens do not depend on its neighbours' settings.
    filtered: dict[int, list[int]] = defaultdict(list)
    for row, p in enumerate(params):
        if p.top_k > 0 or p.top_p < 1:
            filtered[min(p.top_k or vocab_size, vocab_size)].append(row)
    for top_k, some in filtered.items():
        [rows] = to_device(device, np.array(some))
        probabilities[rows] = _keep_top(probabilities[rows], top_k, top_p[rows].float())
    cumulative = probabilities.double().cumsum(dim=-1)
    # Scaled by the total instead of normalised; the last token with any probability absorbs rounding.
    targets = targets.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_(max=vocab_size - 1)


def _keep_top(probabilities: torch.Tensor, top_k: int, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the k likeliest tokens, and of those all behind the smallest set that reaches p.

    Args:
        probabilities: `[rows, vocab_size]`.
        top_k: at least 1. Up to a quarter of the vocabulary those tokens alone are put in order.
        top_p: `[rows]`; one of next to nothing keeps the likeliest token.
    """
    if top_k <= probabilities.shape[-1] // 4:
        ordered, order = probabilities.topk(top_k, dim=-1)
    else:
        ordered, order = (each[:, :top_k] for each in probabilities.sort(dim=-1, descending=True, stable=True))
    before = ordered.cumsum(dim=-1) - ordered
    threshold = top_p.unsqueeze(-1) * ordered.sum(dim=-1, keepdim=True)
    ranks = torch.arange(top_k, device=ordered.device)
    ordered = ordered.masked_fill((before >= threshold) & (ranks > 0), 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered)
