"""The profile window: traces that tools can read, and every task of every traced step by name, device by device."""

import gzip
import itertools
import json
import os
import signal
from collections import defaultdict

import jax
import pytest

from ppctl import cli
from ppctl.config import MLP, Config, Mesh, Regression, Schedule
from ppctl.schedule import build
from ppctl.training import profiler
from ppctl.training.job import assemble
from ppctl.training.metrics import Metrics

TINY = (
    "data=synthetic data.batch_size=16 data.vocab_size=16 data.num_sequences=512 data.eval_fraction=0.1 "
    "model.d_model=16 model.num_heads=2 model.seq_len=8 run.platform=cpu run.dtype=float32 run.eval_every=null "
    "run.tensorboard=false run.checkpoint.every=null run.num_steps=6 run.profile.start=2 run.profile.num_steps=2"
)


def traced_run(run_dir, *words):
    return cli.main(["train", *TINY.split(), f"run.dir={run_dir}", *words])


def planes(directory):
    """The planes of the only trace below `directory`."""
    [file] = directory.rglob("*.xplane.pb")
    return list(jax.profiler.ProfileData.from_file(str(file)).planes)


def tasks(run_dir):
    """(track names by device, events of each device in order of time) of the run's task trace."""
    trace = json.loads((run_dir / "profile" / profiler.TASKS_FILE).read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    rows = defaultdict(list)
    for event in sorted((event for event in trace if event["ph"] == "X"), key=lambda event: event["ts"]):
        rows[event["tid"]].append(event)
    return names, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "pp", "microbatches", "chunks", "last_forward"),
    [
        # with evaluations and saves in the window
        pytest.param(
            *("gpipe", "mesh=1x1 run.eval_every=1 run.eval_batches=1 run.checkpoint.every=1", 1, 4, 1, True),
            marks=pytest.mark.full,
        ),
        pytest.param("1f1b", "mesh=1x2 executor.remat=full", 2, 4, 1, False, marks=pytest.mark.full),
        pytest.param("interleaved", "mesh=2x2x1", 2, 2, 2, True, marks=pytest.mark.full),
        ("zb_h1", "mesh=1x2 executor.remat=full", 2, 4, 1, False),
    ],
)
def test_each_task_of_each_traced_step_is_one_event(tmp_path, name, words, pp, microbatches, chunks, last_forward):
    stages = pp * chunks
    words = [*words.split(), f"schedule={name}", f"schedule.num_microbatches={microbatches}"]
    assert traced_run(tmp_path, *words, f"model.num_layers={stages}") == 0
    schedule = build(name, pp, microbatches, **({"num_chunks": chunks} if chunks > 1 else {}))
    names, rows = tasks(tmp_path)
    assert len(names) == len(rows) == (2 if "2x2" in words[0] else 1) * pp
    for device, events in rows.items():
        rank = int(names[device].split()[1])
        # with remat=full the last stage's forward runs inside its backward
        expected = [t for t in schedule.ranks[rank] if last_forward or t.kind != "F" or t.stage < stages - 1]
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
    """An evaluation may have operations of the same names: here a second program has all of them."""
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

    shapes = engine.states.staged, engine.placed_batch
    programs = [jax.jit(f).lower(*shapes).compile() for f in (engine.train_step, other)]
    state, batch = engine.new_state(), engine.put(next(job.data.batches()))
    window = profiler.Window(tmp_path, 0, 1)
    with profiler.traced(window), window.step(0):
        for program in programs:
            jax.block_until_ready(program(state, batch))
    path = profiler.write_tasks(tmp_path, programs[0].as_text(), job.pipe.ticks, job.pipe.mesh)
    events = json.loads(path.read_text())["traceEvents"]
    found = [event["name"] for event in events if event["ph"] == "X"]
    assert sorted(found) == sorted(str(task) for tasks in job.pipe.schedule.ranks for task in tasks)


@pytest.mark.full
def test_the_window_holds_its_steps_and_no_other(tmp_path, capsys):
    assert traced_run(tmp_path, "mesh=1x2", "schedule=gpipe", "model.num_layers=2") == 0
    out = capsys.readouterr().out
    assert f"profile   {tmp_path}/profile (xprof, Perfetto); tasks by rank for Perfetto in {tmp_path}/profile/" in out
    modules = defaultdict(set)
    for plane in planes(tmp_path / "profile"):
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_module" in stats:
                    modules[stats["hlo_module"]].add(stats["run_id"])
    assert {name: len(runs) for name, runs in modules.items()} == {"jit_step": 2}
    [perfetto] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    trace = json.loads(gzip.decompress(perfetto.read_bytes()))
    steps = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("train")}
    assert steps == {"train"}


@pytest.mark.full
def test_a_run_interrupted_in_the_window_leaves_a_readable_trace(tmp_path, monkeypatch):
    log = Metrics.log

    def signal_itself(self, record):
        log(self, record)
        if record["step"] == 3:  # the first of the window
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Metrics, "log", signal_itself)
    words = ["mesh=1x2", "schedule=gpipe", "model.num_layers=2", "run.num_steps=50", "run.profile.num_steps=40"]
    assert traced_run(tmp_path, *words) == 143
    events = [event.name for plane in planes(tmp_path / "profile") for line in plane.lines for event in line.events]
    assert "train" in events


def test_an_exception_in_the_window_ends_the_trace(tmp_path):
    window = profiler.Window(tmp_path, 0, 5)

    def interrupted():
        with profiler.traced(window), window.step(0):
            jax.block_until_ready(jax.numpy.ones(3) + 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not window.running
    assert planes(tmp_path)


def test_without_a_window_nothing_is_traced(tmp_path):
    window = profiler.Window(tmp_path / "profile", None, 2)
    with profiler.traced(window), window.step(0):
        assert not window.running
    assert not window.is_due(5)
    assert not (tmp_path / "profile").exists()


def test_tasks_are_not_written_for_a_trace_without_operations(tmp_path):
    assert profiler.write_tasks(tmp_path, "HloModule jit_step, is_scheduled=true\n", None, None) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
