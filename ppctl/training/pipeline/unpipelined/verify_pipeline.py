"""`ppctl.verify`: a pipeline's loss and gradients compared with those of its model without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppctl.training.pipeline.call_checks import on_host
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.unpipelined.verification import (
    Leaf,
    Number,
    compare_gradients,
    tolerance_of,
    worst_of,
)
from ppctl.training.pipeline.unpipelined.whole_model import initial_params, plain_functions


@dataclass(frozen=True)
class Verification:
    """Loss and gradients of a batch next to those of the un-pipelined model.

    Errors are relative: of an array to its largest entry. Up to `tolerance` they are rounding.
    """

    loss: Number
    gradients: tuple[Leaf, ...]  # by the names of the author's parameters
    tolerance: float

    @property
    def worst(self) -> Leaf:
        """The gradient of the largest error."""
        return worst_of(self.gradients)

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        errors = [self.loss.error, *(leaf.error for leaf in self.gradients)]
        return all(error <= self.tolerance for error in errors)  # NaN fails


def verify(pipe: Pipeline, batch: Mapping[str, Any], seed: int | None = None) -> Verification:
    """Return a pipeline's loss and gradients compared with plain autodiff through its whole model.

    The comparison is as sharp as the dtypes: with compute and parameters in float64 a wrong
    schedule cannot hide behind rounding (tolerance 1e-10; float32 1e-4, bfloat16 5e-2).

    Args:
        batch: Of the pipeline's size.
        seed: Of the initial parameters; None: the pipeline's.

    ConfigError: the batch has other shapes or values than the pipeline takes. The un-pipelined
    model runs on one device.
    """
    arrays = on_host(batch, pipe.batch_shapes, pipe.stack)
    state = pipe.init(seed)
    params = initial_params(pipe.stack, pipe.states.seed if seed is None else seed)
    loss_and_grads, _ = plain_functions(*pipe.plain)
    found = compare_gradients(pipe, loss_and_grads, params, state, arrays)
    return Verification(found.loss, found.leaves, tolerance_of(pipe))
