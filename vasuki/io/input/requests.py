"""Input rows -> Requests: lazily, in input order, tokenised ahead in a background thread.

    table.blocks -> drafts (prompt, settings) -> tokenised -> Requests -> bounded queue -> scheduler

Whatever is wrong with one row becomes the `error` of its Request. A row with n samples becomes n Requests that share
the prompt's tokens. `Request.max_tokens` is the row's setting, cut to what the model's context leaves after the prompt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vasuki.base.config import JobConfig
from vasuki.engine.sequence import NO_TOKENS, Request
from vasuki.io.formats.sources import Block
from vasuki.io.input.continuations import ScoredText, continuation_reader
from vasuki.io.input.openai_batch import read_body
from vasuki.io.input.prefetch import Prefetch
from vasuki.io.input.prompts import conversation_templates, is_chat, prompt_reader
from vasuki.io.input.row_error import RowError
from vasuki.io.input.sampling import SamplingReader
from vasuki.io.input.tables import Rows
from vasuki.io.input.templates import as_it_is
from vasuki.io.input.tokenised import Draft, PromptEncoder, PromptTokenizer
from vasuki.io.selection import EVERY_ROW, Selection
from vasuki.io.values import value_bytes
from vasuki.models.sentence import Embedding, longest_text

log = logging.getLogger(__name__)

_BLOCKS_AHEAD = 2
_SENT_AS_CHAT = "each prompt is sent as a user's message in the model's chat template"
_SENT_AS_TEXT = "each prompt is sent as bare text, without a chat template"


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
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._is_batch_format = job.input.format == "openai-batch"
        as_chat = is_chat(job.input, tokenizer.has_chat_template, job.task)
        if job.input.prompt:
            log.info(_SENT_AS_CHAT if as_chat else _SENT_AS_TEXT)
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
        if job.task in ("embed", "classify"):
            self._max_context_tokens = longest_text(job.model, max_context_tokens)
        self._wants_choices = job.output.choice_probabilities
        self._continuations = continuation_reader(job, mark)
        self._priority_column, self._deadline_column = job.input.priority, job.input.deadline
        self._length_column = job.plan.length_column
        self._tokens = PromptTokenizer(tokenizer, job, self._max_context_tokens, vocab_size, twin)
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

    def _tokenised(self, selection: Selection) -> Generator[list[Draft], None, None]:
        for block in self._table.blocks(selection):
            yield from self._tokens.tokenised(self._drafts(block))
        self._tokens.say_what_was_cut()

    def _drafts(self, block: Block) -> list[Draft]:
        ids = self._table.ids(block)
        carried = self._table.carried(block)
        drafts = []
        for position, (row, row_id) in enumerate(zip(block.rows, ids, strict=True)):
            draft = Draft(row, row_id, {name: values[position] for name, values in carried.items()})
            draft.arrived_s = block.arrived_s
            try:
                if row in block.malformed:
                    raise RowError(block.malformed[row])
                self._fill(draft, {name: values[position] for name, values in block.columns.items()})
            except RowError as problem:
                draft.error = str(problem)
            drafts.append(draft)
        return drafts

    def _fill(self, draft: Draft, values: Mapping[str, Any]) -> None:
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
        self._tokens.refuse_if_too_long(prompt)
        draft.prompt = prompt
        if self._priority_column:
            draft.priority = _number(values[self._priority_column], "priority", -math.inf, otherwise=0.0)
        if self._deadline_column:
            draft.due_s = draft.arrived_s + _number(values[self._deadline_column], "deadline", 0.0, otherwise=math.inf)
        if self._length_column:
            draft.estimated_tokens = _estimate(values[self._length_column])

    def _requests_of(self, draft: Draft) -> Iterator[Request]:
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
            second_begins=draft.second_begins,
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
