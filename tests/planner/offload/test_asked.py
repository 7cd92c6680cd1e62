"""What the job asks to move moves, under each policy and in each backend; or the job is refused by that key's name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.base.errors import JobFileError
from vasuki.engine.policy import POLICIES
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.models.shape import Backend, ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import simulate_plan

SMALL = replace(named_shape("llama-3-8b"), num_layers=8)
A10 = find_profile("a10")
ROWS = Lengths(np.full(40, 300), np.full(40, 100))
HOST = 2**30
NEVER = [("park", policy) for policy in ("orca", "orca-best", "orca-worst", "baton", "baton-pd", "vasuki-paper")]
NEVER += [("stream", "vasuki-paper")]
MOVED = [(mode, policy) for mode in ("stream", "park") for policy in POLICIES if (mode, policy) not in NEVER]


@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize(("mode", "policy"), MOVED)
def test_every_policy_moves_what_the_job_asks_it_to(mode: str, policy: str, backend: Backend) -> None:
    shape, engine = replace(SMALL, backend=backend), EngineConfig.model_validate({"policy": policy})
    kv = KVConfig.model_validate({"offload": mode, "host_memory": HOST, "device_memory": 2**26})
    plan = make_plan(ROWS, shape, A10, engine=engine, kv=kv)
    assert (plan.policy, plan.offload.mode) == (policy, mode)
    assert (plan.offload.streamed_layers > 0) == (mode == "stream")
    assert (plan.offload.host_blocks > 0) == (mode == "park")
    assert 0 < plan.host_bytes <= HOST
    all_blocks = len(ROWS) * -(-399 // plan.settings.block_tokens)
    assert plan.offload.host_blocks <= all_blocks  # what is pinned beyond that is pinned in vain
    run = simulate_plan(plan, ROWS, shape, A10)
    assert run.result.written.rows == len(ROWS)
    assert not run.result.written.failed
    if mode == "stream":
        assert run.to_dict()["kv"]["offloaded_bytes"] > 0


@pytest.mark.parametrize(
    ("mode", "policy"), [*NEVER, *(("ahead", name) for name, policy in POLICIES.items() if not policy.ordered)]
)
def test_what_a_policy_cannot_do_is_refused(mode: str, policy: str) -> None:
    kv = KVConfig.model_validate({"offload": mode})
    with pytest.raises(JobFileError, match=rf"kv\.offload: {mode} cannot be done: .*{policy}.*; leave it out"):
        make_plan(ROWS, SMALL, A10, engine=EngineConfig.model_validate({"policy": policy}), kv=kv)


def test_baton_parks_who_makes_room_unless_the_job_says_otherwise() -> None:
    """Its batch grows while prompts fit (section 4.3), and shrinks again by rows that wait on the host."""
    tight = {"device_memory": 2**27, "host_memory": HOST}
    rows = Lengths(np.full(60, 300), np.full(60, 300))
    runs = {}
    for mode in ("auto", "none"):
        plan = make_plan(
            rows,
            SMALL,
            A10,
            engine=EngineConfig(policy="baton-preemptive"),
            kv=KVConfig.model_validate({**tight, "offload": mode}),
        )
        runs[plan.offload.mode] = simulate_plan(plan, rows, SMALL, A10).to_dict()["preemptions"]
    assert runs["park"]["swap"] > 0
    assert runs["park"]["recompute"] == runs["none"]["swap"] == 0 < runs["none"]["recompute"]


@pytest.mark.parametrize(
    "policy", [name for name, policy in POLICIES.items() if not (policy.parks or policy.goes_deep)]
)
def test_nothing_moves_under_other_policies_where_nobody_asks(policy: str) -> None:
    plan = make_plan(ROWS, SMALL, A10, engine=EngineConfig.model_validate({"policy": policy}))
    assert plan.offload.mode == "none"
    none = make_plan(
        ROWS, SMALL, A10, engine=EngineConfig.model_validate({"policy": policy}), kv=KVConfig(offload="none")
    )
    assert none.makespan_s == plan.makespan_s


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_models_whose_buffers_save_nothing_stream_where_asked(layers: int) -> None:
    plan = make_plan(ROWS, replace(SMALL, num_layers=layers), A10, kv=KVConfig(offload="stream"))
    assert 0 < plan.offload.streamed_layers < layers
    assert make_plan(ROWS, replace(SMALL, num_layers=layers), A10).offload.mode == "none"


@pytest.mark.parametrize(
    ("why", "shape"),
    [
        ("the model has one layer", replace(SMALL, num_layers=1)),
        ("rows keep states or caches", replace(SMALL, backend="alone")),
    ],
)
def test_a_model_that_cannot_stream_is_refused(why: str, shape: ModelShape) -> None:
    with pytest.raises(JobFileError, match=f"kv.offload: stream cannot be done: {why}"):
        make_plan(ROWS, shape, A10, kv=KVConfig(offload="stream"))


def test_stages_do_not_stream() -> None:
    layout = Layout(pipeline_parallel=2)
    with pytest.raises(JobFileError, match=r"kv.offload: stream cannot be done: it is not simulated with stages"):
        make_plan(ROWS, SMALL, A10, kv=KVConfig(offload="stream"), layout=layout)


def test_streamed_layers_keep_to_the_host_memory() -> None:
    """Blocks whose homes find no room there are none, though the device has room for more."""
    kv = KVConfig(offload="stream", host_memory=16 * 2**20, device_memory=2**30)
    plan = make_plan(ROWS, SMALL, A10, kv=kv)
    assert plan.offload.mode == "stream"
    assert 0 < plan.host_bytes <= 16 * 2**20
