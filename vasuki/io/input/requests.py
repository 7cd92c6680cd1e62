"""Input rows -> Requests: lazily, in input order, tokenised ahead in a background thread.

    table.blocks -> drafts (prompt, settings) -> one tokenizer call per block -> Requests -> bounded queue -> scheduler

Whatever is wrong with one row becomes the `error` of its Request. A row with n samples becomes n Requests that share
the prompt's tokens. `Request.max_tokens` is the row's setting, cut to what the model's context leaves after the prompt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig
from vasuki.base.errors import VasukiError, one_line
from vasuki.base.units import plural
from vasuki.engine.sequence import NO_TOKENS, Request, SamplingParams
from vasuki.io.formats.sources import Block
from vasuki.io.input.continuations import ScoredText, continuation_reader, joined, without_last_spaces
from vasuki.io.input.openai_batch import read_body
from vasuki.io.input.prefetch import Prefetch
from vasuki.io.input.prompts import Message, Prompt, conversation_templates, is_chat, prompt_reader
from vasuki.io.input.row_error import RowError
from vasuki.io.input.sampling import SamplingReader
from vasuki.io.input.tables import Rows
from vasuki.io.input.templates import as_it_is
from vasuki.io.selection import EVERY_ROW, Selection
from vasuki.io.values import value_bytes
from vasuki.models.sentence import Embedding

P = TypeVar("P")

log = logging.getLogger(__name__)

_BLOCKS_AHEAD = 2
_MOST_CHARACTERS = 2**20  # that are tokenised in one call, unless a prompt has more
_SENT_AS_CHAT = "each prompt is sent as a user's message in the model's chat template"
_SENT_AS_TEXT = "each prompt is sent as bare text, without a chat template"
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
class _Draft:
    """A row on its way to becoming Requests."""

    row: int
    id: str | int
    carried: dict[str, Any]
    prompt: Prompt | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    estimated_tokens: int = 0
    token_ids: Any = NO_TOKENS  # int32 [num_prompt_tokens]
    scored: list[ScoredText] = field(default_factory=list)
    error: str = ""
    arrived_s: float = 0.0
    priority: float = 0.0
    due_s: float = math.inf


class RequestStream:
    """An iterator of Requests. Its thread starts at once; close it, or use a `with` statement, to stop it early.

    Args:
        table: from `open_table(job)`, or rows that arrive.
        job: decides prompt, settings and carried columns.
        tokenizer: the model's.
        max_context_tokens: most tokens of prompt and answer together.
        vocab_size: token ids must lie below it, whether given in the input or by the tokenizer.
        selection: which rows to read.
        twin: makes the tokenizer that plans are made with, whose tokens of the first row are compared.

    Raises:
        ModelError: the job needs a chat template and the model has none.
        JobFileError: the job names a token that the model does not have.

    Raises, while iterating:
        ModelError: the tokenizer cannot do what the job asks, such as render messages.
    """

    def __init__(
        self,
        table: Rows,
        job: JobConfig,
        tokenizer: PromptEncoder,
        *,
        max_context_tokens: int,
        vocab_size: int,
        selection: Selection = EVERY_ROW,
        twin: Callable[[], PromptEncoder] | None = None,
    ) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self._twin = twin
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._is_batch_format = job.input.format == "openai-batch"
        as_chat = is_chat(job.input, tokenizer.has_chat_template, job.task)
        if job.input.prompt:
            log.info(_SENT_AS_CHAT if as_chat else _SENT_AS_TEXT)
        self._input = job.input
        self._system = conversation_templates(job.input) if self._is_batch_format else []
        marks = {"tokens": (as_it_is, as_it_is), "text": (tokenizer.marked, tokenizer.marked)}
        self._mark_messages, self._mark_prompt = marks.get(job.input.control_tokens, (tokenizer.marked, as_it_is))
        mark = self._mark_messages if as_chat else self._mark_prompt
        self._read_prompt = None if self._is_batch_format else prompt_reader(job.input, vocab_size, as_chat, mark)
        self._sampling = SamplingReader(job.sampling, vocab_size, job.output, job.constraint)
        self._alternatives = job.output.alternatives
        self._generates = job.task == "generate"
        self._scores = job.task == "score"
        self._embedding = Embedding.of(job) if job.task == "embed" else None
        if self._embedding:
            self._max_context_tokens = min(max_context_tokens, self._embedding.most_tokens or max_context_tokens)
        self._truncated = 0
        self._wants_choices = job.output.choice_probabilities
        self._continuations = continuation_reader(job, mark)
        self._priority_column, self._deadline_column = job.input.priority, job.input.deadline
        self._length_column = job.plan.length_column
        self._blocks = Prefetch(self._tokenised(selection), _BLOCKS_AHEAD)
        # Made one at a time: a row may have thousands of samples.
        self._requests = (
            request for drafts in self._blocks for draft in drafts for request in self._requests_of(draft)
        )

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        return next(self._requests)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the background thread. Nothing can be read afterwards."""
        self._requests.close()
        self._blocks.close()

    def _tokenised(self, selection: Selection) -> Generator[list[_Draft], None, None]:
        for block in self._table.blocks(selection):
            for drafts in _pieces(self._drafts(block)):
                self._tokenise(drafts)
                yield drafts
        if self._truncated:
            log.warning("%s cut to %d tokens", plural(self._truncated, "prompt"), self._max_context_tokens)

    def _drafts(self, block: Block) -> list[_Draft]:
        ids = self._table.ids(block)
        carried = self._table.carried(block)
        drafts = []
        for position, (row, row_id) in enumerate(zip(block.rows, ids, strict=True)):
            draft = _Draft(row, row_id, {name: values[position] for name, values in carried.items()})
            draft.arrived_s = block.arrived_s
            try:
                if row in block.malformed:
                    raise RowError(block.malformed[row])
                self._fill(draft, {name: values[position] for name, values in block.columns.items()})
            except RowError as problem:
                draft.error = str(problem)
            drafts.append(draft)
        return drafts

    def _fill(self, draft: _Draft, values: Mapping[str, Any]) -> None:
        if self._read_prompt is None:
            system = [
                {"role": role, "content": template.render(values, self._mark_messages)}
                for role, template in self._system
            ]
            marks = self._mark_messages, self._mark_prompt
            prompt, settings = read_body(values, self._vocab_size, system, *marks, self._alternatives)
            draft.sampling = self._sampling.read(values, settings)
        else:
            draft.sampling = self._sampling.read(values)
            prompt = self._read_prompt(values)
        if self._wants_choices and draft.sampling.constraint:
            draft.scored = [ScoredText(choice) for choice in draft.sampling.constraint.choices]
        elif self._scores:
            draft.scored = [ScoredText(text) for text in self._continuations(values)]
        if self._embedding and isinstance(prompt, str):
            prompt = self._embedding.prompt + prompt
        if (
            isinstance(prompt, str | list)
            and not self._input.truncate
            and self._tokenizer.surely_exceeds(prompt, self._max_context_tokens)
        ):
            raise RowError(self._no_room(f"{_num_characters(prompt)} characters"))
        draft.prompt = prompt
        if self._priority_column:
            draft.priority = _number(values[self._priority_column], "priority", -math.inf, otherwise=0.0)
        if self._deadline_column:
            draft.due_s = draft.arrived_s + _number(values[self._deadline_column], "deadline", 0.0, otherwise=math.inf)
        if self._length_column:
            draft.estimated_tokens = _estimate(values[self._length_column])

    def _tokenise(self, drafts: list[_Draft]) -> None:
        texts: list[tuple[_Draft, str]] = []
        conversations: list[tuple[_Draft, list[Message]]] = []
        for draft in drafts:
            if isinstance(draft.prompt, str):
                texts.append((draft, draft.prompt))
            elif isinstance(draft.prompt, list):
                conversations.append((draft, draft.prompt))
            elif draft.prompt is not None:
                draft.token_ids = draft.prompt
            draft.prompt = None
        now = self._input.now
        _encode(texts, self._tokenizer.encode_batch, "the tokenizer")
        _encode(conversations, partial(self._tokenizer.encode_messages, now=now), "the chat template")
        if self._twin and (texts or conversations):
            twin, self._twin = self._twin(), None
            _compare(texts[:1], twin.encode_batch)
            _compare(conversations[:1], partial(twin.encode_messages, now=now))
        if self._input.truncate:
            self._truncate([draft for draft in drafts if not draft.scored])
        self._tokenise_scored(drafts, {id(draft): text for draft, text in texts})
        for draft in drafts:
            draft.error = draft.error or self._problem(draft)

    def _truncate(self, drafts: list[_Draft]) -> None:
        """Cut prompts where the model's limit is, but for the special tokens that it expects at their ends."""
        most = self._max_context_tokens
        for draft in drafts:
            if len(draft.token_ids) > most:
                behind = self._behind
                draft.token_ids = np.concatenate([draft.token_ids[: most - len(behind)], behind])
                self._truncated += 1

    @cached_property
    def _behind(self) -> Ints:
        """The special tokens that the tokenizer puts behind a text."""
        [whole], plain = self._tokenizer.encode_batch(["a"]), self._tokenizer.encode_plain("a")
        ends = [end for end in range(len(plain), len(whole) + 1) if whole[end - len(plain) : end] == plain]
        return np.array(whole[max(ends, default=len(whole)) :], np.int32)

    def _tokenise_scored(self, drafts: list[_Draft], texts: Mapping[int, str]) -> None:
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
                self._truncated += max([each.cut(self._max_context_tokens) for each in draft.scored])

    def _problem(self, draft: _Draft) -> str:
        """Why a prompt cannot be run; empty if it can."""
        token_ids, num_tokens = draft.token_ids, len(draft.token_ids)
        if not num_tokens:
            return "prompt is empty"
        longest = max((len(each.prompt) for each in draft.scored), default=0)
        own = 0 if self._scores else num_tokens + self._generates
        if max(own, longest) > self._max_context_tokens:
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
        return f"prompt has {length}: no room is left in the model's context of {self._max_context_tokens}"

    def _requests_of(self, draft: _Draft) -> Iterator[Request]:
        """Yield one Request for each sample; a single one for a row that cannot be run."""
        num_tokens = len(draft.token_ids)
        carried_bytes = sum(map(value_bytes, draft.carried.values()))
        max_tokens = min(draft.sampling.max_tokens, self._max_context_tokens - num_tokens)
        sampling = draft.sampling
        if draft.scored:
            sampling = replace(sampling, n=sampling.n if self._generates else 0, scored=len(draft.scored))
        whole = Request(
            row=draft.row,
            id=draft.id,
            num_prompt_tokens=num_tokens,
            max_tokens=max(0, max_tokens),
            prompt_token_ids=NO_TOKENS if draft.error else draft.token_ids,
            sampling=sampling,
            estimated_tokens=draft.estimated_tokens,
            carried=draft.carried,
            carried_bytes=carried_bytes,
            error=draft.error,
            priority=draft.priority,
            arrived_s=draft.arrived_s,
            due_s=draft.due_s,
        )
        if draft.error:
            yield whole
            return
        if not (self._generates or self._scores):
            pooling = self._embedding.pooling if self._embedding else "last"
            num_read = 1 if pooling == "last" else num_tokens
            read = replace(whole, num_read=num_read, reads_first=pooling == "cls")
            yield replace(read, max_tokens=1, estimated_tokens=1)
            return
        for sample_index in range(sampling.n):
            yield replace(whole, sample_index=sample_index)
        for index, each in enumerate(draft.scored, sampling.n):
            yield replace(
                whole,
                num_prompt_tokens=len(each.prompt),
                prompt_token_ids=each.prompt,
                max_tokens=1,
                estimated_tokens=1,
                sample_index=index,
                num_read=len(each.targets),
                targets=each.targets,
                continuation=each.text,
            )


