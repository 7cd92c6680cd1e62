"""Text and messages to token ids, and back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import Any

from transformers import AutoTokenizer

from vasuki.errors import ModelError
from vasuki.sequence import Sequence


class Tokenizer:
    """The model's own tokenizer, with the few calls that a job needs."""

    def __init__(self, path: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            raise ModelError(f"model {path} has no usable tokenizer: {_first_line(error)}") from None
        if not getattr(self._tokenizer, "vocab_size", 0):
            raise ModelError(f"model {path} has no usable tokenizer: its vocabulary is empty")
        self._name = functools.cache(lambda token_id: self._text([token_id], skip_special_tokens=False))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token, for models whose config names none."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model expects around it."""
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=True)["input_ids"]
        return encoded

    def encode_messages(self, conversations: Rows[Rows[Mapping[str, Any]]]) -> list[list[int]]:
        """Token ids of each conversation, rendered by the chat template, open for the assistant's turn.

        Raises:
            ModelError: the model has no chat template.
            Exception: whatever the template raises for messages it does not accept.
        """
        if not self._tokenizer.chat_template:
            raise ModelError("the model has no chat template; use input.prompt instead of input.messages")
        encoded: list[list[int]] = self._tokenizer.apply_chat_template(
            list(conversations), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return encoded

    def decode(self, sequence: Sequence) -> str:
        """The sequence's output as text, without special tokens, cut before the first stop string."""
        text = self._text(sequence.output_token_ids)
        cuts = [position for stop in sequence.request.sampling.stop if (position := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        """Whether a stop string is complete, or the special token that it names is there, once `token_id` follows.

        A token stands for at least one byte, so a stop string of n bytes lies within the last n tokens. A few more are
        decoded because the first ones may be the rest of a character, or lose a leading space.
        """
        stops = sequence.request.sampling.stop
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + 4
        tail = self._text([*sequence.output_token_ids[1 - window :], token_id])
        return any(stop in tail for stop in stops) or self._name(token_id) in stops

    def _text(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
