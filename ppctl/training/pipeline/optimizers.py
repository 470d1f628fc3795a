"""Train steps with optax optimizers, clipping by the global norm, and learning-rate schedules."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from optax.contrib import MuonDimensionNumbers, muon as matrices_by_muon

from ppctl import config as settings
from ppctl.config.groups.optim_settings import Adafactor, Lion
from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import names_of, with_layers
from ppctl.executors.stage.ordered_loops import ordered
from ppctl.model import layer_reports as reports
from ppctl.model.random_keys import with_example_keys
from ppctl.model.stack import NO_DECAY, Stack, init
from ppctl.model.trainable_parameters import AVERAGE, MOMENTS, is_none, trained_part, with_trained
from ppctl.training.pipeline import layer_optimizers as by_layer
from ppctl.training.pipeline.network_optimizers import NetworkOptimizer
from ppctl.training.pipeline.user_code import custom_optimizer


def learning_rates(
    lr: float,
    min_lr_fraction: float,
    warmup_steps: int,
    num_steps: int,
    lr_schedule: str = "cosine",
    decay_fraction: float = 0.2,
) -> optax.Schedule:
    """Return the learning rate by update: linear warm-up to `lr`, then `lr_schedule`.

    lr_schedule: cosine | linear, down to lr * min_lr_fraction | constant | wsd (constant, then
    linear in the last decay_fraction of the steps). The first update has lr / (warmup_steps + 1),
    not 0. Runs shorter than the warm-up reach `lr` too.
    """
    # 1. sizes, in updates
    warm = min(warmup_steps, num_steps - 1)
    left, least = max(num_steps, warm + 1) - warm, lr * min_lr_fraction
    falling = min(left, max(1, round(decay_fraction * num_steps)))
    # 2. the parts, warm-up first: (schedule, its number of updates)
    linear, constant = optax.linear_schedule, optax.constant_schedule(lr)
    after = {
        "cosine": [(optax.cosine_decay_schedule(lr, left, min_lr_fraction if lr else 0.0), left)],
        "linear": [(linear(lr, least, left), left)],
        "constant": [(constant, left)],
        "wsd": [(constant, left - falling), (linear(lr, least, falling), falling)],
    }[lr_schedule]
    parts = [(linear(lr / (warm + 1), lr, warm), warm), *after]
    ends = np.cumsum([length for _, length in parts])[:-1].tolist()
    rates = optax.join_schedules([part for part, _ in parts], ends)
    return lambda k: jnp.asarray(rates(jnp.asarray(k, float)))  # float32, also with x64


def decays(params: Any) -> Any:
    """Return a boolean per leaf: weight decay applies to matrices, not to norms and biases."""
    return jax.tree.map_with_path(
        lambda path, a: a.ndim > 1 and names_of(path[-1:])[0] not in NO_DECAY, params
    )


adamw = partial(optax.adamw, mask=decays)


def clipped(
    optimizer: optax.GradientTransformation, max_norm: float | None
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer preceded by clipping to max_norm; None: no clipping, same state tree.

    `update(..., norm=n)` takes the global norm, which may include gradients outside its tree.
    """
    clip = optax.identity() if max_norm is None else clip_by_norm(max_norm)
    both = optax.chain(clip, optimizer)
    skips = isinstance(optimizer, by_layer.SkipsNonFinite)
    return by_layer.SkipsNonFinite(*both) if skips else both


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return optax.clip_by_global_norm with a given norm: g / max(1, norm / max_norm)."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Array, **_: Any) -> tuple:
        clipped = lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(clipped, updates), state

    # optax's type of `update` has no extra arguments
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def global_norm(tree: Any) -> Array:
    """Return the 2-norm of all leaves together, in at least float32."""
    return jnp.sqrt(sum_of_squares(tree))


def sum_of_squares(tree: Any) -> Array:
    """Return the sum of squares of all entries of all leaves, in at least float32."""
    wide = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in jax.tree.leaves(tree))
    return sum((jnp.sum(jnp.square(a)) for a in wide), start=jnp.zeros((), jnp.float32))


Tree = Any
ModelOptimizer = by_layer.LayerOptimizer | NetworkOptimizer
Optimizer = optax.GradientTransformation | ModelOptimizer
# (params, batch) -> (losses by name, gradients)
LossAndGrads = Callable[[Tree, Tree], tuple[dict[str, Array], Tree]]


