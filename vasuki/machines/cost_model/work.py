"""What a step computes, as sums over its chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vasuki.machines.cost_model.copies import Copies

if TYPE_CHECKING:
    from vasuki.engine.batch import Batch


class StepWork(NamedTuple):
    """What a step computes, as sums over its chunks: all that the cost model needs to know.

    A chunk of n tokens that ends at context e counts n to `num_tokens`. If n is 1 it is a decode and counts e to
    `decode_context_tokens`; otherwise it counts e to `chunk_context_tokens` and its n * e - n * (n - 1) / 2 causal
    (query, key) pairs to `chunk_pairs`. The windowed sums are the same for layers with a sliding window.
    """

    num_tokens: int
    num_samples: int
    num_decodes: int = 0
    num_chunks: int = 0  # of more than one token
    decode_context_tokens: int = 0
    chunk_context_tokens: int = 0
    chunk_pairs: float = 0
    windowed_decode_context_tokens: int = 0
    windowed_chunk_context_tokens: int = 0
    windowed_chunk_pairs: float = 0
    copies: tuple[Copies, ...] = ()
    calls: int = 1  # forwards of the model that the step takes

    @property
    def one_call(self) -> StepWork:
        """The mean of its calls, as far as their tokens go."""
        if self.calls == 1:
            return self
        counts = (self.num_tokens, self.num_samples, self.num_decodes, self.num_chunks)
        tokens, samples, decodes, chunks = (round(count / self.calls) for count in counts)
        return self._replace(num_tokens=max(1, tokens), num_samples=samples, num_decodes=decodes, num_chunks=chunks)

    @classmethod
    def of(
        cls,
        tokens: Iterable[int],
        contexts: Iterable[int],
        num_samples: int | None = None,
        window: int = 0,
        copies: tuple[Copies, ...] = (),
    ) -> StepWork:
        """Sum over chunks.

        Args:
            tokens: tokens of each chunk.
            contexts: context length after each chunk.
            num_samples: sampled tokens; one for each chunk if not given.
            window: the model's sliding window in tokens, 0 for none.
            copies: KV that moves meanwhile.
        """
        sizes = list(zip(tokens, contexts, strict=True))
        starts = [end - 1 for count, end in sizes if count == 1]
        chunks = [size for size in sizes if size[0] != 1]
        return cls._sum(starts, chunks, len(sizes) if num_samples is None else num_samples, window, copies)

    @classmethod
    def from_batch(cls, batch: Batch, window: int = 0, copies: tuple[Copies, ...] = ()) -> StepWork:
        """The work of a scheduled batch."""
        starts, chunks, num_samples = batch.starts, [], len(batch.starts)
        for _, start, count, samples in batch.prefills:
            num_samples += samples
            if count == 1:
                starts = [*starts, start]
            else:
                chunks.append((count, start + count))
        return cls._sum(starts, chunks, num_samples, window, copies)

    @classmethod
    def _sum(
        cls,
        starts: list[int],
        chunks: list[tuple[int, int]],
        num_samples: int,
        window: int,
        copies: tuple[Copies, ...],
    ) -> StepWork:
        """Add up the positions of decodes, and tokens and contexts of longer chunks."""
        num_decodes, chunk_tokens = len(starts), 0
        decode_context = windowed_decode_context = sum(starts) + num_decodes
        chunk_context = windowed_chunk_context = 0
        pairs: float = 0
        windowed_pairs: float = 0
        for count, end in chunks:
            chunk_tokens += count
            chunk_context += end
            pairs += causal_pairs(count, end)
            if window:
                windowed_chunk_context += min(end, window + count)
                windowed_pairs += windowed_causal_pairs(count, end, window)
        if window:
            last = window - 1  # position whose token sees just a window
            windowed_decode_context -= sum([start - last for start in starts if start > last])
        else:
            windowed_chunk_context, windowed_pairs = chunk_context, pairs
        return cls(
            num_decodes + chunk_tokens,
            num_samples,
            num_decodes,
            len(chunks),
            decode_context,
            chunk_context,
            pairs,
            windowed_decode_context,
            windowed_chunk_context,
            windowed_pairs,
            copies,
        )


def causal_pairs(num_tokens: int, context: int) -> float:
    """(query, key) pairs of the last `num_tokens` of `context` positions under a causal mask."""
    return num_tokens * context - num_tokens * (num_tokens - 1) / 2


def windowed_causal_pairs(num_tokens: int, context: int, window: int) -> float:
    """Count the pairs where a position sees itself and at most `window - 1` before it."""
    start = context - num_tokens
    growing = max(0, min(context, window) - start)  # leading queries whose window is not full yet
    return growing * start + growing * (growing + 1) / 2 + (num_tokens - growing) * window
