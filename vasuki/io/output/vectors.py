"""What is written of a text's vector, and of the scores of its labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vasuki.base.config import JobConfig
from vasuki.models.sentence import Embedding, Labels

_NAME = pa.dictionary(pa.int32(), pa.string())


def vector_fields(job: JobConfig) -> list[pa.Field]:
    """The columns of a job that embeds or classifies."""
    if job.task == "embed":
        number = pa.float16() if job.embed.dtype == "float16" else pa.float32()
        return [pa.field("embedding", pa.list_(number, Embedding.of(job).width))]
    labels = Labels.of(job.model)
    label = [] if len(labels.names) == 1 else [pa.field("label", _NAME)]
    scores = pa.list_(pa.struct([("label", _NAME), ("score", pa.float64())]))
    every = [pa.field("scores", scores)] if job.output.scores or (labels.scale == "sigmoid" and label) else []
    return [*label, pa.field("score", pa.float64()), *every]


class VectorReader:
    """Makes these columns of what the model says of a text.

    Args:
        job: whose texts they are.
    """

    def __init__(self, job: JobConfig) -> None:
        self._embedding = Embedding.of(job) if job.task == "embed" else None
        self._labels = Labels.of(job.model) if job.task == "classify" else None
        self._number = np.float16 if job.embed.dtype == "float16" else np.float32

    def values(self, read: list[float]) -> dict[str, Any]:
        """The columns' values, from hidden states or logits."""
        numbers = np.array(read)
        if self._embedding is not None:
            return {"embedding": self._vector(numbers, self._embedding)}
        assert self._labels is not None
        scores = _scaled(numbers, self._labels)
        best = int(scores.argmax())
        told = [
            {"label": name, "score": score} for name, score in zip(self._labels.names, scores.tolist(), strict=True)
        ]
        return {"label": self._labels.names[best], "score": float(scores[best]), "scores": told}

    def _vector(self, numbers: NDArray[np.float64], how: Embedding) -> NDArray[Any]:
        """Cut before it is made as long as 1, as vectors that may be cut are trained."""
        numbers = numbers[: how.width]
        if how.normalizes and (length := np.linalg.norm(numbers)):
            numbers = numbers / length
        return numbers.astype(self._number)


def _scaled(logits: NDArray[np.float64], labels: Labels) -> NDArray[np.float64]:
    if labels.scale == "none":
        return logits
    if labels.scale == "sigmoid":
        scores: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
        return scores
    weights = np.exp(logits - logits.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
