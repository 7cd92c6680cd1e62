"""How a mixture's experts are computed on a GPU: one rule for plans of cards elsewhere and for runs.

Torch has a grouped product, which needs not wait to learn how many rows each expert has, for few generations of cards.
Elsewhere up to `MOST_ROWS_OF_ALL_EXPERTS` rows pass all experts: see `vasuki.hf.kernels.experts`.
"""

from __future__ import annotations

MOST_ROWS_OF_ALL_EXPERTS = 128  # through each, for which a product takes no longer than its weights
_GROUPED_PRODUCTS = (9, 10)  # major compute capabilities: Hopper, and Blackwell in data centres


def waits_for_experts(generation: tuple[int, int]) -> bool:
    """Whether a card of that compute capability waits in every layer for how many rows each expert has."""
    return generation[0] not in _GROUPED_PRODUCTS
