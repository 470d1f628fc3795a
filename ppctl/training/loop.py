"""The training loop: steps, evaluations, checkpoints and what is recorded of them."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from ppctl.errors import ConfigError, NonFiniteError, PpctlError, SaveError
from ppctl.launch import distributed
from ppctl.reports import timeline_io
from ppctl.reports.charts.drawing import Drawing
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulate import Timeline
from ppctl.training import profiler, timeline
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.engines import Footprint
from ppctl.training.environment import versions
from ppctl.training.heartbeat import Watch
from ppctl.training.job import TrainingJob, model_flops, unit_of_work
from ppctl.training.known_hardware import mfu_peak_flops
from ppctl.training.metrics import Metrics
from ppctl.training.prediction import StepPrediction

Tree = Any
MOST_TIMES = 1000  # of steps that are kept, for their median
TIMELINE_AFTER = 2  # steps that warm up before the one that run.timeline measures


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """ConfigError where the body cannot write to run_dir, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be written: {error.strerror}. Free the disk, or use another run.dir."
        ) from error


@dataclass
class Loop:
    """The training loop. Numbers of a step are read one step later, so that the devices never wait for the host."""

    job: TrainingJob
    footprint: Footprint  # of the compiled step
    compile_time_s: float
    checkpoints: Checkpoints
    metrics: Metrics
    watch: Watch
    prediction: StepPrediction
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))  # the newest
    last: dict[str, Any] = field(default_factory=dict)  # the newest record
    _unread: tuple[int, Tree, float] | None = None  # finished steps, numbers, when dispatched
    _ready_s: float = 0.0

    def run(self, state: Tree, start: int, asked_to_leave: Callable[[int], int | None]) -> int:
        """The exit code, after the last step or the one after which asked_to_leave gives a signal; that step is saved.

        asked_to_leave(finished): the signal that asks the run to end after this step, or None.
        """
        config = self.job.config.run
        directory, every, eval_every = Path(config.dir) / "profile", config.checkpoint.every, config.eval_every
        batches = self.job.data.batches(start, self.job.pipe.engine.examples)
        # of several processes the first traces its own devices
        traced_from = config.profile.start if distributed.is_lead() else None
        window = profiler.Window(directory, traced_from, config.profile.num_steps)
        self.last = {"step": start}
        with profiler.traced(window):
            for step in range(start, config.num_steps):
                self.watch.note("read", step + 1)
                batch = self.job.pipe.engine.put(next(batches))
                self.watch.note("run", step + 1)
                if step == window.start:
                    self._read()  # no step before the window in its trace
                dispatched_s = time.perf_counter()
                measured = None
                if config.timeline and step == min(start + TIMELINE_AFTER, config.num_steps - 1):
                    self._read()
                    engine: Any = self.job.pipe.engine  # config.check asks for one whose tasks are programs
                    state, numbers, measured = timeline.timed_step(engine, self.job.pipe.schedule, state, batch)
                else:
                    with window.step(step):
                        state, numbers = self.job.pipe.engine.step(state, batch)
                self._read(dispatched_s)
                self._unread = (step + 1, numbers, dispatched_s)
                finished = step + 1
                if measured is not None and distributed.is_lead():
                    self._read()  # what is written of it is no part of the step
                    self._show_timeline(measured, finished)
                with self._saving(finished):
                    self.checkpoints.poll()
                if window.is_due(finished):
                    self._read()
                    self._show_profile(window.finish(), finished)
                if eval_every is not None and finished % eval_every == 0:
                    self._read()
                    self.watch.note("evaluate", finished)
                    self._evaluate(state, finished)
                leaving = asked_to_leave(finished)  # asked once: a signal that comes later finds nothing saved
                if leaving or finished == config.num_steps or (every is not None and finished % every == 0):
                    self._read()
                    if leaving is not None:
                        self.metrics.note(f"{signal.Signals(leaving).name}: saving step {finished} and leaving")
                    self.watch.note("save", finished)
                    is_last = leaving is not None or finished == config.num_steps
                    self._save(state, finished, is_last=is_last)
                    if is_last:
                        return 0 if leaving is None else 128 + leaving
        return 0

    def summary(self, exit_code: int) -> dict[str, Any]:
        """The run in one JSON object."""
        config = self.job.config
        return {
            "status": "interrupted" if exit_code else "finished",
            "run_dir": config.run.dir,
            "compile_time_s": self.compile_time_s,
            **self.last,
        }

    def _read(self, next_dispatched_s: float | None = None) -> None:
        """Waits for the step in flight, checks its numbers and logs them.

        next_dispatched_s: when the next step's dispatch began, if it has. A step that is done by its end counts as done
        at its beginning: a dispatch may take as long as a step.
        """
        if self._unread is None:
            return
        (finished, numbers, dispatched_s), self._unread = self._unread, None
        was_ready = next_dispatched_s is not None and all(a.is_ready() for a in jax.tree.leaves(numbers))
        loss, grad_norm, lr = (float(numbers[name]) for name in ("loss", "grad_norm", "lr"))
        now = next_dispatched_s if was_ready and next_dispatched_s is not None else time.perf_counter()
        step_time_s = now - max(self._ready_s, dispatched_s)
        self._ready_s = now
        self.step_times_s.append(step_time_s)
        self.last = {"step": finished, "loss": loss, "grad_norm": grad_norm, "lr": lr, "step_time_s": step_time_s}
        self.last |= self._speeds(step_time_s)
        with writing(Path(self.job.config.run.dir)):
            self.metrics.log(self.last)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            # neither depends on the learning rate of this step: the state before it is lost too
            raise self._non_finite(finished, f"loss={loss}, grad_norm={grad_norm}", newest_good=finished - 2)

    def _non_finite(self, finished: int, what: str, *, newest_good: int) -> NonFiniteError:
        """The error for step `finished`, with the checkpoint to go back to."""
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
        unit, count, flops, peak, bubble = self._work
        return {
            unit: count / step_time_s,
            "model_flops_per_s": flops / step_time_s,
            "mfu_fraction": None if peak is None else flops / step_time_s / peak,
            "compile_time_s": self.compile_time_s,
            "predicted_bubble_fraction": bubble,
            "predicted_step_time_s": self.prediction.step_time_s,
            "predicted_memory_bytes": self.prediction.memory_bytes,
            "memory_bytes": max(self.footprint.total_bytes),
        }

    @cached_property
    def _work(self) -> tuple[str, int, int, float | None, float | None]:
        """Of one step: unit of speed, its number, FLOPs; FLOP/s of all devices; predicted bubble."""
        pipe, config = self.job.pipe, self.job.config
        unit, count = unit_of_work(self.job)
        device = pipe.mesh.devices.flat[0]
        peak = mfu_peak_flops(config.hardware, device.device_kind, str(pipe.dtype))
        all_peak = None if peak is None else peak * pipe.mesh.size
        return unit, count, model_flops(pipe), all_peak, pipe.bubble()

    def _evaluate(self, state: Tree, finished: int) -> None:
        engine = self.job.pipe.engine
        batches = self.job.data.eval_batches(self.job.config.run.eval_batches, engine.examples)
        losses = [engine.loss(state, engine.put(batch)) for batch in batches]
        with writing(Path(self.job.config.run.dir)):
            self.metrics.log_eval(finished, {"eval_loss": sum(map(float, losses)) / len(losses)})

    def _save(self, state: Tree, finished: int, *, is_last: bool) -> None:
        """Nothing; saves a state whose every number is finite. That of a step's loss says nothing of its update."""
        with self._saving(finished):
            self.checkpoints.wait()  # for the save before
        data = self.job.data
        meta = {
            "step": finished,
            "config": asdict(self.job.config),
            "data": {"fingerprint": data.fingerprint, "source": data.source, "next_step": finished},
            "rng": {"seed": self.job.config.run.seed, "data_order": "a function of seed and step"},
            "versions": versions(),
        }
        with self._saving(finished, is_last=is_last):
            if not self.checkpoints.save(finished, self.job.pipe.engine.to_natural(state), meta):
                raise self._non_finite(finished, "its update is not finite", newest_good=finished - 1)
            if is_last:
                self.checkpoints.wait()

    @contextmanager
    def _saving(self, finished: int, *, is_last: bool = False) -> Iterator[None]:
        """Ends training when the body fails to save, or says so and goes on, as run.checkpoint.on_failure asks for."""
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
        """Nothing; writes and shows a measured step."""
        directory = Path(self.job.config.run.dir) / "timeline"
        with writing(directory):
            for line in timeline_io.write_timeline(directory, measured):
                self.metrics.note(line)
        self._show_gantt(measured.schedule, lambda: timeline_io.measured_and_predicted(measured), finished)

    def _show_profile(self, directory: Path, finished: int) -> None:
        """Nothing; says where a trace is, and writes and shows its tasks where it tells them."""
        written, ticks = None, self.job.pipe.ticks
        if ticks is not None:
            written = profiler.write_tasks(directory, self.footprint.text, ticks, self.job.pipe.mesh)
        tasks = "" if written is None else f"; tasks by rank for Perfetto in {written}"
        self.metrics.note(f"profile   {directory} (xprof, Perfetto){tasks}")
        if written is None or ticks is None:
            return
        with suppress(ValueError, PpctlError):  # several processes: not all ranks are in it, and the report says so
            measured, _ = timeline_io.read_profile(written, ticks.schedule)
            self._show_gantt(ticks.schedule, lambda: timeline_io.measured_and_predicted(measured, ticks), finished)

    def _show_gantt(self, schedule: Schedule, draw: Callable[[], Sequence[Drawing]], finished: int) -> None:
        if self.metrics.board is not None:
            self.metrics.board.gantt("schedule/measured", schedule, draw, finished)
