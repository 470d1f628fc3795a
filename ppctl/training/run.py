"""`ppctl train`: from a request to a run, and all that a run leaves behind. Read `_train` first: it is the whole story.

A run directory holds config.yaml, status.jsonl, metrics.jsonl, eval.jsonl, tensorboard/, profile/ and
checkpoints/<step>/.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from ppctl.config import Config, Transformer
from ppctl.errors import ConfigError
from ppctl.executors import placement
from ppctl.executors.mesh import hosts_text
from ppctl.executors.xla_flags import text_of
from ppctl.launch import distributed
from ppctl.launch.supervise import STOP_SIGNALS, handling
from ppctl.reports.charts.drawing import drawing_of_timeline
from ppctl.reports.run_files import MEMORY_FILE, SCHEDULE_FILE, check_run_dir
from ppctl.reports.run_status import (
    CHANGED,
    DIRECTORY,
    FINISHED,
    INTERRUPTED,
    OVERRIDES,
    HeldError,
    NoRunStatus,
    RunStatus,
    held_by,
)
from ppctl.reports.terminal import OutputConsole, replace_file
from ppctl.schedule.simulate import peak_activations, simulate
from ppctl.schedule.text import to_csv
from ppctl.schedule.timeline import timeline_at
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checks import check_job
from ppctl.training.compilation_cache import counted_programs, keep_compiled
from ppctl.training.engines import Footprint
from ppctl.training.environment import environment
from ppctl.training.heartbeat import Heartbeat
from ppctl.training.job import DEFAULT_DTYPE, TrainingJob, assemble, partition_text
from ppctl.training.kept_tokenizer import changed_tokenizer, keep_tokenizer
from ppctl.training.loop import Loop, writing
from ppctl.training.metrics import Metrics, NoMetrics
from ppctl.training.models import attention_kernels
from ppctl.training.prediction import StepPrediction
from ppctl.training.process_group import compare, process_group
from ppctl.training.resume import Resumed, resume
from ppctl.training.start import start_jax
from ppctl.training.start_from import state_from
from ppctl.training.step_clock import StepClock
from ppctl.training.tensorboard import TensorBoardLog
from ppctl.training.trackers import check_trackers

Tree = Any
Predict = Callable[[TrainingJob], StepPrediction]  # of a step, before anything is compiled
LOCKSTEP_NOTICE = 1.05  # say so when lockstep ticks stretch the schedule by more than this


def train(config: Config, overrides: Sequence[str], *, predict: Predict, as_json: bool) -> int:
    """Train a config, and return the exit code: 0 trained to run.num_steps, 130 or 143 interrupted after saving.

    overrides: those that the run was started with, as typed. predict: step time and memory before anything is compiled.

    Raises PpctlError for requests that cannot be served, NonFiniteError when the loss or a gradient is not finite.
    """
    check_run_dir(Path(config.run.dir))
    check_trackers(config.run.other_trackers)
    other = held_by(Path(config.run.dir))
    if other is not None:  # it would lose the save that it is writing
        raise _held(config, other)
    start_jax(config, config.run.dtype or DEFAULT_DTYPE)
    note = keep_compiled(config)
    with process_group(config) as heartbeat:
        return _train(config, overrides, heartbeat, predict, note, as_json=as_json)


def _train(
    config: Config, overrides: Sequence[str], heartbeat: Heartbeat, predict: Predict, note: str | None, *, as_json: bool
) -> int:
    is_lead, run_dir = distributed.is_lead(), Path(config.run.dir)
    console = OutputConsole(stderr=as_json, quiet=not is_lead)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    job = assemble(config)
    for each in filter(None, (note, *check_job(job))):
        say(f"note      {each}")
    with _status(config) as status, _checkpoints(config) as checkpoints:
        start, restored, _ = resumed = resume(config, job, checkpoints, say)
        if start == 0:
            restored = state_from(config, job)
        elif (differs := changed_tokenizer(config)) is not None:
            say(f"note      {differs}; of this text it makes the same tokens, and is kept from now on")
        if start == config.run.num_steps:
            say(f"{run_dir} has finished all run.num_steps={start} steps. Use a larger run.num_steps to go on.")
            if as_json and is_lead:
                print(json.dumps({"status": FINISHED, "run_dir": config.run.dir, "step": start}))
            return 0
        prediction = predict(job)
        for line in (*describe(job, start), *resumed.lines(), prediction.line()):
            say(line)
        where = environment(job.pipe.mesh) | {"xla_flags": text_of(job.pipe.execution.xla_flags)}
        _record_start(job, status, resumed, overrides, where)
        with counted_programs() as programs:
            footprint, compile_time_s = compile_steps(job, console)
        say(f"compiled in {compile_time_s:.1f} s{_kept_text(programs)}")
        _write_memory(run_dir, job, start)
        heartbeat.note("start", start)
        compare({})  # waits for all: Gloo gives up on a process that compiles half a minute longer than the others
        state = job.pipe.init() if restored is None else job.pipe.from_natural(restored)
        del restored, resumed
        placed = _show_placement(job, state, console) if config.run.show_placement else {}
        with _metrics(config, start, console) as metrics, StepClock() as clock:
            show_start(metrics.tensorboard, job, overrides, where, footprint, prediction)
            for tracker in metrics.trackers:
                tracker.begin(run_dir, config.run.name, asdict(config))
            loop = Loop(job, footprint, compile_time_s, checkpoints, metrics, heartbeat, prediction, clock)
            with _stop_requests(console) as stop_requested:
                exit_code = loop.run(state, start, stop_requested)
            for tracker in metrics.trackers:
                tracker.is_finished = exit_code == 0
            if metrics.tensorboard is not None:
                metrics.tensorboard.step_times(loop.step_times_s, loop.last["step"])
        with writing(run_dir):
            status.end(**_ending(exit_code, loop.last["step"]))
    summary = loop.summary(exit_code)
    if loop.step_times_s:
        say(prediction.compared(loop.step_times_s, max(footprint.total_bytes)))
    left = "checkpoints, metrics and logs" if config.run.checkpoint.enabled else "metrics and logs"
    say(f"{summary['status']} at step {summary['step']}; {left} are in {run_dir}")
    if as_json and is_lead:
        print(json.dumps(summary | placed))
    return exit_code


def _checkpoints(config: Config) -> Checkpoints:
    keep, timeout_s = config.run.checkpoint.keep, config.run.checkpoint.timeout_s
    directory = Path(config.run.dir) / "checkpoints"
    return Checkpoints(directory, keep=keep, timeout_s=timeout_s, gather=distributed.gather)


def _status(config: Config) -> RunStatus:
    """Return the record of this start of the run, which holds the run directory; the lead process alone has one."""
    if not distributed.is_lead():
        return NoRunStatus()
    try:
        with writing(Path(config.run.dir)):
            return RunStatus(Path(config.run.dir))
    except HeldError as error:
        raise _held(config, error.pid) from None


def _held(config: Config, pid: int | None) -> ConfigError:
    who = "another process" if pid is None else f"process {pid}"
    how = (
        ". The lock of a machine that was lost ends after minutes" if pid is None else f": kill -INT {pid}, which saves"
    )
    return ConfigError(
        f"run.dir={config.run.dir} is written by {who} now. Use another run.name, or end that run first{how}."
    )


def _record_start(
    job: TrainingJob, status: RunStatus, start: Resumed, overrides: Sequence[str], where: Mapping[str, Any]
) -> None:
    """Write the settings of this start of the run, and that it has started; the lead process alone does."""
    config = job.config
    if distributed.is_lead():
        run_dir = Path(config.run.dir)
        with writing(run_dir):
            (run_dir / "config.yaml").write_text(as_yaml(config))
            if job.choice is not None:
                (run_dir / SCHEDULE_FILE).write_text(to_csv(job.pipe.schedule.ranks))
            keep_tokenizer(config)
            changed = {CHANGED: start.records()} if start.changed else {}
            status.begin(start.step, **{**where, DIRECTORY: os.getcwd(), OVERRIDES: [*overrides]}, **changed)


def as_yaml(config: Config) -> str:
    """Return all settings of a config as YAML."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _write_memory(run_dir: Path, job: TrainingJob, start: int) -> None:
    """Write the memory breakdown of the compiled step; the lead process alone does."""
    if distributed.is_lead():
        with writing(run_dir):
            memory = {"step": start, "ranks": job.pipe.memory()}
            replace_file(run_dir / MEMORY_FILE, json.dumps(memory) + "\n")


