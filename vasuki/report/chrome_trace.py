"""A run's trace as tracks of time, in the Trace Event Format that Perfetto and chrome://tracing open.

    runs     |------------------ run 0 ------------------|----- run 1 -----|
    steps    | prompts | prompts, decodes | decodes |     | decodes | ...
    copies   |         | copies |         | copies |
    commits                               ^ 12 rows                 ^ 3 rows
    KV, sequences                 counters, after each step

Times are in microseconds, each run begins where the one before it ended, and each shard is a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from vasuki.base.errors import JobFileError, one_line
from vasuki.io.location import Location
from vasuki.io.output.trace import StepRecord, read_trace, trace_files

_US = 1e6  # in a second
_TRACKS = ("runs", "steps", "copies", "commits")
_RUNS, _STEPS, _COPIES, _COMMITS = range(1, 5)

Event = dict[str, Any]


def write_chrome_trace(run_dir: str, target: str) -> int:
    """Write the trace of a run folder to the file `target`, step by step. Returns the number of events.

    Raises:
        InputError: there is no trace, or a line is not a step.
        JobFileError: a file cannot be read or written.
    """
    num_events = 0
    try:
        files = trace_files(Location.parse(run_dir))
        with Location.parse(target).replaced() as out:
            out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            for pid, file in enumerate(files, 1):
                for event in chrome_events(read_trace(file), file.name):
                    line = json.dumps({"pid": pid, "tid": 0, **event}, separators=(",", ":"))
                    out.write(b",\n" * bool(num_events) + line.encode())
                    num_events += 1
            out.write(b"]}\n")
    except (OSError, ValueError) as error:
        raise JobFileError(f"cannot make {target} of {run_dir}: {one_line(error)}") from None
    return num_events


def chrome_events(steps: Iterable[StepRecord], name: str) -> Iterator[Event]:
    """The events of one trace: names of its tracks, then an event for each step, and for each run when it is over."""
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    for tid, track in enumerate(_TRACKS, 1):
        yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": track}}
    run, run_start_s, end_s = -1, 0.0, 0.0
    for step in steps:
        if step.run != run:
            if run >= 0:
                yield _slice(_RUNS, f"run {run}", run_start_s, end_s)
            run, run_start_s = step.run, end_s
        end_s = run_start_s + step.t_s
        yield from _events_of(step, max(run_start_s, end_s - step.elapsed_s), end_s)
    if run >= 0:
        yield _slice(_RUNS, f"run {run}", run_start_s, end_s)


def _events_of(step: StepRecord, start_s: float, end_s: float) -> Iterator[Event]:
    work = {"prompts": step.prefill_tokens, "decodes": step.decode_tokens}
    yield _slice(
        _STEPS,
        ", ".join(kind for kind, tokens in work.items() if tokens) or "moves",
        start_s,
        end_s,
        prefill_tokens=step.prefill_tokens,
        decode_tokens=step.decode_tokens,
        predicted_ms=round(1e3 * step.predicted_s, 4),
        preempted=step.preempted,
        finished=step.finished,
    )
    if step.copied_bytes or step.swapped_blocks:
        copy_end_s = min(end_s, start_s + step.exposed_copy_s + step.hidden_copy_s)
        name = "swaps" if step.swapped_blocks else "streamed layers"
        moved = dict(bytes=step.copied_bytes, swapped_blocks=step.swapped_blocks, exposed_s=step.exposed_copy_s)
        yield _slice(_COPIES, name, start_s, copy_end_s, **moved)
    if step.committed_rows:
        yield {"ph": "i", "name": f"{step.committed_rows} rows", "tid": _COMMITS, "ts": _US * end_s, "s": "t"}
    for name, values in (
        ("KV bytes", {"device": step.kv_device_bytes, "host": step.kv_host_bytes}),
        ("sequences", {"in the batch": step.seqs, "waiting": step.waiting}),
    ):
        yield {"ph": "C", "name": name, "ts": _US * end_s, "args": values}


def _slice(tid: int, name: str, start_s: float, end_s: float, **arguments: float) -> Event:
    return {"ph": "X", "name": name, "tid": tid, "ts": _US * start_s, "dur": _US * (end_s - start_s), "args": arguments}
