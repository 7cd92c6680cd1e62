"""`vasuki init`: a job file to start from."""

from __future__ import annotations

import json
from pathlib import Path

from vasuki.base.errors import JobFileError

_JOB = """\
# docs/job.md says what each key means, and lists the others
name: {name}
model: {{path: PATH_OR_HUB_ID}}            # a folder with config.json, weights and tokenizer, or a Hugging Face id
input:
  path: {folder}/prompts.jsonl            # Parquet, JSONL or CSV; a file, folder or glob
  id: id
  prompt: "Translate into French: {{text}}"   # sent in the model's chat template when it has one
output: {{path: {folder}/out, columns: [text]}}
sampling: {{max_tokens: 128, temperature: 0}}
errors: {{max_fraction: 0.01}}             # more failed rows than this end the run with exit code 3
"""
_PROMPTS = ["The cheese is on the table.", "Where is the library?", "It will rain tomorrow."]


def write_starter(folder: str) -> list[str]:
    """Write `job.yaml` and `prompts.jsonl` into a folder. Raises JobFileError rather than overwrite one."""
    base = Path(folder)
    files = {
        base / "job.yaml": _JOB.format(name=base.resolve().name, folder=folder.rstrip("/")),
        base / "prompts.jsonl": "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(_PROMPTS)),
    }
    for path in files:
        if path.exists():
            raise JobFileError(f"{path} exists already")
    try:
        base.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobFileError(f"cannot write to {folder}: {error.strerror}") from None
    return [str(path) for path in files]
