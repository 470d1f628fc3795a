"""`ppctl verify`: show that gradients and train steps equal those of the un-pipelined model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ppctl.config import Config
from ppctl.reports.terminal import OutputConsole, show_json, show_table
from ppctl.training.checks import check_job
from ppctl.training.compilation_cache import keep_compiled
from ppctl.training.job import TrainingJob, assemble, partition_text
from ppctl.training.plain_steps import plain_model
from ppctl.training.verification import (
    GradientComparison,
    Number,
    StepComparison,
    TrainingComparison,
    compare_gradients,
    compare_training,
    steps_with_clipping,
    tolerance_of,
    with_clip_norm,
    worst_of,
)

assemble_to_verify = partial(assemble, default_dtype="float64")


def verify(config: Config, *, as_json: bool) -> int:
    """Return 0 when gradients and train steps are within the dtype's tolerance, else 1. float64 unless run.dtype."""
    unkept = keep_compiled(config)
    job = assemble_to_verify(config)
    tolerance = tolerance_of(job)
    notes = [note for note in (unkept, *check_job(job)) if note is not None]
    plain = plain_model(job)
    state = job.pipe.init()  # compiled once, for gradients and steps
    gradients = compare_gradients(job, plain, state)
    training = None
    if config.verify.steps:
        steps = steps_with_clipping(plain, config.verify.steps, tolerance)
        if steps.clip_norm != config.optim.clip_norm:
            job = assemble_to_verify(with_clip_norm(config, steps.clip_norm))
        training = compare_training(job, steps, state, config)
    ok = all(error <= allowed for error, allowed in _errors(gradients, training, tolerance))  # NaN fails
    if as_json:
        show_json(_document(job, gradients, training, ok=ok))
    else:
        _show(job, config, gradients, training, notes, ok=ok)
    return 0 if ok else 1


def _errors(
    gradients: GradientComparison, training: TrainingComparison | None, tolerance: float
) -> Iterator[tuple[float, float]]:
    """Yield every error with its tolerance."""
    numbers = [gradients.loss]
    leaves = [*gradients.leaves]
    if training is not None:
        numbers += [number for step in training.steps for number in (step.loss, step.grad_norm)]
        numbers += [] if training.eval_loss is None else [training.eval_loss]
        leaves += training.state
        yield from ((error, training.rates_tolerance) for error in _rate_errors(training))
    yield from ((each.error, tolerance) for each in (*numbers, *leaves))


def _rate_errors(training: TrainingComparison) -> list[float]:
    return [*(step.lr.error for step in training.steps), training.rates_error]


def _document(
    job: TrainingJob, gradients: GradientComparison, training: TrainingComparison | None, *, ok: bool
) -> dict[str, Any]:
    """Return all that was compared as plain JSON."""
    found = {
        "ok": ok,
        "dtype": str(job.pipe.dtype),
        "tolerance": tolerance_of(job),
        "loss": gradients.loss.value,
        "reference_loss": gradients.loss.reference,
        "loss_error": gradients.loss.error,
        "worst": asdict(worst_of(gradients.leaves)),
        "gradients": [asdict(leaf) for leaf in gradients.leaves],
        "training": None,
    }
    if training is not None:
        found["training"] = asdict(training) | {"worst": asdict(worst_of(training.state))}
    return found


def _show(
    job: TrainingJob,
    config: Config,
    gradients: GradientComparison,
    training: TrainingComparison | None,
    notes: Sequence[str],
    *,
    ok: bool,
) -> None:
    """Print two tables, what was compared beside them, and the verdict."""
    console, tolerance = OutputConsole(), tolerance_of(job)
    line = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    rows = (
        (
            leaf.name,
            "x".join(map(str, leaf.shape)),
            f"{leaf.norm:.6g}",
            f"{leaf.max_abs:.3e}",
            f"{leaf.max_difference:.1e}",
            _error_text(leaf.error, tolerance),
            "" if leaf.layer is None else str(leaf.layer),
        )
        for leaf in gradients.leaves
    )
    columns = ("gradient", "shape", "norm", "max |reference|", "max |difference|", "error", "worst layer")
    show_table(console, f"gradients of {_what(config)} compared with the un-pipelined model's", columns, rows)
    text = partition_text(job)
    if text is not None:
        line(f"partition {text}")
    for note in notes:
        line(f"note      {note}")
    worst = worst_of(gradients.leaves)
    line(f"loss      {_number_text(gradients.loss, tolerance)}")
    line(f"worst     {worst.name}, {_error_text(worst.error, tolerance)} of its largest entry")
    if training is not None:
        line("")
        columns = ("step", "loss", "reference", "error", "grad_norm", "error", "lr", "error", "clipped")
        title = "train steps compared with the un-pipelined model's, updated by optax alone"
        show_table(console, title, columns, (_step_row(step, training, tolerance) for step in training.steps))
        for text in _training_lines(job, config, training, tolerance):
            line(text)
    line(f"{'equal' if ok else 'NOT EQUAL'} within {tolerance:g} ({job.pipe.dtype})")


