"""Models that answer with hidden states, or with what a classification head makes of them, in place of logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast

from vasuki.base.errors import ModelError


def class_for(task: str, architectures: list[str] | None) -> Any:
    """Transformers' class that reads a model's files for a task: those of causal language models have a head, too."""
    if task == "classify":
        return AutoModelForSequenceClassification
    is_bare = task == "embed" and not any(name.endswith("ForCausalLM") for name in architectures or ())
    return AutoModel if is_bare else AutoModelForCausalLM


def without_pooler(config: Any) -> dict[str, bool]:
    """What asks transformers to leave out a layer behind the hidden states, which need not be in a model's files."""
    known = inspect.signature(AutoModel._model_mapping[type(config)].__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in known else {}


class Body(torch.nn.Module):
    """A model without its language head, called like one with it. Its `logits` are hidden states, or what `head` makes
    of them.

    Args:
        model: gives the last hidden states.
        config: of the whole.
        head: `[num_tokens, hidden_size]` -> `[num_tokens, num_labels]`.
    """

    def __init__(self, model: Any, config: Any, head: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self._made_of = (model,)  # itself, whatever takes its place in the module
        self.head = head or torch.nn.Identity()
        self.config = config
        self._supports_attention_backend = getattr(model, "_supports_attention_backend", False)

    @classmethod
    def of(cls, model: Any, task: str, path: str) -> Body:
        """The part of a model that a task reads. Raises ModelError for a head of another kind."""
        base = model.base_model
        if task == "embed":
            return cls(base, model.config)
        head = getattr(model, "score", None)
        if not isinstance(head, torch.nn.Linear):
            raise ModelError(f"{path}: {type(model).__name__} has a head that is unknown here")
        return cls(base, model.config, head)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def set_attn_implementation(self, name: str) -> None:
        """As transformers' models have it."""
        self._made_of[0].set_attn_implementation(name)

    def forward(self, logits_to_keep: Any = slice(None), **arguments: Any) -> CausalLMOutputWithPast:
        hidden = self.model(**arguments).last_hidden_state
        return CausalLMOutputWithPast(logits=self.head(hidden[:, logits_to_keep]))