def _show_placement(job: TrainingJob, state: Tree, console: Console) -> dict[str, Any]:
    """Print which device holds which parameters, and return the same as plain JSON."""
    placed = placement.placement(job.pipe.engine.parameters(state), job.pipe.layout, distributed.gather)
    placement.print_placement(console, placed)
    return {"placement": asdict(placed)}


def show_start(
    log: TensorBoardLog | None,
    job: TrainingJob,
    overrides: Sequence[str],
    where: Mapping[str, Any],
    footprint: Footprint,
    prediction: StepPrediction,
) -> None:
    """Show in TensorBoard, if it is written, a start before its first step: request, place, schedule and memory."""
    if log is None:
        return
    log.request(overrides, as_yaml(job.config), where)
    log.memory(footprint.total_bytes, prediction.memory_bytes)
    pipe = job.pipe
    if pipe.execution.is_pipelined:
        schedule, costs = pipe.schedule, pipe.task_costs
        draw = lambda: [drawing_of_timeline(f"{schedule.name}, ideal", timeline_at(schedule, pipe.ticks, costs))]  # noqa: E731
        log.gantt("schedule/ideal", schedule, draw, log.first_step)


def _ending(exit_code: int, step: int) -> dict[str, Any]:
    """Return the record of a run that ended in order.

    >>> _ending(130, 7)
    {'status': 'interrupted', 'step': 7, 'reason': 'SIGINT'}
    """
    if exit_code == 0:
        return {"status": FINISHED, "step": step}
    return {"status": INTERRUPTED, "step": step, "reason": signal.Signals(exit_code - 128).name}


