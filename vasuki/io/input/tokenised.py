"""Prompts -> token ids: those of many rows in few calls of the tokenizer, cut where that is asked for.

Whatever is wrong with one row becomes the `error` of its draft.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig
from vasuki.base.errors import VasukiError, one_line
from vasuki.base.units import plural
from vasuki.engine.sequence import NO_TOKENS, SamplingParams
from vasuki.io.input.continuations import ScoredText, joined, without_last_spaces
from vasuki.io.input.prompts import Message, Pair, Prompt
from vasuki.io.input.row_error import RowError

P = TypeVar("P")
E = TypeVar("E")

log = logging.getLogger(__name__)

_MOST_CHARACTERS = 2**20  # that are tokenised in one call, unless a prompt has more
_NO_PROMPTS_FAULT = (VasukiError, RuntimeError, MemoryError)  # but trouble of the model, the machine or threads


class PromptEncoder(Protocol):
    """Text and conversations -> token ids.

    Calls come from one background thread, while the engine's thread decodes: the two must not share changeable state.
    """

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return one list of token ids for each text, special tokens included."""
        ...

    def encode_messages(self, conversations: list[list[Message]], now: datetime) -> list[list[int]]:
        """Return one list of token ids for each conversation, rendered by the chat template, ready for the model's
        answer. `now` is what a template is told that prints the time."""
        ...

    def encode_pairs(self, pairs: list[Pair], most_tokens: int | None = None) -> list[tuple[list[int], int]]:
        """Return for each pair of texts the token ids of both, special tokens included, and where those begin that the
        model is told are the second's; 0 where it is not told. Of pairs with more tokens the longer text is cut."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Return token ids of a text, without special tokens around it."""
        ...

    def marked(self, text: str, own: Sequence[tuple[int, int]] = ()) -> str:
        """The text, its control tokens marked to be read as text, but for those within the spans `own` (begin, end),
        which the job itself has written."""
        ...

    def surely_exceeds(self, prompt: str | list[Message], num_tokens: int) -> bool:
        """Whether a text or a conversation has more tokens, where its length alone tells, without tokenising it."""
        ...


@dataclass(slots=True)
class Draft:
    """A row on its way to becoming Requests."""

    row: int
    id: str | int
    carried: dict[str, Any]
    prompt: Prompt | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    estimated_tokens: int = 0
    token_ids: Any = NO_TOKENS  # int32 [num_prompt_tokens]
    second_begins: int = 0  # see Request
    scored: list[ScoredText] = field(default_factory=list)
    error: str = ""
    arrived_s: float = 0.0
    priority: float = 0.0
    due_s: float = math.inf


