"""The records of a run's steps and evaluations, and the errors of steps that are not finite."""

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from ppctl.config import Transformer
from ppctl.errors import NonFiniteError, SaveError, SkippedError
from ppctl.model.cross_entropy import perplexity
from ppctl.model.experts.expert_balance import balance
from ppctl.model.layer_reports import COUNTS
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline.engines.step_programs import Footprint
from ppctl.training.pipeline.job import TrainingJob, unit_of_work
from ppctl.training.pipeline.mfu import ModelFlops, mfu, mfu_peak_flops, model_flops
from ppctl.training.run.events import Events
from ppctl.training.run.metrics import SKIPPED, Metrics
from ppctl.training.run.run_environment import writing
from ppctl.training.run.run_lines import StepPrediction

Tree = Any
MOST_TIMES = 1000  # number of newest step times, for their median


@dataclass
class StepRecords:
    """The records of a run, with speeds and predictions. last: the newest record of a step."""

    job: TrainingJob
    checkpoints: Checkpoints
    metrics: Metrics
    events: Events
    prediction: StepPrediction
    footprint: Footprint  # memory and text of the compiled step
    compile_time_s: float
    last: dict[str, Any] = field(default_factory=dict)
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    _num_in_row: int = 0  # consecutive skipped steps
    _is_empty_noted: bool = False  # True after the note on a batch without losses

    def add(self, finished: int, numbers: Tree, step_time_s: float) -> None:
        """Check the numbers of a finished step and log them. Raises for numbers not finite."""
        names = "loss", *self.job.pipe.attached_losses, "grad_norm", "lr"
        self.step_times_s.append(step_time_s)
        self.last = {"step": finished} | {name: float(numbers[name]) for name in names}
        loss, grad_norm = self.last["loss"], self.last["grad_norm"]
        if COUNTS in numbers and isinstance(self.job.config.model, Transformer):
            self.last |= balance(jax.device_get(numbers[COUNTS]))
        self.last |= {"step_time_s": step_time_s, **self._speeds(step_time_s)}
        if num_skipped := self.metrics.num_skipped:
            rates: Any = self.job.pipe.lr_schedule
            self.last["lr"] = float(rates(finished - 1 - num_skipped))
        if self.job.config.run.on_nonfinite == "skip":
            self.last["skipped_steps"] = num_skipped
            if not math.isfinite(grad_norm):
                self._skip(finished)
                return
            self._num_in_row = 0
        with writing(Path(self.job.config.run.dir)):
            self.metrics.log(self.last, self.job.pipe.attached_losses)
        if loss == grad_norm == 0 and not self._is_empty_noted:
            self._is_empty_noted = True
            self.metrics.note(
                f"note: step {finished} has loss 0 and gradient 0: its batch has no tokens to "
                "predict (only prompts and padding), so only the optimizer's momentum and decay "
                "change the parameters."
            )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            # loss and gradients come from the state before this step, finished - 1: it is bad, too
            what = f"loss={loss}, grad_norm={grad_norm}"
            raise self.non_finite(finished, what, newest_good=finished - 2)

    def add_evaluation(self, finished: int, eval_loss: float) -> None:
        record = {"eval_loss": eval_loss}
        if self.job.data.vocab_size is not None:
            record |= {"eval_perplexity": perplexity(eval_loss)}
        with writing(Path(self.job.config.run.dir)):
            self.metrics.log_eval(finished, record)
        self.events.tell("evaluated", step=finished, **record)

    def _skip(self, finished: int) -> None:
        """Record a step without an update. SkippedError after run.max_skipped steps in a row."""
        run = self.job.config.run
        examples = self.job.data.examples_of(finished - 1)
        with writing(Path(run.dir)):
            self.metrics.log_skipped(self.last, examples)
        self.events.tell("skipped", step=finished, examples=examples)
        self._num_in_row += 1
        if self._num_in_row >= run.max_skipped:
            raise SkippedError(
                f"step {finished}: {self._num_in_row} steps in a row have gradients that are not "
                f"finite (run.max_skipped={run.max_skipped}); {SKIPPED} in {run.dir} lists their "
                "examples. Try a smaller optim.lr, or look at these examples."
            )

    def non_finite(self, finished: int, what: str, *, newest_good: int) -> NonFiniteError:
        """Return the error of step `finished`; it names the newest good checkpoint."""
        with suppress(SaveError):
            self.checkpoints.wait()
        steps, optim = self.checkpoints.stored.steps(), self.job.config.optim
        good = [step for step in steps if step <= newest_good]
        kept = f"the checkpoint of step {good[-1]} is good" if good else "no checkpoint is good"
        lost = ", ".join(str(step) for step in steps if step > newest_good)
        away = f"; move {lost} away: resuming from there fails again" if lost else ""
        clip = f"a smaller optim.clip_norm (now {optim.clip_norm})"
        clip = "optim.clip_norm=1.0 (now null)" if optim.clip_norm is None else clip
        return NonFiniteError(
            f"step {finished}: {what}. Training stopped; {kept} "
            f"({self.checkpoints.directory}){away}. Try a smaller optim.lr (now {optim.lr}), "
            f"more optim.warmup_steps (now {optim.warmup_steps}) or {clip}."
        )

    def _speeds(self, step_time_s: float) -> dict[str, Any]:
        (unit, count, flops, peak), predicted = self._work, self.prediction
        return {
            unit: count / step_time_s,
            "model_flops_per_s": flops.full / step_time_s,
            "mfu_fraction": mfu(flops.full, step_time_s, peak),
            "mfu_causal_fraction": mfu(flops.causal, step_time_s, peak),
            "compile_time_s": self.compile_time_s,
            "ideal_bubble_fraction": predicted.ideal_bubble_fraction,
            "predicted_bubble_fraction": predicted.bubble_fraction,
            "predicted_step_time_s": predicted.step_time_s,
            "predicted_memory_bytes": predicted.memory_bytes,
            "memory_bytes": max(self.footprint.total_bytes),
        }

    @cached_property
    def _work(self) -> tuple[str, int, ModelFlops, float | None]:
        """Return (unit of speed, units of a step, FLOPs of a step, peak FLOP/s of all devices)."""
        meshes, hardware = self.job.pipe.meshes, self.job.config.hardware
        peak = mfu_peak_flops(hardware, meshes.device.device_kind, str(self.job.pipe.dtype))
        all_peak = None if peak is None else peak * meshes.num_devices
        return *unit_of_work(self.job), model_flops(self.job), all_peak
