"""Prompt lengths of models that only have a shape: a token for every few characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

CHARACTERS_PER_TOKEN = 4  # of English text with a vocabulary of 32,000 to 128,000


class TokenCounter:
    """Stands in for a tokenizer where there is none."""

    has_chat_template = True  # so that jobs with conversations can be planned

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return about as many numbers as there will be tokens; texts with a common beginning get the same first
        numbers."""
        return [_made_up_ids(text) for text in texts]

    def encode_messages(self, conversations: list[list[Any]], now: object) -> list[list[int]]:
        """Count conversations in the same way, without what a chat template would add."""
        return self.encode_batch(list(map(_joined, conversations)))

    def encode_pairs(
        self, pairs: Sequence[Sequence[str]], most_tokens: int | None = None
    ) -> list[tuple[list[int], int]]:
        """The same for two texts."""
        return [(_made_up_ids(first + second)[:most_tokens], 0) for first, second in pairs]

    def encode_plain(self, text: str) -> list[int]:
        """The same for a text within another."""
        return _made_up_ids(text)

    def marked(self, text: str, own: object = ()) -> str:
        """The text itself: no control tokens are known that it might spell."""
        return text

    def surely_exceeds(self, prompt: str | list[Any], num_tokens: int) -> bool:
        """Whether a text or a conversation surely has more tokens than that."""
        return _count(prompt if isinstance(prompt, str) else _joined(prompt)) > num_tokens


def _joined(messages: list[Any]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def _count(text: str) -> int:
    return len(text) // CHARACTERS_PER_TOKEN + 1


def _made_up_ids(text: str) -> list[int]:
    """A number for every few characters, negative: they stand for no token of a vocabulary."""
    count = _count(text)
    padded = text.ljust(count * CHARACTERS_PER_TOKEN, "\0").encode("utf-32-le", "surrogatepass")
    pieces = np.frombuffer(padded, np.uint32).reshape(count, CHARACTERS_PER_TOKEN)
    hashed = pieces @ (np.uint32(2_654_435_761) ** np.arange(1, CHARACTERS_PER_TOKEN + 1, dtype=np.uint32))
    ids: list[int] = (hashed | np.uint32(2**31)).view(np.int32).tolist()
    return ids
