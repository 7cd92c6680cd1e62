"""Rows held back -> batches, the spatial packer of Dynamic Prefill Packing (section 3.3).

The paper maximises the tokens in all batches (its equation 2), which are the same however rows are placed, by a
recurrence (equation 3) that indexes prefixes of the rows but takes arbitrary subsets. Wanted are the fewest batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from vasuki.arrivals.gathering import Gathering
from vasuki.engine.sequence import Request
from vasuki_solvers import first_fit, pack_exact

_MOST_NODES = 2_000  # of the exact search, some milliseconds


def pack_requests(requests: Sequence[Request], config: Gathering) -> list[list[Request]]:
    """Put rows into batches of at most `batch_tokens` prompt tokens (T_max) and `batch_rows` rows (B_max).

    The batch with the row that came first is the first, and rows keep their order in it. A prompt that is longer than a
    batch has one to itself. `exact` ends its search after some thousand nodes with the best that it has found.
    """
    lengths = [min(request.num_prompt_tokens, config.batch_tokens) for request in requests]
    if sum(lengths) <= config.batch_tokens and len(lengths) <= config.batch_rows:
        return [list(requests)] if requests else []  # which is most often so, and asked between two steps
    if config.packing == "exact":
        packing = pack_exact(lengths, config.batch_tokens, max_items=config.batch_rows, max_nodes=_MOST_NODES)
    else:
        packing = first_fit(lengths, config.batch_tokens, max_items=config.batch_rows)
    return [[requests[i] for i in content] for content in sorted(map(sorted, packing.bins))]
