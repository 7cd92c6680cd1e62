"""What a model's own files say of vectors and labels, as sentence-transformers and transformers save them.

modules.json                           which steps make a vector of a text
1_Pooling/config.json                  what is taken of its tokens
sentence_bert_config.json              how many of them there are at most; newer ones in tokenizer_config.json
config_sentence_transformers.json      what goes before a text
config.json                            sizes, and the labels of a classification head
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vasuki.base.config import JobConfig, ModelConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.models.config_json import encodes
from vasuki.models.files import description_folder

Pooling = Literal["mean", "last", "cls"]
Scale = Literal["softmax", "sigmoid", "none"]

_POOLINGS: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}  # by the names of the files
_SCALES: dict[str, Scale] = {"Identity": "none", "Sigmoid": "sigmoid"}
_TRANSFORMER = "sentence_bert_config.json"
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a text becomes a vector."""

    pooling: Pooling
    normalizes: bool
    width: int  # numbers of a vector
    prompt: str = ""  # before each text

    @classmethod
    def of(cls, job: JobConfig) -> Embedding:
        """As the job says, else as the model does.

        Raises:
            ModelError: a file of the model cannot be read.
            JobFileError: neither says how, or a step is unknown.
        """
        folder, asked = description_folder(job.model), job.embed
        steps = [str(step.get("type", "")).rpartition(".")[2] for step in _read(folder / "modules.json", [])]
        if odd := next((step for step in steps if step not in _STEPS), ""):
            raise JobFileError(
                f"task: embed: {job.model.path} has a step {odd} behind its pooling, which is unknown here"
            )
        kinds = _read(folder / _TRANSFORMER, {}).get("modality_config") or {}
        if job.input.prompt and job.input.chat == "auto" and "message" in kinds:
            raise JobFileError(
                f"input.chat: {job.model.path} says that texts go through its chat template, with no turn for the "
                "model, which is unknown here; set it to false to embed them as they are, or to true"
            )
        pooling = asked.pooling if asked.pooling != "auto" else _pooling(folder, job.model.path)
        config = _text_config(folder)
        if pooling == "cls" and not encodes(config):
            raise JobFileError(f"embed.pooling: the first token of {job.model.path} knows nothing of those behind it")
        hidden = int(config.get("hidden_size") or config["dim"])
        if asked.dimensions and asked.dimensions > hidden:
            raise JobFileError(f"embed.dimensions: the model has {hidden} for each text, not {asked.dimensions}")
        normalizes = "Normalize" in steps if asked.normalize == "auto" else bool(asked.normalize)
        return cls(
            pooling,
            normalizes,
            asked.dimensions or hidden,
            _prompt(folder, asked.prompt_name),
        )


def longest_text(model: ModelConfig, context: int) -> int:
    """Most tokens of a text that is embedded or classified, at most `context`, as sentence-transformers has it."""
    folder = description_folder(model)
    given = _read(folder / _TRANSFORMER, {}).get("max_seq_length")
    given = given or _read(folder / "tokenizer_config.json", {}).get("model_max_length") or context
    return min(context, int(given))


@dataclass(frozen=True, slots=True)
class Labels:
    """What a classification head tells apart."""

    names: tuple[str, ...]
    scale: Scale  # of its logits to scores, as transformers' pipeline chooses it, or a cross-encoder's own file

    @classmethod
    def of(cls, model: ModelConfig) -> Labels:
        """Raises ModelError if config.json names none, or asks for a scale that is unknown here."""
        config = _read(description_folder(model) / "config.json", {})
        names = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
        try:
            ordered = tuple(str(names[str(index)]) for index in range(len(names)))
        except (KeyError, TypeError):
            raise ModelError(f"{model.path}: config.json numbers its labels otherwise than from 0") from None
        kind = config.get("problem_type")
        if kind == "regression":
            return cls(ordered, "none")
        if len(ordered) == 1 and (name := _activation(config)):
            if name not in _SCALES:
                raise ModelError(f"{model.path}: config.json asks for the activation {name}, which is unknown here")
            return cls(ordered, _SCALES[name])
        return cls(ordered, "sigmoid" if kind == "multi_label_classification" or len(ordered) == 1 else "softmax")


def _activation(config: dict[str, Any]) -> str:
    """What sentence-transformers makes of the only number of a cross-encoder, by the class of torch."""
    own = config.get("sentence_transformers") or {}
    return str(own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]


def _pooling(folder: Path, path: str) -> Pooling:
    said = _read(folder / "1_Pooling" / "config.json", {})
    modes = said.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, is_set in said.items()  # as before sentence-transformers 6
        if name.startswith("pooling_mode_") and is_set is True
    ]
    modes = [modes] if isinstance(modes, str) else modes
    if not modes:
        raise JobFileError(
            f"embed.pooling: {path} does not say how its tokens become a vector; set it to mean, last or cls"
        )
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise JobFileError(f"embed.pooling: {path} asks for {' and '.join(modes)}, which is unknown here")
    if said.get("include_prompt") is False:
        raise JobFileError(f"embed.pooling: {path} leaves the tokens of prompts out, which is unknown here")
    return _POOLINGS[modes[0]]


def _prompt(folder: Path, name: str) -> str:
    said = _read(folder / "config_sentence_transformers.json", {})
    prompts, name = said.get("prompts") or {}, name or said.get("default_prompt_name") or ""
    if name and name not in prompts:
        known = ", ".join(prompts) or "none"
        raise JobFileError(f"embed.prompt_name: the model has no prompt '{name}'; it has {known}")
    return str(prompts[name]) if name else ""


def _text_config(folder: Path) -> dict[str, Any]:
    config = _read(folder / "config.json", {})
    return dict(config.get("text_config", config))


def _read(file: Path, otherwise: Any) -> Any:
    """What a file of JSON holds, or that where there is none. Raises ModelError."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
