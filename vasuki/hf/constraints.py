"""Constraints of answers while they are decoded: of each row's logits, tokens that its answer may not go on with are
taken out, by `llguidance`.

A row's state follows from its tokens alone: it is made again after a kill, a preemption or on another replica.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vasuki.base.constraint import Constraint
from vasuki.base.errors import ModelError, one_line
from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.loading.tokenizer import Tokenizer

_REMEMBERED = 1024  # constraints


class Constraints:
    """The states of all rows that are under way.

    Args:
        tokenizer: of the model; its markers of thoughts say where the answers of rows begin that have such.
        vocab_size: of the logits.
        eos_token_ids: that end an answer.

    Raises:
        ModelError: the library cannot tell which bytes the tokenizer's tokens stand for.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        from llguidance import LLExecutor
        from llguidance.hf import from_tokenizer

        # The library knows one token that ends an answer: wherever that is allowed, all of them are.
        self._ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        end = self._ends[0] if self._ends else None
        try:
            self._tokens = from_tokenizer(tokenizer.own, n_vocab=vocab_size, eos_token=end)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            why = f"answers cannot be made to look like something by the model's tokenizer: {one_line(error)}"
            raise ModelError(why) from None
        self._vocab_size = vocab_size
        self._executor = LLExecutor()
        self._beginning = lru_cache(_REMEMBERED)(self._begun)  # each row may have a constraint of its own
        self._tokenizer = tokenizer
        self._thoughts: dict[tuple[int, int], int] = {}  # how many tokens of a row are known to be such
        self._starts: dict[tuple[int, int], int] = {}  # how many come before its answer, where that has begun
        self._matchers: dict[tuple[int, int], tuple[Any, int]] = {}  # by row and sample, with the tokens it has seen
        self.problem = ""  # of a row that cannot go on
        self.broken: set[tuple[int, int]] = set()  # such rows

    def mask(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Logits `[num_sequences, vocab_size]` with minus infinity where a row's answer may not go on."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        starts = {
            row: start
            for row, sequence in enumerate(sequences)
            if sequence.request.sampling.constraint is not None and (start := self._start(sequence)) is not None
        }
        if not starts:
            return logits
        rows = list(starts)
        bits = allocate_token_bitmask(len(rows), self._vocab_size)
        matchers = [(self._matcher(sequences[row], start), index) for index, (row, start) in enumerate(starts.items())]
        fill_next_token_bitmask_par(self._executor, matchers, bits)
        for index, (row, start) in enumerate(starts.items()):
            for token_id in self._allowed_besides(sequences[row], start):
                bits[index, token_id // 32] |= np.uint32(1 << token_id % 32).astype(np.int32)
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
        start = self._start(sequence)
        if start is None or token_id in self._allowed_besides(sequence, start):
            return False
        matcher, key = self._matcher(sequence, start), sequence.request.key
        seen = len(sequence.output_token_ids) + 1
        is_over = token_id in self._ends
        if not is_over:
            matcher.consume_token(token_id)
            is_over = matcher.is_stopped()
        if matcher.is_error():
            constraint = sequence.request.sampling.constraint
            assert constraint is not None
            self.problem = _why_broken(matcher, constraint)
            self.broken.add(key)
            is_over = True
        self._matchers[key] = matcher, seen
        if seen >= sequence.request.max_tokens:
            self.forget(sequence)
        return is_over

    def _start(self, sequence: Sequence) -> int | None:
        """How many tokens of the output come before the answer; None while the row thinks."""
        if not sequence.request.sampling.reasoning:
            return 0
        key = sequence.request.key
        if key in self._starts:
            return self._starts[key]
        start = self._tokenizer.reasoning.answer_start(sequence, self._thoughts.get(key, 0))
        if start is None:
            self._thoughts[key] = len(sequence.output_token_ids)
        elif start < len(sequence.output_token_ids):  # else the next token may still come before it
            self._starts[key] = start
        return start

    def _allowed_besides(self, sequence: Sequence, start: int) -> Collection[int]:
        """Tokens with which an answer does not begin, but which may come before it."""
        if not sequence.request.sampling.reasoning or start < len(sequence.output_token_ids):
            return ()
        if self._tokenizer.reasoning.may_open(sequence):
            return (self._tokenizer.reasoning.opens,)
        return self._tokenizer.reasoning.breaks if start and self._tokenizer.reasoning.may_break(sequence) else ()

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a row that has ended."""
        self._matchers.pop(sequence.request.key, None)
        self._starts.pop(sequence.request.key, None)
        self._thoughts.pop(sequence.request.key, None)

    def _matcher(self, sequence: Sequence, start: int) -> Any:
        """The row's state behind the tokens that it has, of which the answer begins with number `start`."""
        key, tokens = sequence.request.key, sequence.output_token_ids
        matcher, seen = self._matchers.get(key, (None, 0))
        if matcher is None or seen != len(tokens):
            constraint = sequence.request.sampling.constraint
            assert constraint is not None
            matcher = self._beginning(constraint).deep_copy()
            matcher.consume_tokens(tokens[start:])
            self._matchers[key] = matcher, len(tokens)
        return matcher

    def _begun(self, constraint: Constraint) -> Any:
        """The state before the first token, which rows copy."""
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, constraint.grammar, log_level=0)


def _why_broken(matcher: Any, constraint: Constraint) -> str:
    """Why a row cannot go on."""
    if matcher.get_error().startswith("NoExtension"):
        return f"no token of the model's vocabulary goes on with an answer as {constraint.key} has it"
    return f"{constraint.key} became too complex to be followed: {matcher.get_error().splitlines()[0]}"
