"""How vasuki and what it is compared with differ: by a handful of switches over one scheduler.

`vllm` is the scheduler of vLLM's present engine, as read in its `vllm/v1/core/sched/scheduler.py` (2026): first come,
first served; running sequences first (the decoding ones came first); prompts in chunks together with them; blocks for
the chunk at hand and no more, without a watermark. A sequence that finds none preempts the last running one, if
need be itself; that one is computed again from the head of the queue, and nothing new starts in that step. Prefixes are
shared. The limits are its offline class's on cards below 70 GiB; on larger ones, but an A100, it has 16,384
tokens and 1,024 sequences. Simplified: what waiting rows begin with is evicted last, as everywhere here, where vLLM
evicts the coldest first; and a row that found no blocks is asked again when some were freed, not in every step.

`vllm-v0` is its first engine: whole prompts, and alone.

`sarathi` fills what the last chunk of a prompt leaves of a step with the next prompt. `sarathi-paper` does not: a batch
has a chunk of one prompt (decode-maximal batching, 4.3). `orca-best` and `orca-worst` are the cases between which that
paper's section 5.2 places Orca: one whole prompt beside the decodes of each step, and rows that all begin together.

`vasuki-paper` is Sarathi's scheduler with what that paper adds to it: as each batch forms, its Algorithms 1 and 2
decide how many layers' KV live on the host (5.1), and a row starts when all layers have room for its prompt (5.2).

`static` is what transformers does with a batch, `baton` a batch whose slots are filled again (Baton, arXiv 2410.18701),
and `-pd` either with prompts computed apart; what they pad is in `shaping`. `baton-preemptive` is `baton-pd` with its
section 4.3: rows start as long as their prompts fit, and who has to make room, for memory or for urgent rows, waits on
the host.

`prefill-packing` is the system of Dynamic Prefill Packing: rows that arrive are gathered and packed (`vasuki.arrivals`)
before the scheduler sees them. Here it computes whole prompts, a packed batch of them a step, together with the
decodes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

from vasuki.base.errors import JobFileError, did_you_mean


class Mixing(enum.Enum):
    """How prompts and decodes share steps."""

    MIXED = "mixed"  # both in one step
    PREFILL_FIRST = "prefill first"  # prompts alone whenever one fits, else decodes alone
    EXCLUSIVE = "exclusive"  # as above, but a prefill phase starts only when enough memory is free


class Admission(enum.Enum):
    """Memory that must be available before a waiting row starts."""

    CHUNK = "chunk"  # the chunk of its prompt that the step has budget for
    ROOM = "room"  # that chunk, and what decodes will take soon
    PROMPT = "prompt"  # its prompt; growth is met by stalls and preemption
    ALL_LAYERS = "all layers"  # the same with room for all layers, also where some live on the host
    MAXIMUM = "maximum"  # its prompt and max_tokens, in addition to all running rows'
    PEAK = "peak"  # so that the sum of all expected growth never exceeds the pool


@dataclass(frozen=True, slots=True)
class Policy:
    """What tells one scheduler from another."""

    name: str
    admission: Admission
    mixing: Mixing = Mixing.MIXED
    chunked: bool = True  # a prompt may be split over steps
    one_prompt: bool = False  # a step computes a chunk of one prompt at most
    refill: bool = True  # False: rows join only an empty batch, as in request-level serving
    waves: bool = False  # rows keep their slot until the last of their batch ends
    pads: Literal["", "similar", "together"] = ""  # prompts, to others of similar length, or to all chunks of the step
    ordered: bool = False  # rows are taken in a planned order; those that arrive by rounds, the short prompts first
    as_they_come: bool = False  # the plan is the order in which the input has them
    sorted_prompts: bool = False  # rows are taken in order of prompt length
    gathers: bool = False  # rows that arrive are held back to be packed
    urgent_first: bool = False  # rows that wait urgently start in place of others; elsewhere they only wait in front
    shares_prefixes: bool = False
    parks: bool = False  # rows that make room wait on the host, where the job leaves that open; vasuki's by price
    goes_deep: bool = False  # how many layers live on the host is decided batch by batch, where the job leaves it open
    evicts_least_computed: bool = False  # False: the victim is the row that came last
    chunk_tokens: int = 512  # token budget where the job names none; vasuki's is planned

    @property
    def makes_room(self) -> bool:
        """Whether a running row may have to leave, because others grow more than foreseen or one is urgent."""
        return self.admission is not Admission.MAXIMUM or self.waves or self.urgent_first


_WHOLE_PROMPTS = Policy("", Admission.MAXIMUM, chunked=False, chunk_tokens=2048)
_STATIC = replace(_WHOLE_PROMPTS, name="static", mixing=Mixing.PREFILL_FIRST, refill=False, waves=True, pads="together")

POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "vasuki",
            Admission.ROOM,
            ordered=True,
            urgent_first=True,
            shares_prefixes=True,
            evicts_least_computed=True,
        ),
        Policy("sarathi", Admission.PROMPT),
        Policy("sarathi-paper", Admission.PROMPT, one_prompt=True),
        Policy("vasuki-paper", Admission.ALL_LAYERS, goes_deep=True),
        replace(_WHOLE_PROMPTS, name="orca"),
        replace(_WHOLE_PROMPTS, name="orca-best", one_prompt=True),
        replace(_WHOLE_PROMPTS, name="orca-worst", refill=False),
        replace(_WHOLE_PROMPTS, name="vllm-v0", admission=Admission.PROMPT, mixing=Mixing.PREFILL_FIRST),
        Policy("vllm", Admission.CHUNK, shares_prefixes=True, chunk_tokens=8192),
        _STATIC,
        replace(_STATIC, name="static-sorted", sorted_prompts=True),
        replace(_STATIC, name="static-pd", pads="similar"),
        replace(_WHOLE_PROMPTS, name="baton", pads="together"),
        replace(_WHOLE_PROMPTS, name="baton-pd", pads="similar"),
        replace(
            _WHOLE_PROMPTS,
            name="baton-preemptive",
            admission=Admission.PROMPT,
            pads="similar",
            urgent_first=True,
            parks=True,
        ),
        replace(
            _WHOLE_PROMPTS,
            name="prefill-packing",
            admission=Admission.PROMPT,
            gathers=True,
            urgent_first=True,
            chunk_tokens=20_000,
        ),
    )
}


def find_policy(name: str) -> Policy:
    """Look a policy up by name. Raises JobFileError with the nearest known one."""
    try:
        return POLICIES[name]
    except KeyError:
        raise JobFileError(f"unknown policy '{name}'{did_you_mean(name, POLICIES)}") from None


def runnable_policy(name: str, attention: str, rows_arrive: bool = False) -> Policy:
    """Look a policy up that a run may have with that `engine.attention`. Raises JobFileError for one that pads where
    rows may be packed, and for one that gathers rows where all are there."""
    policy = find_policy(name)
    if policy.gathers and not rows_arrive:
        raise JobFileError(
            f"engine.policy: {name} gathers rows that arrive one by one: in `simulate`, in `watch --stdin`, and in "
            "`watch` on one JSONL file"
        )
    if policy.pads and attention != "padded":
        raise JobFileError(f"engine.policy: {name} pads its batches; a run does so with engine.attention: padded")
    return policy
