"""An input far larger than the memory it may take, streamed from file to part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEXT_BYTES = 1_000
CEILING_MB = 100

STREAM = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from rooms import ByteTokenizer
from vasuki.base.job_file import load_job
from vasuki.io.input.requests import RequestStream
from vasuki.io.input.tables import open_table
import numpy, pyarrow.parquet, vasuki.io.output.output_folder

class Short(ByteTokenizer):
    def encode_batch(self, texts):
        return [[1, 2, 3] for _ in texts]

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mb()
job = load_job(sys.argv[2])
table = open_table(job)
rows = 0
with RequestStream(table, job, Short(), max_context_tokens=64, vocab_size=9) as requests:
    for request in requests:
        assert request.row == rows and not request.error
        rows += 1
print(json.dumps({"rows": rows, "grown_mb": peak_mb() - before}))
"""


@pytest.mark.parametrize(("form", "num_rows"), [("parquet", 300_000), ("jsonl", 120_000)])
def test_memory_is_bounded_whatever_the_input(tmp_path: Path, form: str, num_rows: int) -> None:
    text = "x" * TEXT_BYTES
    if form == "parquet":
        schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
        with pq.ParquetWriter(tmp_path / "in.parquet", schema, use_dictionary=False) as writer:
            for start in range(0, num_rows, 100_000):
                ids = list(range(start, start + 100_000))
                writer.write_table(pa.table({"id": ids, "text": [text] * len(ids)}), row_group_size=100_000)
    else:
        with open(tmp_path / "in.jsonl", "w") as file:
            file.writelines(f'{{"id": {i}, "text": "{text}"}}\n' for i in range(num_rows))
    (tmp_path / "job.yaml").write_text(
        f"model: {{path: m}}\ninput: {{path: {tmp_path}/in.{form}, id: id, prompt: '{{text}}', chat: false}}\n"
        f"output: {{path: {tmp_path}/out, columns: [text]}}\n"
    )
    command = [sys.executable, "-c", STREAM, str(Path(__file__).parent), str(tmp_path / "job.yaml")]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["rows"] == num_rows
    assert result["grown_mb"] < CEILING_MB
