"""Texts through a model whose tokens attend to those behind them, too: each as a whole, in the step in which its last
token is computed, side by side with others, or padded to the length of others that are about as long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.hf.attention.inputs import tokens_of
from vasuki.hf.encoders.side_by_side import SideBySide
from vasuki.hf.kernels.transfer import to_device

_MOST_PADDING = 1.05  # columns of a rectangle, over the tokens in it
_MOST_TOKENS = {"cpu": 512, "cuda": 16_384}  # of texts that are computed together: more gain nothing


class Encoder:
    """Computes texts.

    Args:
        model: of transformers, without a cache; with a head for classes, or without one.
        gives_states: whether it gives hidden states, which are pooled; else numbers of each row.
        side_by_side: how texts share a row; None if they are padded.
    """

    def __init__(self, model: Any, gives_states: bool, side_by_side: SideBySide | None) -> None:
        self._model, self._gives_states = model, gives_states
        self._padding = getattr(model.config, "pad_token_id", None) or 0
        self._side_by_side = side_by_side
        self._together = _rectangles if side_by_side is None else _rows

    def __call__(self, batch: Batch) -> torch.Tensor:
        """What the model says of the rows that the batch ends, `[num_samples, width]`."""
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        said: dict[int, torch.Tensor] = {}
        for rows in self._together(np.array([chunk.end for chunk in chunks]), _MOST_TOKENS[self._model.device.type]):
            said |= zip(rows, self._compute([chunks[row] for row in rows]), strict=True)
        return torch.stack([said[row] for row in range(len(chunks))]) if chunks else torch.zeros(0, 1)

    @torch.inference_mode()
    def _compute(self, chunks: list[ScheduledChunk]) -> list[torch.Tensor]:
        if self._side_by_side is not None:
            ids = [np.asarray(tokens_of(chunk.sequence, 0, chunk.end), np.int64) for chunk in chunks]
            states = self._side_by_side(to_device(self._model.device, *ids))
            return [_pooled(*each) for each in zip(states, chunks, strict=True)]
        output = self._padded(chunks)
        if not self._gives_states:
            return list(output.logits)
        padded = zip(output.last_hidden_state, chunks, strict=True)
        return [_pooled(states[: chunk.end], chunk) for states, chunk in padded]

    def _padded(self, chunks: list[ScheduledChunk]) -> Any:
        """What the model gives for rows that are padded to the longest of them."""
        lengths = np.array([chunk.end for chunk in chunks])
        ids = np.full((len(chunks), lengths.max()), self._padding, np.int64)
        for row, chunk in enumerate(chunks):
            ids[row, : chunk.end] = tokens_of(chunk.sequence, 0, chunk.end)
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        given = {"input_ids": ids, "attention_mask": mask, **_kinds(chunks, ids.shape[1])}
        on_device = to_device(self._model.device, *(each.reshape(-1) for each in given.values()))
        return self._model(**{name: each.view(ids.shape) for name, each in zip(given, on_device, strict=True)})


def _kinds(chunks: list[ScheduledChunk], width: int) -> dict[str, Ints]:
    """Which text of a pair each token belongs to, for models that are told."""
    begins = np.array([chunk.sequence.request.second_begins or width for chunk in chunks])
    if (begins == width).all():
        return {}
    return {"token_type_ids": (np.arange(width) >= begins[:, None]).astype(np.int64)}


def _pooled(states: torch.Tensor, chunk: ScheduledChunk) -> torch.Tensor:
    """`[width]` of a text's hidden states `[num_tokens, width]`."""
    request = chunk.sequence.request
    if request.reads_first:
        return states[0].double()
    return states.double().mean(dim=0) if request.num_read > 1 else states[-1].double()


def _rows(lengths: Ints, most_tokens: int) -> Iterator[list[int]]:
    """Texts that stand in one row."""
    group: list[int] = []
    for row, length in enumerate(lengths.tolist()):
        if group and lengths[group].sum() + length > most_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _rectangles(lengths: Ints, most_tokens: int) -> Iterator[list[int]]:
    """Texts that are padded to one length, longest first."""
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
