"""Rows -> the lines of result and error files that hosted batch APIs give back: a chat completion for each row.

Fields and their values follow `openai.types.chat.ChatCompletion` and the batch API's reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from vasuki.io.values import as_text

Line = dict[str, Any]


def result_line(samples: Sequence[Line], model: str, created_s: int) -> Line:
    """What a batch API says of a row: an answer with a choice for each sample, or the error of one of them."""
    custom_id = as_text(samples[0]["id"])
    key = hashlib.blake2b(custom_id.encode(), digest_size=12).hexdigest()
    line: Line = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": None, "error": None}
    errors = [sample["error"] for sample in samples if sample["error"]]
    if errors:
        return line | {"error": {"code": "invalid_request", "message": errors[0]}}
    prompt_tokens = samples[0]["prompt_tokens"]
    output_tokens = sum(sample["output_tokens"] for sample in samples)
    body = {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [_choice(sample) for sample in samples],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        },
    }
    return line | {"response": {"status_code": 200, "request_id": f"req_{key}", "body": body}}


def _choice(sample: Line) -> Line:
    return {
        "index": sample.get("sample", 0),
        "message": {"role": "assistant", "content": sample["output"], "refusal": None},
        "logprobs": _logprobs(sample.get("logprobs")),
        "finish_reason": sample["finish_reason"],
    }


def _logprobs(tokens: Sequence[Line] | None) -> Line | None:
    """Of an output with the column `logprobs`."""
    if tokens is None:
        return None
    content = [_token(each) | {"top_logprobs": [*map(_token, each.get("top_logprobs", ()))]} for each in tokens]
    return {"content": content, "refusal": None}


def _token(token: Line) -> Line:
    text = token["token"]
    of_bytes = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())  # of parts of a character
    return {"token": text, "bytes": of_bytes, "logprob": token["logprob"]}
