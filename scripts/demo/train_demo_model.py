"""Train the demo model: a small Llama that rewrites dates in many spellings as ISO 8601.

What it is: a real model behind the demo job, so that the job's output can be checked against a true answer. About
0.7 million parameters in the Llama shape (grouped-query attention, SwiGLU, RoPE, tied embeddings), trained from
nothing on texts that `demo_dates` makes up. A text goes in as it is; the tokenizer frames it as `<bos> text <iso>`, and
the model answers with ten characters and `<eos>`: eleven tokens.

What it isn't: a language model. It knows the spellings of `demo_dates.SPELLINGS`, the years 1900 to 2099, one date in
a text, and the made-up sentences around it. To anything else it still answers with something that looks like a date.
It takes no instructions, so its chat template refuses system messages. Positions past the longest training text,
rounded up to `CONTEXT_TOKENS`, are not offered.

    python scripts/demo/train_demo_model.py               # writes models/dates and jobs/data/dates.parquet
    python scripts/demo/train_demo_model.py --data-only   # writes the table alone, without torch

The seed decides the table bit for bit. It decides the model up to the order in which a torch version, on a number of
threads, adds floating-point numbers. The last line on stdout is one JSON object with the greedy exact match on the
table's rows, of which training sees neither the text nor the spelled date.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from demo_dates import MAX_TEXT_CHARS, Example, evaluation_examples, training_examples

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
EVALUATION_ROWS = 2000

PAD, BOS, EOS, ISO = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<iso>")
VOCABULARY_TOKENS = 768
TOKENIZER_ROWS = 20_000
CONTEXT_TOKENS = 512
ANSWER_TOKENS = len("2001-05-07") + 1  # every digit and dash is a token of its own, and <eos>
MAX_NEW_TOKENS = 24  # what evaluation allows: an answer that runs on is a wrong answer
IGNORED = -100  # what cross_entropy skips

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ bos_token + message['content'] + sep_token }}
{%- elif message['role'] == 'assistant' -%}
{{ message['content'] + eos_token }}
{%- else -%}
{{ raise_exception('this model takes no ' + message['role'] + ' messages: it only rewrites dates') }}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training: short texts first, where reading a date is learned cheaply, then texts of every length."""

    steps: int
    max_text_chars: int
    batch_tokens: int  # padded, prompts and answers


PHASES = (Phase(2200, 32, 2048), Phase(1000, MAX_TEXT_CHARS, 4096))
POOL_ROWS = 2048  # sorted by length before they are cut into batches, so that little is padding
PEAK_LEARNING_RATE = 2e-3  # 3e-3 starts faster but is behind after 500 steps; 6e-3 is far behind throughout
INITIALIZER_RANGE = 0.06  # near 1 / sqrt(hidden size); Llama's 0.02 needs three times the steps
WARMUP_STEPS = 100
LOG_EVERY_STEPS = 100


# --- Data -----------------------------------------------------------------------------------------------------------


