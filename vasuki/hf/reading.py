"""What the model says of a row's own tokens, in place of tokens that it would choose.

    score      the log-probabilities of the tokens that follow some positions, summed
    embed      the hidden states of positions, as a mean; of a single one, that itself
    classify   what a classification head makes of the last one

A row's last positions are read, over as many chunks as they are computed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch
from vasuki.engine.sequence import Request
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.sampler import logprobs_of

MOST_LOGITS = 2**27  # of positions that are read at once: half a gigabyte in float32


@dataclass(frozen=True, slots=True)
class ReadPositions:
    """What is read of a batch.

    Args:
        places: of the positions within the step `[num_positions]`.
        targets: the tokens that follow them, where these are scored `[num_positions]`, else 0.
        chunk_of: the chunk that each lies in `[num_positions]`.
    """

    places: Ints
    targets: Ints
    chunk_of: Ints

    @classmethod
    def of(cls, batch: Batch) -> ReadPositions:
        places, targets, chunk_of = [], [], []
        first = 0  # place of the chunk
        for index, chunk in enumerate(batch.chunks):
            request = chunk.sequence.request
            if request.num_read:
                own = np.arange(max(chunk.start, begin := _first_read(request)), chunk.end)
                places.append(own - chunk.start + first)
                targets.append(np.asarray(request.targets)[own - begin] if len(request.targets) else 0 * own)
                chunk_of.append(np.full(len(own), index))
            first += chunk.num_tokens
        if not places:
            return cls(*(np.empty(0, np.int64) for _ in range(3)))
        return cls(*(np.concatenate(each).astype(np.int64) for each in (places, targets, chunk_of)))


class Readings:
    """Sums of rows that were read in part."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, batch: Batch, positions: ReadPositions, outputs: torch.Tensor) -> dict[int, torch.Tensor]:
        """What the rows come to whose last position is among these, float64 `[width]`, by chunk.

        Args:
            batch: that was computed.
            positions: of it.
            outputs: of the model at these positions: logits, or hidden states `[num_positions, width]`.
        """
        targets, chunk_of = to_device(outputs.device, positions.targets, positions.chunk_of)
        scored = any(len(chunk.sequence.request.targets) for chunk in batch.chunks)
        read = logprobs_of(outputs, targets).unsqueeze(-1) if scored and len(targets) else outputs
        sums = torch.zeros(len(batch.chunks), read.shape[-1], dtype=torch.float64, device=outputs.device)
        sums.index_add_(0, chunk_of, read.double())
        ended = {}
        for index, chunk in enumerate(batch.chunks):
            request, key = chunk.sequence.request, chunk.sequence.request.key
            if not request.num_read:
                continue
            total = sums[index]
            if chunk.start > _first_read(request):  # as an earlier chunk has begun
                total = total + self._begun.pop(key)
            if chunk.samples:
                self._begun.pop(key, None)
                ended[index] = total if len(request.targets) else total / request.num_read
            elif chunk.end > _first_read(request):
                self._begun[key] = total
        return ended


def _first_read(request: Request) -> int:
    """The first position that is read."""
    return request.num_prompt_tokens - request.num_read