class PromptTokenizer:
    """Gives drafts their token ids.

    Args:
        tokenizer: the model's.
        job: says how prompts are read.
        most_tokens: of a prompt, and of its answer.
        vocab_size: token ids must lie below it, whether given in the input or by the tokenizer.
        twin: makes the tokenizer that plans are made with, whose tokens of the first row are compared.
    """

    def __init__(
        self,
        tokenizer: PromptEncoder,
        job: JobConfig,
        most_tokens: int,
        vocab_size: int,
        twin: Callable[[], PromptEncoder] | None,
    ) -> None:
        self._tokenizer, self._input, self._vocab_size, self._twin = tokenizer, job.input, vocab_size, twin
        self._most_tokens = most_tokens
        self._generates, self._scores = job.task == "generate", job.task == "score"
        self._num_cut = 0

    def tokenised(self, drafts: list[Draft]) -> Iterator[list[Draft]]:
        """Drafts, some at a time, with their token ids or errors."""
        for piece in _pieces(drafts):
            self._tokenise(piece)
            yield piece

    def say_what_was_cut(self) -> None:
        """At the end of the input."""
        if self._num_cut:
            log.warning("%s cut to %d tokens", plural(self._num_cut, "prompt"), self._most_tokens)

    def refuse_if_too_long(self, prompt: Prompt) -> None:
        """Raises RowError for a prompt that surely has too many tokens, without tokenising it."""
        if self._input.truncate or not isinstance(prompt, str | list):
            return
        if self._tokenizer.surely_exceeds(prompt, self._most_tokens):
            raise RowError(self._no_room(f"{_num_characters(prompt)} characters"))

    def _tokenise(self, drafts: list[Draft]) -> None:
        texts: list[tuple[Draft, str]] = []
        pairs: list[tuple[Draft, Pair]] = []
        conversations: list[tuple[Draft, list[Message]]] = []
        for draft in drafts:
            if isinstance(draft.prompt, str):
                texts.append((draft, draft.prompt))
            elif isinstance(draft.prompt, Pair):
                pairs.append((draft, draft.prompt))
            elif isinstance(draft.prompt, list):
                conversations.append((draft, draft.prompt))
            elif draft.prompt is not None:
                draft.token_ids = draft.prompt
            draft.prompt = None
        now = self._input.now
        _encode(texts, self._tokenizer.encode_batch, "the tokenizer", _keep_ids)
        _encode(conversations, partial(self._tokenizer.encode_messages, now=now), "the chat template", _keep_ids)
        _encode(pairs, self._tokenizer.encode_pairs, "the tokenizer", _keep_pair)
        if self._twin and (texts or conversations):
            twin, self._twin = self._twin(), None
            _compare(texts[:1], twin.encode_batch)
            _compare(conversations[:1], partial(twin.encode_messages, now=now))
        if self._input.truncate:
            self._cut_pairs([pair for pair in pairs if len(pair[0].token_ids) > self._most_tokens])
            self._truncate([draft for draft in drafts if not draft.scored])
        self._tokenise_scored(drafts, {id(draft): text for draft, text in texts})
        for draft in drafts:
            draft.error = draft.error or self._problem(draft)

    def _truncate(self, drafts: list[Draft]) -> None:
        """Cut prompts where the model's limit is, but for the special tokens that it expects at their ends."""
        most = self._most_tokens
        for draft in drafts:
            if len(draft.token_ids) > most:
                behind = self._behind
                draft.token_ids = np.concatenate([draft.token_ids[: most - len(behind)], behind])
                self._num_cut += 1

    def _cut_pairs(self, pairs: list[tuple[Draft, Pair]]) -> None:
        """The longer text first, as sentence-transformers does."""
        _encode(
            pairs, partial(self._tokenizer.encode_pairs, most_tokens=self._most_tokens), "the tokenizer", _keep_pair
        )
        self._num_cut += len(pairs)

    @cached_property
    def _behind(self) -> Ints:
        """The special tokens that the tokenizer puts behind a text."""
        [whole], plain = self._tokenizer.encode_batch(["a"]), self._tokenizer.encode_plain("a")
        ends = [end for end in range(len(plain), len(whole) + 1) if whole[end - len(plain) : end] == plain]
        return np.array(whole[max(ends, default=len(whole)) :], np.int32)

    def _tokenise_scored(self, drafts: list[Draft], texts: Mapping[int, str]) -> None:
        """Give texts that are scored their tokens; `texts` are prompts of bare text."""
        for draft in drafts:
            if draft.error:
                continue
            if self._scores and not draft.scored:  # the prompt itself
                draft.scored = [ScoredText("")]
                draft.scored[0].split(draft.token_ids, 1)
            elif (text := texts.get(id(draft))) is not None and draft.scored:
                kept, spaces = without_last_spaces(text)
                try:
                    before, *whole = self._tokenizer.encode_batch(
                        [kept, *(kept + spaces + each.text for each in draft.scored)]
                    )
                except Exception as error:
                    draft.error = f"the tokenizer refuses the continuation: {one_line(error) or type(error).__name__}"
                    continue
                for each, token_ids in zip(draft.scored, whole, strict=True):
                    each.split(np.asarray(token_ids, np.int32), len(before))
            else:
                for each in draft.scored:
                    each.split(*joined(draft.token_ids, self._tokenizer.encode_plain(each.text)))
            if self._input.truncate and draft.scored:
                self._num_cut += max([each.cut(self._most_tokens) for each in draft.scored])

    def _problem(self, draft: Draft) -> str:
        """Why a prompt cannot be run; empty if it can."""
        token_ids, num_tokens = draft.token_ids, len(draft.token_ids)
        if not num_tokens:
            return "prompt is empty"
        longest = max((len(each.prompt) for each in draft.scored), default=0)
        own = 0 if self._scores else num_tokens + self._generates
        if max(own, longest) > self._most_tokens:
            return self._no_room(f"{max(num_tokens, longest + 1)} tokens")
        if any(not len(each.targets) for each in draft.scored):
            return "there is no token behind the first, which a likelihood could be of"
        if any(len(each.targets) > len(each.prompt) for each in draft.scored):
            return "there is no room for a token before those that are scored"
        if (
            largest := int(token_ids.max())
        ) >= self._vocab_size:  # an added token, for which the model has no embedding
            return f"prompt has token {largest}, outside the model's vocabulary of {self._vocab_size} tokens"
        return ""

    def _no_room(self, length: str) -> str:
        return f"prompt has {length}: no room is left in the model's context of {self._most_tokens}"


