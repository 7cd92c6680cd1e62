"""Seconds a request takes in the long run, by arithmetic alone: enough to tell good step sizes from bad ones.

While a job runs, as many requests start as end. With B sequences that sample in a step, each of P prompt and D output
tokens, B / D of them end in it, so that prompts must pass at P B / D tokens a step. B is what memory holds, unless the
steps are too small for that flow: then prompts fill every step and B settles where P B / D is what decodes leave of it
(Sarathi, section 4.2), below 1 where a prompt takes more steps than its output. The last chunk of a prompt samples,
too: of B sequences, B (D - 1) / D decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vasuki.engine.policy import Mixing
from vasuki.machines.cost_model import CostModel, StepTime, StepWork, causal_pairs
from vasuki.planner.lengths import Lengths

PACKED = 0.97  # share of the KV memory that running sequences fill on average
PACKED_IN_PHASES = 0.85  # the same where prompts and decodes take turns: memory empties before it is filled again


@dataclass(frozen=True, slots=True)
class MeanRow:
    """Means over the requests of a job."""

    requests: int
    prompt_tokens: float  # to compute: what rows share is computed once
    output_tokens: float
    held_tokens: float  # by a sequence in addition to its shared prefix, averaged over the steps in which it decodes
    context_tokens: float  # that it attends to, averaged likewise
    prefix_tokens: float  # that it shares
    chunk_context_tokens: float  # at the end of a prompt chunk
    widest_tokens: float  # context of the longest row that decodes, of all that run

    @classmethod
    def of(cls, lengths: Lengths) -> MeanRow:
        prompts, outputs = lengths.prompt_tokens.astype(float), lengths.output_tokens.astype(float)
        shared = np.zeros(len(lengths)) if lengths.prefixes is None else lengths.prefixes.found().astype(float)
        own = lengths.own_prompt_tokens.astype(float)
        growth = outputs * (outputs - 1) / 2
        return cls(
            requests=len(lengths),
            prompt_tokens=float((prompts - shared).mean()),
            output_tokens=float(outputs.mean()),
            held_tokens=float((outputs * own + growth).sum() / outputs.sum()),
            context_tokens=float((outputs * prompts + growth).sum() / outputs.sum()),
            prefix_tokens=float((prompts - own).mean()),
            chunk_context_tokens=float((np.square(prompts) - np.square(shared)).sum() / (prompts - shared).sum() / 2),
            widest_tokens=float((prompts + outputs / 2).max()),
        )

    def most_sequences(self, kv_tokens: int, state_tokens: float = 0.0) -> float:
        """Sequences that run at a time when memory is full. Each holds its KV and a state as large as the KV of
        `state_tokens`."""
        held = self.held_tokens + state_tokens
        return max(1.0, min(float(self.requests), PACKED * (kv_tokens - self.prefix_tokens) / held))


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The steady state of a job: sequences in a step, and seconds a request."""

    request_s: float
    sequences: float  # that sample in a step
    decode_step_s: float  # of a step without prompts
    mixed_step_s: float  # of a full step
    hidden: float  # share of the copy time that passes behind compute; 1 where nothing is copied


def steady_state(
    cost: CostModel,
    work: MeanRow,
    kv_tokens: int,
    chunk_tokens: int,
    max_num_seqs: int,
    mixing: Mixing,
    streamed_layers: int = 0,
    copy_bytes: float = 0.0,
    short_step_tokens: int = 0,
) -> SteadyState:
    """The state that a job settles at under these limits. Streaming is as in `CostModel.repeated`.

    Prompts that need more than short steps and less than full ones get as many of either as they need.
    """

    def step(decodes: float, chunk: float) -> StepTime:
        count, size = max(0, round(decodes)), max(0, round(chunk))
        context = max(size, round(work.chunk_context_tokens)) if size else 0
        calls = {"ragged": 1.0, "padded": (count > 0) + (size > 0)}.get(backend, count + size / work.prompt_tokens)
        seen = round(work.widest_tokens if backend == "padded" else work.context_tokens)
        work_of_step = StepWork(
            num_tokens=count + size,
            num_samples=max(1, count),
            num_decodes=count,
            num_chunks=bool(size),
            decode_context_tokens=count * seen,
            chunk_context_tokens=context,
            chunk_pairs=causal_pairs(size, context) if backend == "ragged" else size * context,
            calls=max(1, round(calls)),
        )
        if backend == "uncached":  # a token is a chunk of all that it sees
            work_of_step = work_of_step._replace(
                num_tokens=count * seen + size,
                num_decodes=0,
                num_chunks=count + bool(size),
                decode_context_tokens=0,
                chunk_context_tokens=count * seen + context,
                chunk_pairs=count * seen * seen + size * context,
            )
        return next(cost.repeated(work_of_step, 1, streamed_layers, copy_bytes))

    backend, prompt, output = cost.shape.backend, work.prompt_tokens, work.output_tokens
    decoding = (output - 1) / output  # of the sequences that sample
    sequences = min(float(max_num_seqs), work.most_sequences(kv_tokens))
    if mixing is Mixing.MIXED:
        wanted, room = prompt * sequences / output, chunk_tokens - decoding * sequences
        if wanted > room:
            sequences = chunk_tokens * output / (prompt + output - 1)
            wanted = room = prompt * sequences / output
        decodes = decoding * sequences
        short = max(0.0, short_step_tokens - decodes)
        if 0 < wanted < short:
            short, room = 0.0, short
        decode, other, full = step(decodes, 0), step(decodes, short), step(decodes, room)
        # for a request, those that it shares with others divided
        full_steps = output / sequences * (wanted - short) / (room - short)
        other_steps = output / sequences - full_steps
    else:
        sequences = max(1.0, sequences * PACKED_IN_PHASES / PACKED)
        decode, full = step(sequences, 0), step(0, chunk_tokens)
        other, full_steps, other_steps = decode, prompt / chunk_tokens, (output - 1) / sequences
    request_s, exposed_s, hidden_s = (full_steps * a + other_steps * b for a, b in zip(full, other, strict=True))
    copied_s = exposed_s + hidden_s
    return SteadyState(request_s, sequences, decode.total_s, full.total_s, hidden_s / copied_s if copied_s else 1.0)


def price_split(cost: CostModel, work: MeanRow, kv_tokens: int, chunk_tokens: int, max_num_seqs: int) -> float:
    """The share of a job's time, and so of its price, that its prompts answer for.

    Both share steps, so the time is split as each would take by itself: prompts in full steps, decodes side by
    side without prompts.
    """
    apart = steady_state(cost, work, kv_tokens, chunk_tokens, max_num_seqs, Mixing.EXCLUSIVE)
    prompt_s = work.prompt_tokens / chunk_tokens * apart.mixed_step_s
    decode_s = work.output_tokens / apart.sequences * apart.decode_step_s
    return prompt_s / (prompt_s + decode_s)