def _pieces(drafts: list[_Draft]) -> Iterator[list[_Draft]]:
    """Rows to tokenise in one call: a tokenizer takes many times the memory of a text."""
    piece: list[_Draft] = []
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
    return len(prompt) if isinstance(prompt, str) else 0


def _encode(drafts: list[tuple[_Draft, P]], encode: Callable[[list[P]], list[list[int]]], who: str) -> None:
    """Tokenise all prompts in one call; if it fails, one by one, to find the rows that it fails for."""
    if not drafts:
        return
    try:
        encoded = [np.asarray(token_ids, dtype=np.int32) for token_ids in encode([prompt for _, prompt in drafts])]
    except Exception as error:
        if isinstance(error, _NO_PROMPTS_FAULT) and not isinstance(error, RecursionError):
            raise
        if len(drafts) > 1:
            for pair in drafts:
                _encode([pair], encode, who)
        else:
            drafts[0][0].error = f"{who} refuses the prompt: {one_line(error) or type(error).__name__}"
        return
    for (draft, _), token_ids in zip(drafts, encoded, strict=True):
        draft.token_ids = token_ids


def _compare(drafts: list[tuple[_Draft, P]], encode: Callable[[list[P]], list[list[int]]]) -> None:
    """Say so if a plan reads the first prompt otherwise than the run."""
    for draft, prompt in drafts:
        planned = _Draft(draft.row, draft.id, {})
        _encode([(planned, prompt)], encode, "")
        if not draft.error and not np.array_equal(planned.token_ids, draft.token_ids):
            log.warning(
                "row %s has %d prompt tokens by the tokenizer that answers, and %d by the one that plans are made with",
                draft.id,
                len(draft.token_ids),
                len(planned.token_ids),
            )


def _number(value: Any, what: str, least: float, otherwise: float) -> float:
    """A number from a column, or `otherwise` where it is null. Raises RowError."""
    if value is None or value == "":
        return otherwise
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        wanted = "a number" if least < 0 else f"a number from {least:g} on"
        raise RowError(f"{what} is {value!r}, which is not {wanted}")
    return number


def _estimate(value: Any) -> int:
    """Tokens a row is expected to produce; 0, that is max_tokens, where the column does not say."""
    try:
        return max(0, int(float(value)))
    except (TypeError, ValueError, OverflowError):
        return 0
