"""Texts of prompts to token ids: what a row spells stays text, and what a text begins with is not put before it again.

A row may spell control tokens of the model, such as `<|im_end|>`, and so end its own turn and begin another speaker's.
Where it must not, marks go around them before the prompt is put together, and what stands between marks is encoded as
any other text. The marks are lone surrogates: no text of a file has them, and no tokenizer takes them.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

log = logging.getLogger(__name__)

_BEGIN, _END = "\udc00", "\udc01"
_WITHOUT_MARKS = str.maketrans("", "", _BEGIN + _END)

Span = tuple[int, int]


class PromptText:
    """What every tokenizer does with texts, whatever splits them.

    Args:
        encode: token ids of texts; the flag asks for the special tokens that the model expects around each.
        encode_as_text: token ids of a text in which no token is spelled.
        id_of: the id of a token, None if there is none.
        added: the tokenizer's added tokens.
        template: source of the chat template, empty if there is none.
        control: further tokens that the tokenizer names as control tokens.
    """

    def __init__(
        self,
        encode: Callable[[list[str], bool], list[list[int]]],
        encode_as_text: Callable[[str], list[int]],
        id_of: Callable[[str], int | None],
        added: Iterable[Any],
        template: str = "",
        control: Sequence[str] = (),
    ) -> None:
        self._encode = encode
        self._encode_as_text = encode_as_text
        self._id_of = id_of
        contents = {
            token.content
            for token in added
            if token.special or token.content in control or (token.content in template and not token.content.isspace())
        }
        longest_first = sorted(map(re.escape, contents), key=len, reverse=True)
        self._tokens = re.compile("|".join(longest_first) or "(?!)")
        self._marks = re.compile(f"{_BEGIN}({self._tokens.pattern}){_END}|[{_BEGIN}{_END}]")

    def bare(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, with the special tokens that the model expects around them.

        A text that is rendered already, so that it begins with the model's start token, gets no second one.
        """
        return [self._started_once(token_ids) for token_ids in self._ids(texts, True)]

    def rendered(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that a chat template made: it writes the special tokens itself."""
        return self._ids(texts, False)

    def marked(self, text: str, own: Sequence[Span] = ()) -> str:
        """The text with marks around control tokens, but for those within what the job itself has written.

        Args:
            text: of a prompt or message.
            own: where the job's words are in it.
        """

        def mark(token: re.Match[str]) -> str:
            is_own = any(begin <= token.start() and token.end() <= end for begin, end in own)
            return token[0] if is_own else f"{_BEGIN}{token[0]}{_END}"

        return self._tokens.sub(mark, text)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        usual = [text for text in texts if not _is_marked(text)]
        encoded = iter(self._encode(usual, special) if usual else ())
        return [self._of_marked(text, special) if _is_marked(text) else next(encoded) for text in texts]

    def _of_marked(self, text: str, special: bool) -> list[int]:
        """Raises ValueError where a token comes out of its own text all the same."""
        first, *others = self._marks.split(text)  # text, what stands between marks or None, text, ...
        token_ids = self._encode([first], False)[0] if first else []
        for index, piece in enumerate(others):
            if not piece:
                continue
            if index % 2:
                token_ids += self._within(piece, lambda each: self._encode([each], False)[0])
                continue
            as_text = self._within(piece, self._encode_as_text)
            if self._id_of(piece) in as_text:
                raise ValueError(f"the model's tokenizer cannot read {piece!r} as text")
            token_ids += as_text
        before, behind = self._around if special else ([], [])
        return [*before, *token_ids, *behind]

    def _within(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a piece from the midst of a text: behind a line break no space is put before it."""
        line_break = self._line_break
        token_ids = encode("\n" + piece)
        is_apart = token_ids[: len(line_break)] == line_break
        return token_ids[len(line_break) :] if is_apart else encode(piece)

    def _started_once(self, token_ids: list[int]) -> list[int]:
        before, _ = self._around
        count = len(before)
        if not count or token_ids[count : 2 * count] != before:
            return token_ids
        _say_started()
        return token_ids[count:]

    @functools.cached_property
    def _line_break(self) -> list[int]:
        return self._encode(["\n"], False)[0]

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens before and behind a text."""
        [inner], [whole] = self._encode(["a"], False), self._encode(["a"], True)
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return whole[:begin], whole[begin + len(inner) :]
        return [], []


@functools.cache  # once: the tokenizer of a plan finds the same
def _say_started() -> None:
    log.info("texts that begin with the model's start token get no second one")


@functools.cache
def say_continued() -> None:
    """Log once how conversations go on that do not end with a question."""
    log.info("conversations that end with an assistant's message are continued there, not answered in a new turn")


def without_marks(text: str) -> str:
    """The text as the row has it."""
    return text.translate(_WITHOUT_MARKS)


def encoded_as_text(encoder: Any, text: str) -> list[int]:
    """Token ids of a text by a `tokenizers.Tokenizer`, without a look for its added tokens."""
    if encoder.normalizer is not None:
        text = encoder.normalizer.normalize_str(text)
    pieces = [piece for piece, _ in encoder.pre_tokenizer.pre_tokenize_str(text)] if encoder.pre_tokenizer else [text]
    return [token.id for piece in pieces for token in encoder.model.tokenize(piece)]


def _is_marked(text: str) -> bool:
    return _BEGIN in text or _END in text
