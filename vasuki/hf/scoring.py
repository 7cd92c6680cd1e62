"""How likely the model finds texts that it is given, in place of tokens that it would choose.

Of a row's prompt, the last positions each predict a token that is known: the next one of the prompt, and at the end the
text's last. Their log-probabilities are summed over the chunks in which they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.sampler import logprobs_of

MOST_LOGITS = 2**27  # of positions that are scored at once: half a gigabyte in float32


@dataclass(frozen=True, slots=True)
class ScoredPositions:
    """What is scored in a batch.

    Args:
        places: of the positions within the step `[num_positions]`.
        targets: the tokens that they predict `[num_positions]`.
        chunk_of: the chunk that each lies in `[num_positions]`.
    """

    places: Ints
    targets: Ints
    chunk_of: Ints

    @classmethod
    def of(cls, batch: Batch) -> ScoredPositions:
        places, targets, chunk_of = [], [], []
        first = 0  # place of the chunk
        for index, chunk in enumerate(batch.chunks):
            request = chunk.sequence.request
            if count := request.num_targets:
                begin = request.num_prompt_tokens - count  # the first position that is scored
                own = np.arange(max(chunk.start, begin), chunk.end)
                places.append(own - chunk.start + first)
                targets.append(np.asarray(request.targets)[own - begin])
                chunk_of.append(np.full(len(own), index))
            first += chunk.num_tokens
        if not places:
            return cls(*(np.empty(0, np.int64) for _ in range(3)))
        return cls(*(np.concatenate(each).astype(np.int64) for each in (places, targets, chunk_of)))


class Scores:
    """Sums of rows that were computed in part."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, batch: Batch, positions: ScoredPositions, logits: torch.Tensor) -> dict[int, torch.Tensor]:
        """The sums of the rows whose last position is among these, by chunk.

        Args:
            batch: that was computed.
            positions: of it.
            logits: at these positions `[num_positions, vocab_size]`.
        """
        targets, chunk_of = to_device(logits.device, positions.targets, positions.chunk_of)
        sums = torch.zeros(len(batch.chunks), dtype=torch.float64, device=logits.device)
        if len(targets):
            sums.index_add_(0, chunk_of, logprobs_of(logits, targets).double())
        ended = {}
        for index, chunk in enumerate(batch.chunks):
            request, key = chunk.sequence.request, chunk.sequence.request.key
            if not request.num_targets:
                continue
            total = sums[index]
            if chunk.start > request.num_prompt_tokens - request.num_targets:  # as an earlier chunk has begun
                total = total + self._begun.pop(key)
            if chunk.samples:
                self._begun.pop(key, None)
                ended[index] = total
            else:
                self._begun[key] = total
        return ended
