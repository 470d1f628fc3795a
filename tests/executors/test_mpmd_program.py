"""The mpmd executor's order, collectives, kept arrays and number of compilations."""

import re
import weakref
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest
from support.mpmd_cases import MpmdCase, make_engine
from support.selection import full

from ppctl.executors import compiler_options
from ppctl.executors.mpmd.dispatch_plan import last_uses
from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.placement_costs import peak_activations
from ppctl.schedule.simulator import simulate

COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
TASKS = ("E", "F", "B", "I", "W")


def case_of(schedule, **changes):
    return MpmdCase(
        schedule,
        **({"mesh": (1, 4, 1), "model": "mlp", "num_layers": 9, "remat": "layer"} | changes),
    )


def ops_of(case, what="step"):
    engine, _ = make_engine(case)
    return engine, engine.plans.plan(what)[0]


@pytest.mark.parametrize("schedule", FAMILIES)
def test_every_rank_gets_its_tasks_in_program_order_and_the_host_dispatches_readers_after_writers(
    schedule,
):
    engine, ops = ops_of(case_of(schedule))
    program = case_of(schedule).program()
    for rank, tasks in enumerate(program.ranks):
        assert [op.task for op in ops if op.program and op.rank == rank and op.task] == list(tasks)
    written = set(engine.given_shapes)
    for op in ops:
        assert set(op.reads) <= written, op
        written |= set(op.writes)
    assert sum(op.program is None and op.task is not None for op in ops) == sum(
        2 * program.num_microbatches for a, b in pairwise(program.rank_of) if a != b
    )


@pytest.mark.parametrize("schedule", FAMILIES)
def test_a_receiver_starts_ready_tasks_before_it_waits_for_a_move(schedule):
    case = case_of(schedule)
    _, ops = ops_of(case)
    times = simulate(case.program(), task_costs(case.remat))
    begins = [op.program and op.task and times.start_s[op.task] for op in ops]
    for i, move in enumerate(ops):
        if move.program is None and move.task is not None:
            later = [
                s
                for s, op in zip(begins[i:], ops[i:], strict=True)
                if op.rank == move.rank and s is not None
            ]
            assert all(start_s >= times.end_s[move.task] for start_s in later), move


def test_with_remat_full_the_last_forward_is_left_to_its_backward():
    _, ops = ops_of(case_of("1f1b", remat="full"))
    kinds = {op.task.kind for op in ops if op.task and op.task.stage == 3}
    assert kinds == {"B"}
    assert not any(key[0] == "stash" for op in ops for key in op.writes)


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved", "zb_v"])
def test_buffers_are_freed_after_their_last_use(schedule):
    engine, ops = ops_of(case_of(schedule))
    kept = engine.plans.plan("step")[1]
    freed = last_uses(ops, {*kept, *engine.given_shapes})
    live = set()
    for op, drop in zip(ops, freed, strict=True):
        live = (live | set(op.writes)) - set(drop)
    assert live <= {*kept, *engine.given_shapes}


@pytest.mark.parametrize(
    "schedule", ["1f1b", full("zb_h1"), full("gpipe"), full("interleaved"), full("zb_v")]
)
def test_the_peak_of_live_buffers_is_the_simulated_one(schedule):
    case = case_of(schedule)
    engine, batch = make_engine(case)
    walk = engine.walk("step")
    held = defaultdict(
        lambda: defaultdict(list)
    )  # rank -> (stage, microbatch) -> buffers of its stash or pending
    peak = [0] * 4

    def watched(op, call):
        def run(*values):
            written = call(*values)
            del values
            for key, value in zip(op.writes, written, strict=True):
                if key[0] in ("stash", "pending"):
                    held[op.rank][key[1:]] += [weakref.ref(leaf) for leaf in jax.tree.leaves(value)]
            if op.task is not None and op.task.kind == "F" and op.program is not None:
                alive = lambda refs: any(
                    ref() is not None and not ref().is_deleted() for ref in refs
                )
                peak[op.rank] = max(peak[op.rank], sum(map(alive, held[op.rank].values())))
            return written

        return run

    steps = tuple(
        (watched(op, call), *rest)
        for op, (call, *rest) in zip(walk.entries, walk.steps, strict=True)
    )
    engine.walks["step"] = replace(walk, steps=steps)
    jax.block_until_ready(engine.step(engine.new_state(), engine.batches.put(batch)))
    schedule = case.program()
    assert peak == [count * schedule.num_chunks for count in peak_activations(schedule)]


