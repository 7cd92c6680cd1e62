"""What a model's files say of generating: the tokens that end answers, and what is asked for and not applied."""

from __future__ import annotations

import json
import logging
import re
import reprlib
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from vasuki.base.errors import ModelError
from vasuki.hf.loading.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# What generation_config.json may ask for that changes greedy output, each with its value that changes nothing.
_NOT_APPLIED: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1,
    "num_beams": 1,
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}


def generation_of(model: Any) -> Any:
    """Its defaults, or those of transformers."""
    return getattr(model, "generation_config", None) or GenerationConfig()


def end_tokens(name: str, config: Any, generation: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer. Says so if answers go on behind the one that the tokenizer has for their end."""
    eos = generation.eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
    own = tokenizer.eos_token_id
    if own is not None and eos_ids and own not in eos_ids:
        log.warning(
            "%s: answers end with %s, as its configuration says, and not with %s, the end token of its tokenizer; "
            "name that in sampling.stop if they should",
            name,
            " or ".join(tokenizer.text_of([token_id]) or str(token_id) for token_id in sorted(eos_ids)),
            tokenizer.text_of([own]),
        )
    return eos_ids


def refuse_broken_defaults(file: Path) -> None:
    """Refuse a generation_config.json that transformers would pass over, and with it the tokens that end answers."""
    if not file.exists():
        return
    try:
        json.loads(file.read_text(encoding="utf-8"))
        end = GenerationConfig.from_pretrained(str(file.parent)).eos_token_id
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or first_line(error)}") from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {first_line(error)}") from None
    except Exception as error:
        raise ModelError(f"{file} does not say how to generate: {first_line(error)}") from None
    if not all(type(token_id) is int for token_id in (end if isinstance(end, list) else [end or 0])):
        raise ModelError(f"{file}: eos_token_id should be a token id or a list of them, not {end!r}")


def warn_of_penalties(generation: Any) -> None:
    """Say what the model asks for that rows do not get."""
    values = {name: getattr(generation, name, None) for name in _NOT_APPLIED}
    asked = [
        f"{name} {reprlib.repr(value)}"
        for name, value in values.items()
        if value not in (None, _NOT_APPLIED[name], [], {})
    ]
    if asked:
        are = "is" if len(asked) == 1 else "are"
        log.warning("generation_config.json asks for %s, which %s not applied", " and ".join(asked), are)


def first_line(error: Exception) -> str:
    """What an error of transformers' says first, or what would help."""
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error).strip()
    if "trust_remote_code=True" in text:
        return "it comes with code, which runs only if the job says model.trust_remote_code and you --trust-remote-code"
    text = re.sub(r":\n\s*", ": ", text)  # where it says of what it speaks, and then what is wrong
    return (text.splitlines() or [type(error).__name__])[0][:300]