def _step_row(step: StepComparison, training: TrainingComparison, tolerance: float) -> tuple[str, ...]:
    return (
        str(step.step),
        f"{step.loss.value:.9g}",
        f"{step.loss.reference:.9g}",
        _error_text(step.loss.error, tolerance),
        f"{step.grad_norm.value:.6g}",
        _error_text(step.grad_norm.error, tolerance),
        f"{step.lr.value:.6g}",
        _error_text(step.lr.error, training.rates_tolerance),
        "yes" if step.is_clipped else "no",
    )


def _training_lines(job: TrainingJob, config: Config, training: TrainingComparison, tolerance: float) -> Iterator[str]:
    """Yield a line for each thing that was compared of the train steps as a whole."""
    worst, last = worst_of(training.state), len(training.steps)
    layer = "" if worst.layer is None else f" in layer {worst.layer}"
    yield (
        f"state     {len(training.state)} arrays of parameters and optimizer after step {last}; worst {worst.name}, "
        f"{_error_text(worst.error, tolerance)} of its largest change{layer}"
    )
    if training.eval_loss is None:
        yield "eval      none (run.eval_every=null)"
    else:
        many = job.num_eval_batches
        yield f"eval      {_number_text(training.eval_loss, tolerance)}, of {many} batch{'es' * (many > 1)}"
    rates = _error_text(training.rates_error, training.rates_tolerance)
    yield f"lr        of all steps up to run.num_steps={config.run.num_steps}: error {rates} of the largest"
    yield f"clipping  {_clipping_text(config, training)}"


def _clipping_text(config: Config, training: TrainingComparison) -> str:
    if training.clip_norm is None:
        return "none (optim.clip_norm=null)"
    source = f"optim.clip_norm={config.optim.clip_norm:g}"
    if training.is_clip_norm_requested:
        at = source
    else:
        which = "all" if training.steps[0].grad_norm.reference >= (config.optim.clip_norm or 0.0) else "none"
        at = f"a norm of {training.clip_norm:.6g}, chosen here: {source} would clip {which} of these steps"
    clipped = [str(step.step) for step in training.steps if step.is_clipped]
    kept = [str(step.step) for step in training.steps if not step.is_clipped]
    is_undone = config.executor.DISPATCHES_TASKS and getattr(config.executor, "post_validation", False)
    done, stood = ("undone and taken again", "let stand") if is_undone else ("clipped", "not clipped")
    parts = [f"{what}: {', '.join(steps)}" for what, steps in ((done, clipped), (stood, kept)) if steps]
    return f"at {at}; steps {'; '.join(parts)}"


def _number_text(number: Number, tolerance: float) -> str:
    error = _error_text(number.error, tolerance)
    return f"{number.value:.12g}, reference {number.reference:.12g}, relative error {error}"


def _error_text(error: float, tolerance: float) -> str:
    return f"{error:.1e}" + ("" if error <= tolerance else " !")  # NaN is marked


def _what(config: Config) -> str:
    if not config.executor.IS_PIPELINED:
        return "executor=reference"
    chunks = "".join(f", {value} {key.removeprefix('num_')}" for key, value in config.schedule.knobs().items())
    return (
        f"schedule={config.schedule.name} ({config.schedule.num_microbatches} microbatches{chunks}), "
        f"mesh={config.mesh.text}, remat={config.executor.remat}"
    )
