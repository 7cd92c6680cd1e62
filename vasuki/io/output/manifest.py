"""manifest.json: what a run did, for people, schedulers and `vasuki report`.

Written in one motion when a run ends. Rows and tokens count everything in the folder, also what earlier runs left;
timings, steps, KV traffic and cost are of the run that wrote it, and `runs` has what each run took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pydantic
from pydantic import TypeAdapter

from vasuki.arrivals.percentiles import Percentiles
from vasuki.base.errors import InputError
from vasuki.io.location import Location
from vasuki.machines.price import Cost

MANIFEST = "manifest.json"
SCHEMA_VERSION = 2  # with 1, parts had an empty `error` where there was none; they may still be there


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Input rows. Those neither succeeded nor failed are still to do."""

    total: int = 0
    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of the rows in the output, those computed again (after preemptions, or of rows that an earlier run began),
    and tokens of prefixes that other rows had computed."""

    prompt: int = 0
    output: int = 0
    recomputed: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by part of the run. `makespan_s` is from first row read to last row durable; `tail_s` from the end of the
    first replica that had nothing more to do to the end of the last one."""

    load_s: float = 0.0
    plan_s: float = 0.0
    compile_s: float = 0.0
    generate_s: float = 0.0
    makespan_s: float = 0.0
    tail_s: float = 0.0

    @property
    def foreseen_s(self) -> float:
        """The part of the makespan that a plan speaks of: generation, without loading the model or planning."""
        return self.generate_s or self.makespan_s


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plan said of `Timings.generate_s`: loading is not in it. None where there was none, or rows arrive."""

    makespan_s: float | None = None
    lower_bound_s: float | None = None  # at datasheet rates
    schedule_bound_s: float | None = None  # under the cost model that says the makespan
    source: str = ""  # of that model's rates: measured, by whom and when, or a datasheet
    output_tokens_estimate: int = 0  # by the plan


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no schedule beats, of the rows of this run and the lengths that they turned out to have.

    None where that is not known: while rows arrive, and on replicas of several kinds.
    """

    schedule_s: float | None = None  # under the cost model, on a machine as fast as this one was: no run takes less
    pace: float | None = None  # seconds of the run's steps over what the cost model says of them; it is in `schedule_s`
    datasheet_s: float | None = None  # at datasheet rates
    uncertainty: float | None = None  # what not knowing the lengths beforehand added, in simulation: 0.02 is 2 %


