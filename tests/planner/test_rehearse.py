"""Ranks run one by one on one device run the dispatched tasks, and the step is simulated from their
times.
"""

import json
import re
import time
from dataclasses import replace
from math import prod

import jax
import pytest
from support.selection import full_except

from ppctl import cli, config
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.plan_tasks import TASKS
from ppctl.executors.work.planned_step import Machine
from ppctl.executors.work.roofline import Link, Speed
from ppctl.planner.cost.predict_step import step_of
from ppctl.planner.cost.step_time import op_times
from ppctl.planner.rehearsal import rehearse_ranks as rehearse
from ppctl.planner.rehearsal.rank_on_device import RankOnDevice, RankTimes, Replicas, time_update
from ppctl.planner.rehearsal.timed_runs import Timing, examples_of_device
from ppctl.training.pipeline.job import assemble


@pytest.fixture(autouse=True)
def one_run(monkeypatch):
    monkeypatch.setattr(rehearse, "RUNS", 1)


SMALL = config.Config(
    model=config.MLP(num_layers=8, d_model=16),
    mesh=config.Mesh(1, 4, 1),
    schedule=config.Schedule("1f1b", 6),
    executor=config.Mpmd(remat="none"),
    data=config.Regression(batch_size=24),
    run=config.Run(dtype="float32"),
)
FREE = Machine(Speed(1e30, 1e30), Link(0.0, 1e30), None, None, 0.0)  # nothing but tasks takes time


def on_one():
    return Replicas(jax.devices()[:1])


def on(machine, job):
    return replace(step_of(job), machine=machine)


REQUESTS = {
    "1f1b": SMALL,
    "the vocabulary on all ranks": replace(
        SMALL,
        model=config.Transformer(num_layers=4, d_model=8, num_heads=2, seq_len=8),
        data=config.Synthetic(batch_size=6, vocab_size=13),
        schedule=config.Schedule("zb_h1", 6, vocab="parallel"),
    ),
    "split, placed in a V": replace(SMALL, schedule=config.Schedule("zb_v", 6)),
    "chunks": replace(
        SMALL,
        schedule=config.Interleaved(num_microbatches=8, num_chunks=2),
        data=config.Regression(batch_size=16),
    ),
    "recomputed": replace(SMALL, executor=config.Mpmd(remat="full")),
    "experts on two devices": replace(
        SMALL,
        model=config.Transformer(
            num_layers=4, d_model=8, num_heads=2, seq_len=8, moe=Experts(4, dispatch="alltoall")
        ),
        data=config.Synthetic(batch_size=12, vocab_size=13),
        mesh=config.Mesh(1, 2, 1, 2),
    ),
    "copies": replace(SMALL, mesh=config.Mesh(1, 2, 2)),
}
ALL_ALIKE = Timing(1.0, 1e-9)  # the speed of one of them


def times(request, forward_s, backward_s, at_once=ALL_ALIKE):
    """Return times of every rank of a request with these seconds of tasks, run separately and at once."""
    job = assemble(request, on_one_device=True)
    stages = range(job.pipe.schedule.num_stages)
    task_s = {
        (s, kind): seconds
        for s in stages
        for kind, seconds in (("F", forward_s), ("B", backward_s))
    }
    ranks = range(job.pipe.schedule.num_ranks)
    number, update = job.pipe.meshes.num_devices, Timing(0.5, 0.25)
    found = RankTimes(Timing(1.0, at_once.cpu_s), at_once, number, update, task_s, 100)
    ran = dict.fromkeys(ranks, found)
    return rehearse.Simulated(job, on(FREE, job), ran, list(ranks))


@pytest.mark.parametrize("name", full_except([*REQUESTS], "1f1b"))
def test_rehearsed_tasks_of_a_rank_are_the_dispatched_ones(name):
    job = assemble(REQUESTS[name], on_one_device=True)
    entries, _ = job.pipe.engine.plans.plan("step")
    for r, (_, prepare, tasks) in enumerate(rehearse.rank_parts(job)):
        wanted = [
            entry
            for entry in entries
            if entry.program and entry.program.kind in TASKS and entry.rank == r
        ]
        assert tasks == wanted
        assert prepare in entries


