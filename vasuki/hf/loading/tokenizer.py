"""Text and messages to token ids, and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import chat_template_utils

from vasuki.base.config import ModelConfig
from vasuki.base.conversations import Ending, ending_of
from vasuki.base.errors import ModelError
from vasuki.engine.sequence import Decoded, Sequence
from vasuki.hf.loading.least_tokens import LeastTokens
from vasuki.hf.loading.prompt_text import PromptText, Span, encoded_as_text, say_continued, without_marks
from vasuki.hf.loading.reasoning import Reasoning
from vasuki.hf.loading.tokenizer_files import LEGACY_TEMPLATE, legacy_template, splits_by_file
from vasuki.models.files import IS_POINTER, POINTER, description_folder, starts_with, why_no_json

transformers.logging.set_verbosity_error()

_SENTENCEPIECE = b"\n"  # the tag of its first piece; files of tiktoken are text
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "*.bpe", "*.py")
_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", LEGACY_TEMPLATE)
_TAIL = 8  # tokens before a text that decide how it begins: a character has four at most, and some may be spaces


class Tokenizer:
    """The model's own tokenizer, with the few calls that a job needs.

    Args:
        path: a folder or hub id.
        revision: of the hub's model.
        trust_remote_code: whether a class that comes with the model may run.

    Raises:
        ModelError: there is none, or it cannot be read.
    """

    def __init__(self, path: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
        folder = description_folder(ModelConfig(path=path, revision=revision))
        try:
            if splits_by_file(folder, trust_remote_code):
                self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
            else:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                    path, revision=revision, trust_remote_code=trust_remote_code
                )
            self._tokenizer.chat_template = self._tokenizer.chat_template or legacy_template(folder)
        except Exception as error:
            raise ModelError(_what_is_wrong(path, folder, error)) from None
        # Without files, classes of some models make up a tokenizer of their special tokens.
        if self._tokenizer.vocab_size <= len(self._tokenizer.all_special_tokens):
            raise ModelError(f"model {path} has no usable tokenizer: its vocabulary is empty")
        is_plain = type(self._tokenizer).__module__.startswith("transformers.")  # no class that came with the model
        encoder = getattr(self._tokenizer, "backend_tokenizer", None) if is_plain else None
        self._least_tokens = LeastTokens(encoder)
        template = self._tokenizer.chat_template or ""
        added = self._tokenizer.added_tokens_decoder
        self._prompts = PromptText(
            self._encode,
            functools.partial(encoded_as_text, encoder) if encoder else self._encode_as_text,
            self._tokenizer.convert_tokens_to_ids,
            added.values(),
            template if isinstance(template, str) else "\0".join(template.values()),
            getattr(self._tokenizer, "chat_control_tokens", None) or (),
        )
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._name = functools.cache(lambda token_id: self._text([token_id]))
        self._is_none = functools.cache(lambda token_id: self._tokenizer.convert_ids_to_tokens(token_id) is None)

    @property
    def own(self) -> Any:
        """The tokenizer of transformers behind it."""
        return self._tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token, for models whose config names none."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template, as chat models do."""
        return bool(self._tokenizer.chat_template)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model expects around it."""
        return self._prompts.bare(texts)

    def encode_messages(self, conversations: Rows[Rows[Mapping[str, Any]]], now: datetime) -> list[list[int]]:
        """Token ids of each conversation, rendered by the chat template, as far as the model goes on from there.

        Args:
            conversations: lists of messages.
            now: the time that a template is told which asks for it.

        Raises:
            ModelError: the model has no chat template.
            Exception: whatever the template raises for messages it does not accept.
        """
        if not self.has_chat_template:
            raise ModelError("the model has no chat template, which conversations need")
        return self._prompts.rendered([self._rendered(messages, now) for messages in conversations])

    def marked(self, text: str, own: Rows[Span] = ()) -> str:
        """The text, its control tokens marked to be read as text, but for those within the spans `own`."""
        return self._prompts.marked(text, own)

    def surely_exceeds(self, prompt: str | Rows[Mapping[str, Any]], num_tokens: int) -> bool:
        """Whether a text or a conversation has more tokens, where its length alone tells."""
        prompt = without_marks(prompt) if isinstance(prompt, str) else prompt
        return self._least_tokens.exceed(
            prompt, num_tokens, lambda messages: without_marks(self._rendered(messages, datetime.now()))
        )

    def encode_pairs(self, pairs: Rows[Rows[str]], most_tokens: int | None = None) -> list[tuple[list[int], int]]:
        """Token ids of both texts of each pair, with the special tokens that the model expects, and where those begin
        that it is told are the second's: 0 where it is not told. Of pairs with more tokens the longer text is cut."""
        encoded = self._tokenizer(
            [first for first, _ in pairs],
            [second for _, second in pairs],
            truncation="longest_first" if most_tokens else False,
            max_length=most_tokens,
        )
        kinds = encoded.get("token_type_ids", [()] * len(pairs))
        begins = [list(each).index(1) if 1 in each else 0 for each in kinds]
        return list(zip(encoded["input_ids"], begins, strict=True))

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self._prompts.rendered([text])[0]

    def text_of(self, token_ids: Rows[int]) -> str:
        """What the model reads, special tokens included."""
        return self._text(list(token_ids))

    @functools.cached_property
    def reasoning(self) -> Reasoning:
        """Where the model thinks aloud. Raises JobFileError if it has no markers for that."""
        return Reasoning.of(self._id_of, self._special, self.encode_plain, self._text)

    def decode(self, sequence: Sequence) -> Decoded:
        """The sequence's output as it goes on behind its prompt, cut before the first stop string. Without special
        tokens, unless the row keeps them."""
        start = self.reasoning.answer_start(sequence) if sequence.request.sampling.reasoning else 0
        output, before = sequence.output_token_ids, self._tail_of_prompt(sequence)
        if start == 0:
            return Decoded(self._cut(self._text_behind(before, self._kept(output, sequence)), sequence))
        pieces = [self._kept(piece, sequence) for piece in self.reasoning.thoughts(output[:start])]
        said = "\n\n".join(self._text_behind(before, piece).strip() for piece in pieces if piece)
        if start is None:
            return Decoded("", self._cut(said, sequence))
        answer = self._text_behind(output[max(0, start - _TAIL) : start], self._kept(output[start:], sequence))
        return Decoded(self._cut(answer, sequence), said or None)

    def refuse_without_reasoning(self) -> None:
        """Raises JobFileError if the model has no markers for its thoughts."""
        _ = self.reasoning

    def _kept(self, token_ids: list[int], sequence: Sequence) -> list[int]:
        return [token_id for token_id in token_ids if self._has_text(token_id, sequence)]

    def _cut(self, text: str, sequence: Sequence) -> str:
        cuts = [position for stop in sequence.request.sampling.stop if (position := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def _id_of(self, token: str) -> int | None:
        """The id of a token, None if there is none."""
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        return token_id if self._tokenizer.convert_ids_to_tokens(token_id or 0) == token else None

    def meets_stop_string(self, sequence: Sequence, token_id: int) -> bool:
        """Return whether a stop string is complete, or the special token that it names is there, once `token_id`
        follows.

        A token with a text stands for at least one byte, so a stop string of n bytes lies within the last n of them. A
        few more are decoded because the first ones may be the rest of a character.
        """
        stops = sequence.request.sampling.stop
        if not stops:
            return False
        if self._name(token_id) in stops:
            return True
        if not self._has_text(token_id, sequence):
            return False
        window = max(len(stop.encode()) for stop in stops) + 4
        last = [*self._last_with_text(sequence, window + _TAIL - 1), token_id]
        before = last[:-window] or self._tail_of_prompt(sequence)
        whole = self._text([*before, *last[-window:]])
        if not any(stop in whole for stop in stops):  # as nearly always
            return False
        tail = self._text_behind(before, last[-window:])
        return any(stop in tail for stop in stops)

    def _last_with_text(self, sequence: Sequence, count: int) -> list[int]:
        token_ids = sequence.output_token_ids
        for some in (token_ids[-2 * count :], token_ids):
            last = [token_id for token_id in some if self._has_text(token_id, sequence)][-count:]
            if len(last) == count:
                break
        return last

    def _has_text(self, token_id: int, sequence: Sequence) -> bool:
        """Whether a token is part of the output's text: special ones may be left out, and some ids have no token."""
        is_kept = sequence.request.sampling.special_tokens or token_id not in self._special
        return is_kept and not self._is_none(token_id)

    def _tail_of_prompt(self, sequence: Sequence) -> list[int]:
        return [int(token_id) for token_id in sequence.request.prompt_token_ids[-_TAIL:]]

    def _text_behind(self, before: list[int], token_ids: list[int]) -> str:
        """Text of tokens that stand behind others: decoders drop the space before the first token of all."""
        if not token_ids:
            return ""
        whole, start = self._text([*before, *token_ids]), self._text(before)
        while not whole.startswith(start):  # as it ended in the midst of a character
            start = start[:-1]
        return whole[len(start) :]

    def _rendered(self, messages: Rows[Mapping[str, Any]], now: datetime) -> str:
        if isinstance(source := self._tokenizer.get_chat_template(), str):
            chat_template_utils._compile_jinja_template(source).globals["strftime_now"] = now.strftime
        ending = ending_of(messages)
        if ending is Ending.CONTINUED:
            say_continued()
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=ending is Ending.NEW_TURN,
            continue_final_message=ending is Ending.CONTINUED,
            tokenize=False,
        )
        return text

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=special)["input_ids"]
        return encoded

    def _encode_as_text(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return token_ids

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text


def _what_is_wrong(path: str, folder: Path, error: Exception) -> str:
    """A file that is no JSON, of which transformers does not say which one it is; else what it says itself."""
    for file in (folder / name for name in _FILES):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except OSError:  # not there
            continue
        except ValueError as problem:
            return why_no_json(file, problem)
    for file in sorted(folder.glob("*.model")):
        if starts_with(file, POINTER):
            return f"{file} {IS_POINTER}"
        if starts_with(file, _SENTENCEPIECE) and find_spec("sentencepiece") is None:
            return f"{file} is read by sentencepiece, which is not installed: pip install sentencepiece protobuf"
    if folder.is_dir() and not any(file for pattern in _VOCABULARIES for file in folder.glob(pattern)):
        return f"model {path} has no usable tokenizer: no tokenizer.json in it, nor a file that one could be made of"
    missing = folder.is_dir() and not (folder / "tokenizer.json").exists()
    reason = "no tokenizer.json in it, and transformers says: " if missing else ""
    return f"model {path} has no usable tokenizer: {reason}{_first_line(error).rstrip(': ')}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
