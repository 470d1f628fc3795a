"""Every task of every traced step by name, device by device, from what CPUs, GPUs and TPUs write
into traces.
"""

import itertools
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import jax
import pytest
from support.cuda_plugin import needs_cuda_plugin
from support.selection import full
from support.traced_run import traced_run

from ppctl.cli.compose import compose
from ppctl.config import MLP, Config, Interleaved, Mesh, Regression, Schedule, Spmd
from ppctl.executors.model_shapes import Model
from ppctl.reports.measured_timeline_file import TASKS_FILE
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import Task
from ppctl.training.pipeline.engines import make_engine as make
from ppctl.training.pipeline.job import assemble
from ppctl.training.run.profiler import task_bodies, write_tasks


def tasks(run_dir):
    """(track names by device, events of each device in order of time) of the run's task trace."""
    trace = json.loads((run_dir / "profile" / TASKS_FILE).read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"
    }
    rows = defaultdict(list)
    for event in sorted(
        (event for event in trace if event["ph"] == "X"), key=lambda event: event["ts"]
    ):
        rows[event["tid"]].append(event)
    return names, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "pp", "microbatches", "chunks", "last_forward"),
    [
        # with evaluations and saves in the window
        pytest.param(
            *(
                "gpipe",
                "mesh=1x1 run.eval_every=1 run.eval_batches=1 run.checkpoint.every=1",
                1,
                4,
                1,
                True,
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "1f1b", "mesh=1x2 executor.remat=full", 2, 4, 1, False, marks=pytest.mark.full
        ),
        pytest.param("interleaved", "mesh=2x2x1", 2, 2, 2, True, marks=pytest.mark.full),
        pytest.param(
            "zb_h1", "mesh=1x2 executor.remat=full", 2, 4, 1, False, marks=pytest.mark.full
        ),
        pytest.param(
            "eager_1f1b", "mesh=1x2 schedule.vocab=parallel", 2, 4, 1, True, marks=pytest.mark.full
        ),
        pytest.param(
            "zb_h1", "mesh=1x2 schedule.vocab=parallel", 2, 4, 1, True, marks=pytest.mark.full
        ),
    ],
)
def test_each_task_of_each_traced_step_is_one_event(
    tmp_path, name, words, pp, microbatches, chunks, last_forward
):
    stages = pp * chunks
    words = [*words.split(), f"schedule={name}", f"schedule.num_microbatches={microbatches}"]
    assert traced_run(tmp_path, *words, f"model.num_layers={stages}") == 0
    schedule = build(name, pp, microbatches, **({"num_chunks": chunks} if chunks > 1 else {}))
    names, rows = tasks(tmp_path)
    assert len(names) == len(rows) == (2 if "2x2" in words[0] else 1) * pp
    for device, events in rows.items():
        rank = int(names[device].split()[1])
        # with remat=full the last stage's forward runs inside its backward
        expected = [
            t for t in schedule.ranks[rank] if last_forward or t.kind != "F" or t.stage < stages - 1
        ]
        if "schedule.vocab=parallel" in words:
            expected += [Task(rank, kind, m) for kind in "ETG" for m in range(microbatches)]
        num_tasks = len(expected)
        assert len(events) == 2 * num_tasks, names[device]
        for step in (events[:num_tasks], events[num_tasks:]):
            found = [event["name"] for event in step]
            assert sorted(found) == sorted(map(str, expected)), names[device]
            # the order of ticks; within one, forward and backward are independent
            numbers = [event["args"]["tick"] for event in step]
            assert numbers == sorted(numbers)
            for task in expected:
                if task.kind == "B" and str(task._replace(kind="F")) in found:
                    assert found.index(str(task._replace(kind="F"))) < found.index(str(task))
        for event, after in itertools.pairwise(events):
            assert event["dur"] > 0
            assert event["ts"] + event["dur"] <= after["ts"] + 1e-6, (event, after)
        for event in events:
            args = event["args"]
            assert event["name"] == f"{args['stage']}{args['kind']}{args['microbatch']}"


@pytest.mark.full
def test_operations_of_another_program_are_no_tasks(tmp_path):
    """An evaluation may have operations of the same names: a second program has all of them."""
    config = Config(
        model=MLP(num_layers=2, d_model=8),
        data=Regression(batch_size=8, num_rows=512),
        mesh=Mesh(1, 2),
        schedule=Schedule(num_microbatches=2),
    )
    job = assemble(config)
    engine = job.pipe.engine

    def other(state, batch):
        return engine.train_step(state, batch)

    shapes = engine.states.staged, engine.batches.placed
    programs = [jax.jit(f).lower(*shapes).compile() for f in (engine.train_step, other)]
    state, batch = engine.new_state(), engine.batches.put(next(job.data.batches()))
    with jax.profiler.trace(str(tmp_path)):
        for program in programs:
            jax.block_until_ready(program(state, batch))
    path = write_tasks(tmp_path, programs[0].as_text(), job.pipe.ticks, job.pipe.meshes.storage, 1)
    events = json.loads(path.read_text())["traceEvents"]
    found = [event["name"] for event in events if event["ph"] == "X"]
    assert sorted(found) == sorted(str(task) for tasks in job.pipe.schedule.ranks for task in tasks)


