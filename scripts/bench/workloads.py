"""Write the models and workloads of docs/performance.md: random weights, made-up prompts.

    python scripts/bench/workloads.py DIR [--kind smol] [--seed 0]

DIR gets a folder with the model, called after its kind, and three workloads for `bench.py`: Parquet with `id`,
`prompt_token_ids` and `max_tokens`. Times depend on shapes and lengths, not on what weights and prompts say, so all of
it comes from a seed.

    sum      long prompts, short answers, as in summaries
    trans    answers somewhat longer than prompts, as in translations
    mixed    one row with a long prompt, one with a long answer and two short ones, in random order
"""

from __future__ import annotations

import argparse
import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Ints = npt.NDArray[np.int64]

# Sizes of LlamaConfig. smol is SmolLM-135M's shape, b1 that of Llama-3.2-1B with a smaller vocabulary.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=16000,
        max_position_embeddings=4096,
    ),
    "smol": dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "b1": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32000,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
TOKENIZER_SIZE = 16_000
PROMPT_TOKENS = (5, 15_000)  # prompts draw from these ids: known to every tokenizer here, and none special


@dataclass(frozen=True)
class Lengths:
    """A number of log-normal lengths, cut at both ends."""

    rows: int
    median: float
    sigma: float
    shortest: int
    longest: int

    def draw(self, rng: np.random.Generator) -> Ints:
        drawn = rng.lognormal(np.log(self.median), self.sigma, self.rows).astype(np.int64)
        return np.clip(drawn, self.shortest, self.longest)


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and of answers; each adds up to the same number of rows."""

    seed: int
    prompts: tuple[Lengths, ...]
    outputs: tuple[Lengths, ...]
    shuffled: bool = False

    def table(self, seed: int = 0) -> pa.Table:
        """The rows, with `id`, `prompt_token_ids` and `max_tokens`."""
        rng = np.random.default_rng(seed + self.seed)
        prompts = np.concatenate([lengths.draw(rng) for lengths in self.prompts])
        outputs = np.concatenate([lengths.draw(rng) for lengths in self.outputs])
        if self.shuffled:
            order = rng.permutation(len(prompts))
            prompts, outputs = prompts[order], outputs[order]
        token_ids = [rng.integers(*PROMPT_TOKENS, int(tokens)).tolist() for tokens in prompts]
        return pa.table(
            {"id": list(range(len(prompts))), "prompt_token_ids": token_ids, "max_tokens": outputs.tolist()}
        )


WORKLOADS = {
    "sum": Workload(1, (Lengths(64, 350, 0.7, 32, 1500),), (Lengths(64, 40, 0.6, 8, 128),)),
    "trans": Workload(2, (Lengths(64, 110, 0.6, 16, 400),), (Lengths(64, 140, 0.6, 16, 400),)),
    "mixed": Workload(
        3,
        (Lengths(24, 900, 0.3, 400, 1500), Lengths(72, 60, 0.5, 16, 200)),
        (Lengths(24, 24, 0.4, 8, 64), Lengths(24, 220, 0.4, 100, 400), Lengths(48, 24, 0.4, 8, 64)),
        shuffled=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--kind", choices=SHAPES, default="smol", help="shape of the model: 135M or 1.04B parameters")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, workload in WORKLOADS.items():
        table = workload.table(options.seed)
        pq.write_table(table, options.folder / f"{name}.parquet")
        print(f"{name}: {table.num_rows} rows, {sum_of(table)[0]:,} prompt and {sum_of(table)[1]:,} output tokens")
    parameters = write_model(options.folder / options.kind, SHAPES[options.kind], options.seed)
    print(f"{options.folder / options.kind}: {parameters / 1e6:,.1f}M parameters")


def sum_of(table: pa.Table) -> tuple[int, int]:
    """Prompt and output tokens of a workload."""
    return sum(map(len, table["prompt_token_ids"].to_pylist())), sum(table["max_tokens"].to_pylist())


def write_model(folder: Path, shape: dict[str, Any], seed: int = 0) -> int:
    """Write a Llama of that shape with random weights in bfloat16, and its tokenizer. Returns its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    bos, eos, pad = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), bos_token=bos, eos_token=eos, pad_token=pad, padding_side="left"
    ).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer that knows bytes, and two and three lower-case letters in a row."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    merges = list(itertools.islice(_merges(letters), TOKENIZER_SIZE - len(SPECIAL_TOKENS) - 256))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(letters: Sequence[str]) -> Iterator[tuple[str, str]]:
    pairs = [(first, second) for first in letters for second in letters]
    yield from pairs
    yield from ((first + second, third) for first, second in pairs for third in letters)


if __name__ == "__main__":
    main()
