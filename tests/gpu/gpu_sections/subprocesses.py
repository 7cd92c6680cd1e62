"""Other programs: the tests that need a card, compute-sanitizer, and vLLM in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from gpu_sections.setting import WORKLOADS, Finding, Record, Setting, digits, fitting, run_planned

_ROOT = Path(__file__).resolve().parents[3]
_TAIL = 400  # characters of what a program said that is kept
_SANITIZER_FOUND = 9
_VLLM_ROWS = 2048
_VLLM_START_S = 90  # that it takes to compile and to record, about: what is left goes to rows

# Answers `rows`, `[prompt token ids, output tokens]` by workload. Prints a line when it is ready, and one for each.
_VLLM = """
import json, sys, time
started_s = time.perf_counter()
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
engine = LLM(**job["engine"])
print("READY", json.dumps({"start_s": time.perf_counter() - started_s}), flush=True)
for name, rows in job["rows"].items():
    prompts = [{"prompt_token_ids": ids} for ids, _ in rows]
    how = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=most, detokenize=False) for _, most in rows]
    started_s = time.perf_counter()
    answers = engine.generate(prompts, how, use_tqdm=False)
    seconds, tokens = time.perf_counter() - started_s, sum(len(each.outputs[0].token_ids) for each in answers)
    print("DONE", json.dumps({"workload": name, "seconds": seconds, "tokens": tokens}), flush=True)
"""


def tests(setting: Setting, share_s: float) -> Finding:
    """What `pytest -m gpu` says."""
    finding = Finding()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    done, said = _run(command, share_s, cwd=_ROOT)
    counted = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}
    if done is None or done not in (0, 5) or not counted:
        finding.failures.append(f"pytest -m gpu: {_why(done, share_s)}: {said[-_TAIL:]}")
    if setting.on_gpu and not counted.get("passed"):
        finding.failures.append("pytest -m gpu: no test ran")
    finding.rows.append({"tests": "pytest -m gpu", **counted})
    return finding


def sanitizer(setting: Setting, share_s: float) -> Finding:
    """Whether a kernel reads or writes where nothing is, in a few steps of tiny models."""
    program = _sanitizer()
    if not setting.on_gpu or program is None:
        why = "not found: pip install nvidia-cuda-sanitizer-api" if setting.on_gpu else "a CPU has none"
        return Finding(rows=[{"program": "compute-sanitizer", "found": why}])
    finding = Finding()
    check = [str(_ROOT / "scripts/gpu/gpu_check.py"), "--toy", "--device", "cuda", "--only", "golden"]
    command = [program, "--tool", "memcheck", "--error-exitcode", str(_SANITIZER_FOUND), sys.executable, *check]
    command += ["--out", str(setting.out / "sanitizer"), "--budget-s", str(share_s)]
    # Each tensor in its own memory, or what lies next to one is another that may be read.
    done, said = _run(command, share_s, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", said)
    if done == _SANITIZER_FOUND or (errors and int(errors[-1])):
        places = list(dict.fromkeys(re.findall(r"=+ (Invalid .*|Program hit .*)", said)))
        finding.failures.append(f"compute-sanitizer: {'; '.join(places)[:_TAIL] or said[-_TAIL:]}")
    elif done is None:
        finding.notes.append(f"compute-sanitizer: {_why(done, share_s)}; --only sanitizer gives it all of the time")
    elif done:
        finding.failures.append(f"compute-sanitizer: {_why(done, share_s)}: {said[-_TAIL:]}")
    finding.rows.append({"program": program, "found": f"{errors[-1]} errors" if errors else "no summary"})
    return finding


def _sanitizer() -> str | None:
    """From a CUDA toolkit, or from the package nvidia-cuda-sanitizer-api."""
    packages = Path(sysconfig.get_path("purelib"), "nvidia")
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, packages.glob("*/bin"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def vllm(setting: Setting, share_s: float) -> Finding:
    """The same rows by vLLM, with weights of its own making, and by vasuki, each with the card to itself."""
    finding, name = Finding(), setting.large
    workloads = WORKLOADS[-1:] if setting.toy else WORKLOADS
    each_s = max(1.0, share_s - _VLLM_START_S) / len(workloads) / 3
    rows, ours = {}, {}
    setting.loaded_alone(name)
    for workload in workloads:
        rows[workload] = fitting(setting, name, workload, 8 if setting.toy else _VLLM_ROWS, each_s)
        run_planned(setting, name, rows[workload][:64])  # loads kernels, as vLLM does while it starts
        run = run_planned(setting, name, rows[workload])
        ours[workload] = run.rows.output_tokens / (run.seconds + run.plan.plan_s)
    setting.forget()
    folder = setting.out / "model-for-vllm"
    setting.config(name).save_pretrained(folder)
    longest = max(each.num_prompt_tokens + each.max_tokens for some in rows.values() for each in some)
    engine: Record = {"model": str(folder), "skip_tokenizer_init": True, "load_format": "dummy"}
    engine |= {"dtype": str(setting.dtype).removeprefix("torch."), "max_model_len": longest}
    job = folder / "job.json"
    asked = {
        workload: [(each.prompt_token_ids.tolist(), each.max_tokens) for each in some]
        for workload, some in rows.items()
    }
    job.write_text(json.dumps({"engine": engine, "rows": asked}))
    done, said = _run([setting.vllm, "-c", _VLLM, str(job)], share_s)
    lines = dict.fromkeys(workloads) | {
        found["workload"]: found for found in map(json.loads, re.findall(r"^DONE (.+)$", said, re.MULTILINE))
    }
    ready = re.search(r"^READY (.+)$", said, re.MULTILINE)
    start_s = float(json.loads(ready[1])["start_s"]) if ready else 0.0
    for workload, found in lines.items():
        expected = sum(each.max_tokens for each in rows[workload])
        if found is None or found["tokens"] != expected:
            finding.failures.append(f"vLLM, {workload}: {_why(done, share_s)}: {said[-_TAIL:]}")
            continue
        theirs = found["tokens"] / found["seconds"]
        finding.rows.append(
            {
                "workload": workload,
                "rows": len(rows[workload]),
                "vasuki, tokens/s": digits(ours[workload]),
                "vLLM, tokens/s": digits(theirs),
                "ratio": digits(ours[workload] / theirs),
                "vLLM's start, s": digits(start_s),
            }
        )
    finding.notes.append(
        f"{name}: ratio is vasuki's output tokens a second, planning included, over vLLM's without its start"
    )
    return finding


def _run(command: list[str], seconds: float, **options: Any) -> tuple[int | None, str]:
    """The exit code and all that a program said; None where it was not done in time, and was ended."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, **options
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return None, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def _why(code: int | None, seconds: float) -> str:
    return f"not done within {seconds:.0f} s" if code is None else f"exit code {code}"
