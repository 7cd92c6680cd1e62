"""Whether answers are equal to the bit in every way of running a job: twelve ways, in bfloat16.

    python scripts/bench/same_answers.py --model DIR --rows rows.jsonl [--limit N] [--characters N] [--temperature T]

Rows have the column `text`, or are a workload of `bench.py`: Parquet with `id`, `prompt_token_ids` and `max_tokens`, of
which each row generates so many. Prints how many rows of each way have the tokens and log-probabilities of the first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ours import answers, options_of, texts_of

from vasuki.base.job_file import parse_job

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "as planned": {},
    "row by row": {"engine": {"max_num_seqs": 1}},
    "steps of 32 tokens": {"engine": {"chunk_tokens": 32}},
    "steps of 2,048 tokens": {"engine": {"chunk_tokens": 2048}},
    "as vLLM": {"engine": {"policy": "vllm"}},
    "as Orca": {"engine": {"policy": "orca"}},
    "prompts and decodes in turn": {"engine": {"policy": "vllm-v0"}},
    "little memory": {"kv": {"device_memory": "40MiB"}},
    "parked": {"kv": {"device_memory": "40MiB", "offload": "park", "host_memory": "256MiB"}},
    "layers streamed": {"kv": {"device_memory": "40MiB", "offload": "stream", "host_memory": "256MiB"}},
    "blocks of 8 tokens": {"kv": {"block_tokens": 8}},
    "two replicas": {"engine": {"replicas": 2}},
}


def main() -> None:
    parser = options_of(__doc__, limit=600)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    first: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        source, prompts, answer = Path(options.rows), {"prompt_token_ids": "prompt_token_ids"}, {"ignore_eos": True}
        most_tokens: Any = {"column": "max_tokens"}
        if source.suffix != ".parquet":
            texts, source, most_tokens = texts_of(options), Path(folder) / "rows.parquet", 32
            pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), source)
            prompts, answer = {"prompt": "{text}"}, {"ignore_eos": False}
        for number, (name, sections) in enumerate(WAYS.items()):
            tree: dict[str, Any] = {
                "model": {"path": options.model, "dtype": "bfloat16"},
                "input": {"path": str(source), "id": "id", "duplicates": "each", **prompts},
                "sampling": {"max_tokens": most_tokens, "temperature": options.temperature, "seed": 1, **answer},
                "output": {"path": f"{folder}/{number}", "token_ids": True, "logprobs": 1},
            }
            rows = answers(parse_job({**tree, **sections}))
            first = first or rows
            equal = sum(repr(row) == repr(other) for row, other in zip(rows, first, strict=True))
            print(f"{name}: {equal} of {len(first)} rows are equal", flush=True)


if __name__ == "__main__":
    main()
