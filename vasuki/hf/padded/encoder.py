"""Texts through a model whose tokens attend to those behind them, too: each as a whole, in the step in which its last
token is computed, and with others that are about as long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.hf.attention.inputs import tokens_of
from vasuki.hf.kernels.transfer import to_device

_MOST_PADDING = 1.05  # columns of a rectangle, over the tokens in it
_MOST_TOKENS = {"cpu": 512, "cuda": 16_384}  # of one with several rows: more gain nothing


class Encoder:
    """Computes texts.

    Args:
        model: of transformers, without a cache; with a head for classes, or without one.
        gives_states: whether it gives hidden states, which are pooled; else numbers of each row.
    """

    def __init__(self, model: Any, gives_states: bool) -> None:
        self._model, self._gives_states = model, gives_states
        self._padding = getattr(model.config, "pad_token_id", None) or 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        """What the model says of the rows that the batch ends, `[num_samples, width]`."""
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        said: dict[int, torch.Tensor] = {}
        for rows in _rectangles(np.array([chunk.end for chunk in chunks]), _MOST_TOKENS[self._model.device.type]):
            said |= zip(rows, self._compute([chunks[row] for row in rows]), strict=True)
        return torch.stack([said[row] for row in range(len(chunks))]) if chunks else torch.zeros(0, 1)

    @torch.inference_mode()
    def _compute(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        lengths = np.array([chunk.end for chunk in chunks])
        ids = np.full((len(chunks), lengths.max()), self._padding, np.int64)
        for row, chunk in enumerate(chunks):
            ids[row, : chunk.end] = tokens_of(chunk.sequence, 0, chunk.end)
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        device = self._model.device
        input_ids, attention_mask = (
            each.view(ids.shape) for each in to_device(device, ids.reshape(-1), mask.reshape(-1))
        )
        output = self._model(input_ids=input_ids, attention_mask=attention_mask, **self._kinds(chunks, ids.shape[1]))
        if not self._gives_states:
            logits: torch.Tensor = output.logits
            return logits
        return self._pooled(output.last_hidden_state, attention_mask, chunks)

    def _kinds(self, chunks: list[ScheduledChunk], width: int) -> dict[str, torch.Tensor]:
        """Which text of a pair each token belongs to, for models that are told."""
        begins = np.array([chunk.sequence.request.second_begins or width for chunk in chunks])
        if (begins == width).all():
            return {}
        kinds = (np.arange(width) >= begins[:, None]).astype(np.int64)
        [on_device] = to_device(self._model.device, kinds.reshape(-1))
        return {"token_type_ids": on_device.view(kinds.shape)}

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor, chunks: list[ScheduledChunk]) -> torch.Tensor:
        """`[rows, width]` of hidden states `[rows, columns, width]`."""
        lasts = mask.sum(dim=1) - 1
        pooled = states[torch.arange(len(states), device=states.device), lasts].double()
        means = [row for row, chunk in enumerate(chunks) if chunk.sequence.request.num_read > 1]
        if means:
            weights = mask[means].unsqueeze(-1).double()
            pooled[means] = (states[means].double() * weights).sum(dim=1) / weights.sum(dim=1)
        firsts = [row for row, chunk in enumerate(chunks) if chunk.sequence.request.reads_first]
        pooled[firsts] = states[firsts, 0].double()
        return pooled


def _rectangles(lengths: Ints, most_tokens: int) -> Iterator[list[int]]:
    """Rows that are computed together, longest first."""
    group: list[int] = []
    tokens = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        columns = int(lengths[group[0]]) if group else int(lengths[row])
        count, filled = len(group) + 1, tokens + int(lengths[row])
        if group and (columns * count > min(most_tokens, _MOST_PADDING * filled)):
            yield group
            group, filled = [], int(lengths[row])
        group.append(row)
        tokens = filled
    if group:
        yield group
