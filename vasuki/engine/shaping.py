"""How a step's chunks are laid out in calls of a model that knows no packed attention, for each policy that pads.

    baton-pd         prompts of similar lengths in a call, decodes in one (Baton, section 4.2)
    baton            all of them in one: decodes are padded to the longest prompt (Baton, section 4.1)
    static-pd        as baton-pd, but batches keep their size and their columns until the last of their rows ends
    static           the same as baton: transformers' batches

Other policies leave it to the backend: as baton-pd, or prompts share rows where that costs less.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from vasuki.engine.batch import Batch
from vasuki.engine.policy import Policy
from vasuki.engine.rectangles import Price, Rows, rectangles


class Shaped(NamedTuple):
    """A call: a rectangle of new tokens, over columns of keys."""

    rows: Rows
    columns: int = 0  # at least; more than the rows have are padding


class Shaping(Protocol):
    """Sees the batches of one run, in their order."""

    def __call__(self, batch: Batch) -> Iterable[Shaped]:
        """The calls of a step. A chunk that is in two rows is computed twice, to the same end."""
        ...


class Similar:
    """Chunks of similar lengths share a call. Arguments as in `rectangles`."""

    def __init__(self, longest_packed: int = 0, price: Price | None = None, always: bool = False) -> None:
        self._how = longest_packed, price, always

    def __call__(self, batch: Batch) -> Iterable[Shaped]:
        """See the class."""
        chunks = [(start, 1) for start in batch.starts] + [(start, count) for _, start, count, _ in batch.prefills]
        return map(Shaped, rectangles(chunks, len(batch.decodes), *self._how))


class Together:
    """All chunks share a call."""

    def __call__(self, batch: Batch) -> Iterable[Shaped]:
        """See the class."""
        return [Shaped([[i] for i in range(batch.num_seqs)])]


class Waves:
    """Batches whose rows keep their slots, and whose cache its columns, until the last of them ends.

    Args:
        prompts: shapes the step in which a batch starts.
    """

    def __init__(self, prompts: Shaping) -> None:
        self._prompts = prompts
        self._rows = self._columns = 0  # of the batch that runs, behind its prompts

    def __call__(self, batch: Batch) -> Iterable[Shaped]:
        """Rows that have ended are computed on, as the first of the others is."""
        if batch.prefills:
            self._rows = batch.num_seqs
            self._columns = max(chunk.end for chunk in batch.chunks)
            return self._prompts(batch)
        if not batch.decodes:
            return []
        rows = [[i] for i in range(len(batch.decodes))]
        steps = batch.starts[0] - batch.decodes[0].request.num_prompt_tokens
        return [Shaped(rows + [[0]] * (self._rows - len(rows)), self._columns + steps + 1)]


def shaping_of(policy: Policy) -> Shaping | None:
    """The policy's own; None where it leaves that to the backend."""
    if not policy.pads:
        return None
    shaping = Together() if policy.pads == "together" else Similar()
    return Waves(shaping) if policy.waves else shaping
