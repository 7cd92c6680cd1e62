"""Logits to token ids.

A sampled token is the inverse of the cumulative distribution at a number between 0 and 1 that is a hash of the row's
seed, id, sample index and position. There is no generator whose state neighbours could advance, so a row draws the same
numbers alone, in any batch, and after a restart.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels.top_tokens import keep_top_k, keep_top_p
from vasuki.hf.kernels.transfer import to_device
from vasuki.machines.memory_budget import DRAWN_LOGITS

# A kernel that draws: see `kernels.by_triton.sampling.draw`.
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, bool], None]

NO_TOKEN = -1
_SLICE = 512  # tokens of the vocabulary
_COLDEST = 1e-30  # temperature up to which a row is greedy: logits divided by less overflow in float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry for each row of logits, where the logits are."""

    token_ids: torch.Tensor  # int64; NO_TOKEN where the logits are no numbers
    logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # float32; empty unless asked for
    # The likeliest tokens, `[rows, alternatives]`, and their log-probabilities; empty unless asked for.
    likeliest: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    likely: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    values: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, 0)
    )  # float64 `[rows, width]`, of rows that are read

    @classmethod
    def nothing(cls) -> Sampled:
        """The result of a step that only copies."""
        return cls(torch.empty(0, dtype=torch.int64))

    @classmethod
    def together(cls, pieces: list[Sampled]) -> Sampled:
        """Of pieces of a step, one after another."""
        pieces = [piece for piece in pieces if len(piece.token_ids)]
        if len(pieces) < 2:
            return pieces[0] if pieces else cls.nothing()
        if width := max(piece.values.shape[1] for piece in pieces):
            pieces = [piece if len(piece.values) else piece.without_values(width) for piece in pieces]
        return cls(*map(torch.cat, zip(*(piece.tensors for piece in pieces), strict=True)))

    def without_values(self, width: int) -> Sampled:
        """The same beside others that have some."""
        return replace(self, values=self.token_ids.new_zeros((len(self.token_ids), width), dtype=torch.float64))

    def among(self, rows: torch.Tensor, values: torch.Tensor) -> Sampled:
        """The same at these rows of a step whose others are read."""

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            if not len(tensor):
                return tensor
            return tensor.new_zeros((len(values), *tensor.shape[1:])).index_copy_(0, rows, tensor)

        token_ids, logprobs, likeliest, likely, _ = map(spread, self.tensors)
        return Sampled(token_ids, logprobs, likeliest, likely, values)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order of its arguments."""
        return self.token_ids, self.logprobs, self.likeliest, self.likely, self.values


def sample(
    logits: torch.Tensor,
    sequences: list[Sequence],
    want_logprobs: bool = False,
    draw: Draw | None = None,
    unedited: torch.Tensor | None = None,
    alternatives: int = 0,
) -> Sampled:
    """Choose the next token of each sequence.

    Args:
        logits: `[num_sequences, vocab_size]`.
        sequences: whose settings count.
        want_logprobs: also say how likely each token was.
        draw: a kernel that draws all rows at once.
        unedited: the logits as the model gave them, where they are others: what log-probabilities are of.
        alternatives: how many of the likeliest tokens are told with theirs.
    """
    token_ids, largest = likeliest(logits)
    drawn = [row for row, sequence in enumerate(sequences) if draws(sequence)]
    if draw is not None and drawn:
        asked = _settings(drawn, sequences)
        [settings] = to_device(logits.device, asked.reshape(-1))
        by_count, by_sum = bool((asked[2] > 0).any()), bool((asked[3] < 1).any())
        draw(logits, largest, settings.view(asked.shape), token_ids, by_count, by_sum)
        drawn = []
    for some in _slices(drawn, logits.shape[-1], logits.device):
        [rows] = to_device(logits.device, np.array(some))
        own = logits[rows].float().masked_fill_(~torch.isfinite(largest[rows]).unsqueeze(-1), 0.0)
        tokens = _drawn(own, [sequences[row] for row in some])
        token_ids[rows] = torch.where(token_ids[rows] == NO_TOKEN, NO_TOKEN, tokens)
    if not want_logprobs:
        return Sampled(token_ids)
    own = logits if unedited is None else unedited
    if not alternatives:
        return Sampled(token_ids, logprobs_of(own, token_ids))
    return Sampled(token_ids, logprobs_of(own, token_ids), *_likely(own, alternatives))


def _likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's likeliest tokens, `[rows, count]`, and their log-probabilities."""
    parts = torch.split(logits, max(1, DRAWN_LOGITS // logits.shape[-1]))
    found = [some.float().log_softmax(-1).topk(min(count, logits.shape[-1])) for some in parts]
    return torch.cat([each.indices for each in found]), torch.cat([each.values for each in found])


def draws(sequence: Sequence) -> bool:
    """Whether a sequence's next token is drawn; otherwise it is the likeliest."""
    return sequence.request.sampling.temperature > _COLDEST


def _slices(rows: list[int], vocab_size: int, device: torch.device) -> Iterator[list[int]]:
    """Rows a few at a time: drawing holds several times as much memory as the logits, and CUDA's sort as much again."""
    at_a_time = max(1, DRAWN_LOGITS // vocab_size // (2 if device.type == "cuda" else 1))
    for first in range(0, len(rows), at_a_time):
        yield rows[first : first + at_a_time]


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's token: `[rows, vocab_size]`, `[rows]` -> float32 `[rows]`."""
    at_a_time = max(1, DRAWN_LOGITS // logits.shape[-1])
    parts = zip(torch.split(logits, at_a_time), torch.split(token_ids, at_a_time), strict=True)
    chosen = [some.float().log_softmax(-1).gather(-1, ids.clamp(min=0).unsqueeze(-1)) for some, ids in parts]
    return torch.cat(chosen).squeeze(-1)


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's likeliest token, and its logit: `[rows, vocab_size]` -> int64 `[rows]`, `[rows]`.

    NO_TOKEN where that is no number or infinite: a NaN counts as the largest, and masks leave some logit finite.
    """
    token_ids = argmax(logits)
    largest = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(torch.isfinite(largest), token_ids, NO_TOKEN), largest


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Each row's largest. On a CPU NumPy takes a tenth of torch's time."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def uniform(sequence: Sequence) -> float:
    """The number in [0, 1) that decides the sequence's next token."""
    request = sequence.request
    key = f"{request.sampling.seed}\0{request.id!r}\0{request.sample_index}\0{sequence.num_output_tokens}"
    if failed := request.progress.failed_tries:
        key += f"\0{failed}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _settings(rows: list[int], sequences: list[Sequence]) -> npt.NDArray[np.float64]:
    """What a kernel is told of the rows that it draws, `[6, drawn]`: see `Draw`."""
    params = [sequences[row].request.sampling for row in rows]
    numbers = [uniform(sequences[row]) for row in rows]
    asked = zip(rows, params, numbers, strict=True)
    return np.array([(row, p.temperature, p.top_k, p.top_p, p.min_p, number) for row, p, number in asked]).T


def _drawn(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Draw each row's token; the logits `[rows, vocab_size]` in float32 are overwritten."""
    params = [sequence.request.sampling for sequence in sequences]
    device, vocab_size = logits.device, logits.shape[-1]
    temperature, top_p, numbers = to_device(
        device,
        np.array([p.temperature for p in params]),
        np.array([p.top_p for p in params]),
        np.array([uniform(sequence) for sequence in sequences]),
    )
    # Shares of no particular sum, the largest of a row 1.
    shares = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature.float().unsqueeze(-1)).exp_()
    # By their own k, so that a row's tokens do not depend on its neighbours' settings.
    filtered: dict[int, list[int]] = defaultdict(list)
    for row, p in enumerate(params):
        if p.top_k > 0 or p.top_p < 1:
            filtered[min(p.top_k or vocab_size, vocab_size)].append(row)
    for top_k, some in filtered.items():
        [rows] = to_device(device, np.array(some))
        if top_k == vocab_size:
            shares[rows] = keep_top_p(shares[rows], top_p[rows].float())
        else:
            shares[rows] = keep_top_k(shares[rows], top_k, top_p[rows].float())
    if any(p.min_p for p in params):
        [least] = to_device(device, np.array([p.min_p for p in params], dtype=np.float32))
        shares.masked_fill_(shares < least.unsqueeze(-1), 0.0)
    return _inverse(shares, numbers)


def _inverse(shares: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token at which a row's sum first exceeds a number of its total: `[rows, vocab_size]`, `[rows]` float64 from 0
    to 1, without it -> int64 `[rows]`.

    In two steps, so that no row is summed up token by token: first the slice of the vocabulary, then the token in it.
    """
    vocab_size = shares.shape[-1]
    whole = vocab_size // _SLICE * _SLICE
    slices = shares[:, :whole].view(len(shares), whole // _SLICE, _SLICE)
    sums = [part.sum(dim=-1, dtype=torch.float64) for part in (slices, shares[:, whole:].unsqueeze(1))]
    of_slices = torch.cat(sums, dim=-1).cumsum(dim=-1)
    numbers = numbers.unsqueeze(-1) * of_slices[:, -1:]
    place = _first_beyond(of_slices, numbers)
    places = place * _SLICE + torch.arange(_SLICE, device=shares.device)
    within = shares.gather(-1, places.clamp(max=vocab_size - 1)).double().masked_fill_(places >= vocab_size, 0.0)
    before = torch.nn.functional.pad(of_slices, (1, 0)).gather(-1, place)
    return (place * _SLICE + _first_beyond(within.cumsum_(dim=-1), (numbers - before).clamp_(min=0))).squeeze(-1)


def _first_beyond(sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The place of the first of rising sums that exceeds a number, `[rows, count]` and `[rows, 1]`; a number that
    rounding has brought to the last sum is just below it."""
    below = torch.nextafter(sums[:, -1:], torch.zeros_like(sums[:, -1:]))
    return torch.searchsorted(sums, torch.minimum(numbers, below), right=True)
