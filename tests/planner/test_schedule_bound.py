"""No simulated schedule beats the bound, whatever the job, the machine, the policy and the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hybrid import HYBRID
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_lp import schedule_lp_s

from vasuki.base.config import EngineConfig
from vasuki.engine.loop import Observer
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES, Admission, Mixing
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.measured_points import AttentionPoint, AttentionPoints, InStep, Measured
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout, spread_buffers
from vasuki.models.named import named_shape
from vasuki.models.shape import Backend, ModelShape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths, SharedPrefixes
from vasuki.planner.one_device import make_plan
from vasuki.planner.rows_done import RowsDone
from vasuki.planner.schedule_bound import StepRoom, step_rooms
from vasuki.planner.schedule_bound import schedule_bound_s as bound_of_sums_s
from vasuki.planner.simulated import simulate_plan
from vasuki.simulator import simulate, simulate_pipelines

LLAMA = replace(named_shape("llama-3-8b"), num_layers=4)
SHAPES = {
    "dense": LLAMA,
    "small": replace(LLAMA, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64),
    "window": replace(LLAMA, sliding_window=64, num_windowed_layers=4),
    "some windows": replace(LLAMA, sliding_window=100, num_windowed_layers=2),
    "experts": replace(named_shape("mixtral-8x7b"), num_layers=4, num_expert_layers=4),
    "recurrent": HYBRID,
    "padded": replace(LLAMA, backend="padded"),
    "alone": replace(LLAMA, backend="alone"),
}
CARDS = ("a10", "a40", "a100", "h100", "cpu")


def schedule_bound_s(lengths: Lengths, cost: CostModel, rooms: list[StepRoom], offload: bool = False) -> float:
    return bound_of_sums_s(JobSums.of_lengths(cost.shape, lengths), cost, rooms, offload)


@dataclass(frozen=True)
class Run:
    """A job and how it is run."""

    lengths: Lengths
    cost: CostModel
    settings: EngineSettings
    order: list[int]
    known: bool

    @property
    def offload(self) -> bool:
        return bool(self.settings.offload.streamed_layers or self.settings.offload.host_blocks)

    @property
    def room(self) -> StepRoom:
        """What the device holds, and the largest step."""
        limits, policy, layers = self.settings.limits, self.settings.policy, self.cost.shape.num_layers
        streamed = self.settings.offload.streamed_layers
        resident = (layers - streamed + spread_buffers(layers, streamed)) / layers
        split = policy.chunked and policy.refill and self.cost.shape.backend != "alone"
        step_tokens = max(limits.chunk_tokens, limits.max_num_seqs) if split else math.inf
        states = limits.max_num_seqs * self.cost.shape.state_bytes  # whose memory fewer rows leave to blocks
        kv_tokens = self.settings.kv_tokens + math.ceil(states / self.cost.shape.kv_bytes_per_token)
        return StepRoom(step_tokens, resident * kv_tokens)

    def bound_s(self) -> float:
        return schedule_bound_s(self.lengths, self.cost, [self.room], self.offload)

    def makespan_s(self, *observers: Observer) -> float:
        requests = list(self.lengths.requests(self.known))
        outputs, order = self.lengths.output_tokens.tolist(), [requests[row] for row in self.order]
        run = simulate_pipelines if self.cost.layout.num_streams > 1 else simulate
        return run(order, outputs, self.settings, self.cost, observers=observers).makespan_s


@st.composite
def profiles(draw: st.DrawFn, shape: ModelShape) -> HardwareProfile:
    """A shipped profile, or one with made-up measurements in steps and of attention."""
    profile = find_profile(draw(st.sampled_from(CARDS)))
    if draw(st.booleans()):
        return profile
    ratio = st.floats(0.5, 2.0)
    sizes = sorted(draw(st.sets(st.sampled_from([1, 4, 16, 64, 100, 256, 1000, 6000]), min_size=1, max_size=4)))
    in_step = InStep(tokens=tuple(sizes), ratio=tuple(draw(ratio) for _ in sizes))
    points = tuple(
        AttentionPoint(sequences=sequences, tokens=tokens, context=context, us=draw(st.floats(5, 500)))
        for sequences, tokens, context in ((1, 1, 50), (8, 1, 300), (60, 1, 800), (1, 32, 64), (2, 128, 500))
    )
    attention = AttentionPoints(
        heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=shape.dtype, points=points
    )
    measured = Measured(source="made up", in_step=in_step, attention=(attention,) if draw(st.booleans()) else ())
    return profile.model_copy(update={"measured": measured})


@st.composite
def shared_beginnings(draw: st.DrawFn, rows: int) -> SharedPrefixes:
    """What rows begin with: nothing, one text, or that and more."""
    first, more = draw(st.sampled_from([1, 16, 100])), draw(st.sampled_from([8, 40, 300]))
    text = np.arange(first + more, dtype=np.int32)
    of_row = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    return SharedPrefixes([text[:0], text[:first], text], np.array(of_row))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A job of up to 40 rows in memory for one row or more."""
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, longest = draw(st.integers(1, 40)), draw(st.sampled_from([3, 30, 300]))
    prompts = seed.integers(1, draw(st.sampled_from([5, 100, 600])) + 1, rows)
    outputs = seed.integers(1, longest + 1, rows)
    limits = outputs + seed.integers(0, 50, rows) * draw(st.integers(0, 1))
    name = draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]
    profile = draw(profiles(shape))
    host_layers = draw(st.sampled_from([0, 0, 0, 1, 2])) if name in ("dense", "small") else 0
    layout = Layout(host_layers=host_layers)
    if not host_layers and name == "dense" and profile.kind == "gpu":
        layout = draw(st.sampled_from([Layout(), Layout(2), Layout(1, 2), Layout(2, 2, 2), Layout(data_parallel=2)]))
    prefixes = draw(shared_beginnings(rows)) if shape.in_blocks and draw(st.booleans()) else None
    if prefixes is not None:
        prompts = prompts + prefixes.tokens()
    lengths = Lengths(prompts, outputs, None, limits, prefixes)
    policy = POLICIES[draw(st.sampled_from(sorted(POLICIES)))]
    staged = layout.pipeline_parallel > 1
    if policy.pads and (staged or profile.kind == "cpu"):
        policy = POLICIES["vasuki"]
    if not shape.in_blocks:
        policy = replace(policy, shares_prefixes=False)
    if policy.ordered:
        policy = replace(
            policy,
            admission=draw(st.sampled_from([Admission.ROOM, Admission.PROMPT, Admission.PEAK])),
            mixing=draw(st.sampled_from([Mixing.MIXED, Mixing.EXCLUSIVE])),
        )
    chunk_tokens = draw(st.sampled_from([16, 40, 128, 512, 2048]))
    limits_of = Limits(
        chunk_tokens=chunk_tokens,
        max_num_seqs=draw(st.sampled_from([1, 4, 16, 64, 256])),
        short_step_tokens=draw(st.sampled_from([0, chunk_tokens // 4, chunk_tokens // 2])),
        usual_row_tokens=draw(st.sampled_from([0, 50, 1000])),
    )
    block_tokens = draw(st.sampled_from([1, 8, 16]))
    row_blocks = -(-int(lengths.peak_tokens.max()) // block_tokens)
    num_blocks = row_blocks + round(row_blocks * draw(st.floats(0.05, 12)))
    settings_of = EngineSettings(policy, limits_of, num_blocks, block_tokens)
    offload = draw(st.sampled_from(["none", "stream", "park", "ahead"]))
    if policy.ordered and offload != "none" and not shape.recurrent and not (staged and offload == "stream"):
        if offload == "stream":
            moved = OffloadPlan("stream", streamed_layers=draw(st.integers(1, 3)))
        else:
            least, ahead = draw(st.sampled_from([1, 64])), offload == "ahead"
            moved = OffloadPlan("park", host_blocks=5 * num_blocks, park_min_tokens=least, prefills_ahead=ahead)
        settings_of = replace(settings_of, offload=moved)
        if offload == "ahead":
            settings_of = replace(settings_of, policy=replace(policy, admission=Admission.PEAK, mixing=Mixing.MIXED))
    order = seed.permutation(rows).tolist()
    return Run(lengths, CostModel(shape, profile, layout), settings_of, order, draw(st.booleans()))


@settings(max_examples=100, deadline=None)
@given(runs())
def test_no_schedule_beats_the_bound(run: Run) -> None:
    assert 0 < run.bound_s() <= run.makespan_s() * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_no_run_beats_the_bound_of_what_it_has_done(run: Run) -> None:
    """Whatever its rows shared and computed again, and as exactly as the plan where nothing is shared."""
    done = RowsDone(run.cost.shape)
    makespan_s = run.makespan_s(done)
    bound_s = bound_of_sums_s(done.sums, run.cost, [run.room], run.offload)
    assert 0 < bound_s <= makespan_s * (1 + 1e-9)
    if run.lengths.prefixes is None:
        assert bound_s == pytest.approx(run.bound_s())


@settings(max_examples=30, deadline=None)
@given(runs().filter(lambda run: run.cost.layout.num_streams == 1))
def test_the_linear_program_lies_between(run: Run) -> None:
    program_s = schedule_lp_s(run.lengths, run.cost, [run.room], run.offload)
    counted_lower = 3e-4 if run.cost.shape.recurrent else 1e-5  # by the program, of what recurrent layers take
    assert run.bound_s() * (1 - counted_lower) <= program_s <= run.makespan_s() * (1 + 1e-5)


def job(rows: int, prompt: int, output: int) -> Lengths:
    return Lengths(np.full(rows, prompt), np.full(rows, output), None, np.full(rows, output))


def run_of(lengths: Lengths, cost: CostModel, kv_tokens: int, chunk_tokens: int = 128, max_num_seqs: int = 512) -> Run:
    limits = Limits(chunk_tokens, max_num_seqs)
    policy = replace(POLICIES["vasuki"], admission=Admission.PEAK)
    return Run(lengths, cost, EngineSettings(policy, limits, kv_tokens, 1), list(range(len(lengths))), known=True)


A10, CPU = find_profile("a10"), find_profile("cpu")
MANY_SMALL = replace(SHAPES["small"], num_layers=30)
TIGHT = {
    "one row": run_of(job(1, 2, 50), CostModel(LLAMA, A10), 200),
    "few rows": run_of(job(16, 2, 300), CostModel(LLAMA, A10), 20_000),
    "many rows": run_of(job(128, 2, 300), CostModel(LLAMA, A10), 80_000),
    "on a CPU": run_of(job(32, 2, 100), CostModel(LLAMA, CPU), 4000),
    "launches": run_of(job(4, 4, 50), CostModel(MANY_SMALL, find_profile("h100"), Layout(host_layers=1)), 300),
    "weights on the host": run_of(job(4, 20, 50), CostModel(LLAMA, A10, Layout(host_layers=2)), 300),
    "experts": run_of(job(1, 2, 100), CostModel(SHAPES["experts"], find_profile("a100")), 200),
    "a window": run_of(job(128, 2, 300), CostModel(SHAPES["window"], A10), 80_000),
    "recurrent": run_of(job(16, 2, 300), CostModel(HYBRID, A10), 20_000, 128, 16),
    "replicas": run_of(job(256, 2, 300), CostModel(LLAMA, A10, Layout(data_parallel=2)), 80_000, 128, 128),
    "stages": run_of(job(256, 2, 300), CostModel(LLAMA, A10, Layout(1, 2)), 80_000, 128, 128),
}


@pytest.mark.parametrize("name", TIGHT)
def test_a_tenth_more_would_be_beaten(name: str) -> None:
    """Each term is needed: these schedules come within 10 % of the bound."""
    run = TIGHT[name]
    assert run.bound_s() <= run.makespan_s() * (1 + 1e-9)
    assert 1.1 * run.bound_s() > run.makespan_s()


def test_memory_for_one_row_at_a_time() -> None:
    """Rows have to run one after the other, and take as many steps."""
    cost = CostModel(LLAMA, A10)
    side_by_side, in_turn = run_of(job(8, 400, 100), cost, 8 * 500), run_of(job(8, 400, 100), cost, 510)
    assert in_turn.bound_s() > 3 * side_by_side.bound_s()
    assert in_turn.makespan_s() < 1.25 * in_turn.bound_s()


def test_a_link_makes_room() -> None:
    """As much as it carries, and a fast one more than a slow one."""
    lengths, room = job(300, 1000, 200), [StepRoom(math.inf, 10_000)]
    costs = CostModel(LLAMA, A10), CostModel(LLAMA, find_profile("gh200"))
    slow, fast = (schedule_bound_s(lengths, cost, room) / schedule_bound_s(lengths, cost, room, True) for cost in costs)
    assert 1 < slow < fast


@pytest.mark.parametrize(("card", "rows", "prompt", "output"), [("a10", 4, 1000, 200), ("h100", 1, 2000, 300)])
def test_half_a_link_would_be_beaten(card: str, rows: int, prompt: int, output: int) -> None:
    """Nearly all KV passes over the link in every step, behind about as much computing."""
    profile, shape = find_profile(card), named_shape("llama-3-8b")
    held = rows * (prompt + output) + 100
    run = run_of(job(rows, prompt, output), CostModel(shape, profile), held, chunk_tokens=4096)
    streams = OffloadPlan("stream", streamed_layers=shape.num_layers)
    run = replace(run, settings=replace(run.settings, num_blocks=-(-held // 64), block_tokens=64, offload=streams))
    curve = tuple(
        point.model_copy(update={way: getattr(point, way) / 2 for way in ("h2d", "d2h", "both")})
        for point in profile.link.curve
    )
    slow = profile.model_copy(update={"link": profile.link.model_copy(update={"curve": curve})})
    assert run.bound_s() <= run.makespan_s() < replace(run, cost=CostModel(shape, slow)).bound_s()


def test_shared_prefixes_are_free() -> None:
    """Rows are counted as if each had its own text alone, but for what it attends to."""
    cost, room = CostModel(LLAMA, A10), [StepRoom(512, 20_000)]
    prefixes = SharedPrefixes([np.zeros(0, np.int32), np.zeros(400, np.int32)], np.ones(100, np.int64))
    plain = job(100, 500, 40)
    shared, short = replace(plain, prefixes=prefixes), job(100, 100, 40)
    shared_s, plain_s, short_s = (schedule_bound_s(each, cost, room) for each in (shared, plain, short))
    assert short_s < shared_s < 0.6 * plain_s
    run = replace(run_of(shared, cost, 20_000), settings=EngineSettings(POLICIES["vasuki"], Limits(512, 512), 1250, 16))
    assert shared_s <= run.makespan_s() < plain_s


@pytest.mark.parametrize("backend", ["ragged", "padded", "alone"])
def test_plans_of_any_backend_end_behind_their_bound(backend: Backend) -> None:
    """Where rows run one by one, prompts are computed with their last chunk, in no more steps for being cut."""
    lengths, a10 = job(6, 900, 5), find_profile("a10")
    engine = EngineConfig(chunk_tokens=64, max_num_seqs=1)
    plan = make_plan(lengths, replace(LLAMA, backend=backend), a10, engine=engine)
    simulated = simulate_plan(plan, lengths, replace(LLAMA, backend=backend), a10).plan
    assert simulated.makespan_s == plan.makespan_s
    assert 0 <= simulated.gap < 4
    rooms = plan.any_schedule.rooms(Layout())
    roomiest = max(room.kv_tokens for room in rooms)
    assert len(rooms) > 30 if backend != "alone" else rooms == [(math.inf, roomiest)]


def test_every_step_size_has_a_room() -> None:
    rooms = step_rooms(lambda step_tokens: 5000 - step_tokens)
    assert rooms[0] == (16, 4999)
    assert rooms[-1] == (math.inf, 5000 - 4097)
    assert [room.kv_tokens for room in rooms[1:]] == [5000 - room.step_tokens - 1 for room in rooms[:-1]]
    assert step_rooms(lambda step_tokens: 7) == [(math.inf, 7)]
    assert step_rooms(lambda step_tokens: max(0, 100 - step_tokens))[-1].step_tokens == 112


def test_the_best_step_size_counts() -> None:
    """Neither steps that are too small nor those that leave too little memory."""
    cost, lengths = CostModel(LLAMA, A10), job(200, 300, 50)
    rooms = [StepRoom(64, 9000), StepRoom(512, 6000), StepRoom(math.inf, 400)]
    alone = [schedule_bound_s(lengths, cost, [room]) for room in rooms]
    assert schedule_bound_s(lengths, cost, rooms) == min(alone) == alone[1]


def test_nothing_takes_no_time_and_several_devices_have_no_program() -> None:
    assert schedule_bound_s(job(0, 1, 1), CostModel(LLAMA, A10), [StepRoom(16, 16)]) == 0
    stages = CostModel(LLAMA, A10, Layout(1, 2))
    with pytest.raises(ValueError, match="no linear program"):
        schedule_lp_s(job(1, 1, 1), stages, [StepRoom(16, 16)])


@settings(max_examples=15)
@given(
    gaps_s=st.lists(st.sampled_from([0.0, 0.001, 0.1, 5.0]), min_size=1, max_size=40),
    tokens=st.tuples(st.integers(1, 500), st.integers(1, 60)),
    policy=st.sampled_from(["vasuki", "vllm", "prefill-packing"]),
)
def test_rows_that_arrive_are_not_counted_before_they_do(
    gaps_s: list[float], tokens: tuple[int, int], policy: str
) -> None:
    arrived_at_s, rows = np.cumsum(gaps_s), len(gaps_s)
    lengths = Lengths(np.full(rows, tokens[0]), np.full(rows, tokens[1]), arrived_at_s)
    a10 = find_profile("a10")
    plan = make_plan(lengths, LLAMA, a10, engine=EngineConfig.model_validate({"policy": policy}))
    simulated = simulate_plan(plan, lengths, LLAMA, a10).plan
    assert simulated.makespan_s >= simulated.schedule_bound_s > arrived_at_s[-1]
    assert simulated.gap >= 0
    at_once = make_plan(replace(lengths, arrived_at_s=None), LLAMA, a10)
    assert plan.schedule_bound_s >= at_once.schedule_bound_s


def test_the_bound_of_rows_far_apart_is_what_they_take() -> None:
    lengths = Lengths(np.full(5, 300), np.full(5, 20), np.arange(0.0, 500.0, 100.0))
    plan = make_plan(lengths, LLAMA, find_profile("a10"))
    simulated = simulate_plan(plan, lengths, LLAMA, find_profile("a10")).plan
    assert simulated.schedule_bound_s > 400
    assert simulated.gap < 1e-3