def _metrics(config: Config, start: int, console: Console) -> Metrics:
    run = config.run
    if not distributed.is_lead():
        return NoMetrics()
    return Metrics(
        run.dir,
        num_steps=run.num_steps,
        start_step=start,
        log_every=run.log_every,
        tensorboard=run.writes_tensorboard,
        trackers=run.other_trackers,
        console=console,
    )


def describe(job: TrainingJob, start: int) -> Iterator[str]:
    """Yield the lines that describe a run before it starts."""
    config, pipe = job.config, job.pipe
    schedule, ticks = pipe.schedule, pipe.ticks
    device = pipe.mesh.devices.flat[0]
    model, mesh = config.model, config.mesh
    kernels: tuple[str, ...] = ("xla",)
    if isinstance(model, Transformer):
        kernels = attention_kernels(config, pipe.dtype, device, job.data)
    attention = "" if kernels == ("xla",) else f", attention by {' and '.join(kernels)}"
    trained = "" if pipe.num_trained == pipe.num_parameters else f" ({pipe.num_trained:,} trained)"
    yield (
        f"model     {model.name}, {model.num_layers} layers, {pipe.num_parameters:,} parameters{trained}, "
        f"{pipe.dtype} compute{attention}"
    )
    yield f"data      {job.data.source}"
    over = hosts_text(pipe.mesh)
    yield (
        f"mesh      {mesh.axes_text} on {pipe.mesh.size} x {device.device_kind}{'' if over is None else f', {over}'}"
    )
    if not pipe.execution.is_pipelined:
        yield f"executor  reference (no pipeline), {schedule.num_microbatches} microbatches"
    else:
        many_ticks = "" if ticks is None else f"{ticks.num_ticks} ticks, "
        yield (
            f"schedule  {schedule.name}, {schedule.num_microbatches} microbatches, {schedule.num_chunks} "
            f"chunk{'s' if schedule.num_chunks > 1 else ''} a rank, {many_ticks}"
            f"at most {max(peak_activations(schedule)):g} live activations"
        )
    if job.choice is not None:
        yield f"auto      {job.choice.summary}"
    if pipe.execution.xla_flags:
        yield f"xla       {text_of(pipe.execution.xla_flags)}"
    if pipe.execution.dispatches_tasks:
        barrier = ", no barrier before the optimizer" if pipe.execution.post_validation else ""
        yield f"executor  mpmd: a program for each stage and kind of task, dispatched by the host{barrier}"
    if ticks is not None:
        costs = pipe.task_costs
        stretch = ticks.makespan_s(costs) / simulate(schedule, costs).makespan_s
        if stretch > LOCKSTEP_NOTICE:
            yield (
                f"note      {schedule.name} takes {stretch:.2f} times as long in the lockstep ticks of executor=spmd "
                "as on free-running ranks; schedule=eager_1f1b and interleaved take 1.00 times, with more activations"
            )
    text = partition_text(job)
    if text is not None:
        yield f"partition {text}"
    yield f"run       {config.run.dir}, " + (f"resuming after step {start}" if start else "from the start")


