"""The training loop: steps, evaluations, checkpoints and their records."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ppctl import errors
from ppctl.data.dataset import description
from ppctl.launch import join_processes as distributed
from ppctl.reports import measured_timeline_file as timeline_io
from ppctl.reports.terminal_output import shared_cores_text
from ppctl.schedule.simulator import Timeline
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline.job import TrainingJob, evaluate, num_eval_batches
from ppctl.training.run import profiler
from ppctl.training.run.heartbeat import Heartbeat
from ppctl.training.run.process_group import raise_together
from ppctl.training.run.profiler import ProfileWindow
from ppctl.training.run.run_environment import checkpoint_metadata, num_cores, writing
from ppctl.training.run.step_clock import StepClock
from ppctl.training.run.step_records import StepRecords

Tree = Any
WARM_UP_STEPS = 2  # first steps of each start, slowed by allocations and caches
STOP = 0  # the signal number of a request by `ppctl stop`
# number of finished steps -> the signal that requests an end after this step, STOP or None
StopRequested = Callable[[int], int | None]


class Dispatched(NamedTuple):
    """A step in flight."""

    finished: int  # number of steps, this one included
    numbers: Tree  # loss, grad_norm, lr, ... on the devices
    step_time_s: Future[float]


def metadata(job: TrainingJob, finished: int) -> dict[str, Any]:
    """Return the metadata of a checkpoint after `finished` steps."""
    data = description(job.data, job.pipe.batch_shapes)
    return checkpoint_metadata(asdict(job.settled), finished, job.sources, data)


def _read_ahead(batches: Iterator[Tree]) -> tuple[Tree, Any, Callable[[], list[bool]]]:
    """Return (next batch, error, function that waits for flags: which processes have an error)."""
    batch, found = None, None
    try:
        batch = next(batches)
    except (errors.ConfigError, errors.DataError) as error:
        found = error
    return batch, found, distributed.gather_later(found is not None)


@dataclass
class Loop:
    """The training loop. It reads a step's numbers one step later, so devices never wait for it."""

    job: TrainingJob
    records: StepRecords
    checkpoints: Checkpoints
    heartbeat: Heartbeat
    clock: StepClock
    _unread: Dispatched | None = None  # the step in flight

    def run(self, state: Tree, start: int, stop_requested: StopRequested) -> int | None:
        """Train from step `start` and save the last step; return the signal that stopped the run.

        Returns None if the run has reached run.num_steps.
        """
        config, engine = self.job.config.run, self.job.pipe.engine
        save_every, eval_every = config.checkpoint.every, config.eval_every
        measured = min(start + WARM_UP_STEPS, config.num_steps - 1) if config.timeline else None
        batches = self._batches(start)
        self.records.last = {"step": start}
        if config.eval_at_start and start == 0:
            self._evaluate(state, 0)
        with ProfileWindow(config, start) as profile:
            if profile.passed is not None:
                self.records.metrics.note(f"profile   {profile.passed}")
            for step in range(start, config.num_steps):
                # 1. train
                finished, begins_trace = step + 1, step in profile.steps[:1]
                with self._saved_first(state, step, is_new=step > start):
                    if begins_trace or step == measured:
                        self._read()  # waits for the previous step, which must not be measured
                    if begins_trace:
                        profile.begin()
                    self.heartbeat.note("read", finished)
                    batch = engine.batches.put(next(batches))
                self.heartbeat.note("run", finished)
                state, now, timeline = self._train_step(state, batch, step, step == measured)
                # 2. check the save under way; log, trace and evaluate
                with self._saving(finished):
                    self.checkpoints.poll()
                with self._saved_first(state, finished):
                    self._read(then=now)
                    if timeline is not None and distributed.is_lead():
                        self._read()  # waits for the step: its time must not include the writing
                        _show_timeline(self.records, timeline)
                    if profile.is_open and finished == profile.steps.stop:
                        self._end_profile(profile, finished)
                    if eval_every is not None and finished % eval_every == 0:
                        self._evaluate(state, finished)
                    # called once: a signal between two calls would stop the run unsaved
                    stop_signal = stop_requested(finished)
                    is_last = stop_signal is not None or finished == config.num_steps
                    is_due = is_last or (save_every is not None and finished % save_every == 0)
                    if is_due:
                        self._read()
                # 3. save, and stop
                if is_due:
                    self._save(state, finished, is_last=is_last, stop_signal=stop_signal)
                if is_last:
                    self._end_profile(profile, finished)
                    return stop_signal
        return None

    def _batches(self, start: int) -> Iterator[Tree]:
        """Yield this process's examples of each step, read ahead; all raise if one cannot read."""
        batches = self.job.data.batches(start, self.job.pipe.engine.batches.examples)
        ahead = _read_ahead(batches)
        for step in range(start, self.job.config.run.num_steps):
            batch, error, failed = ahead
            raise_together(error, failed())
            if step + 1 < self.job.config.run.num_steps:
                ahead = _read_ahead(batches)
            yield batch

    def _train_step(
        self, state: Tree, batch: Tree, step: int, is_measured: bool
    ) -> tuple[Tree, Dispatched, Timeline | None]:
        """Dispatch a step; return (state, step, timeline). Waits for the end of a measured step."""
        engine, measured = self.job.pipe.engine, None
        self.clock.begin()
        if is_measured:
            timed: Any = engine  # Mpmd: config.check refuses run.timeline for other engines
            state, numbers, measured = profiler.timed_step(timed, state, batch)
        else:
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, numbers = engine.step(state, batch)
        return state, Dispatched(step + 1, numbers, self.clock.watch(numbers)), measured

    def _read(self, then: Dispatched | None = None) -> None:
        """Wait for the step in flight, check its numbers and log them.

        then: the next step in flight. It is set even if this one ends training, so that
        `_saved_first` records each step that it saves.
        """
        unread, self._unread = self._unread, then
        if unread is not None:
            self.records.add(unread.finished, unread.numbers, unread.step_time_s.result())

    def _evaluate(self, state: Tree, finished: int) -> None:
        self._read()
        self.heartbeat.note("evaluate", finished)
        number = num_eval_batches(self.job.config.run, self.job.data)
        eval_loss = evaluate(self.job.pipe.engine, self.job.data, number, state)
        self.records.add_evaluation(finished, eval_loss)

    def _save(self, state: Tree, finished: int, *, is_last: bool, stop_signal: int | None) -> None:
        """Save the state. NonFiniteError if any number in it is not finite, whatever the loss."""
        assert self._unread is None, "a saved step has its records"
        is_saved = self.job.config.run.checkpoint.enabled
        if stop_signal is not None:
            name = signal.Signals(stop_signal).name if stop_signal else "stop"
            is_alone = stop_signal and not distributed.is_joined()
            again = f"; a second {name} ends it at once, unsaved" if is_alone else ""
            unsaved = f"leaving after step {finished}, unsaved"
            what = f"saving step {finished} and leaving{again}" if is_saved else unsaved
            self.records.metrics.note(f"{name}: {what}")
        if not is_saved:
            return
        self.heartbeat.note("save", finished)
        with self._saving(finished):
            self.checkpoints.wait()  # until the previous save has finished
        with self._saving(finished, is_last=is_last):
            state = self.job.pipe.engine.to_natural(state)
            if not self.checkpoints.save(finished, state, metadata(self.job, finished)):
                what = "its update is not finite"
                raise self.records.non_finite(finished, what, newest_good=finished - 1)
            if is_last:
                self.checkpoints.wait()

    @contextmanager
    def _saved_first(self, state: Tree, finished: int, *, is_new: bool = True) -> Iterator[None]:
        """Save a new state before an error of the body ends training.

        An error of only one of several processes saves nothing, because a save needs all of them.
        is_new: whether this start has trained `state`, so that it must be saved.
        """
        try:
            yield
        except (
            errors.ConfigError,
            errors.DataError,
            errors.ElsewhereError,
            errors.SkippedError,
        ) as error:
            is_of_all = errors.AgreedError, errors.ElsewhereError, errors.SkippedError
            if distributed.is_joined() and not isinstance(error, is_of_all):
                raise
            with suppress(errors.SkippedError, errors.ConfigError):  # the first error ends training
                self._read()
            if not (is_new and self.job.config.run.checkpoint.enabled):
                raise
            what = f"Step {finished} is saved."
            try:
                self._save(state, finished, is_last=True, stop_signal=None)
            except errors.SaveError as failed:
                what = str(failed)
            error.args = (f"{error} {what}",)
            raise

    @contextmanager
    def _saving(self, finished: int, *, is_last: bool = False) -> Iterator[None]:
        """Raise, or print and go on, if the body fails to save (run.checkpoint.on_failure)."""
        try:
            yield
        except errors.SaveError as error:
            if is_last:
                raise
            if self.job.config.run.checkpoint.on_failure == "stop":
                what = f"{error} Training stopped after step {finished}; run.checkpoint.on_failure"
                raise errors.SaveError(f"{what}=continue goes on.") from error
            again = "The next save tries again (run.checkpoint.on_failure=continue)."
            self.records.metrics.note(f"note: {error} {again}")

    def _end_profile(self, profile: ProfileWindow, finished: int) -> None:
        """Write the open trace and its tasks; print their place, or why no step was traced."""
        steps, pipe, tasks = profile.steps, self.job.pipe, ""
        if not profile.is_open:
            if finished <= steps.start:
                text = f"no trace: the run ends before step {steps.start} (the first is 0)"
                self.records.metrics.note(f"profile   {text}")
            return
        self._read()
        lacks = profile.end(finished)
        if pipe.ticks is not None:
            program, mesh = self.records.footprint.text, pipe.meshes.storage
            traced = program, pipe.ticks, mesh, finished - steps.start
            with writing(profile.directory):
                file = profiler.write_tasks(profile.directory, *traced)
            tasks = "" if file is None else f"; tasks by rank for Perfetto in {file}"
        self.records.metrics.note(f"profile   {profile.directory} (xprof, Perfetto){lacks}{tasks}")


def _show_timeline(records: StepRecords, measured: Timeline) -> None:
    directory = Path(records.job.config.run.dir) / "timeline"
    predicted, meshes = records.prediction, records.job.pipe.meshes
    bubbles = predicted.ideal_bubble_fraction, predicted.bubble_fraction
    with writing(directory):
        lines = [*timeline_io.write_timeline(directory, measured, *bubbles)]
    shared = shared_cores_text(len(meshes.storage.local_devices), num_cores(meshes))
    for line in lines if shared is None else [*lines, f"note      {shared}"]:
        records.metrics.note(line)
