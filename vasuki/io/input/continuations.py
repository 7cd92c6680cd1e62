"""Texts whose likelihood behind a prompt is asked for: `input.continuation`, or choices of which the probabilities are.

Where a prompt is bare text, it and what follows are tokenised as one text, and what the prompt's own tokens do not
cover is scored; spaces at the end of the prompt belong to what follows (as EleutherAI's lm-evaluation-harness has it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig
from vasuki.base.config_values import Column
from vasuki.io.input.row_error import RowError
from vasuki.io.input.templates import Mark, Template

MOST_TEXTS = 1000  # of a row


@dataclass(slots=True)
class ScoredText:
    """A text, on its way to becoming a request."""

    text: str
    prompt: Any = ()  # int32 [num_prompt_tokens], up to the token before its last
    targets: Any = ()  # int32 [num_read]

    def split(self, token_ids: Ints, num_before: int) -> None:
        """Set both from the tokens of prompt and text, of which the first `num_before` are not scored."""
        self.prompt, self.targets = token_ids[:-1], token_ids[num_before:]

    def cut(self, most_tokens: int) -> bool:
        """Leave out the beginning of a prompt that is longer. Returns whether that was needed."""
        is_longer = len(self.prompt) > most_tokens
        self.prompt = self.prompt[-most_tokens:]
        return is_longer


def continuation_reader(job: JobConfig, mark: Mark) -> Callable[[Mapping[str, Any]], list[str]]:
    """A function that gets the texts of a row from its values; none where its prompt is the text. It raises RowError.

    Raises:
        JobFileError: a template is malformed.
    """
    given = job.input.continuation
    if isinstance(given, Column):
        return lambda values: _texts(values[given.column], given.column)
    templates = _templates(given)
    return lambda values: [_present(template.render(values, mark)) for template in templates]


def continuation_columns(job: JobConfig) -> list[str]:
    """The columns that they name. Raises JobFileError."""
    given = job.input.continuation
    if isinstance(given, Column):
        return [given.column]
    return [column for template in _templates(given) for column in template.columns]


def _templates(given: str | tuple[str, ...]) -> list[Template]:
    texts = (given,) if isinstance(given, str) else given
    return [Template.parse(text, "input.continuation", needs_column=False) for text in texts if text]


def without_last_spaces(prompt: str) -> tuple[str, str]:
    """A prompt, and the spaces at its end."""
    kept = prompt.rstrip()
    return kept, prompt[len(kept) :]


def _texts(value: Any, column: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RowError(f"column '{column}' is no list of texts")
    if not 0 < len(value) <= MOST_TEXTS:
        raise RowError(f"column '{column}' has {len(value)} texts; there may be 1 to {MOST_TEXTS}")
    return [_present(each) for each in value]


def _present(text: str) -> str:
    if not text:
        raise RowError("continuation is empty")
    return text


def joined(before: Any, text_ids: list[int]) -> tuple[Ints, int]:
    """The tokens of a prompt and of what follows it, and how many are the prompt's."""
    return np.concatenate([before, np.array(text_ids, np.int32)]), len(before)
