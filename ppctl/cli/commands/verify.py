"""`ppctl verify`: show that the pipelined gradients equal those of the un-pipelined model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ppctl.config import Config
from ppctl.executors.reference import reference
from ppctl.model.stack import init
from ppctl.reports.terminal import show_json, show_table
from ppctl.training.job import TrainingJob, assemble, partition_text

Tree = Any
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}  # of max|difference| / max|reference|


@dataclass(frozen=True)
class Leaf:
    """The comparison of one gradient array. error: max_difference / max_abs; layer: where it is worst."""

    name: str
    shape: tuple[int, ...]
    norm: float  # of all entries
    max_abs: float  # of the reference
    max_difference: float  # largest |difference|
    error: float
    layer: int | None  # None: not a stack of layers


def verify(config: Config, *, as_json: bool) -> int:
    """Return 0 when loss and gradients are within the dtype's tolerance, else 1. float64 unless run.dtype."""
    job = assemble(config, default_dtype="float64")
    tolerance = TOLERANCE[str(job.pipe.dtype)]
    expected_loss, expected, loss, grads = both(job)
    leaves = list(compare_gradients(expected, grads))
    loss_error = abs(loss - expected_loss) / (abs(expected_loss) or 1.0)  # of a loss of 0: the difference itself
    worst = max(leaves, key=lambda leaf: (np.isnan(leaf.error), leaf.error))
    ok = all(error <= tolerance for error in (loss_error, *(leaf.error for leaf in leaves)))  # NaN fails
    if as_json:
        document = {
            "ok": ok,
            "dtype": str(job.pipe.dtype),
            "tolerance": tolerance,
            "loss": loss,
            "reference_loss": expected_loss,
            "loss_error": loss_error,
            "worst": asdict(worst),
            "gradients": [asdict(leaf) for leaf in leaves],
        }
        show_json(document)
        return 0 if ok else 1
    console = Console()
    rows = (
        (
            leaf.name,
            "x".join(map(str, leaf.shape)),
            f"{leaf.norm:.6g}",
            f"{leaf.max_abs:.3e}",
            f"{leaf.max_difference:.1e}",
            f"{leaf.error:.1e}" + ("" if leaf.error <= tolerance else " !"),
            "" if leaf.layer is None else str(leaf.layer),
        )
        for leaf in leaves
    )
    columns = ("gradient", "shape", "norm", "max |reference|", "max |difference|", "error", "worst layer")
    show_table(console, f"gradients of {_what(config)} compared with the un-pipelined model's", columns, rows)
    line = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    text = partition_text(job)
    if text is not None:
        line(f"partition {text}")
    line(f"loss      {loss:.12g}, reference {expected_loss:.12g}, relative error {loss_error:.1e}")
    line(f"worst     {worst.name}, {worst.error:.1e} of its largest entry")
    line(f"{'equal' if ok else 'NOT EQUAL'} within {tolerance:g} ({job.pipe.dtype})")
    return 0 if ok else 1


def both(job: TrainingJob) -> tuple[float, Tree, float, Tree]:
    """Return (reference loss, reference gradients, loss, gradients) of the first batch, gradients in natural order."""
    config, pipe = job.config, job.pipe
    batch = next(job.data.batches())
    params = jax.jit(lambda: init(pipe.stack, config.run.seed))()
    plain = reference(
        pipe.stack,
        num_microbatches=config.schedule.num_microbatches,
        remat="none",
        unroll=config.executor.unroll,
        dtype=pipe.dtype,
    )
    expected_loss, expected = jax.jit(plain)(params, batch)
    loss, grads = pipe.loss_and_grads(pipe.init(), batch)
    return float(expected_loss), expected, float(loss), grads


def compare_gradients(expected: Tree, actual: Tree) -> Iterator[Leaf]:
    """Yield the comparison of each leaf of two gradient trees in natural order."""
    for (path, want), got in zip(
        jax.tree_util.tree_flatten_with_path(expected)[0], jax.tree.leaves(actual), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        difference = np.abs(want - got)
        max_abs, max_difference = float(np.abs(want).max()), float(difference.max())
        layer = None
        if name.startswith("layers/"):
            layer = int(difference.reshape(len(difference), -1).max(axis=1).argmax())
        yield Leaf(
            name,
            want.shape,
            float(np.linalg.norm(got)),
            max_abs,
            max_difference,
            max_difference / (max_abs or 1.0),
            layer,
        )


def _what(config: Config) -> str:
    if not config.executor.IS_PIPELINED:
        return "executor=reference"
    chunks = "".join(f", {value} {key.removeprefix('num_')}" for key, value in config.schedule.knobs().items())
    return (
        f"schedule={config.schedule.name} ({config.schedule.num_microbatches} microbatches{chunks}), "
        f"mesh={config.mesh.text}, remat={config.executor.remat}"
    )