def _pieces(drafts: list[Draft]) -> Iterator[list[Draft]]:
    """Rows to tokenise in one call: a tokenizer takes many times the memory of a text."""
    piece: list[Draft] = []
    num_characters = 0
    for draft in drafts:
        num_characters += (length := _num_characters(draft.prompt))
        if piece and num_characters > _MOST_CHARACTERS:
            yield piece
            piece, num_characters = [], length
        piece.append(draft)
    if piece:
        yield piece


def _num_characters(prompt: Prompt | None) -> int:
    """Of a text, or of all messages of a conversation; 0 where there is nothing to tokenise."""
    if isinstance(prompt, list):
        return sum(len(str(message["content"])) for message in prompt)
    if isinstance(prompt, Pair):
        return len(prompt.first) + len(prompt.second)
    return len(prompt) if isinstance(prompt, str) else 0


def _keep_ids(draft: Draft, token_ids: list[int]) -> None:
    draft.token_ids = np.asarray(token_ids, dtype=np.int32)


def _keep_pair(draft: Draft, encoded: tuple[list[int], int]) -> None:
    token_ids, draft.second_begins = encoded
    _keep_ids(draft, token_ids)


def _encode(
    drafts: list[tuple[Draft, P]],
    encode: Callable[[list[P]], list[E]],
    who: str,
    keep: Callable[[Draft, E], None],
) -> None:
    """Tokenise all prompts in one call; if it fails, one by one, to find the rows that it fails for."""
    if not drafts:
        return
    try:
        for (draft, _), encoded in zip(drafts, encode([prompt for _, prompt in drafts]), strict=True):
            keep(draft, encoded)
    except Exception as error:
        if isinstance(error, _NO_PROMPTS_FAULT) and not isinstance(error, RecursionError):
            raise
        if len(drafts) > 1:
            for one in drafts:
                _encode([one], encode, who, keep)
        else:
            drafts[0][0].error = f"{who} refuses the prompt: {one_line(error) or type(error).__name__}"


def _compare(drafts: list[tuple[Draft, P]], encode: Callable[[list[P]], list[list[int]]]) -> None:
    """Say so if a plan reads the first prompt otherwise than the run."""
    for draft, prompt in drafts:
        planned = Draft(draft.row, draft.id, {})
        _encode([(planned, prompt)], encode, "", _keep_ids)
        if not draft.error and not np.array_equal(planned.token_ids, draft.token_ids):
            log.warning(
                "row %s has %d prompt tokens by the tokenizer that answers, and %d by the one that plans are made with",
                draft.id,
                len(draft.token_ids),
                len(planned.token_ids),
            )
