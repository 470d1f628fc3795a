"""`ppctl train`: run a config and write its files. Read `_train` first.

A run directory holds config.yaml, status.jsonl, metrics.jsonl, eval.jsonl, tensorboard/, profile/
and checkpoints/<step>/.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from ppctl.config import Config, Run
from ppctl.errors import ConfigError
from ppctl.executors.compiler_options import text_of
from ppctl.launch import join_processes as distributed
from ppctl.launch.supervisor import STOP_SIGNALS, handling
from ppctl.reports import run_status
from ppctl.reports.foreign_files import check_inside, check_place
from ppctl.reports.run_files import MEMORY_FILE, SCHEDULE_FILE, WRITTEN
from ppctl.reports.run_status import FINISHED, INTERRUPTED, STOP_FILE, STOPPED, HeldError, RunStatus
from ppctl.reports.terminal_output import OutputConsole, replace_file, show_json, show_lines
from ppctl.schedule.schedule_text import to_csv
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import check_names
from ppctl.training.pipeline.engines.step_programs import Footprint
from ppctl.training.pipeline.jax_start import keep_compiled, start_jax
from ppctl.training.pipeline.job import DEFAULT_DTYPE, TrainingJob, assemble, state_bytes
from ppctl.training.pipeline.job_checks import check_job
from ppctl.training.run.events import Events
from ppctl.training.run.heartbeat import Heartbeat
from ppctl.training.run.kept_tokenizer import changed_tokenizer, keep_source
from ppctl.training.run.loop import STOP, Loop, StopRequested
from ppctl.training.run.metrics import Metrics
from ppctl.training.run.process_group import compare, process_group
from ppctl.training.run.resume import Resumed, resume, state_from
from ppctl.training.run.run_environment import check_disk, environment, writing
from ppctl.training.run.run_lines import StepPrediction, describe
from ppctl.training.run.step_clock import StepClock
from ppctl.training.run.step_records import StepRecords
from ppctl.training.run.trackers import check_trackers

Predict = Callable[[TrainingJob], StepPrediction]  # predicts a step; called before compiling
Say = Callable[..., None]  # prints lines


def train(config: Config, overrides: Sequence[str], *, predict: Predict, as_json: bool) -> int:
    """Train a config and return the exit code: 0 finished, 128 + signal number if interrupted.

    overrides: words of the command line, for the record. as_json: print one JSON document to
    standard output, and lines to standard error. PpctlError if the request is impossible,
    NonFiniteError if a loss, gradient or update is not finite.
    """
    run_dir = Path(config.run.dir)
    check_place(run_dir, "run.dir")
    check_inside(run_dir, WRITTEN, "run.dir")
    check_trackers(config.run.trackers)
    writer = run_status.held_by(run_dir)
    if writer is not None:  # a second process would remove the unfinished save of the first
        raise _held(run_dir, writer)
    start_jax(config.run, config.run.dtype or DEFAULT_DTYPE, config.mesh.num_devices)
    note = keep_compiled(config.run.compilation_cache)
    with process_group(config.run, config.mesh, asdict(config)) as heartbeat:
        console = OutputConsole(stderr=as_json, quiet=not distributed.is_lead())
        job = assemble(config)
        if config.run.checkpoint.enabled:
            check_names(job.pipe.states.natural)
        for each in filter(None, (note, *check_job(job))):
            show_lines(console, f"note      {each}")
        return _train(job, overrides, heartbeat, predict, console, as_json=as_json)


def _train(
    job: TrainingJob,
    overrides: Sequence[str],
    heartbeat: Heartbeat,
    predict: Predict,
    console: OutputConsole,
    *,
    as_json: bool,
) -> int:
    is_lead, run, say = distributed.is_lead(), job.config.run, partial(show_lines, console)
    run_dir = Path(run.dir)
    with (
        Events(run.on_event if is_lead else None, run_dir, say) as events,
        _status(run_dir) as status,
        _checkpoints(run, events) as checkpoints,
    ):
        heartbeat.tell = lambda event, reason: events.tell(event, reason=reason)
        # 1. find where to start
        start, restored, _ = resumed = resume(job, checkpoints, say)
        if start == 0:
            restored = state_from(job)
        _note_tokenizer(job, start, say)
        if start == run.num_steps:
            steps = f"run.num_steps={start} steps"
            say(f"{run_dir} has finished all {steps}. Use a larger run.num_steps to go on.")
            if as_json and is_lead:
                show_json({"status": FINISHED, "run_dir": run.dir, "step": start})
            return 0
        if run.checkpoint.on_failure == "stop":
            check_disk(run, state_bytes(job))
        # 2. describe and record the start
        prediction = predict(job)
        notes = status.notes if status else ()
        say(*describe(job, start, resumed.changed), prediction.line(), *notes)
        if status is not None:
            _record_start(job, status, resumed, overrides)
        events.tell("started", step=start, num_steps=run.num_steps)
        # 3. compile, and place the state
        compiled = _compiled(job, say, start)
        heartbeat.note("start", start)
        compare({})  # waits for all: Gloo gives up after half a minute
        engine = job.pipe.engine
        state = engine.new_state() if restored is None else engine.from_natural(restored)
        del restored, resumed
        # 4. train
        with _metrics(job, start, console) as metrics, StepClock() as clock:
            records = StepRecords(job, checkpoints, metrics, events, prediction, *compiled)
            loop = Loop(job, records, checkpoints, heartbeat, clock)
            with _stop_requests(console, run_dir / STOP_FILE) as stop_requested:
                stopped_by = loop.run(state, start, stop_requested)
            metrics.is_finished = stopped_by is None
        ending, facts = _ending(stopped_by, records.last["step"])
        if status is not None:
            with writing(run_dir):
                status.end(status=ending, **facts)
                (run_dir / STOP_FILE).unlink(missing_ok=True)
        events.tell(ending, **facts)
    # 5. sum up
    _sum_up(records, ending, say, as_json=as_json and is_lead)
    return 128 + stopped_by if stopped_by else 0


def _note_tokenizer(job: TrainingJob, start: int, say: Say) -> None:
    """Print a line if the tokenizer differs from that of run.start_from, or of an earlier start."""
    run, data = job.config.run, job.config.data
    directory, what = run.start_from, "token ids may mean other texts than in run.start_from"
    if start:
        directory, what = run.dir, "it makes the same tokens of this text and replaces the copy"
    differs = None if directory is None else changed_tokenizer(Path(directory), data)
    if differs:
        say(f"note      {differs}; {what}")


def _checkpoints(run: Run, events: Events) -> Checkpoints:
    """Open the checkpoints of a run; each finished save is an event."""
    return Checkpoints(
        Path(run.dir) / "checkpoints",
        keep=run.checkpoint.keep,
        keep_every=run.checkpoint.keep_every,
        gather=distributed.gather,
        saved=lambda step: events.tell("saved", step=step),
    )


@contextmanager
def _stop_requests(console: OutputConsole, stop_file: Path) -> Iterator[StopRequested]:
    """Yield the function that returns requests for an end.

    stop_file: written by `ppctl stop`; process 0 looks for it after each step. The second signal of
    a kind ends the process at once. In a run of several processes, JAX handles SIGTERM and stops
    all at the same step, so other requests (SIGINT, stop_file, a closed output) send SIGTERM.
    """
    received: list[int] = []
    is_joined = distributed.is_joined()

    def handle(number: int, _frame: Any) -> None:
        received.append(number)
        # the default action ends the process at a second signal; a handler of Python would wait for
        # the step and the save
        if number != signal.SIGPIPE:
            signal.signal(number, signal.SIG_DFL)
        if is_joined:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_requested(finished: int) -> int | None:
        if not is_joined:
            return received[0] if received else STOP if stop_file.exists() else None
        if distributed.is_lead() and not received and stop_file.exists():
            handle(signal.SIGUSR1, None)
        if not distributed.stop_requested(finished):
            return None
        return STOP if stop_file.exists() else signal.SIGTERM

    numbers = (signal.SIGINT,) if is_joined else STOP_SIGNALS
    console.when_reader_gone = lambda: handle(signal.SIGPIPE, None)
    try:
        with handling(numbers, handle):
            yield stop_requested
    finally:
        console.when_reader_gone = None


def _sum_up(records: StepRecords, status: str, say: Say, *, as_json: bool) -> None:
    run, last = records.job.config.run, records.last
    if records.step_times_s:
        say(records.prediction.compared(records.step_times_s, max(records.footprint.total_bytes)))
    left = "checkpoints, metrics and logs" if run.checkpoint.enabled else "metrics and logs"
    say(f"{status} at step {last['step']}; {left} are in {Path(run.dir)}")
    if as_json:
        times = {"compile_time_s": records.compile_time_s}
        show_json({"status": status, "run_dir": run.dir} | times | last)


def _status(run_dir: Path) -> AbstractContextManager[RunStatus | None]:
    """Lock the run directory; return the record of this start, None except on process 0."""
    if not distributed.is_lead():
        return nullcontext()
    try:
        with writing(run_dir):
            return RunStatus(run_dir)
    except HeldError as error:
        raise _held(run_dir, error.pid) from None


def _held(run_dir: Path, pid: int | None) -> ConfigError:
    who, how = f"process {pid}", f": kill -INT {pid}, which saves"
    if pid is None:
        who, how = "another process", ". If its machine is lost, the lock expires within minutes"
    what = f"run.dir={run_dir} is written by {who} now"
    return ConfigError(f"{what}. Use another run.name, or end that run first{how}.")


def _record_start(
    job: TrainingJob, status: RunStatus, start: Resumed, overrides: Sequence[str]
) -> None:
    config, run_dir = job.config, Path(job.config.run.dir)
    facts = environment(job.pipe.meshes) | {"xla_flags": text_of(job.pipe.execution.xla_flags)}
    facts |= {run_status.DIRECTORY: os.getcwd(), run_status.OVERRIDES: [*overrides]}
    facts[run_status.COSTS] = asdict(job.pipe.scheduled.costs)
    if start.changed:
        facts[run_status.CHANGED] = [each._asdict() for each in start.changed]
    with writing(run_dir):
        (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        if job.choice is not None:
            (run_dir / SCHEDULE_FILE).write_text(to_csv(job.pipe.schedule.ranks))
        keep_source(config.run, config.data)
        (run_dir / STOP_FILE).unlink(missing_ok=True)  # a request to an earlier start
        status.begin(start.step, **facts)


def _ending(stopped_by: int | None, step: int) -> tuple[str, dict[str, Any]]:
    """Return (status, facts) of a run that ended without an error.

    >>> _ending(2, 7), _ending(STOP, 7)
    (('interrupted', {'step': 7, 'reason': 'SIGINT'}), ('stopped', {'step': 7}))
    """
    if not stopped_by:
        return FINISHED if stopped_by is None else STOPPED, {"step": step}
    return INTERRUPTED, {"step": step, "reason": signal.Signals(stopped_by).name}


def _metrics(job: TrainingJob, start: int, console: Console) -> Metrics:
    """Open the records of this start; only process 0 writes them."""
    run = job.config.run
    how = {name: getattr(run, name) for name in ("name", "num_steps", "log_every", "trackers")}
    where, settings = run.dir if distributed.is_lead() else None, asdict(job.config)
    return Metrics(where, start_step=start, settings=settings, console=console, **how)


def _compiled(job: TrainingJob, say: Say, start: int) -> tuple[Footprint, float]:
    """Compile the step, record its memory, and return (footprint, seconds of compiling)."""
    began = time.perf_counter()
    say("compiling ...")
    footprint = job.pipe.engine.compile(evaluate=job.config.run.eval_every is not None)
    seconds = time.perf_counter() - began
    say(f"compiled in {seconds:.1f} s")
    if distributed.is_lead():
        run_dir, memory = Path(job.config.run.dir), {"step": start, "ranks": job.pipe.memory()}
        with writing(run_dir):
            replace_file(run_dir / MEMORY_FILE, json.dumps(memory) + "\n")
    return footprint, seconds
