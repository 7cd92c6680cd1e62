"""The probe of the padded backend: a few rows through the model in both ways, by `generate` and by this backend.

    step 1    a a a a a a a      step 2    . . . a      step 3    . a a      and so on, to the last token
              . . b b b c c                . . . b                . . b
                                           . . . c                . . c
                                           d d d                  d d

Rows join with whole prompts and with parts of them, so that padding lies before prompts and next to longer rows, and
two prompts share a row, if the model lets them. What `generate` says of each by itself is fed to both, and logits are
compared.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig

from vasuki.base.errors import one_line
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.blocks import BlockTable
from vasuki.engine.sequence import Request, Sequence, Status
from vasuki.engine.shaping import Similar
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.padded.block_cache import layout_of
from vasuki.hf.padded.calls import ModelCall
from vasuki.hf.padded.forward import Alone, Forward, Padded
from vasuki.hf.padded.held_memory import ALL_IN_BLOCKS, HeldBytes, held_bytes
from vasuki.models.config_json import longest_packed
from vasuki.models.shape import Backend

log = logging.getLogger(__name__)

_PROMPTS = ((7, 7), (3, 3), (2, 2), (5, 3))  # tokens of each prompt, and of its first chunk
_JOINS = (0, 0, 0, 1)  # step of each
_NEW_TOKENS = 4
_BLOCK_TOKENS = 4
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}  # mean difference of logits, in their standard deviation
_ROUGHLY = 0.1  # the same of other types


class Served(NamedTuple):
    """How a model's rows can be computed, and what its layers store."""

    backend: Backend
    layout: KVLayout  # of blocks; without heads where rows are computed alone
    longest_packed_tokens: int = 0  # of a prompt that may share a row with others; 0: none may
    held: HeldBytes = ALL_IN_BLOCKS  # by each row that is computed alone


def fewest_rows(rows: int, new: int, width: int) -> float:
    """A price of rectangles by which prompts share rows wherever they can."""
    return rows


def probe(model: Any) -> Served:
    """See how a model can be computed. Raises Unsupported by name."""
    vocab_size = int(model.config.get_text_config().vocab_size)
    prompts = [(np.arange(count) * (row + 2) + 3) % vocab_size for row, (count, _) in enumerate(_PROMPTS)]
    own = _own_cache(model, prompts[0])
    if own is None and _looks_ahead(model, prompts[0]):
        raise Unsupported("its tokens attend to those behind them")
    if getattr(model.config, "hash_seed", 0) is None:  # Reformer
        raise Unsupported("it hashes tokens at random, so that no two runs agree, unless its config has a hash_seed")
    try:
        expected = [_generated(model, prompt) for prompt in prompts]
    except Exception as error:
        raise Unsupported(f"`generate` does not run it: {one_line(error)}") from None
    try:
        return _probe_padded(model, own, prompts, expected)
    except Unsupported as error:
        why = error
    backends: tuple[Backend, ...] = ("uncached",) if own is None else ("alone", "uncached")
    backend = next(
        (backend for backend in backends if not _difference(model, Alone(model, backend), prompts, expected)), None
    )
    if backend is None:
        raise Unsupported("what it keeps of a row is of use to `generate` alone, and without it its tokens are others")
    log.info("%s is computed row by row: %s", type(model).__name__, why)
    num_layers = len(getattr(own, "layers", ())) or int(model.config.get_text_config().num_hidden_layers)
    held = held_bytes(lambda tokens: backend == "alone" and _own_cache(model, np.arange(tokens) % vocab_size))
    return Served(backend, KVLayout.uniform(num_layers, 0, 0, model.dtype), held=held)


