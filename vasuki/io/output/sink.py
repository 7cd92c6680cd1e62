"""The sink of finished sequences: text is decoded, samples of a row are gathered, and rows become durable in parts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from vasuki.base.config import JobConfig
from vasuki.engine.sequence import Decoded, FinishReason, Progress, Request, Sequence
from vasuki.io.output.answers import Answer
from vasuki.io.output.parts import PartWriter, Totals
from vasuki.io.output.scores import score_values
from vasuki.io.output.typed import reader_of
from vasuki.io.output.vectors import VectorReader

log = logging.getLogger(__name__)


class RowSink:
    """The engine's `Sink`.

    A row with n samples is buffered when the last of them is done: a row is in the output with all its samples or not
    at all, so that one flag a row says what is left to do.

    Attributes:
        again: requests to be served once more, for who takes them.

    Args:
        writer: makes the parts.
        decode: what the output of a finished sequence says, without the stop string.
        text_of: that of some tokens, for the column `logprobs`.
        on_commit: called after every part, and as often while no row ends; the place to write down what else is known.
        on_row: told of the answers of each row.
        job: says what answers look like, how often a row is asked again whose answer is not like that, and what is made
            of scores.
        clock: decides when a part is due where time goes on while no step does; that of the steps if not given.
    """

    def __init__(
        self,
        writer: PartWriter,
        decode: Callable[[Sequence], Decoded],
        text_of: Callable[[list[int]], str] = str,
        on_commit: Callable[[], None] = lambda: None,
        on_row: Callable[[list[Answer]], None] = lambda answers: None,
        clock: Callable[[], float] | None = None,
        job: JobConfig | None = None,
    ) -> None:
        self._writer = writer
        self._decode = decode
        self._on_commit = on_commit
        self._on_row = on_row
        self._clock = clock
        self._job = job
        self._reader = reader_of(job) if job else None
        self._text_of = text_of
        self._vectors = VectorReader(job) if job and job.task in ("embed", "classify") else None
        self._retries = job.errors.retries if job else 0
        self.again: deque[Request] = deque()
        self._keeps_logprobs = "logprobs" in writer.schema.names
        self._keeps_token_ids = "output_token_ids" in writer.schema.names
        self._samples: dict[int, list[tuple[Sequence, Answer]]] = {}  # by row, until all are there
        self.written = Totals()  # rows handed to the writer, committed or not
        self._answers = 0  # that ended by themselves or might have
        self._cut = 0  # of them, by their limit

    def write(self, sequence: Sequence) -> None:
        """Take a finished or rejected sequence."""
        request = sequence.request
        answer = self._answer(sequence)
        failed = request.progress.failed_tries
        if answer.answer_status == "invalid" and failed < self._retries and request.sampling.temperature:
            self.again.append(replace(request, progress=Progress(failed_tries=failed + 1)))
            return
        samples = self._samples.setdefault(request.row, [])
        samples.append((sequence, answer))
        if request.error or len(samples) == request.sampling.requests:
            del self._samples[request.row]
            answers = self._answers_of(samples)
            self._writer.append(answers)
            self.written += Totals.of(answers)
            self._on_row(answers)

    def _answers_of(self, samples: list[tuple[Sequence, Answer]]) -> list[Answer]:
        """The lines of a row: of its samples, each with what its scored texts came to, or a single one of those."""
        samples.sort(key=lambda sample: sample[0].request.sample_index)
        scored = [(sequence, answer) for sequence, answer in samples if sequence.request.num_read]
        if not scored:
            return [answer for _, answer in samples]
        answers = [answer for sequence, answer in samples if not sequence.request.num_read]
        failed = next((answer for _, answer in scored if answer.error), None)
        if failed is not None:
            return [failed]
        assert self._job is not None, "a job asks for them"
        if self._vectors:
            values = self._vectors.values(scored[0][0].value)
        else:
            values = score_values(self._job, [sequence for sequence, _ in scored])
        if answers:
            return [replace(answer, values=values) for answer in answers]
        return [
            replace(scored[0][1], sample=0, values=values, prompt_tokens=sum(each.prompt_tokens for _, each in scored))
        ]

    def incomplete(self) -> Iterator[Sequence]:
        """Finished samples of rows that lack others, and rows that are to be asked again."""
        for samples in self._samples.values():
            yield from (sequence for sequence, _ in samples)
        yield from map(Sequence, self.again)

    def commit_if_due(self, now_s: float) -> None:
        """Make rows durable if it is time. `now_s` is that of the steps, from the writer's `started_s`."""
        if self._writer.commit_if_due(self._clock() if self._clock else now_s):
            self._on_commit()

    def commit(self) -> None:
        """Make every complete row durable now."""
        self._writer.commit()
        self._on_commit()

    def close(self) -> None:
        """Make every complete row durable, and leave a part even if there is none. Say so if most answers were cut."""
        self._writer.close()
        self._on_commit()
        if 2 * self._cut > self._answers:
            log.info("%d of %d answers ran to their limit of tokens and were cut there", self._cut, self._answers)

    def _answer(self, sequence: Sequence) -> Answer:
        request = sequence.request
        error = request.error or sequence.error
        if not error and sequence.finish_reason is FinishReason.ERROR:
            error = "failed without a reason"
        if error:
            return Answer(
                row=request.row,
                id=request.id,
                output="",
                finish_reason=FinishReason.ERROR.value,
                error=error,
                prompt_tokens=request.num_prompt_tokens,
                sample=request.sample_index,
                carried=request.carried,
            )
        reason = sequence.finish_reason
        assert reason is not None, "only finished sequences have an answer"
        if not request.sampling.ignore_eos:
            self._answers += 1
            self._cut += reason is FinishReason.LENGTH
        text, reasoning = self._decode(sequence)
        value, status = None, None
        if self._reader:
            value, status = self._reader.read(text, reason is FinishReason.LENGTH, request.sampling.constraint)
        return Answer(
            row=request.row,
            id=request.id,
            output=text,
            finish_reason=reason.value,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=sequence.num_output_tokens,
            sample=request.sample_index,
            output_token_ids=np.array(sequence.output_token_ids, dtype=np.int32) if self._keeps_token_ids else (),
            logprob=sequence.logprob,
            logprobs=self._logprobs(sequence) if self._keeps_logprobs else None,
            carried=request.carried,
            answer=value,
            answer_status=status,
            tries=request.progress.failed_tries + 1,
            reasoning=reasoning,
        )

    def _logprobs(self, sequence: Sequence) -> list[dict[str, Any]]:
        """How likely each token was, as the column has it."""

        def told(token_id: int, logprob: float) -> dict[str, Any]:
            return {"token": self._text_of([token_id]), "token_id": token_id, "logprob": logprob}

        tokens = zip(sequence.output_token_ids, sequence.token_logprobs, strict=True)
        return [
            told(token_id, of.logprob) | {"top_logprobs": [told(*each) for each in of.likeliest]}
            for token_id, of in tokens
        ]
