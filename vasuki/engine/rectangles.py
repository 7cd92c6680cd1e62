"""Which chunks of a step are computed together where a model knows no packed attention: rectangles of rows and columns.

Decodes make one. Prompts make one for each group of similar lengths (Baton, section 4.2), so that padding stays rare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

MOST_PADDING = 1.25  # times the new tokens of a rectangle's rows is its new columns, at most


def rectangles(chunks: Sequence[tuple[int, int]], num_decodes: int) -> Iterator[list[int]]:
    """The chunks of each rectangle, by their place.

    Chunks from the middle of a sequence keep their order: they may read blocks that an earlier chunk of the step fills.

    Args:
        chunks: first position and tokens of each, decodes first.
        num_decodes: how many of them are decodes.
    """
    lengths = [count for _, count in chunks]
    prompts = range(num_decodes, len(chunks))
    if num_decodes:
        yield list(range(num_decodes))
    yield from _similar(sorted((i for i in prompts if not chunks[i][0]), key=lengths.__getitem__), lengths)
    yield from _similar((i for i in prompts if chunks[i][0]), lengths)


def _similar(order: Iterable[int], lengths: list[int]) -> Iterator[list[int]]:
    """Cut into groups, each as long as its padding is little."""
    group: list[int] = []
    total = longest = 0
    for i in order:
        longest, total = max(longest, lengths[i]), total + lengths[i]
        if group and (len(group) + 1) * longest > MOST_PADDING * total:
            yield group
            group, longest, total = [], lengths[i], lengths[i]
        group.append(i)
    if group:
        yield group
