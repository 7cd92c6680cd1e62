"""The work of a step whose chunks don't share one packed forward: columns of rectangles, or calls row by row.

    ragged    a call for each rectangle of a policy that pads; every row has as many new tokens and as long a context as
              the longest, of which kernels see what is causal and in the window
    padded    the same under a mask: all pairs are computed, prompts that share a row or not
    alone     a call for each row; a prompt is computed with its last chunk, from its first token
    uncached  the same, and each token after it is computed with all tokens before it

Windows are masks of all but the first: what they hide is computed all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vasuki.engine.shaping import Shaped
from vasuki.machines.cost_model.copies import Copies
from vasuki.machines.cost_model.work import StepWork


class Piece(NamedTuple):
    """A chunk as the cost model sees it."""

    start: int
    num_tokens: int
    samples: bool


class _UnpackedCall(NamedTuple):
    """A forward of `rows` rows of `new` tokens, over `width` columns of keys."""

    rows: int
    new: int
    width: int


def padded_work(
    pieces: Sequence[Piece], calls: Iterable[Shaped], copies: tuple[Copies, ...] = (), window: int | None = None
) -> StepWork:
    """The work of rectangles, whose rows hold pieces, by their place. `window` is that of kernels that know what is
    causal, 0 for none; None for a mask."""
    found, num_samples = [], 0
    for rows, columns in calls:
        num_samples += sum(pieces[i].samples for row in rows for i in row)
        new = [sum(pieces[i].num_tokens for i in row) for row in rows]
        width = max(pieces[row[0]].start + count for row, count in zip(rows, new, strict=True))
        found.append(_UnpackedCall(len(rows), max(new), max(width, columns)))
    if window is None:
        return _work(found, num_samples, copies)
    rows_of = [call for call in found for _ in range(call.rows)]  # none where a step only copies
    tokens, contexts = [call.new for call in rows_of], [call.width for call in rows_of]
    return StepWork.of(tokens, contexts, num_samples, window, copies)._replace(calls=len(found))


def rectangle_work(rows: int, new: int, width: int) -> StepWork:
    """The work of one rectangle, see `engine.rectangles.Price`."""
    return _work([_UnpackedCall(rows, new, width)], rows, ())


def work_alone(pieces: Sequence[Piece], copies: tuple[Copies, ...] = (), cached: bool = True) -> StepWork:
    """The work of rows that are computed one after another."""
    ends = [(piece.num_tokens, piece.start + piece.num_tokens) for piece in pieces if piece.samples]
    calls = [_UnpackedCall(1, 1 if cached and count == 1 else end, end) for count, end in ends]
    return _work(calls, len(ends), copies)


def _work(calls: Sequence[_UnpackedCall], num_samples: int, copies: tuple[Copies, ...]) -> StepWork:
    decodes = [call for call in calls if call.new == 1]
    longer = [call for call in calls if call.new > 1]
    num_decodes = sum(call.rows for call in decodes)
    sums = (
        sum(call.rows * call.width for call in decodes),
        sum(call.rows * call.width for call in longer),
        sum(call.rows * call.new * call.width for call in longer),
    )
    return StepWork(
        num_decodes + sum(call.rows * call.new for call in longer),
        num_samples,
        num_decodes,
        sum(call.rows for call in longer),
        *sums,
        *sums,
        copies,
        max(1, len(calls)),
    )
