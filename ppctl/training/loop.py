"""The training loop: steps, evaluations, checkpoints and their records."""

from __future__ import annotations

import errno
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ppctl.data.description import description
from ppctl.errors import ConfigError, NonFiniteError, PpctlError, SaveError
from ppctl.launch import distributed
from ppctl.reports import timeline_io
from ppctl.reports.bubbles import shared_cores_text
from ppctl.reports.charts.drawing import Drawing
from ppctl.reports.run_status import WARM_UP_STEPS
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulate import Timeline
from ppctl.training import profiler, timeline
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.engines import Footprint
from ppctl.training.environment import num_cores, versions
from ppctl.training.evaluation import evaluate
from ppctl.training.heartbeat import Heartbeat
from ppctl.training.job import ModelFlops, TrainingJob, model_flops, unit_of_work
from ppctl.training.known_hardware import mfu_peak_flops
from ppctl.training.metrics import Metrics
from ppctl.training.prediction import StepPrediction
from ppctl.training.step_clock import StepClock
from ppctl.training.traced_tasks import write_tasks

Tree = Any
MOST_TIMES = 1000  # of steps that are kept, for their median


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Raise ConfigError where the body cannot write to run_dir, as on a full disk."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = (
            "Free the disk, or use another run.dir" if is_full else "Use another run.dir, or make this one writable"
        )
        raise ConfigError(f"run.dir={run_dir} cannot be written: {error.strerror}. {remedy}.") from error


def metadata(job: TrainingJob, finished: int) -> dict[str, Any]:
    """Return what a checkpoint says of the job that saves it after so many steps, as plain JSON."""
    return {
        "step": finished,
        "config": asdict(job.config),
        "sources": job.sources,
        "data": {**description(job.data, job.pipe.batch_shapes), "next_step": finished},
        "rng": {"seed": job.config.run.seed, "data_order": "a function of seed and step"},
        "versions": versions(),
    }


