"""How a causal model of transformers is called with a cache, by the arguments that its `forward` knows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

CACHES = ("past_key_values", "cache_params", "state")  # what models call it


class ModelCall:
    """Calls a model, which keeps the names of what it takes and gives.

    Args:
        model: a causal LM of transformers.
        use_cache: whether it is asked to keep anything. Where it keeps that to itself, rows would see each other's.
    """

    def __init__(self, model: Any, use_cache: bool = True) -> None:
        self.model, self._use_cache = model, use_cache
        self._knows = set(inspect.signature(model.forward).parameters)
        self._cache_name = next((name for name in CACHES if name in self._knows), CACHES[0])

    @torch.inference_mode()
    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        ends: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Compute new tokens behind those in the cache.

        Args:
            input_ids, position_ids: `[rows, new]`.
            mask: `[rows, past + new]`, 0 for padding; or bool `[rows, 1, new, new]`, which token sees which; None where
                there is no padding. Recurrences of transformers take a mask for that of the new tokens.
            cache: as the model keeps it; None for an empty one of its own kind.
            ends: int64, places in the flat `[rows * new]` of the tokens whose logits are wanted; None: each row's last.

        Returns:
            Their logits, `[rows or ends, vocab_size]`, and the cache with the new tokens.
        """
        given: dict[str, Any] = {"position_ids": position_ids, "attention_mask": mask, self._cache_name: cache}
        if mask is not None and mask.dim() == 4:  # added to the scores, as every attention of transformers can
            dtype = self.model.dtype
            given["attention_mask"] = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        given["logits_to_keep"] = 1 if ends is None else 0
        arguments = {name: value for name, value in given.items() if name in self._knows}
        with nullcontext() if ends is None else _before(self.model.get_output_embeddings(), ends):
            output = self.model(input_ids=input_ids, use_cache=self._use_cache, return_dict=True, **arguments)
        logits = output.logits[:, -1] if ends is None else output.logits[0]
        return logits, getattr(output, self._cache_name, None)


@contextmanager
def _before(head: torch.nn.Module, ends: torch.Tensor) -> Iterator[None]:
    """Let the head see those tokens alone: their places differ by row, which `logits_to_keep` can't say."""

    def keep(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (arguments[0].flatten(0, 1)[ends].unsqueeze(0),)

    handle = head.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