def test_tasks_are_not_written_for_a_trace_without_operations(tmp_path):
    assert write_tasks(tmp_path, "HloModule jit_step, is_scheduled=true\n", None, None, 1) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


NUM_STEPS = 2


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Two traced steps of interleaved ticks whose tasks stand in loops, as they do in programs for
    GPUs.
    """
    config = Config(
        model=MLP(num_layers=8, d_model=8),
        data=Regression(batch_size=8, num_rows=512),
        mesh=Mesh(1, 2),
        schedule=Interleaved(num_microbatches=4, num_chunks=2),
        executor=Spmd(remat="none"),
    )
    directory = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "Model", lambda *of, **how: Model(*of, **how | {"platform": "gpu"}))
        job = assemble(config)
        text = job.pipe.engine.compile(evaluate=False).text
    engine, batches = job.pipe.engine, job.data.batches()
    state = engine.new_state()
    with jax.profiler.trace(str(directory)):
        for _ in range(NUM_STEPS):
            batch = engine.batches.put(next(batches))
            state, _ = jax.block_until_ready(engine.step(state, batch))
    return SimpleNamespace(
        directory=directory, text=text, ticks=job.pipe.ticks, mesh=job.pipe.meshes.storage
    )


def written(directory, traced, num_steps=NUM_STEPS):
    """(device, name, start, duration) of each task found; None where no file is written."""
    path = write_tasks(directory, traced.text, traced.ticks, traced.mesh, num_steps)
    if path is None:
        return None
    events = json.loads(path.read_text())["traceEvents"]
    return sorted(
        (e["tid"], e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X"
    )


def operations(traced):
    """(device, instruction, start, duration in ps) of all that a trace of CPUs holds of the
    program.
    """
    [file] = traced.directory.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == "jit_step" and "device_ordinal" in stats:
                    start_ps, duration_ps = (
                        round(event.start_ns * 1000),
                        round(event.duration_ns * 1000),
                    )
                    yield stats["device_ordinal"], event.name, start_ps, duration_ps


def trace_of(events, device_name, line_name, directory):
    """Write a trace of (device, name of event, start, duration), as the profiler of an accelerator
    does.
    """
    by_device = defaultdict(list)
    for device, *event in events:
        by_device[device].append(event)
    planes = []
    for device, of_device in by_device.items():
        ids = {name: number for number, (name, *_) in enumerate(of_device, 1)}
        kinds = " ".join(
            f"event_metadata {{ key: {n} value {{ id: {n} name: {json.dumps(name)} }} }}"
            for name, n in ids.items()
        )
        rows = " ".join(
            f"events {{ metadata_id: {ids[name]} offset_ps: {start} duration_ps: {duration} }}"
            for name, start, duration in of_device
        )
        planes.append(
            f'planes {{ name: "/device:{device_name}:{device}" lines {{ name: "{line_name}" '
            f"{rows} }} {kinds} }}"
        )
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace("\n".join(planes))
    (directory / "host.xplane.pb").write_bytes(data)


def as_kernels(instruction):
    """The name of a kernel: letters of the instruction's; of a matrix product the library's own."""
    return (
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"
        if "dot" in instruction
        else re.sub(r"\W", "_", instruction)
    )


@pytest.mark.parametrize(
    ("device", "line", "name"),
    [
        full(("GPU", "Stream #13(Compute)", as_kernels)),
        (
            "TPU",
            "XLA Ops",
            lambda instruction: f"%{instruction} = f32[8,8]{{1,0:T(8,128)}} fusion(%p.1)",
        ),
    ],
)
def test_accelerators_trace_the_same_tasks_as_cpus(traced, tmp_path, device, line, name):
    expected = written(traced.directory, traced)
    ranks = traced.ticks.schedule.ranks
    assert [row[:2] for row in expected] == sorted(
        (r, str(t)) for r in range(2) for t in NUM_STEPS * list(ranks[r])
    )
    trace_of([(d, name(i), *times) for d, i, *times in operations(traced)], device, line, tmp_path)
    found = written(tmp_path, traced)
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    for (_, _, start, duration), (_, task, first, whole) in zip(found, expected, strict=True):
        assert first <= start, task
        assert start + duration <= first + whole + 2, task  # rounded


def test_a_trace_that_lacks_operations_has_no_tasks(traced, tmp_path):
    """GPUs drop what their buffers do not hold."""
    events = sorted(
        ((d, as_kernels(i), *times) for d, i, *times in operations(traced)), key=lambda e: e[2]
    )
    trace_of(events[: len(events) // 2], "GPU", "Stream #13(Compute)", tmp_path)
    assert written(tmp_path, traced) is None


@needs_cuda_plugin
def test_a_program_for_gpus_lists_the_operations_of_a_task():
    words = (
        "model.num_layers=4 model.d_model=64 model.num_heads=1 model.seq_len=64 data=synthetic "
        "data.vocab_size=64"
    )
    machine = (
        "run.dtype=bfloat16 plan.compile=true plan.topology=h100:1x2 mesh=1x2 data.batch_size=8"
    )
    job = assemble(compose([*words.split(), *machine.split(), "schedule=1f1b"]))
    text = job.pipe.engine.compile(evaluate=False).text
    for scope, bodies in task_bodies(text).items():
        assert len(bodies) == 1, scope
        assert any("fusion" in name for name in bodies[0].once)
        assert bodies[0].once < bodies[0].all
