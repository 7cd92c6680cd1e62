"""What driver and replicas tell each other.

replica                        driver
Ready       -------------------->          the model is loaded
            <--------------------  PlanFor   plan for these lengths: asked of one replica of each kind
Planned    -------------------->
            <--------------------  Begin     run by this plan
Report      -------------------->          every few steps: rows that ended, and whether more are wanted
            <--------------------  Take     rows
            <--------------------  Note      how far are the others?
Report      -------------------->          with the tokens of rows in flight
            <--------------------  Finish    no row is left; or Stop, behind the step under way
Over        -------------------->
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from vasuki.base.errors import VasukiError
from vasuki.engine.sequence import NOTHING_SAID, Decoded, Progress, Request
from vasuki.io.output.manifest import Manifest
from vasuki.io.output.trace import StepRecord
from vasuki.machines.here.split import Share
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.leases import Key
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.opening import JobKey


@dataclass(frozen=True, slots=True)
class Setup:
    """What a replica is started with."""

    job: JobKey  # as for this replica: with its share of what a host has once
    share: Share
    index: int
    replicas: int
    json_logs: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The replica has loaded the model."""

    kind: str  # of the device; devices of a kind run by one plan
    max_context_tokens: int
    vocab_size: int
    computed_on: str


@dataclass(frozen=True, slots=True)
class PlanFor:
    """Plan for these requests, shared by all replicas."""

    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with what it was priced by."""

    plan: Plan
    shape: ModelShape
    profile: HardwareProfile


@dataclass(frozen=True, slots=True)
class Begin:
    """Run by this plan."""

    planned: Planned


@dataclass(frozen=True, slots=True)
class Take:
    """Rows to run, in this order."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Note:
    """Report how far the rows in flight are."""


@dataclass(frozen=True, slots=True)
class Finish:
    """No row is left."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End behind the step under way."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A row that has ended."""

    key: Key
    progress: Progress
    said: Decoded = NOTHING_SAID
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica did since its last report."""

    ended: list[Ended] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    wants_rows: bool = False  # said once for each lease
    in_flight: dict[Key, Progress] | None = None  # the answer to a Note, and the last words behind a Stop
    running: int = 0
    kv_share: float = 0.0  # of the device's blocks, that are held


@dataclass(frozen=True, slots=True)
class Over:
    """A replica has ended, and what it measured: rows and tokens are for the driver to count."""

    manifest: Manifest
    done: JobSums  # of the rows that it ran, as far as they came
    pace: float | None  # of its steps, see `TimeLeft.whole_pace`


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica cannot go on."""

    error: VasukiError


ToReplica = PlanFor | Begin | Take | Note | Finish | Stop
ToDriver = Ready | Planned | Report | Over | Failed


class Replicas(Protocol):
    """How the driver reaches its replicas, wherever they run. One that joins later is heard of when it is `Ready`."""

    @property
    def devices(self) -> int:
        """GPUs or machines that are paid for."""
        ...

    def start(self, index: int) -> bool:
        """Start a replica again that has been heard to end; False if there is nowhere left to."""
        ...

    def send(self, index: int, message: ToReplica) -> None:
        """Tell a replica something. One that has died is heard of by `receive`."""
        ...

    def kill(self, index: int) -> None:
        """End a replica at once, which `receive` then tells of."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[int, ToDriver | None]]:
        """What replicas say, after `timeout_s` at the latest; None from one that has ended."""
        ...


SetupOf = Callable[[Share, int, int], Setup]  # of a share, an index, and the number of replicas on its machine
Start = Callable[[SetupOf, list[Share]], AbstractContextManager[Replicas]]
