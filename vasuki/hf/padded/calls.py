"""How a causal model of transformers is called with a cache, by the arguments that its `forward` knows."""

from __future__ import annotations

import inspect
from typing import Any

import torch

CACHES = ("past_key_values", "cache_params", "state")  # what models call it


class ModelCall:
    """Calls a model, which keeps the names of what it takes and gives.

    Args:
        model: a causal LM of transformers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._knows = set(inspect.signature(model.forward).parameters)
        self._cache_name = next((name for name in CACHES if name in self._knows), CACHES[0])

    @torch.inference_mode()
    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Compute new tokens behind those in the cache.

        Args:
            input_ids, position_ids: `[rows, new]`.
            mask: `[rows, past + new]`, 0 for padding.
            cache: as the model keeps it; None for an empty one of its own kind.

        Returns:
            The last token's logits, `[rows, vocab_size]`, and the cache with the new tokens.
        """
        given = {"position_ids": position_ids, "logits_to_keep": 1, "attention_mask": mask, self._cache_name: cache}
        arguments = {name: value for name, value in given.items() if name in self._knows}
        output = self.model(input_ids=input_ids, use_cache=True, return_dict=True, **arguments)
        return output.logits[:, -1], getattr(output, self._cache_name, None)
