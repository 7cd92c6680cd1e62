"""A request as it was read, and the sequence that serves it.

A `Request` never changes. A `Sequence` is its life inside the engine: a few numbers move, everything else is derived.

    token positions   0 ............ num_prompt_tokens ............ num_tokens
                      |-- prompt ----|-- output so far -------------|
                      |-- computed: K and V are in blocks --|-- next chunk --|

A prefill chunk and a decode are the same thing: an interval of positions that is computed in one step. The step that
computes position `num_tokens - 1` samples the next token. Until the device has told which, that one is pending: it
counts as a token, and the next step may compute it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vasuki.base.constraint import Constraint
from vasuki.engine.blocks import BlockTable

NO_TOKENS: tuple[int, ...] = ()
TOKEN_BYTES = 4  # of an id in memory
USUAL = (0.0, math.inf)  # urgency of a row of which nothing is said


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen. Greedy when `temperature` is 0.

    A row's draws depend on `(seed, row id, sample index)` and the position alone, never on its neighbours in the batch.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    min_p: float = 0.0  # 0 keeps it too
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    n: int = 1
    scored: int = 0  # texts whose likelihood is asked for, each by a request of its own
    ignore_eos: bool = False
    special_tokens: bool = False  # stay in the output's text
    reasoning: bool = False  # is kept apart from the answer, of which alone `constraint` speaks
    constraint: Constraint | None = None  # what the answer has to look like
    edits_logits: bool = field(init=False)  # before a token is chosen, which may depend on those before

    @property
    def requests(self) -> int:
        """How many a row has."""
        return self.n + self.scored

    def __post_init__(self) -> None:
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        others = self.min_tokens or self.bad_words or self.logit_bias or self.constraint is not None
        object.__setattr__(self, "edits_logits", bool(penalties or others))


class FinishReason(enum.StrEnum):
    """Why a row ended, as written to the `finish_reason` column."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class TokenLogprob(NamedTuple):
    """How likely the model found a token of the output, and its likeliest tokens at that place."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()  # with theirs, if asked for


class Decoded(NamedTuple):
    """What the output of a row says."""

    text: str
    reasoning: str | None = None  # before it, where that is kept apart


NOTHING_SAID = Decoded("")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come: what a run needs to go on with it that has nothing else of it."""

    output_token_ids: tuple[int, ...] = NO_TOKENS
    logprob: float = 0.0  # sum over them, if asked for
    finish_reason: FinishReason | None = None  # of one that has ended
    token_logprobs: tuple[TokenLogprob, ...] = ()  # of each token, if asked for
    failed_tries: int = 0  # before this one, whose answers were not what they had to be
    value: Any = None  # what was computed of it, where that is no token


UNBEGUN = Progress()


@dataclass(frozen=True, slots=True)
class Request:
    """One output row to produce.

    `prompt_token_ids` is absent in simulated runs, where only lengths matter. A row that cannot be run carries the
    reason in `error` and passes through the engine untouched, to become an output row with `finish_reason=error`.
    """

    row: int  # position in the input, from 0
    id: str | int
    num_prompt_tokens: int
    max_tokens: int
    prompt_token_ids: Any = NO_TOKENS  # int32 [num_prompt_tokens]
    sampling: SamplingParams = SamplingParams()
    sample_index: int = 0  # which of the row's requests: samples, then texts that are scored
    num_read: int = 0  # last positions of the prompt that are read in place of an output
    reads_first: bool = False  # of these only the first position counts
    targets: Any = NO_TOKENS  # [num_read], the tokens behind these, if they are scored
    continuation: str = ""  # the text of them
    second_begins: int = 0  # position of a pair's second text, where the model is told which is which
    estimated_tokens: int = 0  # output length the planner expects; 0 means `max_tokens`
    carried: Mapping[str, Any] = field(default_factory=dict)  # input columns copied to the output
    carried_bytes: int = 0  # about what they take in memory
    error: str = ""
    progress: Progress = UNBEGUN  # that an earlier run made with it
    priority: float = 0.0  # the highest goes first
    arrived_s: float = 0.0  # on the clock of its run, as is
    due_s: float = math.inf  # when it should have ended

    @property
    def key(self) -> tuple[int, int]:
        """Its row and sample, which no other request of a job has."""
        return self.row, self.sample_index

    @property
    def peak_tokens(self) -> int:
        """Tokens of KV that it holds at most: the last possible one is sampled, and never stored."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        return self.carried_bytes + (0 if self.error else TOKEN_BYTES * self.num_prompt_tokens)

    @property
    def urgency(self) -> tuple[float, float]:
        """The least goes first: the highest priority, and among equals what is due first."""
        return -self.priority, self.due_s

    @property
    def is_urgent(self) -> bool:
        """Whether it goes before rows of which nothing is said."""
        return self.urgency < USUAL

    @property
    def expected_tokens(self) -> int:
        """Output tokens to plan for: the estimate, never above `max_tokens`."""
        return min(self.estimated_tokens, self.max_tokens) if self.estimated_tokens else self.max_tokens


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # not admitted, or preempted with its KV dropped
    RUNNING = "running"  # holds device blocks
    PARKED = "parked"  # its KV lies in host blocks
    FINISHED = "finished"  # computes no more and holds no memory


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress. Compared by identity."""

    request: Request
    output_token_ids: list[int] = field(default_factory=list)  # appended by Scheduler.settle
    num_pending_tokens: int = 0  # output behind those, sampled but not known yet; set by Scheduler
    num_computed_tokens: int = 0  # set by Scheduler: positions whose K and V are in blocks
    block_table: BlockTable = field(default_factory=BlockTable)  # filled by Scheduler from the BlockPool
    status: Status = Status.WAITING  # set by Queues, as the row moves
    finish_reason: FinishReason | None = None  # set by Queues when the row ends
    error: str = ""  # set by Scheduler when it rejects, or the model fails
    logprob: float = 0.0  # sum over output tokens, if asked for; set by Scheduler.settle
    token_logprobs: list[TokenLogprob] = field(default_factory=list)  # of each, if asked for; set by Scheduler.settle
    value: Any = None  # that is computed in place of output; set by Scheduler.settle
    prefix_keys: list[bytes] = field(default_factory=list)  # of the prompt's full blocks, set by Prefixes
    num_shared_tokens: int = 0  # of the prompt, found in memory when it started, at most; set by Prefixes
    expected_tokens: int = field(init=False)  # of output, in all; from the request, sharpened by PlannedOrder

    def __post_init__(self) -> None:
        self.expected_tokens = self.request.expected_tokens

    @property
    def urgency(self) -> tuple[float, float]:
        return self.request.urgency

    @property
    def progress(self) -> Progress:
        """How far it has come, as far as that is known."""
        reason = None if self.num_pending_tokens else self.finish_reason
        failed = self.request.progress.failed_tries
        likely = tuple(self.token_logprobs)
        return Progress(tuple(self.output_token_ids), self.logprob, reason, likely, failed, self.value)

    @classmethod
    def going_on(cls, request: Request) -> Sequence:
        """The sequence of a request, with all that an earlier run made of it but whether it has ended."""
        sequence = cls(request)
        if request.progress is not UNBEGUN:
            sequence.become(replace(request.progress, finish_reason=None))
        return sequence

    def become(self, progress: Progress) -> None:
        """Come as far as that."""
        self.output_token_ids, self.logprob = list(progress.output_token_ids), progress.logprob
        self.token_logprobs = list(progress.token_logprobs)
        self.finish_reason, self.value = progress.finish_reason, progress.value

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.num_prompt_tokens + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions still to compute before the next token can be sampled: 1 while decoding, more while prefilling."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0
