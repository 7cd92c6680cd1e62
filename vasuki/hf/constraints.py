"""Constraints of answers while they are decoded: of each row's logits, tokens that its answer may not go on with are
taken out, by `llguidance`.

A row's state follows from its tokens alone: it is made again after a kill, a preemption or on another replica.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vasuki.base.constraint import Constraint
from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels.transfer import to_device


class Constraints:
    """The states of all rows that are under way.

    Args:
        tokenizer: of the model, transformers' own.
        vocab_size: of the logits.
        eos_token_ids: that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        from llguidance import LLExecutor
        from llguidance.hf import from_tokenizer

        # The library knows one token that ends an answer: wherever that is allowed, all of them are.
        self._ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=self._ends[0] if self._ends else None)
        self._vocab_size = vocab_size
        self._executor = LLExecutor()
        self._beginnings: dict[Constraint, Any] = {}  # before the first token, which rows copy
        self._matchers: dict[tuple[int, int], tuple[Any, int]] = {}  # by row and sample, with the tokens it has seen
        self.problem = ""  # of a row that no token of the vocabulary can go on with

    def mask(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Logits `[num_sequences, vocab_size]` with minus infinity where a row's answer may not go on."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.constraint is not None]
        if not rows:
            return logits
        bits = allocate_token_bitmask(len(rows), self._vocab_size)
        matchers = [(self._matcher(sequences[row]), index) for index, row in enumerate(rows)]
        fill_next_token_bitmask_par(self._executor, matchers, bits)
        stuck = np.flatnonzero(~bits.any(axis=1))
        if len(stuck):
            constraint = sequences[rows[stuck[0]]].request.sampling.constraint
            assert constraint is not None
            self.problem = f"no token of the model's vocabulary goes on with an answer as {constraint.key} has it"
        refused = np.unpackbits(~bits.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        refused[:, self._ends] = refused[:, self._ends[:1]]
        places, hidden = to_device(logits.device, np.array(rows), refused.reshape(-1))
        hidden = hidden.view(refused.shape)[:, : self._vocab_size]
        if len(rows) == len(sequences):
            return logits.masked_fill_(hidden, -torch.inf)
        logits[places] = logits[places].masked_fill_(hidden, -torch.inf)
        return logits

    def ends(self, sequence: Sequence, token_id: int) -> bool:
        """Take a row's next token. Returns whether its answer is whole and can't go on."""
        if sequence.request.sampling.constraint is None or token_id < 0:
            return False
        matcher, seen, key = self._matcher(sequence), len(sequence.output_token_ids) + 1, sequence.request.key
        is_over = token_id in self._ends
        if not is_over:
            matcher.consume_token(token_id)
            is_over = matcher.is_stopped()
        self._matchers[key] = matcher, seen
        if seen >= sequence.request.max_tokens:
            self.forget(sequence)
        return is_over

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a row that has ended."""
        self._matchers.pop(sequence.request.key, None)

    def _matcher(self, sequence: Sequence) -> Any:
        """The row's state behind the tokens that it has."""
        key, tokens = sequence.request.key, sequence.output_token_ids
        matcher, seen = self._matchers.get(key, (None, 0))
        if matcher is None or seen != len(tokens):
            constraint = sequence.request.sampling.constraint
            assert constraint is not None
            matcher = self._beginning(constraint).deep_copy()
            matcher.consume_tokens(list(tokens))
            self._matchers[key] = matcher, len(tokens)
        return matcher

    def _beginning(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher

        if constraint not in self._beginnings:
            self._beginnings[constraint] = LLMatcher(self._tokens, constraint.grammar, log_level=0)
        return self._beginnings[constraint]
