"""`ppctl verify`: show that gradients and train steps equal those of the un-pipelined model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from ppctl.config import AnyModel, Config, Mesh, Transformer
from ppctl.config.schedule_from_config import label
from ppctl.reports.terminal_output import OutputConsole, show_json, show_lines, show_table
from ppctl.training.pipeline.jax_start import keep_compiled
from ppctl.training.pipeline.job import TrainingJob, assemble, partition_text
from ppctl.training.pipeline.job_checks import check_job
from ppctl.training.verification import verification, verify_pipeline
from ppctl.training.verification.verification import StepComparison, TrainingComparison
from ppctl.training.verification.verify_pipeline import (
    TOLERANCE,
    Leaf,
    Number,
    Verification,
    worst_of,
)

assemble_to_verify = partial(assemble, default_dtype="float64")
GRADIENT = ("gradient", "shape", "norm", "max |reference|", "max |difference|", "error")
STEP = ("step", "loss", "reference", "error", "grad_norm", "error", "lr", "error", "clipped")


class Comparison(NamedTuple):
    """The comparisons of a job with the un-pipelined model."""

    job: TrainingJob
    of_batch: Verification
    training: TrainingComparison | None  # comparison of train steps; None: verify.steps=0

    @property
    def ok(self) -> bool:
        """Whether every error is within its tolerance."""
        numbers, leaves = [self.of_batch.loss], [*self.of_batch.gradients]
        training, tolerance = self.training, self.of_batch.tolerance
        if training is not None:
            for step in training.steps:
                numbers += [step.loss, step.grad_norm, step.lr, *step.attached.values()]
            numbers += [] if training.eval_loss is None else [training.eval_loss]
            leaves += training.state
        return all(each.error <= tolerance for each in (*numbers, *leaves))  # NaN fails


def verify(config: Config, *, as_json: bool) -> int:
    """Compare gradients and train steps; return 0 if all are within the tolerance, else 1."""
    unkept = keep_compiled(config.run.compilation_cache)
    job = assemble_to_verify(config)
    verify_pipeline.check_comparable(job.pipe)
    found = unkept, capacity_note(config.model, config.mesh), *check_job(job)
    notes = [note for note in found if note is not None]
    plain = verification.plain_model(job)
    state = job.pipe.engine.new_state()  # initial state, for gradients and steps
    batch = job.pipe.put(next(job.data.batches()))
    found = job.pipe.engine.loss_and_grads(state, batch)
    of_batch = verify_pipeline.verify_gradients(job.pipe, plain.first, found)
    training = None
    if config.verify.steps:
        steps = plain.run(config.verify.steps, of_batch.tolerance)
        training = verification.compare_training(job, steps, state)
    comparison = Comparison(job, of_batch, training)
    if as_json:
        show_json(_document(comparison))
    else:
        _show(comparison, notes)
    return int(not comparison.ok)


def capacity_note(model: AnyModel, mesh: Mesh) -> str | None:
    """Return the note that a capacity may drop other tokens than the un-pipelined model does."""
    capacity = model.moe.capacity if isinstance(model, Transformer) else None
    if capacity is None or mesh.ep * mesh.tp == 1:
        return None
    return (
        f"model.moe.capacity={capacity:g} may drop tokens that one device keeps. If the comparison "
        "fails, verify with model.moe.capacity=null."
    )


def _document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparisons as plain JSON."""
    job, of_batch, training = comparison
    loss, leaves = of_batch.loss, of_batch.gradients
    document = {"ok": comparison.ok, "dtype": str(job.pipe.dtype), "tolerance": of_batch.tolerance}
    document |= {"loss": loss.value, "reference_loss": loss.reference, "loss_error": loss.error}
    document |= {"worst": asdict(of_batch.worst), "gradients": [asdict(leaf) for leaf in leaves]}
    steps = training and asdict(training) | {"worst": asdict(worst_of(training.state))}
    return document | {"training": steps}