def write_table(examples: Sequence[Example], path: Path) -> None:
    """Columns `id`, `text` and `iso`, one row for each example, in order."""
    table = pa.table(
        {
            "id": [f"date-{number:04d}" for number in range(1, len(examples) + 1)],
            "text": [example.text for example in examples],
            "iso": [example.iso for example in examples],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


# --- Tokenizer and model --------------------------------------------------------------------------------------------


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, which frames a text as `<bos> text <iso>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (example.text for example in islice(training_examples(seed), TOKENIZER_ROWS))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {ISO}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BOS, ISO)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        sep_token=ISO,
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


# --- Training -------------------------------------------------------------------------------------------------------


def encode(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
    """Token ids of each framed text and of its answer."""
    prompts = tokenizer([example.text for example in examples])["input_ids"]
    answers = tokenizer([example.iso for example in examples], add_special_tokens=False)["input_ids"]
    return [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers, strict=True)]


def collate(rows: Sequence[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token targets, both `[num_rows, longest]`; targets are `IGNORED` outside the answers.

    Padding is on the right, where causal attention never looks, so training needs no mask.
    """
    import torch

    longest = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    inputs = torch.full((len(rows), longest), pad_id)
    targets = torch.full((len(rows), longest), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer) - 1
        inputs[row, :end] = torch.tensor((prompt + answer)[:-1])
        targets[row, len(prompt) - 1 : end] = torch.tensor(answer)
    return inputs, targets


def training_batches(
    tokenizer: PreTrainedTokenizerFast, phase: Phase, seed: int, forbidden_texts: frozenset[str]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An endless stream of batches of at most `phase.batch_tokens` padded tokens, short and long in random order."""
    examples = training_examples(seed, phase.max_text_chars)
    order = Random(f"order/{seed}/{phase.max_text_chars}")
    while True:
        pool = list(islice(examples, POOL_ROWS))
        assert forbidden_texts.isdisjoint(example.text for example in pool), "training on an evaluation text"
        rows = sorted(encode(tokenizer, pool), key=lambda row: len(row[0]))
        assert len(rows[-1][0]) + ANSWER_TOKENS <= CONTEXT_TOKENS, "a training text is longer than the context"
        batches: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * (len(row[0]) + ANSWER_TOKENS) > phase.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        order.shuffle(batches)
        for batch in batches:
            yield collate(batch, tokenizer.pad_token_id)


def learning_rate(step: int, total_steps: int) -> float:
    """Linear warmup, then a cosine down to zero."""
    return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / total_steps))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phases: Sequence[Phase],
    seed: int,
    forbidden_texts: frozenset[str],
) -> dict[str, int]:
    """Train in place; return how many rows and padded tokens it took."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    total_steps = sum(phase.steps for phase in phases)
    step = num_rows = num_tokens = 0
    recent_loss = math.nan
    model.train()
    for phase in phases:
        for inputs, targets in islice(training_batches(tokenizer, phase, seed, forbidden_texts), phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total_steps)
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            answered = targets != IGNORED  # logits for these positions alone: the vocabulary is a fair part of the work
            loss = cross_entropy(model.lm_head(hidden[answered]), targets[answered])
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            step, num_rows, num_tokens = step + 1, num_rows + len(inputs), num_tokens + inputs.numel()
            recent_loss = loss.item() if math.isnan(recent_loss) else 0.98 * recent_loss + 0.02 * loss.item()
            if step % LOG_EVERY_STEPS == 0:
                print(f"step {step}/{total_steps}  loss {recent_loss:.4f}  rows {num_rows}", file=sys.stderr)
    return {"steps": step, "training_rows": num_rows, "training_tokens": num_tokens}


# --- Evaluation -----------------------------------------------------------------------------------------------------


def exact_match(folder: Path, examples: Sequence[Example], dtype: torch.dtype) -> float:
    """Share of examples whose greedy answer, by the saved model in `dtype`, is the true date to the letter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    by_length = sorted(examples, key=lambda example: len(example.text))
    num_right = 0
    for start in range(0, len(by_length), 100):
        group = by_length[start : start + 100]
        prompts = tokenizer([example.text for example in group], padding=True, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(
                input_ids=prompts["input_ids"],
                attention_mask=prompts["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
            )
        answers = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        num_right += sum(answer == example.iso for answer, example in zip(answers, group, strict=True))
    return num_right / len(examples)


def train_and_evaluate(args: argparse.Namespace, examples: Sequence[Example]) -> dict[str, Any]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(args.seed)
    model = build_model(tokenizer)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    figures: dict[str, Any] = {"parameters": model.num_parameters()}
    figures |= train(model, tokenizer, PHASES, args.seed, frozenset(example.text for example in examples))
    figures["train_s"] = round(time.perf_counter() - started_s, 1)
    figures["train_cpu_s"] = round(time.process_time() - started_cpu_s, 1)
    model.save_pretrained(args.model)
    tokenizer.save_pretrained(args.model)
    figures["exact_match_float32"] = exact_match(args.model, examples, torch.float32)
    figures["exact_match_bfloat16"] = exact_match(args.model, examples, torch.bfloat16)
    return figures | {"threads": args.threads, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and write the demo table.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "dates", help="folder to write the model to")
    parser.add_argument("--data", type=Path, default=ROOT / "jobs" / "data" / "dates.parquet", help="table to write")
    parser.add_argument("--data-only", action="store_true", help="write the table and stop; needs no torch")
    args = parser.parse_args()

    examples = list(islice(evaluation_examples(args.seed), EVALUATION_ROWS))
    write_table(examples, args.data)
    figures = {"seed": args.seed, "rows": len(examples)}
    if not args.data_only:
        figures |= train_and_evaluate(args, examples)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