def test_tasks_have_no_collectives_and_complete_gradients_are_reduced_once():
    engine, _ = make_engine(case_of("zb_h1", mesh=(2, 2, 2), num_layers=3))
    engine.compile(evaluate=True)
    found = defaultdict(set)
    for (program, _), compiled in engine.compiled.compiled.items():
        found[program.kind] |= {match[1] for match in COLLECTIVES.finditer(compiled.as_text())}
    assert {kind: found[kind] for kind in TASKS} == {kind: set() for kind in TASKS}
    assert found["prepare"] == {"all-gather"}
    assert found["finish"] >= {"all-reduce"}
    assert found["reduce"] >= {"reduce-scatter"}
    ops = [op for op in engine.plans.plan("step")[0] if op.program]
    assert [op.rank for op in ops if op.program.kind == "finish"] == [0, 1]
    for stage in (0, 1):
        of_rank = [op for op in ops if op.rank == stage]
        (reduced,) = (i for i, op in enumerate(of_rank) if op.program.kind == "reduce")
        assert ("acc", stage) in of_rank[reduced - 1].writes
        assert not any(("acc", stage) in op.writes for op in of_rank[reduced:])


def test_equal_stages_share_a_program_and_a_second_step_compiles_nothing():
    engine, batch = make_engine(case_of("1f1b", num_layers=8))
    engine.compile(evaluate=False)
    lowered = [program.kind for program in engine.compiled.lowered]
    assert lowered.count("F") == lowered.count("B") == 3  # first, last, and one for both in between
    state, placed = engine.new_state(), engine.batches.put(batch)
    before = dict(engine.compiled.compiled)
    for _ in range(2):
        state, _ = engine.step(state, placed)
    assert engine.compiled.compiled == before


def test_temporary_memory_of_1f1b_does_not_grow_with_the_number_of_microbatches():
    def temp_bytes(schedule, num_microbatches):
        case = case_of(schedule, mesh=(1, 2, 1), num_layers=2, num_microbatches=num_microbatches)
        engine, _ = make_engine(replace(case, batch_size=4 * num_microbatches))
        return engine.compile(evaluate=False).temp_bytes

    assert temp_bytes("1f1b", 16) == temp_bytes("1f1b", 4)
    assert temp_bytes("gpipe", 16) > 1.5 * temp_bytes("gpipe", 4)


def test_parameters_and_optimizer_state_live_on_their_rank_only():
    engine, _ = make_engine(MpmdCase("1f1b", (1, 4, 1), model="tied swiglu", num_layers=4))
    state = engine.new_state()
    devices = jax.devices()
    for rank, tree in enumerate(state):
        assert {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()} == {
            devices[rank]
        }
    embed_head = [
        sorted(
            path[0].key
            for path, _ in jax.tree_util.tree_leaves_with_path(t["params"]["embed_head"])
        )
        for t in state
    ]
    assert embed_head == [["embedding"], [], [], ["embedding", "norm"]]
    copies = [np.asarray(state[rank]["params"]["embed_head"]["embedding"]) for rank in (0, 3)]
    np.testing.assert_array_equal(*copies)


def test_ranks_of_several_devices_limit_their_programs_under_way():
    """A turn is a result of each program; XLA starts those of one device in the host's thread."""
    runtime = make_engine(case_of("1f1b", mesh=(2, 2, 1)))[0].runtime
    assert [each.is_limited for each in runtime.under_way] == [True, True]
    runtime.pass_turn(1, turn := np.int32(1))
    assert list(runtime.under_way[1].results) == [turn]
    alone = make_engine(case_of("1f1b", mesh=(1, 2, 1)))[0].runtime
    assert [each.is_limited for each in alone.under_way] == [False, False]


def test_an_option_that_this_compiler_does_not_have_is_left_out(monkeypatch):
    assert not compiler_options._is_known("xla_cpu_no_such_option", False)
    assert compiler_options._is_known("xla_llvm_disable_expensive_passes", False)
    options = {"xla_cpu_no_such_option": False, "xla_backend_optimization_level": 0}
    monkeypatch.setitem(compiler_options.CPU_OPTIONS, "once", options)
    monkeypatch.setattr(compiler_options, "EMITTERS", "xla_cpu_no_such_option")
    assert compiler_options.cpu_options("once") == {"xla_backend_optimization_level": 0}
