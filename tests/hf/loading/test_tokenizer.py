"""The tokens that a plan counts, without torch, are those that a run takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer
from versions import GUARDS_NAMES

from vasuki.base.config import ModelConfig
from vasuki.base.conversations import Conversation, Ending
from vasuki.base.errors import ModelError
from vasuki.hf.loading.plain_tokenizer import PlainTokenizer, tokenizer_without_torch
from vasuki.hf.loading.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "two dogs run"}, {"role": "assistant", "content": "<x> fär away"}]
NOW = datetime(2026, 11, 25, 7, 30)
TEXTS = ["the cat sat on a mat", "<x> far <s> away", ""]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
RENDERED = "<s>user: two dogs run</s>assistant: <x> fär away</s>"


def added_token(content: str, **more: Any) -> dict[str, Any]:
    options = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **options, **more}


TEMPLATES = {
    "break": (
        "{% for m in messages %}{% if m.role != 'user' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "two dogs run",
    ),
    "continue": (
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "<x> fär away",
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "two dogs run<x> fär away",
    ),
    "blocks on lines of their own": (
        "{% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
        "two dogs run\n",
    ),
    "functions": (
        "{% if not messages %}{{ raise_exception('none') }}{% endif %}"
        "{{ strftime_now('today') }} {{ messages[1:] | tojson }}",
        'today [{"role": "assistant", "content": "<x> fär away"}]',
    ),
    "dict": ("{{ dict(a=1) }}", "{'a': 1}"),
    "variables": (
        "{% set n = namespace(last='') %}{% for m in messages %}{% set n.last = m.content %}{% endfor %}{{ n.last }}",
        "<x> fär away",
    ),
    "what is not given": (
        "{{ tools is none }} {{ documents is none }} {{ other is defined }} {{ add_generation_prompt }}",
        "True True False True",
    ),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "flags": ({"chat_template": TEMPLATE, "add_bos_token": True, "add_eos_token": True}, RENDERED),
    "tokens with properties": (
        {
            "chat_template": TEMPLATE + "{{ eod_token }}",
            "bos_token": added_token("<s>", __type="AddedToken"),
            "eos_token": added_token("</s>", __type="AddedToken"),
            "eod_token": "<x>",
            "added_tokens_decoder": {
                "0": added_token("<s>", special=True),
                "1": added_token("</s>", special=True),
                "320": added_token("<x>", lstrip=True, special=True),
            },
        },
        RENDERED.replace(" <x>", "<x>") + "<x>",
    ),
    "templates by name": (
        {"chat_template": [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": TEMPLATE}]},
        RENDERED,
    ),
    **{name: ({"chat_template": template}, rendered) for name, (template, rendered) in TEMPLATES.items()},
}
# What only transformers reads.
NOT_PLAIN = {"generation", "dict", "tokens with properties", "templates by name"}


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """What describes the tiny model, without a chat template."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path)
    return tmp_path


def change(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def of_plan(model: Path) -> PlainTokenizer | Tokenizer:
    return tokenizer_without_torch(ModelConfig(path=str(model)))


def of_run(model: Path) -> Tokenizer:
    return Tokenizer(str(model))


def assert_same(model: Path, rendered: str) -> None:
    plan, run = of_plan(model), of_run(model)
    assert plan.encode_batch(TEXTS) == run.encode_batch(TEXTS)
    asked = Conversation(MESSAGES, Ending.NEW_TURN)
    (token_ids,) = plan.encode_messages([asked], NOW)
    assert [token_ids] == run.encode_messages([asked], NOW)
    assert plan.text_of(token_ids) == run.text_of(token_ids) == rendered


@pytest.mark.parametrize("name", SETTINGS)
def test_templates_and_settings(model: Path, name: str) -> None:
    changes, rendered = SETTINGS[name]
    change(model / "tokenizer_config.json", changes)
    assert_same(model, rendered)
    assert isinstance(of_plan(model), Tokenizer if name in NOT_PLAIN else PlainTokenizer)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image"}]},
        {"role": "assistant", "content": "two", "reasoning": "dogs"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "run", "arguments": {"n": 2}}]},
    ],
)
def test_messages_of_all_kinds(model: Path, message: dict[str, Any]) -> None:
    change(model / "tokenizer_config.json", {"chat_template": "{{ messages | tojson }}"})
    conversations = [Conversation(messages, Ending.NEW_TURN) for messages in (MESSAGES, [message])]
    assert isinstance(plan := of_plan(model), PlainTokenizer)
    assert plan.encode_messages(conversations, NOW) == of_run(model).encode_messages(conversations, NOW)


CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("template", [CHAT, CHAT.replace("m.content", "m.content | trim")])
@pytest.mark.parametrize("last", ["far away", "far away ", "far \n", "", " ", "the cat sat on\n\na"])
def test_an_assistants_last_message_is_continued(model: Path, template: str, last: str) -> None:
    change(model / "tokenizer_config.json", {"chat_template": template})
    messages = [MESSAGES[0], {"role": "assistant", "content": last}]
    transformers_own = AutoTokenizer.from_pretrained(model)
    assert isinstance(of_plan(model), PlainTokenizer)
    for tokenizer in (of_plan(model), of_run(model)):
        expected = transformers_own.apply_chat_template(messages, continue_final_message=True)["input_ids"]
        assert tokenizer.encode_messages([messages], NOW) == [expected]
        for ending, opens in [(Ending.NEW_TURN, True), (Ending.CLOSED, False)]:
            expected = transformers_own.apply_chat_template(messages, add_generation_prompt=opens)["input_ids"]
            assert tokenizer.encode_messages([Conversation(messages, ending)], NOW) == [expected]


def test_a_last_message_that_the_template_drops_cannot_be_continued(model: Path) -> None:
    change(model / "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"})
    for tokenizer in (of_plan(model), of_run(model)):
        with pytest.raises(ValueError, match="message"):
            tokenizer.encode_messages([MESSAGES], NOW)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.sys }}",
        pytest.param("{{ namespace(__class__=1) }}", marks=GUARDS_NAMES),
        pytest.param("{{ namespace({'_x': 1}) }}", marks=GUARDS_NAMES),
        pytest.param("{% set n = namespace() %}{% set n._x = 1 %}", marks=GUARDS_NAMES),
        "{{ raise_exception('no') }}",
    ],
)
def test_templates_cannot_reach_beyond_their_messages(model: Path, template: str) -> None:
    """Nor pass over what they do not accept: the same error comes from both."""
    change(model / "tokenizer_config.json", {"chat_template": template})
    kinds = []
    for tokenizer in (of_plan(model), of_run(model)):
        with pytest.raises(TemplateError) as raised:
            tokenizer.encode_messages([Conversation(MESSAGES, Ending.NEW_TURN)], NOW)
        kinds.append(type(raised.value))
    assert isinstance(of_plan(model), PlainTokenizer)
    assert kinds[0] is kinds[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<new>"},
        {"additional_special_tokens": ["<new>"]},
        {"extra_special_tokens": {"image_token": "<new>"}},
        {"added_tokens_decoder": {"400": added_token("<new>")}},
        {"split_special_tokens": True},
        {"fix_mistral_regex": True},
    ],
)
def test_settings_that_change_the_file_are_left_to_transformers(model: Path, settings: dict[str, Any]) -> None:
    change(model / "tokenizer_config.json", settings)
    assert isinstance(of_plan(model), Tokenizer)
    texts = [*TEXTS, "a<new>b</s>"]
    assert of_plan(model).encode_batch(texts) == of_run(model).encode_batch(texts)


def test_a_template_in_a_file_goes_before_one_in_the_settings(model: Path) -> None:
    change(model / "tokenizer_config.json", {"chat_template": "{{ raise_exception('not this one') }}"})
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert_same(model, RENDERED)


def test_prompts_are_neither_cut_nor_padded(model: Path) -> None:
    change(model / "tokenizer_config.json", {"chat_template": TEMPLATE})
    expected = of_plan(model).encode_batch(TEXTS)
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    change(model / "tokenizer.json", {"truncation": truncation, "padding": padding})
    assert of_plan(model).encode_batch(TEXTS) == expected
    assert_same(model, RENDERED)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("load", [of_plan, of_run])
def test_a_broken_file_is_named(model: Path, load: Callable[[Path], Tokenizer], name: str) -> None:
    (model / name).write_text('{"add_bos_token": tru')
    with pytest.raises(ModelError, match=f"{name} is not valid JSON: .* column"):
        load(model)


@pytest.mark.parametrize("load", [of_plan, of_run])
@pytest.mark.parametrize(
    ("settings", "words"), [({}, "no tokenizer.json"), ({"tokenizer_class": "LlamaTokenizer"}, "vocabulary is empty")]
)
def test_a_tokenizer_without_its_files_is_refused(
    model: Path, load: Callable[[Path], Tokenizer], settings: dict[str, str], words: str
) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=words):
        load(model)


def test_a_vocabulary_in_other_files_is_read_by_the_models_class(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (model / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (model / "merges.txt").write_text("#version: 0.2\na b\n")
    assert of_plan(model).encode_batch(["ab", "aab"]) == of_run(model).encode_batch(["ab", "aab"]) == [[2], [0, 2]]
