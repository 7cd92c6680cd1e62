"""What experiments on this machine's CPU have in common: options, a small Llama, and where their figures go."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import write_page
from reproduce_table import Figures, markdown, rounded

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel
    from vasuki.models.shape import Backend

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "dates"
SIZES = dict(
    vocab_size=768,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=1024,
)


def arguments(about: str | None, data: bool = False, rounds: bool = False) -> argparse.ArgumentParser:
    """Options of an experiment: --write, and those that it needs."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, required=True, help="folder with the traces")
    if rounds:
        parser.add_argument("--rounds", type=int, default=3, help="runs of each, by turns")
    parser.add_argument("--write", action="store_true", help="write the figures to docs/, and its page")
    return parser


def tell(found: dict[str, list[Figures]], write: bool) -> None:
    """Print what was found by claim, and write it if that is wanted."""
    claims = {name: rounded(rows) for name, rows in found.items()}
    for name, rows in claims.items():
        print(f"`{name}`\n\n{markdown(rows)}\n", flush=True)
    if write:
        write_page.update(claims)


def small_llama() -> dict[Backend, LoadedModel]:
    """A Llama with random weights, for both backends."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from vasuki.base.config import ModelConfig
    from vasuki.hf.loading.load_model import load_model

    torch.manual_seed(0)
    torch.set_num_threads(1)  # other programs disturb one thread less than several that wait for each other
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
        model = ModelConfig(path=folder)
        return {"ragged": load_model(model, "cpu"), "padded": load_model(model, "cpu", backend="padded")}
