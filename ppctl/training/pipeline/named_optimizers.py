"""The optimizers of optim=NAME, with their learning-rate schedules."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon as matrices_by_muon

from ppctl import config as settings
from ppctl.config.groups.optim_settings import Adafactor, Lion
from ppctl.errors import ConfigError
from ppctl.model.stack import Stack
from ppctl.training.pipeline.layer_optimizers import skipping
from ppctl.training.pipeline.optimizers import adamw, decays, learning_rates
from ppctl.training.pipeline.update_formulas import names_of
from ppctl.training.pipeline.user_code import custom_optimizer

Tree = Any
RATES = ("lr", "min_lr_fraction", "warmup_steps", "lr_schedule", "decay_fraction")
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients: Jordan et al. 2024
MATRIX = MuonDimensionNumbers(-2, -1)  # last dims: inputs, outputs; a dim of experts precedes them


def make_optimizer(
    request: settings.AnyOptim,
    num_steps: int,
    stack: Stack | None = None,
    on_nonfinite: str = "stop",
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return the optimizer of these settings, without clipping, and its learning-rate schedule.

    stack: the model to train. on_nonfinite: with skip, gradients that are not finite change
    nothing, not even the update count, so the learning rate stays. The state is the same with stop
    and with skip, so a run can change from one to the other. ConfigError for Muon with a
    `Network`, or if the user's function fails.
    """
    rates = rates_of(vars(request), num_steps)
    network = None if stack is None else stack.options.network
    if isinstance(request, settings.Muon) and network is not None:
        raise ConfigError(
            "optim=muon updates matrices of layers only, but a Network does not state which "
            "matrices are in layers. Use optim=custom with a function that does, or optim=adamw."
        )
    made = MAKERS[type(request)](request, rates)
    return (skipping(made) if on_nonfinite == "skip" else made), rates


def rates_of(optim: Mapping[str, Any], num_steps: int) -> optax.Schedule:
    """Return the learning-rate schedule of an optimizer; optim: its settings by name."""
    return learning_rates(num_steps=num_steps, **{name: optim[name] for name in RATES})


def _adamw(of: settings.AdamW, rates: optax.Schedule) -> optax.GradientTransformation:
    return adamw(rates, of.b1, of.b2, of.eps, weight_decay=of.weight_decay)


def _lion(of: Lion, rates: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(rates, of.b1, of.b2, weight_decay=of.weight_decay, mask=decays)


def _lamb(of: settings.Lamb, rates: optax.Schedule) -> optax.GradientTransformation:
    return optax.lamb(rates, of.b1, of.b2, of.eps, weight_decay=of.weight_decay, mask=decays)


def _muon(of: settings.Muon, rates: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon for the matrices of layers, with AdamW for all other parameters."""
    # separate coefficients per iteration let optax scan: on CPUs twice as fast as unrolled
    sizes: dict[str, Any] = {"ns_coeffs": (NEWTON_SCHULZ,) * 5, "beta": of.momentum}
    sizes |= {"weight_decay": of.weight_decay}
    matrices = matrices_by_muon(
        rates,
        **sizes,
        consistent_rms=of.update_rms,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: MATRIX, params),
    )

    def kinds(params: Tree) -> Tree:
        is_matrix = lambda path, a: a.ndim > 1 and names_of(path[:1]) == ("layers",)  # noqa: E731
        return jax.tree_util.tree_map_with_path(
            lambda path, a: "muon" if is_matrix(path, a) else "adamw", params
        )

    return optax.partition({"muon": matrices, "adamw": _adamw(of, rates)}, kinds)


MAKERS: dict[type, Callable[[Any, optax.Schedule], optax.GradientTransformation]] = {
    settings.AdamW: _adamw,
    settings.SGD: lambda of, rates: optax.sgd(rates, of.momentum),
    Lion: _lion,
    Adafactor: lambda of, rates: optax.adafactor(rates),
    settings.Lamb: _lamb,
    settings.Muon: _muon,
    settings.CustomOptim: lambda of, rates: custom_optimizer(of.target, of.options, rates),
}