def _probe_padded(
    model: Any, own: Any, prompts: list[np.ndarray], expected: list[tuple[list[int], torch.Tensor]]
) -> Served:
    """See whether rectangles give its tokens. Raises Unsupported by name."""
    if own is None:
        raise Unsupported("it keeps nothing of a row")
    layout = layout_of(own, model.dtype)
    if hasattr(model.config, "keep_window_size"):  # Doge; equal weights are common where a token is repeated
        raise Unsupported("it attends to the tokens of the largest weights, and tells equal ones apart by their column")
    blocks = KVCache(layout, 3 * len(prompts), _BLOCK_TOKENS, model.device)
    for layer in blocks.layers:
        layer.fill_(7.0)  # finite, and ruinous where a stale value is read
    if why := _difference(model, Padded(model, blocks), prompts, expected):
        raise Unsupported(why)
    longest = longest_packed(model.config.get_text_config().to_dict())
    mixed = _difference(model, Padded(model, blocks, None, Similar(longest, fewest_rows)), prompts, expected)
    return Served("padded", layout, 0 if mixed else longest)


def _looks_ahead(model: Any, prompt: np.ndarray) -> bool:
    """Whether a prompt's last token changes what is said of its first."""
    ids = torch.from_numpy(prompt).to(model.device).unsqueeze(0)
    others = ids.clone()
    others[:, -1] = 0
    with torch.inference_mode():
        first, second = (model(input_ids=each).logits[:, 0] for each in (ids, others))
    return not torch.equal(first, second)


def _own_cache(model: Any, prompt: np.ndarray) -> Any:
    """What a model keeps of a prompt; None if that is nothing."""
    ids = torch.from_numpy(prompt).to(model.device).unsqueeze(0)
    positions = torch.arange(len(prompt)).to(ids).unsqueeze(0)
    try:
        _, cache = ModelCall(model)(ids, positions, None, None)
    except Exception as error:
        raise Unsupported(f"it does not run as a causal model does: {one_line(error)}") from None
    return getattr(cache, "self_attention_cache", cache)  # of a decoder that could have an encoder


def _generated(model: Any, prompt: np.ndarray) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of `generate`, and the logits of each, `[_NEW_TOKENS, vocab_size]`."""
    ids = torch.from_numpy(prompt).to(model.device).unsqueeze(0)
    asked = GenerationConfig(
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        eos_token_id=-1,  # which no token is; None would mean the model's own
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits).float()


def _difference(
    model: Any, forward: Forward, prompts: list[np.ndarray], expected: list[tuple[list[int], torch.Tensor]]
) -> str:
    """What is wrong with this way of computing; empty if nothing is."""
    try:
        found = _computed(forward, prompts, [tokens for tokens, _ in expected])
    except Exception as error:
        return f"its steps fail: {one_line(error)}"
    rounding = _ROUNDING.get(model.dtype, _ROUGHLY)
    for ours, (_, theirs) in zip(found, expected, strict=True):
        if not (ours - theirs).abs().mean() <= rounding * theirs.std():  # nor where one is no number
            return "its tokens differ from `generate`'s"
    return ""


def _computed(forward: Forward, prompts: list[np.ndarray], tokens: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each row behind its prompt and its tokens, `[_NEW_TOKENS, vocab_size]`."""
    rows = [
        Sequence(
            Request(row, row, len(prompt), _NEW_TOKENS, prompt),
            block_table=BlockTable(device=list(range(3 * row, 3 * row + 3))),
            status=Status.RUNNING,
        )
        for row, prompt in enumerate(prompts)
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in itertools.count():
        prefills, decodes = [], []
        for i, row in enumerate(rows):
            if len(logits[i]) == _NEW_TOKENS or step < _JOINS[i]:
                continue
            start = row.num_computed_tokens
            if row.is_decoding:
                decodes.append(row)
            else:
                end = row.num_prompt_tokens if start else _PROMPTS[i][1]
                prefills.append(ScheduledChunk(row, start, end - start, end == row.num_prompt_tokens))
        batch = Batch(decodes, [row.num_computed_tokens for row in decodes], prefills, [])
        if not batch.chunks:
            return [torch.stack(each).float() for each in logits]
        last = iter(forward(batch))
        for chunk in batch.chunks:
            row, i = chunk.sequence, chunk.sequence.request.row
            row.num_computed_tokens = chunk.end
            if chunk.samples:
                logits[i].append(next(last))
                row.output_token_ids.append(tokens[i][len(row.output_token_ids)])
    raise AssertionError
