"""What a row's settings do to its logits before a token is chosen, as transformers' processors and hosted APIs have it.

repetition_penalty     logits of tokens that prompt or output has: divided by it if positive, else multiplied
frequency_penalty      logits of output tokens: less by it for each time
presence_penalty       the same once
min_tokens             no token that ends the answer before the output has so many
"""

from __future__ import annotations

import numpy as np
import torch

from vasuki.engine.sequence import SamplingParams, Sequence
from vasuki.hf.kernels.transfer import to_device


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether these settings do anything here, which depends on the tokens that a row has."""
    penalties = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return bool(penalties or sampling.min_tokens)


def processed(logits: torch.Tensor, sequences: list[Sequence], end_token_ids: frozenset[int]) -> torch.Tensor:
    """Logits `[num_sequences, vocab_size]` as the rows' settings change them, which are overwritten.

    Args:
        logits: of each row's next token.
        sequences: whose settings count.
        end_token_ids: that end an answer.
    """
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if not changes_logits(sampling):
            continue
        own, output = logits[row], np.asarray(sequence.output_token_ids, dtype=np.int64)
        if sampling.repetition_penalty != 1:
            prompt = np.asarray(sequence.request.prompt_token_ids, dtype=np.int64)
            [seen] = to_device(own.device, np.unique(np.concatenate([prompt, output])))
            values, penalty = own[seen], sampling.repetition_penalty
            own[seen] = torch.where(values < 0, values * penalty, values / penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and len(output):
            tokens, counts = np.unique(output, return_counts=True)
            less = sampling.frequency_penalty * counts + sampling.presence_penalty
            places, amounts = to_device(own.device, tokens, less.astype(np.float32))
            own[places] -= amounts.to(own.dtype)
        if len(output) < sampling.min_tokens and end_token_ids:
            [ends] = to_device(own.device, np.array(sorted(each for each in end_token_ids if each < len(own))))
            own[ends] = -torch.inf
    return logits