def _show(comparison: Comparison, notes: Sequence[str]) -> None:
    """Print tables of gradients and train steps, other comparisons, and the verdict."""
    job, of_batch, training = comparison
    tolerance = of_batch.tolerance
    console = OutputConsole()
    line = partial(show_lines, console)
    # 1. gradients
    rows = (_gradient_row(leaf, tolerance) for leaf in of_batch.gradients)
    title = f"gradients of {_what(job.config)} compared with the un-pipelined model's"
    show_table(console, title, (*GRADIENT, "worst layer"), rows)
    text = partition_text(job)
    if text is not None:
        line(f"partition {text}")
    line(*(f"note      {note}" for note in notes))
    worst = of_batch.worst
    line(f"loss      {_number_text(of_batch.loss, tolerance)}")
    line(f"worst     {worst.name}, {_error_text(worst.error, tolerance)} of its largest entry")
    # 2. train steps
    if training is not None:
        line("")
        title = "train steps compared with the un-pipelined model's, updated by plain optax"
        rows = (_step_row(step, tolerance) for step in training.steps)
        show_table(console, title, STEP, rows)
        line(*_training_lines(job, training, tolerance))
    verdict = "equal" if comparison.ok else "NOT EQUAL"
    narrower = "" if tolerance == TOLERANCE[str(job.pipe.dtype)] else ", in parts narrower"
    line(f"{verdict} within {tolerance:g} ({job.pipe.dtype}{narrower})")


def _gradient_row(leaf: Leaf, tolerance: float) -> tuple[str, ...]:
    numbers = f"{leaf.norm:.6g}", f"{leaf.max_abs:.3e}", f"{leaf.max_difference:.1e}"
    layer = "" if leaf.layer is None else str(leaf.layer)
    shape = "x".join(map(str, leaf.shape))
    return leaf.name, shape, *numbers, _error_text(leaf.error, tolerance), layer


def _step_row(step: StepComparison, tolerance: float) -> list[str]:
    row = [str(step.step), f"{step.loss.value:.9g}", f"{step.loss.reference:.9g}"]
    row.append(_error_text(step.loss.error, tolerance))
    for number in (step.grad_norm, step.lr):
        row += [f"{number.value:.6g}", _error_text(number.error, tolerance)]
    return [*row, "yes" if step.is_clipped else "no"]


def _training_lines(
    job: TrainingJob, training: TrainingComparison, tolerance: float
) -> Iterator[str]:
    """Yield lines on the state after the steps, its evaluation and clipping."""
    for name in training.steps[0].attached:
        worst_number = max((step.attached[name] for step in training.steps), key=lambda n: n.error)
        yield f"attached  {name} {_number_text(worst_number, tolerance)}, the worst of all steps"
    worst, last = worst_of(training.state), len(training.steps)
    layer = "" if worst.layer is None else f" in layer {worst.layer}"
    yield (
        f"state     {len(training.state)} arrays of parameters and optimizer after step {last}; "
        f"worst {worst.name}, {_error_text(worst.error, tolerance)} of its largest change{layer}"
    )
    if training.eval_loss is None:
        yield "eval      none (run.eval_every=null)"
    else:
        number = verification.num_compared_batches(job)
        batches = f"{number} batch{'es' * (number > 1)}"
        yield f"eval      {_number_text(training.eval_loss, tolerance)}, of {batches}"
    at = "none (optim.clip_norm=null)"
    if training.clip_norm is not None:
        at = f"at optim.clip_norm={training.clip_norm:g}"
    yield f"clipping  {at}"


def _number_text(number: Number, tolerance: float) -> str:
    error = _error_text(number.error, tolerance)
    return f"{number.value:.12g}, reference {number.reference:.12g}, relative error {error}"


def _error_text(error: float, tolerance: float) -> str:
    return f"{error:.1e}" + ("" if error <= tolerance else " !")  # NaN is marked too


def _what(config: Config) -> str:
    if not config.executor.ENGINE.is_pipelined:
        return "executor=reference"
    schedule = f"{label(config.schedule)}, {config.schedule.num_microbatches} microbatches"
    return f"schedule={schedule}, mesh={config.mesh.text}, remat={config.executor.remat}"