@dataclass(frozen=True, slots=True)
class Ran:
    """How the rows ran, whatever the job left open."""

    policy: str = ""
    solver: str = ""  # of the order in which rows started
    mixing: str = ""  # of prompts and decodes
    chunk_tokens: int = 0  # of a step
    max_num_seqs: int = 0
    block_tokens: int = 0
    kv_tokens: int = 0  # that the device had room for
    offload: str = ""
    layers: float = 0.0  # whose KV passed through the device in every step; of steps that differed, the mean
    weights_on_host: int = 0  # layers
    backend: str = ""
    packing: str = ""  # of padded rows: always, never, or by price; empty where none are padded
    dtype: str = ""
    kv_dtype: str = ""
    quantization: str = "none"  # of products
    computed_on: str = ""  # what answers may depend on beside the job: the device, its instructions, and the libraries
    varies: str = ""  # why a row's last bits may depend on the rows beside it; empty where they do not


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Sequences in a step."""

    mean_seqs: float = 0.0
    max_seqs: int = 0


@dataclass(frozen=True, slots=True)
class KVStats:
    """Memory and traffic of keys and values."""

    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    exposed_copy_s: float = 0.0  # steps waited this long for copies
    hidden_copy_s: float = 0.0  # copies that ran behind compute
    prefilled_ahead: int = 0  # rows that waited on the host with their prompt computed


@dataclass(frozen=True, slots=True)
class PreemptionCounts:
    """Sequences that had to make room."""

    swap: int = 0
    recompute: int = 0


@dataclass(frozen=True, slots=True)
class RunTaken:
    """What one of the runs in a folder took; of one that was killed, what its trace has of it, priced as the run that
    found that."""

    finished_at: str = ""
    run_id: str = ""
    rows: int = 0  # that it wrote
    resumed_rows: int = 0  # that it began with tokens of an earlier run
    load_s: float = 0.0
    makespan_s: float = 0.0
    gpu_hours: float = 0.0
    amount: float | None = None
    currency: str = "USD"
    killed: bool = False  # its time is that of its steps until its last commit, without loading


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole file. Unknown keys are ignored when it is read, so that a newer one can still be compared."""

    job: dict[str, Any]
    config_hash: str
    input_fingerprint: str
    rows: RowCounts = RowCounts()
    copied_rows: int = 0  # of those in the output, the ones that have the answer of a row that asks for the same
    tokens: TokenCounts = TokenCounts()
    timings: Timings = Timings()
    predicted: Predicted = Predicted()
    bounds: Bounds = Bounds()
    ran: Ran = Ran()
    steps: int = 0
    batch: BatchStats = BatchStats()
    kv: KVStats = KVStats()
    preemptions: PreemptionCounts = PreemptionCounts()
    ttft: Percentiles | None = None  # from a row's arrival to its first token; None unless rows arrive
    latency: Percentiles | None = None  # likewise, to its end
    urgent_latency: Percentiles | None = None  # of urgent rows alone
    missed_deadlines: int = 0  # rows of this run, each sample for itself, that ended later than they were due
    device: dict[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    versions: dict[str, str] = field(default_factory=dict)
    simulated: bool = False
    finished_at: str = ""  # ISO 8601, UTC
    run_id: str = ""  # that the log lines of the run carry
    shard: str = ""  # `I/N`; empty for the whole input
    runs: tuple[RunTaken, ...] = ()  # in the order in which they ended; the last one is that of `timings`
    traced_runs: int | None = None  # how many numbers of runs in the trace `runs` accounts for; None: all, it is older
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return {"schema_version": plain.pop("schema_version"), **plain}

    def write(self, place: Location) -> None:
        """Replace the file at `place`. Raises OSError."""
        text = pydantic.TypeAdapter(dict).dump_json(self.to_dict(), indent=2)
        place.write_bytes(text + b"\n")


def after(
    earlier: Manifest | None, manifest: Manifest, rows: int, resumed_rows: int, killed: Iterable[tuple[float, int]] = ()
) -> Manifest:
    """`manifest` of a run that wrote `rows` rows, some of them begun by earlier runs, with what those took.

    Args:
        earlier: the manifest that is there.
        manifest: of the run that has ended.
        rows: that it wrote.
        resumed_rows: that it began with tokens of an earlier run.
        killed: seconds and rows of runs that `earlier` knows nothing of.
    """
    cost = manifest.cost
    own = RunTaken(
        manifest.finished_at,
        manifest.run_id,
        rows,
        resumed_rows,
        manifest.timings.load_s,
        manifest.timings.makespan_s,
        cost.gpu_hours,
        cost.amount,
        cost.currency,
    )
    unsaid = [_like(own, makespan_s, rows) for makespan_s, rows in killed]
    return replace(manifest, runs=(*(earlier.runs if earlier else ()), *unsaid, own))


def _like(run: RunTaken, makespan_s: float, rows: int) -> RunTaken:
    """What a killed run took, on the machine of another run."""
    share = makespan_s / run.makespan_s if run.makespan_s else 0.0
    return RunTaken(
        rows=rows,
        makespan_s=makespan_s,
        gpu_hours=share * run.gpu_hours,
        amount=None if run.amount is None else share * run.amount,
        currency=run.currency,
        killed=True,
    )


def now_utc() -> str:
    """The time for `Manifest.finished_at`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


_ADAPTER = TypeAdapter(Manifest)


def read_manifest(place: Location) -> Manifest:
    """Read a manifest file, or the one in a run folder.

    Raises:
        InputError: there is none, or it cannot be understood.
    """
    try:
        file = place / MANIFEST if place.is_folder() else place
        manifest = _ADAPTER.validate_json(file.read_bytes())
    except OSError:
        raise InputError(f"{place} has no {MANIFEST}: no run has ended there") from None
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise InputError(f"{file} is not a manifest: {where + ': ' if where else ''}{problem['msg']}") from None
    if manifest.schema_version > SCHEMA_VERSION:
        raise InputError(
            f"{file} has schema_version {manifest.schema_version}; this version reads up to {SCHEMA_VERSION}"
        )
    return manifest


def is_manifest(tree: dict[str, Any]) -> bool:
    """Whether JSON can be read as a manifest, or is that of a newer version, which may have other values."""
    version = tree["schema_version"]
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return True
    try:
        _ADAPTER.validate_python(tree)
    except pydantic.ValidationError:
        return False
    return True


def merge(shards: Sequence[Manifest]) -> Manifest:
    """Merge the manifests of shards that ran side by side: work adds up, and time is that of the slowest."""
    first = shards[0]
    steps = sum(shard.steps for shard in shards)
    return replace(
        first,
        rows=_summed(RowCounts, [shard.rows for shard in shards]),
        copied_rows=sum(shard.copied_rows for shard in shards),
        tokens=_summed(TokenCounts, [shard.tokens for shard in shards]),
        timings=_slowest(Timings, [shard.timings for shard in shards]),
        predicted=_all_predicted([shard.predicted for shard in shards]),
        bounds=_slowest(Bounds, [shard.bounds for shard in shards]),
        steps=steps,
        batch=BatchStats(
            mean_seqs=sum(shard.batch.mean_seqs * shard.steps for shard in shards) / steps if steps else 0.0,
            max_seqs=max(shard.batch.max_seqs for shard in shards),
        ),
        kv=replace(
            _summed(KVStats, [shard.kv for shard in shards]),
            peak_device_bytes=max(shard.kv.peak_device_bytes for shard in shards),
            peak_host_bytes=max(shard.kv.peak_host_bytes for shard in shards),
        ),
        preemptions=_summed(PreemptionCounts, [shard.preemptions for shard in shards]),
        missed_deadlines=sum(shard.missed_deadlines for shard in shards),
        device=_of_all([shard.device for shard in shards]),
        cost=_total_cost([shard.cost for shard in shards]),
        runs=tuple(sorted((run for shard in shards for run in shard.runs), key=lambda run: run.finished_at)),
        traced_runs=0,  # each shard has its own trace
        shard="",
    )


def _all_predicted(parts: Sequence[Predicted]) -> Predicted:
    slowest: Predicted = _slowest(Predicted, parts)
    return replace(
        slowest, source=parts[0].source, output_tokens_estimate=sum(part.output_tokens_estimate for part in parts)
    )


def _summed(kind: type[Any], parts: Sequence[Any]) -> Any:
    return kind(**{name: sum(getattr(part, name) for part in parts) for name in kind.__dataclass_fields__})


def _slowest(kind: type[Any], parts: Sequence[Any]) -> Any:
    columns = {name: [getattr(part, name) for part in parts] for name in kind.__dataclass_fields__}
    return kind(**{name: None if None in values else max(values) for name, values in columns.items()})


def _of_all(devices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first device, with the energy that all of them drew, and the most that the host of one of them took away.

    What is not known of one is left out.
    """
    merged = dict(devices[0])
    for name, together in (("energy_j", sum), ("stolen_share", max)):
        values: list[Any] = [device.get(name) for device in devices]
        merged.pop(name, None)
        if None not in values:
            merged[name] = together(values)
    return merged


def _total_cost(costs: Sequence[Cost]) -> Cost:
    """The cost of all shards: sums, and the mean price of a token weighted by the tokens that each shard paid for."""
    gpu_hours = sum(cost.gpu_hours for cost in costs)
    if any(cost.amount is None for cost in costs):
        return Cost(gpu_hours, None, costs[0].currency)
    amount = sum(cost.amount or 0.0 for cost in costs)
    millions = sum((cost.amount or 0.0) / cost.per_million_tokens for cost in costs if cost.per_million_tokens)
    return Cost(gpu_hours, amount, costs[0].currency, amount / millions if millions else None)