def compile_steps(job: TrainingJob, console: Console) -> tuple[Footprint, float]:
    """Compile the step, and return (its footprint, seconds of compiling); the console shows that it goes on."""
    began = time.perf_counter()
    with _alive(console, "compiling"):
        footprint = job.pipe.engine.compile(evaluate=job.config.run.eval_every is not None)
    return footprint, time.perf_counter() - began


def _kept_text(programs: Mapping[str, int]) -> str:
    """Return how many programs were not compiled, to follow the seconds; "" for none.

    >>> _kept_text({"kept": 3, "compiled": 1})
    ', 3 of 4 programs kept from an earlier start'
    """
    kept = programs["kept"]
    return f", {kept} of {kept + programs['compiled']} programs kept from an earlier start" if kept else ""


@contextmanager
def _alive(console: Console, what: str, every_s: float = 15.0) -> Iterator[None]:
    """Show a spinner on a terminal, elsewhere a line now and then, while the body runs."""
    if console.is_interactive:
        with console.status(f"{what} ..."):
            yield
        return
    console.print(f"{what} ...", markup=False, highlight=False)
    began, done = time.perf_counter(), threading.Event()

    def beat() -> None:
        while not done.wait(every_s):
            console.print(f"{what} ... {time.perf_counter() - began:.0f} s", markup=False, highlight=False)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _stop_requests(console: OutputConsole) -> Iterator[Callable[[int], int | None]]:
    """Yield a function of the finished step that returns the signal that requests the run to end, or None.

    The second signal of a kind ends the process at once. In a run of several processes JAX hears SIGTERM and brings all
    to the same step; SIGINT takes that road too, and SIGPIPE, which says that the reader of the output has gone.
    """
    received: list[int] = []
    is_joined = distributed.is_joined()

    def handle(number: int, _frame: Any) -> None:
        received.append(number)
        if number != signal.SIGPIPE:
            signal.signal(number, signal.SIG_DFL)  # Python's own handler would still wait for the step and the save
        console.show_cursor()  # a progress bar hides it
        if is_joined:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_requested(finished: int) -> int | None:
        if is_joined:
            return signal.SIGTERM if distributed.stop_requested(finished) else None
        return received[0] if received else None

    numbers = (signal.SIGINT,) if is_joined else STOP_SIGNALS
    console.when_reader_gone = lambda: handle(signal.SIGPIPE, None)
    try:
        with handling(numbers, handle):
            yield stop_requested
    finally:
        console.when_reader_gone = None
