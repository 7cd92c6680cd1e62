"""Which chunks of a step are computed together where a model knows no packed attention: rectangles of rows and columns.

Decodes make one. Prompts make one for each group of similar lengths (Baton, section 4.2), so that padding stays rare.
Or several share each row of a single one, under a mask that keeps them apart (Prepacking, algorithm 1):

    in groups     a a a a a a a    b b b    d d        packed     a a a a a a a
                                   c c c    e .                   b b b c c c .
                                                                  . . . . d d e
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from vasuki_solvers import first_fit_decreasing

MOST_PADDING = 1.25  # times the new tokens of a rectangle's rows is its new columns, at most

Rows = list[list[int]]  # the chunks of each row of a rectangle, by their place in the step
Price = Callable[[int, int, int], float]  # of a rectangle: its rows, new columns, and columns of keys


def rectangles(
    chunks: Sequence[tuple[int, int]],
    num_decodes: int,
    longest_packed: int = 0,
    price: Price | None = None,
    always: bool = False,
) -> Iterator[Rows]:
    """Each rectangle's chunks.

    Chunks from the middle of a sequence keep their order: they may read blocks that an earlier chunk of the step fills.

    Args:
        chunks: first position and tokens of each, decodes first.
        num_decodes: how many of them are decodes.
        longest_packed: tokens of the longest prompt that may share a row with others.
        price: says whether packing pays; without it, no row is shared.
        always: rows are shared whatever that costs.
    """
    lengths = [count for _, count in chunks]
    prompts = range(num_decodes, len(chunks))
    if num_decodes:
        yield [[i] for i in range(num_decodes)]
    whole = sorted((i for i in prompts if not chunks[i][0]), key=lengths.__getitem__)
    packable = [i for i in whole if (price or always) and lengths[i] <= longest_packed]
    yield from [_packed(packable, lengths)] if always and packable else _cheaper(packable, lengths, price)
    yield from _similar(whole[len(packable) :], lengths)
    yield from _similar((i for i in prompts if chunks[i][0]), lengths)


def _cheaper(order: list[int], lengths: list[int], price: Price | None) -> list[Rows]:
    """Whole prompts, shortest first, in groups or packed, whichever costs less."""
    groups = list(_similar(order, lengths))
    if price is None or not order:
        return groups
    packed, longest = _packed(order, lengths), lengths[order[-1]]
    if len(packed) * longest > MOST_PADDING * sum(lengths[i] for i in order):
        return groups
    sizes = [(len(group), lengths[group[-1][0]]) for group in groups]
    if price(len(packed), longest, longest) >= sum(price(rows, new, new) for rows, new in sizes):
        return groups
    return [packed]


def _packed(order: list[int], lengths: list[int]) -> Rows:
    """As few rows as first-fit-decreasing finds, as long as the longest prompt, the last."""
    bins = first_fit_decreasing([lengths[i] for i in order], lengths[order[-1]]).bins
    return [[order[place] for place in row] for row in bins]


def _similar(order: Iterable[int], lengths: list[int]) -> Iterator[Rows]:
    """Cut into groups, each as long as its padding is little."""
    group: Rows = []
    total = longest = 0
    for i in order:
        longest, total = max(longest, lengths[i]), total + lengths[i]
        if group and (len(group) + 1) * longest > MOST_PADDING * total:
            yield group
            group, longest, total = [], lengths[i], lengths[i]
        group.append([i])
    if group:
        yield group
