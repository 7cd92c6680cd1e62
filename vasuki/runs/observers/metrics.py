"""Figures of a run while it lasts, for Prometheus and other readers of OpenMetrics: in a file, or over HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, start_http_server
from prometheus_client.openmetrics.exposition import generate_latest

from vasuki.base.errors import JobFileError, one_line
from vasuki.base.logs import run_id
from vasuki.io.location import Location
from vasuki.io.output.parts import Totals
from vasuki.io.output.sink import RowSink
from vasuki.io.output.trace import StepRecord
from vasuki.runs.observers.progress import Standing

WRITTEN_EVERY_S = 5.0
_NOBODY_ELSE = "127.0.0.1"

log = logging.getLogger(__name__)


class Metrics:
    """What has happened since the process began, over all of its runs, and the state of the run under way.

    Args:
        path: file that is replaced every few seconds, always whole; empty for none.
        address: `PORT` to serve on for this machine alone, or `HOST:PORT`; empty for none.

    Raises:
        JobFileError: the file cannot be written, or the address not be used.
    """

    def __init__(self, path: str = "", address: str = "") -> None:
        own = self._registry = CollectorRegistry()
        Info("vasuki_run", "Which process this is, as its log lines say.", registry=own).info({"run_id": run_id()})
        self.rows = Gauge("vasuki_rows", "Rows that the run under way has to answer.", registry=own)
        self.rows_done = Counter("vasuki_rows_done", "Rows answered, those that failed included.", registry=own)
        self.rows_failed = Counter("vasuki_rows_failed", "Rows that have an error.", registry=own)
        self.prompt_tokens = Counter("vasuki_prompt_tokens", "Prompt tokens computed.", registry=own)
        self.generated_tokens = Counter("vasuki_generated_tokens", "Tokens sampled.", registry=own)
        self.steps = Counter("vasuki_steps", "Forward passes.", registry=own)
        self.preemptions = Counter("vasuki_preemptions", "Times that a sequence made room.", registry=own)
        self.copied = Counter("vasuki_kv_copied_bytes", "KV moved between device and host.", registry=own)
        self.sequences = Gauge("vasuki_running_sequences", "Sequences in prefill or decode.", registry=own)
        self.kv_share = Gauge("vasuki_kv_used_ratio", "Share of the KV blocks in use.", registry=own)
        self.left = Gauge("vasuki_time_left_seconds", "Predicted time to the last row.", registry=own)
        self.at_risk = Gauge("vasuki_at_risk_seconds", "Time in steps since the last commit.", registry=own)
        self._file = Location.parse(path) if path else None
        self._written_s = 0.0
        self._server: WSGIServer | None = None
        host, _, port = address.rpartition(":")
        if address and not (port.isdecimal() and int(port) < 2**16):
            raise JobFileError(f"--metrics-port {address}: it is neither PORT nor HOST:PORT")
        try:
            if self._file is not None:
                self._write(self._file)
            if address:
                self._server, _ = start_http_server(int(port), host.strip("[]") or _NOBODY_ELSE, own)
                log.info("metrics at http://%s:%d/metrics", host or _NOBODY_ELSE, self._server.server_port)
        except OSError as error:
            raise JobFileError(f"cannot give metrics at {address or path}: {one_line(error)}") from None

    def write_if_due(self) -> None:
        """Replace the file if it is time. A file that cannot be written any more is no reason to end a run."""
        if self._file is None or time.monotonic() - self._written_s < WRITTEN_EVERY_S:
            return
        try:
            self._write(self._file)
        except OSError as error:
            log.warning("no metrics from here on: cannot write %s: %s", self._file, one_line(error))
            self._file = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the last figures, and serve no more."""
        self._written_s = 0.0
        self.write_if_due()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _write(self, file: Location) -> None:
        with file.replaced() as whole:
            whole.write(generate_latest(self._registry))  # type: ignore[no-untyped-call]
        self._written_s = time.monotonic()


@dataclass(slots=True)
class RunMetrics:
    """Counts one run into the metrics of its process.

    Args:
        metrics: of the process.
        num_rows: of this run, as far as is known now.
        sink: knows what it has answered so far.
    """

    metrics: Metrics
    num_rows: Callable[[], int]
    sink: RowSink
    _counted: Totals = field(default_factory=Totals, init=False)

    def count(self, step: StepRecord) -> None:
        """Count a step."""
        to = self.metrics
        to.steps.inc()
        to.prompt_tokens.inc(step.prefill_tokens)
        to.generated_tokens.inc(step.sampled_tokens)
        to.copied.inc(step.copied_bytes)
        to.preemptions.inc(step.preempted)

    def look(self, now: Standing, at_risk_s: float) -> None:
        """Say how the run stands, and since when nothing has become durable."""
        to = self.metrics
        to.sequences.set(now.running)
        to.kv_share.set(now.kv_share)
        to.at_risk.set(at_risk_s)
        to.left.set(now.left_s)
        self._count_rows()
        to.write_if_due()

    def close(self) -> None:
        """Count what came after the last step; nothing is at risk or to be waited for any more."""
        self._count_rows()
        for gauge in (self.metrics.sequences, self.metrics.kv_share, self.metrics.at_risk):
            gauge.set(0)
        if self._counted.rows >= self.num_rows():
            self.metrics.left.set(0)

    def _count_rows(self) -> None:
        rows = self.sink.written
        self.metrics.rows.set(self.num_rows())
        self.metrics.rows_done.inc(rows.rows - self._counted.rows)
        self.metrics.rows_failed.inc(rows.failed - self._counted.failed)
        self._counted = rows
