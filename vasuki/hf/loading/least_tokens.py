"""How many tokens a text has at the least, told by its length alone.

A token stands for no more bytes than the longest one of the vocabulary has. That bounds the tokens of a text wherever
all of it ends up in tokens, which is not so for each tokenizer: some drop spaces, or have one token for whatever they
don't know. Of these nothing is said here, and the text has to be tokenised. A bound is known with

    normaliser        none, a Unicode form, which makes one character of four at most, or what makes no text shorter
    pre-tokenizer     none, or one that splits, but removes nothing
    model             BPE or Unigram in which each byte, or each unknown character, has a token
    added tokens      none in the text that takes the spaces around it with it
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel

_COMPOSED = 4  # characters that a Unicode form makes one of at most, as of U+1F82
_CHARACTER_BYTES = 4  # of UTF-8, at most
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_SPLITS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")


@dataclass(frozen=True, slots=True)
class _Bound:
    """What bounds the tokens of a text from below."""

    longest_bytes: int = 0  # that a token stands for; 0 where nothing is known
    composes: bool = False  # characters may become one, in texts that are not ASCII
    absorbing: tuple[str, ...] = ()  # tokens that take spaces with them, any number


class LeastTokens:
    """The fewest tokens that texts may have.

    Args:
        encoder: a `tokenizers.Tokenizer`; None where the tokenizer is another, of which nothing is known.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def exceed(self, prompt: Any, num_tokens: int, render: Callable[[Any], str]) -> bool:
        """Whether a prompt surely has more tokens. False where only tokenising it would tell.

        Args:
            prompt: a text, or a list of messages.
            num_tokens: that it may have.
            render: messages to text; only called for long ones.
        """
        num_characters = (
            len(prompt)
            if isinstance(prompt, str)
            else sum(len(str(value)) for message in prompt for value in message.values())
        )
        if _CHARACTER_BYTES * num_characters <= num_tokens:
            return False
        room = num_tokens * self._bound.longest_bytes
        if not room or _CHARACTER_BYTES * num_characters <= room:
            return False
        if not isinstance(prompt, str):
            try:
                prompt = render(prompt)
            except Exception:  # of a template, which will say the same when the messages are tokenised
                return False
        if any(token in prompt for token in self._bound.absorbing):
            return False
        if prompt.isascii():
            return len(prompt) > room
        if self._bound.composes:
            return len(prompt) > _COMPOSED * room
        return len(prompt.encode("utf-8", "surrogatepass")) > room

    @functools.cached_property
    def _bound(self) -> _Bound:
        """Looked for when there is a long text: a vocabulary takes a moment to read."""
        return _Bound() if self._encoder is None else _bound_of(self._encoder)


def _bound_of(encoder: Any) -> _Bound:
    normalizers, splits = _members(encoder.normalizer), _members(encoder.pre_tokenizer)
    kinds = [normalizer["type"] for normalizer in normalizers]
    has_form = bool(kinds) and kinds[0] in _FORMS
    of_bytes = any(split["type"] == "ByteLevel" for split in splits)
    added = encoder.get_added_tokens_decoder().values()
    absorbing = [token for token in added if token.lstrip or token.rstrip]
    if (
        not all(map(_makes_none_shorter, normalizers[has_form:]))
        or any(split["type"] not in _SPLITS or split.get("behavior") == "Removed" for split in splits)
        or any(token.normalized for token in absorbing)  # which stand for other texts, too
        or not _has_all(encoder, of_bytes)
    ):
        return _Bound()
    written = [token.content for token in added]
    if encoder.normalizer is not None:
        written += [encoder.normalizer.normalize_str(content) for content in written]
    vocabulary = encoder.get_vocab(with_added_tokens=False)
    longest = max((len(token) if of_bytes else len(token.encode()) for token in vocabulary), default=0)
    return _Bound(
        max([longest, *(len(content.encode()) for content in written)]),
        has_form or "Lowercase" in kinds,
        tuple(token.content for token in absorbing),
    )


def _members(part: Any) -> list[Mapping[str, Any]]:
    """A normaliser or pre-tokenizer as tokenizer.json has it: the parts that follow each other."""

    def flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        members = state.get("normalizers", state.get("pretokenizers"))
        return [state] if members is None else [each for member in members for each in flat(member)]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _makes_none_shorter(normalizer: Mapping[str, Any]) -> bool:
    """Whether no text has fewer characters afterwards, nor fewer bytes; of Lowercase only the former."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return old is not None and len(new) >= len(old) and len(new.encode()) >= len(old.encode())
    return normalizer["type"] in ("Prepend", "Lowercase")


def _has_all(encoder: Any, of_bytes: bool) -> bool:
    """Whether the model has tokens for whatever comes, each for no more than a character where it knows none."""
    model, known = encoder.model, encoder.get_vocab(with_added_tokens=False).keys()
    if not isinstance(model, (BPE, Unigram)):
        return False
    if of_bytes and known >= {*ByteLevel.alphabet()}:
        return True
    falls_back = model.byte_fallback if isinstance(model, BPE) else json.loads(model.__getstate__())["byte_fallback"]
    if falls_back and known >= {f"<0x{byte:02X}>" for byte in range(256)}:
        return True
    return isinstance(model, BPE) and model.unk_token is not None and not model.fuse_unk