def counted_by(optimizer: Optimizer) -> reports.Updates:
    """Return `StackOptions.updates`, for parameters updated from counts; {} for a plain one."""
    return {} if isinstance(optimizer, optax.GradientTransformation) else optimizer.updates


def counts_of(optimizer: Optimizer, grads: Tree) -> dict[str, dict[str, Array]]:
    """Return {"counts": {name: counts [L, ...] in model order}} of staged gradients, or {}."""
    updates = counted_by(optimizer)
    if not updates or isinstance(optimizer, optax.GradientTransformation):
        return {}
    counts = optimizer.layout.to_natural(reports.counted_part(grads, updates))
    return {reports.COUNTS: reports.counts_by_name(counts)}


def ema_of(optimizer: Optimizer) -> float | None:
    """Return the decay of the average of the parameters; None: no average."""
    return None if isinstance(optimizer, optax.GradientTransformation) else optimizer.ema


def init_state(params: Tree, optimizer: Optimizer, trainable: Tree = True) -> Tree:
    """Return {"params", "optimizer", "step"}: the initial state, in the form of checkpoints.

    trainable: as in `StackOptions`; the optimizer has no state for frozen parameters. With an
    average, "optimizer" is {"average": trained parameters, "moments": the optimizer's state}.
    """
    trained = trained_part(params, trainable)
    state = optimizer.init(trained)
    if ema_of(optimizer) is not None:  # copies, because a step reuses the memory of both
        state = {AVERAGE: jax.tree.map(jnp.copy, trained), MOMENTS: state}
    return {"params": params, "optimizer": state, "step": jnp.zeros((), jnp.int32)}


def first_state(stack: Stack, optimizer: Optimizer) -> Callable[..., Tree]:
    """Return the function (seed, layers=None) -> initial state in natural order, of these layers.

    A layer depends on the seed and its number only. Networks draw all parameters together.
    """

    def start(seed: int, layers: np.ndarray | None = None) -> Tree:
        drawn = None if stack.options.network is not None else layers
        state = init_state(init(stack, seed, drawn), optimizer, stack.options.trainable)
        return state if drawn is layers or layers is None else with_layers(state, layers)

    return start


def state_shapes(stack: Stack, optimizer: Optimizer) -> Tree:
    """Return the shapes of a model's `init_state`."""
    of_params = partial(init_state, optimizer=optimizer, trainable=stack.options.trainable)
    return jax.eval_shape(of_params, stack.param_shapes)


def train_step(
    loss_and_grads: LossAndGrads,
    optimizer: Optimizer,
    lr_schedule: optax.Schedule | None = None,
    num_dims: int = 1,
) -> Callable[..., tuple[Tree, dict[str, Array]]]:
    """Return the function (state, batch) -> (next state, metrics).

    batch, num_dims: as in `with_example_keys`. metrics: "loss"; attached losses; "grad_norm", the
    global norm before clipping; "lr" with an lr_schedule; "counts" if the model has counted
    parameters.
    """

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, Array]]:
        batch = with_example_keys(batch, state["step"], num_dims)
        losses, grads = loss_and_grads(state["params"], batch)
        norm = global_norm(reports.without_counted(grads, counted_by(optimizer)))
        metrics: dict[str, Any] = losses | {"grad_norm": norm} | counts_of(optimizer, grads)
        if lr_schedule is not None:
            metrics["lr"] = lr_schedule(state["step"])
        return apply_gradients(optimizer, state, grads, norm, after=metrics), metrics

    return step


