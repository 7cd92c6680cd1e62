"""What one step computes, and what comes back.

A batch is a list of chunks laid end to end, without padding, decoding sequences first:

    chunk        B: start=7, 1 token    A: start=0, 5 tokens    C: start=3, 4 tokens
    tokens       b7                     a0 a1 a2 a3 a4          c3 c4 c5 c6
    samples      b8                                             c7   (its prompt ends here)

Decodes are kept as two plain lists, because there are many of them in every step; `chunks` shows both kinds in the same
form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vasuki.engine.depth import DepthStep
from vasuki.engine.sequence import Sequence, TokenLogprob


class ScheduledChunk(NamedTuple):
    """The interval of positions of one sequence that a step computes. A decode is a chunk of one token."""

    sequence: Sequence
    start: int  # first position, equal to the sequence's num_computed_tokens
    num_tokens: int
    samples: bool  # the chunk reaches the last known token, so the step yields the next one

    @property
    def end(self) -> int:
        """Context length after the chunk, in tokens."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks of one sequence that change tier, block by block.

    Blocks that leave are read before the step's kernels may write to their place; blocks that return are in place
    before the next step, in which their sequence runs again.
    """

    sequence: Sequence
    to_host: bool
    device: list[int]
    host: list[int]


@dataclass(slots=True)
class Batch:
    """One step's work."""

    decodes: list[Sequence]  # one token each, which samples the next
    starts: list[int]  # position of each decode's token
    prefills: list[ScheduledChunk]
    swaps: list[Swap]
    depth: DepthStep | None = None  # of its layers, where that is decided batch by batch
    _chunks: list[ScheduledChunk] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All chunks, decodes first."""
        if self._chunks is None:
            decodes = zip(self.decodes, self.starts, strict=True)
            self._chunks = [ScheduledChunk(sequence, start, 1, True) for sequence, start in decodes] + self.prefills
        return self._chunks

    def split(self, num_tokens: int) -> tuple[Batch, Batch]:
        """The first `num_tokens` tokens, and the others, to be computed after them. Swaps are left to the caller.

        The chunk that is cut samples with its second part. Order is kept: chunks may read what earlier ones write.
        """
        num_decodes = min(num_tokens, len(self.decodes))
        left = num_tokens - num_decodes
        first: list[ScheduledChunk] = []
        rest: list[ScheduledChunk] = []
        for chunk in self.prefills:
            take = min(left, chunk.num_tokens)
            left -= take
            if take:
                ends = take == chunk.num_tokens
                first.append(chunk if ends else ScheduledChunk(chunk.sequence, chunk.start, take, False))
            if take < chunk.num_tokens:
                behind = chunk.num_tokens - take
                rest.append(ScheduledChunk(chunk.sequence, chunk.start + take, behind, chunk.samples))
        return (
            Batch(self.decodes[:num_decodes], self.starts[:num_decodes], first, []),
            Batch(self.decodes[num_decodes:], self.starts[num_decodes:], rest, []),
        )

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes)

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.prefills])

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def num_samples(self) -> int:
        return len(self.decodes) + sum([chunk.samples for chunk in self.prefills])

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a token, in batch order."""
        return self.decodes + [chunk.sequence for chunk in self.prefills if chunk.samples]


class StepResult(NamedTuple):
    """One entry for each chunk that samples, in batch order."""

    token_ids: list[int]  # below 0 where the model gave none, which is the sequence's `problem`
    stopped: list[bool]  # an end-of-sequence token or a stop string was met, or there is no token
    elapsed_s: float
    logprobs: tuple[float, ...] | list[float] = ()  # of the sampled tokens, if asked for
    exposed_copy_s: float = 0.0  # copy time the step waited for
    hidden_copy_s: float = 0.0  # copy time behind compute
    copied_bytes: int = 0  # KV that moved between the tiers, in either direction
    num_steps: int = 1  # that it stands for: more than one only where a simulation skipped those before it
    problem: str = ""  # why some sequences have no token
    token_logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob] = ()  # like `logprobs`, to be kept token by token
    values: tuple[Any, ...] | list[Any] = ()  # what is computed in place of tokens; None where a token is

    def wait(self) -> StepResult:
        """A result is a step that is over."""
        return self
