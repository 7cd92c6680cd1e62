"""A tiny model on disk, with a tokenizer and a chat template, for tests that go through files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = "the cat sat on a mat and saw two dogs run over green hills far away from here to there".split()


def job_tree(model: Path, source: Path, output: Path) -> dict[str, Any]:
    """A job over columns `id` and `text`, as job.yaml has it, small enough for its steps to be many."""
    return {
        "model": {"path": str(model)},
        "input": {"path": str(source), "id": "id", "prompt": "{text}", "chat": False},
        "output": {"path": str(output), "token_ids": True},
        "sampling": {"max_tokens": 8},
        "engine": {"max_num_seqs": 8, "chunk_tokens": 16},
        "kv": {"device_memory": "4MiB"},
    }


def write_tiny_model(folder: Path, max_context: int = 128) -> Path:
    """Save a Llama-shaped model with random weights. The same in every process."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