@pytest.mark.full
@pytest.mark.parametrize("name", full_except([*REQUESTS], "the vocabulary on all ranks"))
def test_every_task_runs_and_their_seconds_add_up_to_the_ranks(name):
    job = assemble(REQUESTS[name], on_one_device=True)
    parts = rehearse.rank_parts(job)
    for part in parts[:1] + parts[-1:]:
        _, _, tasks = part
        found, task_s = RankOnDevice(job, part, examples_of_device(job), on_one()).times(1)
        each = [task_s[entry.task.stage, entry.task.kind] for entry in tasks if entry.task]
        assert sum(each) == pytest.approx(found.wall_s)
        assert min(each) > 0
        assert time_update(job, part, 1, on_one()).wall_s > 0


def test_simulated_devices_run_a_rank_at_once_on_separate_values(monkeypatch):
    job, devices = assemble(SMALL, on_one_device=True), jax.devices()[:2]
    part, on = rehearse.rank_parts(job)[0], Replicas(devices)
    rank = RankOnDevice(job, part, examples_of_device(job), on)
    assert rank.times(1)[0].wall_s > 0
    for value in jax.tree.leaves(rank.values):
        assert value.devices() == {*devices}
        assert {shard.data.shape for shard in value.addressable_shards} == {value.shape}
    program = next(iter(rank.programs.values()))
    assert "all-" not in program.as_text()  # they send nothing
    clock = iter([0.0, 0.0, 1.0, 7.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    assert on.timed(lambda: None, 1).cpu_s == 3.0  # seconds of one of them


def test_cpu_seconds_that_all_ranks_at_work_share_are_more_for_few():
    # a + b / at_once with a = 2, b = 1
    found = RankTimes(Timing(1.0, 3.0), Timing(2.0, 2.25), 4, Timing(0.0, 0.0), {}, 0)
    assert found.cpu_s(1) == pytest.approx(3.0)
    assert found.cpu_s(4) == pytest.approx(2.25)
    assert found.cpu_s(2) == pytest.approx(2.5)
    assert found.cpu_s(8) == pytest.approx(2.125)  # beyond those that ran
    assert replace(found, at_once=found.alone, replicas=1).cpu_s(1) == 3.0


def test_ranks_that_share_cores_are_as_fast_as_measured_together():
    found = RankTimes(Timing(1.0, 1.0), Timing(2.0, 1.0), 4, Timing(0.0, 0.0), {}, 0)
    assert found.capacity == 2.0
    assert replace(found, at_once=Timing(8.0, 1.0)).capacity == 1.0  # one at least


@pytest.mark.parametrize(("fsdp", "share"), [(1, 1), (2, 2)])
def test_a_device_updates_its_share_of_the_state(fsdp, share):
    job = assemble(replace(SMALL, mesh=config.Mesh(1, 2, fsdp)), on_one_device=True)
    shapes = job.pipe.engine.share(0)["params"]
    of_layers = sum(prod(a.shape) for a in jax.tree.leaves(shapes["layers"]))
    per_layer = sum(a.size for a in jax.tree.leaves(job.pipe.model.layer))
    assert of_layers == 4 * per_layer / share


def test_a_step_of_equal_stages_is_the_closed_form():
    found = times(SMALL, 1.0, 2.0)
    assert found.step.pipeline_s == pytest.approx((6 + 4 - 1) * 3.0)
    assert found.step.overhead_s == pytest.approx(0.5)
    assert found.found.bubble_fraction == pytest.approx(3 / 9)
    assert found.timeline.makespan_s == pytest.approx(27.0)


def test_where_a_rank_keeps_all_cores_busy_the_others_wait_for_it():
    assert times(SMALL, 1.0, 2.0, Timing(4.0, 1.0)).step.pipeline_s == pytest.approx(4 * 6 * 3.0)


def test_a_rank_that_is_like_another_takes_its_times_stage_by_stage():
    job = assemble(replace(SMALL, schedule=config.Schedule("zb_v", 6)), on_one_device=True)
    kinds = [kind for kind, _, _ in rehearse.rank_parts(job)]
    assert [kinds.index(kind) for kind in kinds] == [
        0,
        1,
        1,
        1,
    ]  # rank 0 has the embedding and the head
    task_s = {
        (s, kind): 10.0 * s + {"F": 1.0, "I": 2.0, "W": 3.0}[kind]
        for s in (0, 1, 6, 7)
        for kind in ("F", "I", "W")
    }
    whole = Timing(1.0, 1.0)
    ran = dict.fromkeys((0, 1), RankTimes(whole, whole, 4, Timing(0.0, 0.0), task_s, 0))
    costs = rehearse.Simulated(job, on(FREE, job), ran, [0, 1, 1, 1]).costs
    assert costs.forward_s == (1.0, 11.0, 11.0, 11.0, 61.0, 61.0, 61.0, 71.0)
    assert costs.weight_grad_s == (3.0, 13.0, 13.0, 13.0, 63.0, 63.0, 63.0, 73.0)


@pytest.mark.parametrize(
    "executor", [config.Spmd(remat="none"), config.Mpmd(remat="none")], ids=["spmd", "mpmd"]
)
def test_memory_is_the_runs_with_the_temporaries_of_a_task(executor):
    found = times(replace(SMALL, executor=executor), 1.0, 2.0).found
    held = assemble(replace(SMALL, executor=executor)).pipe.memory()
    for of_rank, known in zip(found.ranks, held, strict=True):
        assert of_rank.memory_bytes == {**known, "temporaries": 100}
        assert of_rank.total_bytes == sum(known.values()) - known.get("temporaries", 0) + 100


DIVIDED = replace(
    SMALL,
    model=config.Transformer(num_layers=4, d_model=16, num_heads=2, seq_len=16),
    data=config.Synthetic(batch_size=24, vocab_size=32),
    mesh=config.Mesh(1, 4, 1, tp=2),
)


@pytest.mark.full
def test_sends_of_a_stages_devices_are_counted_besides_one_devices_computation():
    asked = replace(
        DIVIDED, model=replace(DIVIDED.model, num_layers=3), mesh=config.Mesh(1, 3, 1, tp=2, cp=2)
    )
    found = times(asked, 1.0, 2.0, Timing(1.0, 0.25))
    assert found.costs.forward_s[1] == pytest.approx(1.0)
    link = Link(1.0, 1e30)  # a second a message
    slow = replace(found, planned=on(replace(FREE, link=link), found.job))
    along_tp, along_cp = 4, 2  # two gathers and two scatters of a block; its keys and its values
    assert slow.costs.forward_s[1] == pytest.approx(1.0 + along_tp + along_cp)
    layer = op_times(slow.planned).layer
    assert slow.costs.seconds("B", 1, 1) == pytest.approx(
        2.0 + layer.input_grad_s + layer.weight_grad_s
    )
    assert (
        layer.input_grad_s + layer.weight_grad_s > along_tp + along_cp
    )  # and what its forward gathered, again
    stages = [slow.costs.seconds("F", s, 1) + slow.costs.seconds("B", s, 1) - 3.0 for s in range(3)]
    assert slow.found.sent_s == pytest.approx(6 * max(stages))
    assert slow.found.step_cpu_s == pytest.approx(
        4 * 3 * (0.25 + 0.25)
    )  # bytes of all devices of three ranks


@pytest.mark.full
def test_sends_of_vocabulary_parts_are_counted_too():
    """By the tasks of each rank, where all of their seconds are sends."""
    asked = replace(DIVIDED, schedule=replace(DIVIDED.schedule, vocab="parallel"))
    found = times(asked, 0.0, 0.0)
    slow = replace(found, planned=on(replace(FREE, link=Link(1.0, 1e30)), found.job))
    of_ranks = [
        sum(slow.costs.seconds(task.kind, task.stage, 1) for task in tasks)
        for tasks in found.job.pipe.schedule.ranks
    ]
    assert {"S", "T"} & {task.kind for task in found.job.pipe.schedule.ranks[0]}
    assert slow.found.sent_s == pytest.approx(max(of_ranks))


@pytest.mark.full
def test_one_device_of_a_divided_rank_is_rehearsed():
    asked = replace(
        DIVIDED, model=replace(DIVIDED.model, num_layers=2), mesh=config.Mesh(1, 2, 1, tp=2)
    )
    job = assemble(asked, on_one_device=True)
    part = rehearse.rank_parts(job)[1]
    found, task_s = RankOnDevice(job, part, examples_of_device(job), on_one()).times(1)
    assert sum(6 * seconds for seconds in task_s.values()) == pytest.approx(found.wall_s)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "executor", [config.Spmd(remat="layer"), config.Mpmd(remat="full")], ids=["spmd", "mpmd"]
)
def test_one_device_of_each_rank_represents_its_devices_along_tp_and_cp(executor):
    asked = replace(DIVIDED, mesh=config.Mesh(1, 2, 1, tp=2, cp=2), executor=executor)
    found, _ = rehearse.rehearse(asked)
    assert all(each.tasks_s > 0 for each in found.ranks)
    held = assemble(asked, on_one_device=True).pipe.memory()
    assert [each.memory_bytes["parameters"] for each in found.ranks] == [
        each["parameters"] for each in held
    ]


@pytest.mark.full
def test_the_command_prints_writes_and_runs_equal_ranks_once(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = [
        "model=mlp",
        "model.num_layers=4",
        "model.d_model=16",
        "data=regression",
        "data.batch_size=16",
    ]
    words += ["mesh=1x4", "schedule=1f1b", "schedule.num_microbatches=4"]
    assert cli.main(["rehearse", *words, f"plan.html={page}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["ran_as"] for each in found["ranks"]] == [0, 1, 1, 3]
    assert found["step_time_s"] > found["per_step_overhead_s"] > 0
    assert 0 <= found["bubble_fraction"] < 1
    assert found["mfu_fraction"] is None  # a CPU has no peak
    assert found["analytic_step_time_s"] > 0
    text = page.read_text()
    assert "Rehearsal: mlp of 4 layers, mesh 1x4, 1f1b" in text
    assert not re.search(r"(src|href)=", text)  # it loads nothing
    assert cli.main(["rehearse", *words, "executor=mpmd"]) == 0
    assert "3 of 4 ranks on one cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"executor": config.Reference(), "mesh": config.Mesh()},
            "executor=reference has no ranks. Use executor=spmd",
        ),
        (
            {"executor": config.Mpmd(fuse="fb")},
            "it times single tasks, but executor.fuse=fb runs two as one program",
        ),
        (
            {"run": config.Run(distributed="env", num_processes=2)},
            "run.distributed=env joins several processes",
        ),
    ],
)
def test_impossible_rehearsals_are_refused_before_the_model_is_built(changes, message, monkeypatch):
    monkeypatch.setattr(rehearse, "assemble", lambda *args, **more: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        rehearse.rehearse(replace(SMALL, **changes))


def test_a_rank_that_the_device_cannot_hold_is_named(monkeypatch):
    def full(*args):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore"
        )

    monkeypatch.setattr(rehearse, "RankOnDevice", full)
    with pytest.raises(
        ConfigError,
        match=r"Rank 0 does not fit this cpu: Out of memory .* 99 bytes\. Use more ranks",
    ):
        rehearse.rehearse(SMALL)
