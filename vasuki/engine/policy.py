"""How vasuki and what it is compared with differ: by a handful of switches over one scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from vasuki.base.errors import JobFileError, did_you_mean


class Mixing(enum.Enum):
    """How prompts and decodes share steps."""

    MIXED = "mixed"  # both in one step
    PREFILL_FIRST = "prefill first"  # prompts alone whenever one fits, else decodes alone
    EXCLUSIVE = "exclusive"  # as above, but a prefill phase starts only when enough memory is free


class Admission(enum.Enum):
    """Memory that must be available before a waiting row starts."""

    PROMPT = "prompt"  # its prompt; growth is met by stalls and preemption
    MAXIMUM = "maximum"  # prompt and max_tokens, beside those of all that run
    PEAK = "peak"  # so that the sum of all expected growth never exceeds the pool


@dataclass(frozen=True, slots=True)
class Policy:
    """What tells one scheduler from another."""

    name: str
    admission: Admission
    mixing: Mixing = Mixing.MIXED
    chunked: bool = True  # a prompt may be split over steps
    refill: bool = True  # False: rows join only an empty batch, as in request-level serving
    padded: bool = False  # the executor pads rows to the longest, and finished rows keep their slot
    ordered: bool = False  # rows are taken in a planned order, by estimated output lengths
    sorted_prompts: bool = False  # rows are taken in order of prompt length
    shares_prefixes: bool = False
    evicts_least_computed: bool = False  # False: the victim is the row that came last


_STATIC = Policy("static", Admission.MAXIMUM, Mixing.PREFILL_FIRST, chunked=False, refill=False, padded=True)

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("vasuki", Admission.PROMPT, ordered=True, shares_prefixes=True, evicts_least_computed=True),
        Policy("sarathi", Admission.PROMPT),
        Policy("orca", Admission.MAXIMUM, chunked=False),
        Policy("vllm", Admission.PROMPT, Mixing.PREFILL_FIRST, chunked=False),
        _STATIC,
        replace(_STATIC, name="static-sorted", sorted_prompts=True),
    )
}


def find_policy(name: str) -> Policy:
    """Look a policy up by name. Raises JobFileError with the nearest known one."""
    try:
        return POLICIES[name]
    except KeyError:
        raise JobFileError(f"unknown policy '{name}'{did_you_mean(name, POLICIES)}") from None
