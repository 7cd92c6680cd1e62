"""What a row's settings do to its logits before a token is chosen, as transformers' processors and hosted APIs have it.

logit_bias             logits of these tokens: more by it
repetition_penalty     logits of tokens that prompt or output has: divided by it if positive, else multiplied
frequency_penalty      logits of output tokens: less by it for each time
presence_penalty       the same once
bad_words              no token that would complete one
min_tokens             no token that ends the answer before the output has so many
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels.transfer import to_device

_REMEMBERED = 1024  # words


class Processors:
    """What all rows' settings do.

    Args:
        end_token_ids: that end an answer of the model.
        encode: token ids of a text without special ones; may not change.
    """

    def __init__(self, end_token_ids: frozenset[int], encode: Callable[[str], list[int]]) -> None:
        self._end_token_ids = end_token_ids
        self._spellings = lru_cache(_REMEMBERED)(lambda word: _spellings(word, encode))

    def change(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Logits `[num_sequences, vocab_size]` as the rows' settings change them, which are overwritten."""
        for row, sequence in enumerate(sequences):
            if sequence.request.sampling.edits_logits:
                self._change(logits[row], sequence)
        return logits

    def _change(self, own: torch.Tensor, sequence: Sequence) -> None:
        """Of one row, `[vocab_size]`."""
        sampling, output = sequence.request.sampling, np.asarray(sequence.output_token_ids, dtype=np.int64)
        if bias := sampling.logit_bias:
            _add(own, np.array(list(bias)), np.array(list(bias.values())))
        if sampling.repetition_penalty != 1:
            prompt = np.asarray(sequence.request.prompt_token_ids, dtype=np.int64)
            [seen] = to_device(own.device, np.unique(np.concatenate([prompt, output])))
            values, penalty = own[seen], sampling.repetition_penalty
            own[seen] = torch.where(values < 0, values * penalty, values / penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and len(output):
            tokens, counts = np.unique(output, return_counts=True)
            less = sampling.frequency_penalty * counts + sampling.presence_penalty
            _add(own, tokens, -less)
        refused = [
            spelling[-1]
            for word in sampling.bad_words
            for spelling in self._spellings(word)
            if tuple(output[len(output) - len(spelling) + 1 :]) == spelling[:-1]
        ]
        if len(output) < sampling.min_tokens:
            refused += [*self._end_token_ids, *sampling.stop_token_ids]
        if refused:
            [places] = to_device(own.device, np.array(sorted({each for each in refused if each < len(own)}), np.int64))
            own[places] = -torch.inf


def _add(own: torch.Tensor, tokens: NDArray[np.int64], amounts: NDArray[Any]) -> None:
    places, more = to_device(own.device, tokens, amounts.astype(np.float32))
    own[places] += more.to(own.dtype)


def _spellings(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """The tokens of a word at the beginning of a text, and within one."""
    spellings = {tuple(encode(text)) for text in (word.lstrip(), f" {word.lstrip()}")}
    return sorted(spelling for spelling in spellings if spelling)