@dataclass
class Loop:
    """The training loop. Numbers of a step are read one step later, so that the devices never wait for the host."""

    job: TrainingJob
    footprint: Footprint  # of the compiled step
    compile_time_s: float
    checkpoints: Checkpoints
    metrics: Metrics
    heartbeat: Heartbeat
    prediction: StepPrediction
    clock: StepClock
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))  # the newest
    last: dict[str, Any] = field(default_factory=dict)  # the newest record
    _is_empty_noted: bool = False  # that a batch had nothing to learn
    _unread: tuple[int, Tree, float, Future[float]] | None = None  # finished steps, numbers, when dispatched and done

    def run(self, state: Tree, start: int, stop_requested: Callable[[int], int | None]) -> int:
        """Train from step `start`, and return the exit code. The last step, or the one after a stop request, is saved.

        stop_requested(finished): the signal that requests the run to end after this step, or None.
        """
        config, engine = self.job.config.run, self.job.pipe.engine
        save_every, eval_every = config.checkpoint.every, config.eval_every
        measured_step = min(start + WARM_UP_STEPS, config.num_steps - 1) if config.timeline else None
        batches = self.job.data.batches(start, engine.examples)
        self.last = {"step": start}
        with profiler.traced(self._profile_window()) as window:
            for step in range(start, config.num_steps):
                finished = step + 1
                self.heartbeat.note("read", finished)
                batch = engine.put(next(batches))
                self.heartbeat.note("run", finished)
                state = self._train_step(state, batch, step, window, is_measured=step == measured_step)
                with self._saving(finished):
                    self.checkpoints.poll()
                if window.is_due(finished):
                    self._read()
                    self._show_profile(window.finish(), finished)
                if eval_every is not None and finished % eval_every == 0:
                    self._evaluate(state, finished)
                stop_signal = stop_requested(finished)  # called once: a signal that comes later finds nothing saved
                is_last = stop_signal is not None or finished == config.num_steps
                if is_last or (save_every is not None and finished % save_every == 0):
                    self._save(state, finished, is_last=is_last, stop_signal=stop_signal)
                if is_last:
                    return 0 if stop_signal is None else 128 + stop_signal
        return 0

    def _profile_window(self) -> profiler.Window:
        """Return the steps that the profiler traces; of several processes the first traces its own devices."""
        config = self.job.config.run
        start = config.profile.start if distributed.is_lead() else None
        return profiler.Window(Path(config.dir) / "profile", start, config.profile.num_steps)

    def _train_step(self, state: Tree, batch: Tree, step: int, window: profiler.Window, *, is_measured: bool) -> Tree:
        """Dispatch a step, read the one before, and return the next state; a measured step runs alone."""
        engine: Any = self.job.pipe.engine  # config.check lets only one whose tasks are programs be measured
        if step == window.start:
            self._read()  # no step before the window in its trace
        dispatched_s, measured = time.perf_counter(), None
        if is_measured:
            self._read()
            state, numbers, measured = timeline.timed_step(engine, self.job.pipe.schedule, state, batch)
        else:
            with window.step(step):
                state, numbers = engine.step(state, batch)
        done = self.clock.watch(numbers)
        self._read()
        self._unread = (step + 1, numbers, dispatched_s, done)
        if measured is not None and distributed.is_lead():
            self._read()  # writing the timeline is no part of the step
            self._show_timeline(measured, step + 1)
        return state

    def summary(self, exit_code: int) -> dict[str, Any]:
        """Return the run in one JSON object."""
        config = self.job.config
        return {
            "status": "interrupted" if exit_code else "finished",
            "run_dir": config.run.dir,
            "compile_time_s": self.compile_time_s,
            **self.last,
        }

    def _read(self) -> None:
        """Wait for the step in flight, check its numbers and log them."""
        if self._unread is None:
            return
        (finished, numbers, dispatched_s, done), self._unread = self._unread, None
        step_time_s = self.clock.step_time_s(dispatched_s, done)
        loss, grad_norm, lr = (float(numbers[name]) for name in ("loss", "grad_norm", "lr"))
        self.step_times_s.append(step_time_s)
        self.last = {"step": finished, "loss": loss, "grad_norm": grad_norm, "lr": lr, "step_time_s": step_time_s}
        self.last |= self._speeds(step_time_s)
        with writing(Path(self.job.config.run.dir)):
            self.metrics.log(self.last)
        if loss == grad_norm == 0 and not self._is_empty_noted:
            self._is_empty_noted = True
            self.metrics.note(
                f"note: step {finished} has loss 0 and gradient 0, as a batch has in which nothing is to be predicted "
                "(prompts and padding alone). Only the optimizer's own motion and decay change the parameters then."
            )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            # neither depends on the learning rate of this step: the state before it is lost too
            raise self._non_finite(finished, f"loss={loss}, grad_norm={grad_norm}", newest_good=finished - 2)

    def _non_finite(self, finished: int, what: str, *, newest_good: int) -> NonFiniteError:
        """Return the error for step `finished`, with the checkpoint to go back to."""
        with suppress(SaveError):
            self.checkpoints.wait()
        good = [step for step in self.checkpoints.steps() if step <= newest_good]
        kept = f"the checkpoint of step {good[-1]} is good" if good else "there is no checkpoint to go back to"
        lost = [str(step) for step in self.checkpoints.steps() if step > newest_good]
        away = f"; move {', '.join(lost)} away, which leads here with any settings" if lost else ""
        optim = self.job.config.optim
        return NonFiniteError(
            f"step {finished}: {what}. Training stopped; {kept} ({self.checkpoints.directory}){away}. "
            f"Try a smaller optim.lr (now {optim.lr}), more optim.warmup_steps (now {optim.warmup_steps}) or a "
            f"smaller optim.clip_norm (now {optim.clip_norm})."
        )

    def _speeds(self, step_time_s: float) -> dict[str, Any]:
        unit, count, flops, peak = self._work
        return {
            unit: count / step_time_s,
            "model_flops_per_s": flops.full / step_time_s,
            "mfu_fraction": None if peak is None else flops.full / step_time_s / peak,
            "mfu_causal_fraction": None if peak is None else flops.causal / step_time_s / peak,
            "compile_time_s": self.compile_time_s,
            "ideal_bubble_fraction": self.prediction.ideal_bubble_fraction,
            "predicted_bubble_fraction": self.prediction.bubble_fraction,
            "predicted_step_time_s": self.prediction.step_time_s,
            "predicted_memory_bytes": self.prediction.memory_bytes,
            "memory_bytes": max(self.footprint.total_bytes),
        }

    @cached_property
    def _work(self) -> tuple[str, int, ModelFlops, float | None]:
        """Unit of speed, units and FLOPs of a step; peak FLOP/s of all devices."""
        pipe, config = self.job.pipe, self.job.config
        unit, count = unit_of_work(self.job)
        device = pipe.mesh.devices.flat[0]
        peak = mfu_peak_flops(config.hardware, device.device_kind, str(pipe.dtype))
        all_peak = None if peak is None else peak * pipe.mesh.size
        return unit, count, model_flops(self.job), all_peak

    def _evaluate(self, state: Tree, finished: int) -> None:
        self._read()
        self.heartbeat.note("evaluate", finished)
        eval_loss = evaluate(self.job.pipe.engine, self.job.data, self.job.num_eval_batches, state)
        with writing(Path(self.job.config.run.dir)):
            self.metrics.log_eval(finished, {"eval_loss": eval_loss})

    def _save(self, state: Tree, finished: int, *, is_last: bool, stop_signal: int | None) -> None:
        """Save the state if its every number is finite: a finite loss does not prove that its update is."""
        self._read()
        is_saved = self.job.config.run.checkpoint.enabled
        if stop_signal is not None:
            what = f"saving step {finished} and leaving" if is_saved else f"leaving after step {finished}, unsaved"
            self.metrics.note(f"{signal.Signals(stop_signal).name}: {what}")
        if not is_saved:
            return
        self.heartbeat.note("save", finished)
        with self._saving(finished):
            self.checkpoints.wait()  # for the save before
        with self._saving(finished, is_last=is_last):
            state = self.job.pipe.engine.to_natural(state)
            if not self.checkpoints.save(finished, state, metadata(self.job, finished)):
                raise self._non_finite(finished, "its update is not finite", newest_good=finished - 1)
            if is_last:
                self.checkpoints.wait()

    @contextmanager
    def _saving(self, finished: int, *, is_last: bool = False) -> Iterator[None]:
        """End training when the body fails to save, or print that and go on, as run.checkpoint.on_failure requests."""
        try:
            yield
        except SaveError as error:
            if is_last:
                raise
            if self.job.config.run.checkpoint.on_failure == "stop":
                raise SaveError(
                    f"{error} Training stopped after step {finished}; run.checkpoint.on_failure=continue goes on."
                ) from error
            self.metrics.note(f"note: {error} The next save tries again (run.checkpoint.on_failure=continue).")

    def _show_timeline(self, measured: Timeline, finished: int) -> None:
        """Write and show the timeline of a measured step."""
        directory = Path(self.job.config.run.dir) / "timeline"
        with writing(directory):
            ideal, predicted = self.prediction.ideal_bubble_fraction, self.prediction.bubble_fraction
            lines = timeline_io.write_timeline(directory, measured, ideal, predicted)
        for line in lines:
            self.metrics.note(line)
        shared = shared_cores_text(len(self.job.pipe.mesh.local_devices), num_cores(self.job.pipe.mesh))
        if shared is not None:
            self.metrics.note(f"note      {shared}")
        self._show_gantt(measured.schedule, lambda: timeline_io.measured_and_simulated(measured), finished)

    def _show_profile(self, directory: Path, finished: int) -> None:
        """Print where a trace is; write and show its tasks where the backend's trace has them."""
        tasks_file, ticks = None, self.job.pipe.ticks
        if ticks is not None:
            num_steps = self.job.config.run.profile.num_steps
            tasks_file = write_tasks(directory, self.footprint.text, ticks, self.job.pipe.mesh, num_steps)
        tasks = "" if tasks_file is None else f"; tasks by rank for Perfetto in {tasks_file}"
        self.metrics.note(f"profile   {directory} (xprof, Perfetto){tasks}")
        if tasks_file is None or ticks is None:
            return
        with suppress(ValueError, PpctlError):  # several processes: not all ranks are in it, and the report says so
            measured, _ = timeline_io.read_profile(tasks_file, ticks.schedule)
            self._show_gantt(ticks.schedule, lambda: timeline_io.measured_and_simulated(measured, ticks), finished)

    def _show_gantt(self, schedule: Schedule, draw: Callable[[], Sequence[Drawing]], finished: int) -> None:
        if self.metrics.tensorboard is not None:
            self.metrics.tensorboard.gantt("schedule/measured", schedule, draw, finished)
