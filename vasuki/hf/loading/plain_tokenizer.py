"""A model's tokenizer for planning: its files read directly, as transformers takes a second to import.

Only plain files are read so: a tokenizer.json to which tokenizer_config.json adds nothing, and a chat template that
asks for nothing of transformers' own but what is here. Whatever else a model has is left to transformers.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import tokenizers
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from vasuki.base.config import ModelConfig
from vasuki.base.conversations import Ending, ending_of
from vasuki.hf.loading.least_tokens import LeastTokens
from vasuki.hf.loading.prompt_text import PromptText, Span, encoded_as_text, say_continued, without_marks
from vasuki.hf.loading.reasoning import Reasoning
from vasuki.hf.loading.tokenizer_files import legacy_template, read_json
from vasuki.models.files import description_folder

if TYPE_CHECKING:
    from vasuki.hf.loading.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# Settings that change no token of a tokenizer.json; the flags for BOS and EOS do so only where there is none.
_WITHOUT_EFFECT = set(
    "add_bos_token add_eos_token add_prefix_space backend clean_up_tokenization_spaces errors is_local legacy "
    "local_files_only model_input_names model_max_length name_or_path pad_token_type_id padding_side sp_model_kwargs "
    "spaces_between_special_tokens tokenizer_class truncation_side use_default_system_prompt use_fast".split()
)
_HERE = "TheLastMessageGoesOnHere"
_PLAIN_KEYS = {"role", "content", "name"}  # of a message; transformers gives some others several names


def tokenizer_without_torch(model: ModelConfig) -> PlainTokenizer | Tokenizer:
    """The model's tokenizer for planning.

    Raises:
        ModelError: as for a run.
    """
    if plain := PlainTokenizer.of(description_folder(model)):
        return plain
    from vasuki.hf.loading.tokenizer import Tokenizer

    return Tokenizer(os.path.expanduser(model.path), model.revision, model.trust_remote_code)


class PlainTokenizer:
    """What planning needs of a `Tokenizer`, which is the twin that this one's token ids equal."""

    def __init__(self, encoder: Any, source: str, names: Mapping[str, str], twin: Callable[[], Tokenizer]) -> None:
        self._encoder = encoder
        self._template = _environment().from_string(source) if source else None
        self._names = names  # text of the named special tokens, for the template
        self._twin = twin
        self._least_tokens = LeastTokens(encoder)
        added = encoder.get_added_tokens_decoder().values()
        as_text = functools.partial(encoded_as_text, encoder)
        self._prompts = PromptText(self._encode, as_text, encoder.token_to_id, added, source)

    @classmethod
    def of(cls, folder: Path) -> PlainTokenizer | None:
        """The tokenizer of a folder; None if its files are not plain, or something is wrong with them."""
        try:
            encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            settings = read_json(folder / "tokenizer_config.json")
            names = _named_tokens(encoder, settings, folder)
            source = _chat_template(folder, settings)
        except Exception:  # of any file; transformers and `Tokenizer` know better what to say of it
            return None
        encoder.no_truncation()
        encoder.no_padding()

        @functools.cache
        def twin() -> Tokenizer:
            from vasuki.hf.loading.tokenizer import Tokenizer

            return Tokenizer(str(folder))

        return cls(encoder, source, names, twin)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template, as chat models do."""
        return self._template is not None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model expects around it."""
        return self._prompts.bare(texts)

    def encode_messages(self, conversations: Rows[Rows[Mapping[str, Any]]], now: datetime) -> list[list[int]]:
        """Token ids of each conversation, as `Tokenizer` has them. Raises as it does."""
        if self._template is None or not all(_is_plain(message) for messages in conversations for message in messages):
            return self._twin().encode_messages(conversations, now)
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
        """Token ids of pairs of texts, as `Tokenizer` has them."""
        return self._twin().encode_pairs(pairs, most_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self._prompts.rendered([text])[0]

    def refuse_without_reasoning(self) -> None:
        """Raises JobFileError if the model has no markers for its thoughts."""
        Reasoning.of(self._encoder.token_to_id, (), self.encode_plain, self.text_of)

    def text_of(self, token_ids: Rows[int]) -> str:
        """What the model reads, special tokens included."""
        text: str = self._encoder.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _rendered(self, messages: Rows[Mapping[str, Any]], now: datetime) -> str:
        assert self._template is not None, "conversations need a template"
        ending, copies = ending_of(messages), [dict(message) for message in messages]
        given: dict[str, Any] = {"tools": None, "documents": None, "strftime_now": now.strftime, **self._names}
        given["add_generation_prompt"] = ending is Ending.NEW_TURN
        if ending is not Ending.CONTINUED:
            return self._template.render(messages=copies, **given)
        say_continued()
        end_of_message = f"{_HERE} "  # the space shows whether the template trims what messages end with
        last = copies[-1]["content"]
        copies[-1]["content"] = last + end_of_message
        before, found, behind = self._template.render(messages=copies, **given).rpartition(_HERE)
        if not found or last.strip() not in before:
            raise ValueError("the chat template leaves out or changes the last message, which was to be continued")
        return before if behind.startswith(" ") else before.rstrip()

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        return [each.ids for each in self._encoder.encode_batch(texts, add_special_tokens=special)]


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() <= _PLAIN_KEYS and all(type(value) is str for value in message.values())


def _named_tokens(encoder: Any, settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Text of the named special tokens. Raises ValueError if the settings would change what tokenizer.json says."""
    known = {*_NAMED_TOKENS, *_MORE_TOKENS, *_WITHOUT_EFFECT, "added_tokens_decoder", "chat_template"}
    older = any((folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    if not settings.keys() <= known or (older and "added_tokens_decoder" not in settings):
        raise ValueError("not plain")
    names = {name: _text_of(settings[name]) for name in _NAMED_TOKENS if settings.get(name) is not None}
    special = [*names.values(), *(_text_of(token) for name in _MORE_TOKENS for token in settings.get(name) or ())]
    added = encoder.get_added_tokens_decoder().values()
    saved = [tokenizers.AddedToken(**token) for token in settings.get("added_tokens_decoder", {}).values()]
    adds_some = not {*map(repr, saved)} <= {*map(repr, added)} or not {*special} <= {token.content for token in added}
    adds_some |= encoder.padding is not None and "pad_token" not in settings  # that of the padding, for the template
    empty = encoder.get_vocab_size(with_added_tokens=False) <= len(set(special))
    if adds_some or empty:
        raise ValueError("not plain")
    return names


def _text_of(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The source of the model's template, empty if it has none. Raises whatever shows that it is not plain."""
    if (folder / "additional_chat_templates").exists():
        raise ValueError("not plain")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    source = source or legacy_template(folder) or ""
    if not isinstance(source, str) or "dict" in find_undeclared_variables(_environment().parse(source)):
        raise ValueError("not plain")
    return source


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates may use: they come with models, and must not reach beyond what they are given."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["dict"]  # transformers has one of its own, which only a few templates ask for
    environment.globals.update(raise_exception=_refuse, namespace=_Namespace)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Namespace(Namespace):
    """Variables of a template, none of them named like Python's own."""

    def __init__(self, /, *pairs: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"chat templates cannot set {name!r}")
        super().__setitem__(name, value)
