"""What a row's likelihoods come to: its columns where texts are scored, and probabilities of choices."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import Any

import pyarrow as pa

from vasuki.base.config import JobConfig
from vasuki.engine.sequence import Sequence

_CHOICE = pa.struct([("choice", pa.string()), ("logprob", pa.float64()), ("probability", pa.float64())])


def score_fields(job: JobConfig) -> list[pa.Field]:
    """The columns of a job that scores texts, or that wants the probabilities of choices."""
    if job.output.choice_probabilities:
        return [pa.field("choice_probabilities", pa.list_(_CHOICE))]
    if job.task != "score":
        return []
    if not job.scores_lists:
        perplexity = [] if job.input.continuation else [pa.field("perplexity", pa.float64())]
        return [pa.field("logprob", pa.float64()), pa.field("tokens", pa.int32()), *perplexity]
    return [
        pa.field("logprob", pa.list_(pa.float64())),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("best", pa.string()),
        pa.field("probabilities", pa.list_(pa.float64())),
    ]


def score_values(job: JobConfig, scored: Rows[Sequence]) -> dict[str, Any]:
    """The values of these columns for a row, from its texts in their order."""
    logprobs, texts = [row.value[0] for row in scored], [row.request.continuation for row in scored]
    tokens = [row.request.num_read for row in scored]
    if job.output.choice_probabilities:
        told = zip(texts, logprobs, _shares(logprobs), strict=True)
        names = _CHOICE.names
        return {"choice_probabilities": [dict(zip(names, each, strict=True)) for each in told]}
    if not job.scores_lists:
        return {"logprob": logprobs[0], "tokens": tokens[0], "perplexity": _exp(-logprobs[0] / tokens[0])}
    lengths = {
        "none": [1] * len(texts),
        "tokens": tokens,
        "bytes": [len(text.encode()) for text in texts],
    }[job.score.normalization]
    normalised = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
    best = texts[max(range(len(texts)), key=normalised.__getitem__)]
    return {"logprob": logprobs, "tokens": tokens, "best": best, "probabilities": _shares(normalised)}


def _shares(logprobs: list[float]) -> list[float]:
    """Probabilities that add up to 1."""
    most = max(logprobs)
    weights = [math.exp(logprob - most) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