def _waits(optimizer: Optimizer) -> bool:
    """Return whether the update communicates on simulated devices, so that its loops need order."""
    if isinstance(optimizer, optax.GradientTransformation) or optimizer.is_elementwise:
        return False
    mesh = optimizer.layout.mesh
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def apply_gradients(
    optimizer: Optimizer, state: Tree, grads: Tree, norm: Array, after: Tree = None, **of_rank: Any
) -> Tree:
    """Return the next state of a model or of one rank; gradients are None for frozen parameters.

    norm: the norm of the whole model's gradients. after: results of the program's collectives
    before the update. of_rank: layer_in_slot, for a `ModelOptimizer`.
    """
    # 1. the optimizer's parameters
    counted = counted_by(optimizer)
    reported, grads = grads, reports.without_counted(grads, counted)
    is_plain = isinstance(optimizer, optax.GradientTransformation)
    update: Any = (optax.with_extra_args_support(optimizer) if is_plain else optimizer).update
    trained = jax.tree.map(lambda p, g: None if g is None else p, state["params"], grads)

    def run(grads: Tree, held: Tree, params: Tree, norm: Array) -> tuple[Tree, Tree]:
        return update(grads, held, params, norm=norm, **of_rank)

    ema = ema_of(optimizer)
    held = state["optimizer"] if ema is None else state["optimizer"][MOMENTS]
    given = grads, held, trained, norm
    updates, optimizer_state = ordered(run, after, *given) if _waits(optimizer) else run(*given)
    params = with_trained(optax.apply_updates(trained, updates), state["params"])
    # 2. the counted parameters and the average, which a skipped step leaves unchanged, too
    is_guarded = not is_plain and (counted or ema is not None) and optimizer.skips_nonfinite
    is_applied = jnp.isfinite(norm) if is_guarded else True
    params = reports.with_updated(params, reported, counted, by_layer.STAGED, is_applied=is_applied)
    if ema is not None:

        def mean(a: Array | None, p: Array) -> Array | None:
            return None if a is None else a + jnp.where(is_applied, (1 - ema) * (p - a), 0)

        average = jax.tree.map(mean, state["optimizer"][AVERAGE], params, is_leaf=is_none)
        optimizer_state = {AVERAGE: average, MOMENTS: optimizer_state}
    return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}


RATES = ("lr", "min_lr_fraction", "warmup_steps", "lr_schedule", "decay_fraction")
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients: Jordan et al. 2024
MATRIX = MuonDimensionNumbers(-2, -1)  # last dims: inputs, outputs; a dim of experts precedes them


def make_optimizer(
    optim: settings.AnyOptim, num_steps: int, stack: Stack | None = None, on_nonfinite: str = "stop"
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return the optimizer of these settings, without clipping, and its learning-rate schedule.

    stack: the model to train. on_nonfinite: with skip, gradients that are not finite change
    nothing, not even the update count, so the learning rate stays. The state is the same with stop
    and with skip, so a run can change from one to the other. ConfigError for Muon with a
    `Network`, or if the user's function fails.
    """
    rates = rates_of(vars(optim), num_steps)
    network = None if stack is None else stack.options.network
    if isinstance(optim, settings.Muon) and network is not None:
        raise ConfigError(
            "optim=muon updates matrices of layers only, but a Network does not state which "
            "matrices are in layers. Use optim=custom with a function that does, or optim=adamw."
        )
    made = MAKERS[type(optim)](optim, rates)
    return (by_layer.skipping(made) if on_nonfinite == "skip" else made), rates


def rates_of(optim: Mapping[str, Any], num_steps: int) -> optax.Schedule:
    """Return the learning-rate schedule of an optimizer; optim: its settings by name."""
    return learning_rates(num_steps=num_steps, **{name: optim[name] for name in RATES})


def _adamw(of: settings.AdamW, rates: optax.Schedule) -> optax.GradientTransformation:
    return adamw(rates, of.b1, of.b2, of.eps, weight_decay=of.weight_decay)


def _muon(of: settings.Muon, rates: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon for the matrices of layers, with AdamW for all other parameters."""
    matrices = matrices_by_muon(
        rates,
        ns_coeffs=(NEWTON_SCHULZ,) * 5,  # one per iteration: on CPUs twice as fast as unrolled
        beta=of.momentum,
        weight_decay=of.weight_decay,
        consistent_rms=of.update_rms,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: MATRIX, params),
    )

    def kind(path: tuple, a: Array) -> str:
        return "muon" if a.ndim > 1 and names_of(path[:1]) == ("layers",) else "adamw"

    kinds = partial(jax.tree.map_with_path, kind)
    return optax.partition({"muon": matrices, "adamw": _adamw(of, rates)}, kinds)


MAKERS: dict[type, Callable[[Any, optax.Schedule], optax.GradientTransformation]] = {
    settings.AdamW: _adamw,
    settings.SGD: lambda of, rates: optax.sgd(rates, of.momentum),
    Lion: lambda of, rates: optax.lion(
        rates, of.b1, of.b2, weight_decay=of.weight_decay, mask=decays
    ),
    Adafactor: lambda of, rates: optax.adafactor(rates),
    settings.Lamb: lambda of, rates: optax.lamb(
        rates, of.b1, of.b2, of.eps, weight_decay=of.weight_decay, mask=decays
    ),
    settings.Muon: _muon,
    settings.CustomOptim: lambda of, rates: custom_optimizer(of.target, of.options, rates),
}
