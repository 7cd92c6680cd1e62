"""Attention of texts in one packed row, each within itself and to both sides, through transformers' interface.

tokens     a0 a1 a2 | b0 b1 | c0 c1 c2 c3        one packed row, no padding
a0..a2 see a0..a2     b0, b1 see b0, b1          and those within a window, where a layer has one
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from vasuki.hf.attention.ragged_attention import Unsupported, refuse_unknown
from vasuki.hf.fused.replace import close

NAME = "vasuki_side_by_side"
_FEW = 5  # tokens of a text that is computed to see whether a model can be served


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    lengths: Sequence[int] = (),
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' calling convention: `[1, num_heads, num_tokens, head_dim]` in, `[1, num_tokens, ...]` out.

    Args:
        attention_mask: a model that has one of its own is not served.
        sliding_window: a token sees itself and the tokens less than so far before and behind it.
        lengths: of the texts.

    Raises:
        Unsupported: the model asks for something else.
    """
    refuse_unknown({"attention_mask": attention_mask, **other})
    texts, first = [], 0
    for length in lengths:
        last = first + length
        own = query[:, :, first:last], key[:, :, first:last], value[:, :, first:last]
        if sliding_window and length > sliding_window:
            texts.append(_within_window(*own, scaling, sliding_window))
        else:
            texts.append(scaled_dot_product_attention(*own, scale=scaling, enable_gqa=_shares_heads(*own)))
        first = last
    return torch.cat(texts, dim=2).transpose(1, 2), None


def _within_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int,
) -> torch.Tensor:
    """Of a text, a stretch of as many queries as it sees keys to both sides at a time."""
    length, stretch, outputs = query.shape[2], 2 * window, []
    for first in range(0, length, stretch):
        last = min(first + stretch, length)
        begin, end = max(0, first - window + 1), min(length, last + window - 1)
        seen = _band(last - first, end - begin, first - begin, window).to(query.device)
        queries, keys, values = query[:, :, first:last], key[:, :, begin:end], value[:, :, begin:end]
        shares = _shares_heads(queries, keys)
        outputs.append(scaled_dot_product_attention(queries, keys, values, seen, scale=scaling, enable_gqa=shares))
    return torch.cat(outputs, dim=2)


def _shares_heads(query: torch.Tensor, key: torch.Tensor, *_: torch.Tensor) -> bool:
    return query.shape[1] != key.shape[1]


@functools.lru_cache(64)
def _band(num_queries: int, num_keys: int, offset: int, window: int) -> torch.Tensor:
    """Which keys each query sees, `[num_queries, num_keys]`; the first query stands where key `offset` does."""
    apart = torch.arange(num_keys) - torch.arange(offset, offset + num_queries).unsqueeze(1)
    return apart.abs() < window


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


class SideBySide:
    """Calls a model on texts in a packed row.

    Args:
        model: that gives hidden states.
        first_position: of each text; models that leave room for padding count from behind it.
    """

    def __init__(self, model: Any, first_position: int) -> None:
        self._model, self._first = model, first_position

    def __call__(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The hidden states of texts `[num_tokens]`, `[num_tokens, hidden_size]` of each."""
        lengths = [len(text) for text in texts]
        most = torch.arange(self._first, self._first + max(lengths), device=texts[0].device)
        states: torch.Tensor = self._model(
            input_ids=torch.cat(list(texts)).unsqueeze(0),
            position_ids=torch.cat([most[:length] for length in lengths]).unsqueeze(0),
            lengths=lengths,
        ).last_hidden_state
        return torch.split(states[0], lengths)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any) -> SideBySide | None:
        """The way to call a model whose texts come to the same side by side as alone by its own attention; None where
        they don't, and the model is as it was."""
        if not getattr(model, "_supports_attention_backend", False) or "position_ids" not in _parameters(model):
            return None
        window = getattr(model.config, "sliding_window", None) or 0
        long = torch.arange(3, 3 + _FEW + 3 * window, device=model.device) % model.config.vocab_size
        texts = [long, long[:_FEW].flip(0)]
        expected = [model(input_ids=text.unsqueeze(0)).last_hidden_state[0] for text in texts]
        usual = model.config._attn_implementation
        padding = getattr(model.config, "pad_token_id", None) or 0
        try:
            model.set_attn_implementation(NAME)
            for first in (0, padding + 1):
                own = cls(model, first)
                if all(map(close, own(texts), expected)):
                    return own
        except (Unsupported, TypeError, ValueError, RuntimeError, IndexError):  # it asks for what is not given
            pass
        model.set_attn_implementation(usual)
        return None


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
