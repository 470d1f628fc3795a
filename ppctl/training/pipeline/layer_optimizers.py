"""Run an optax optimizer on the parameters as the author of a stack defines them, layer by layer.

The optimizer gets the tree {"embed_head": tree, "layers": tree of one layer}. It runs once for
embedding and head and, by vmap, for each layer. So masks see the author's tree, and norms, factors
and matrix products are those of one parameter. Stacking, padding and sharding are undone before the
update and restored after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import Layout, is_layer, parameter_of
from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.model.layer_reports import Updates, without_counted
from ppctl.model.stack import Stack, shapes_like
from ppctl.model.trainable_parameters import trained_part
from ppctl.training.pipeline import update_formulas as reading

Tree = Any
Slots = np.ndarray | None  # the layer in each slot [V, P, K], -1 for padding
STAGED = 3  # leading dims of layers in staged form: chunk, rank, layer slot
RANK = 1  # index of the rank among these dims


@dataclass(frozen=True)
class LayerOptimizer:
    """An optimizer of a stack. Its state has optax's structure, with stacked leaves for layers.

    `init` takes parameters in natural order, None for frozen ones. `update` takes staged parameters
    of all ranks or of one rank. All layers share the counts of steps.

    `optax.apply_if_finite` must decide the same for all layers, so it gets NaN for all gradients if
    any gradient of the model is not finite. updates: as in `StackOptions`; the optimizer ignores
    the parameters that these functions update. ema: decay of the average of the parameters, which
    `init_state` and `apply_gradients` keep; None: no average.
    """

    optimizer: optax.GradientTransformation
    params: Tree = field(compare=False)  # shapes in natural order, None for frozen parameters
    layout: Layout
    updates: Updates = field(default_factory=dict)
    ema: float | None = None

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer, self.one_layer)
        state = jax.eval_shape(self.optimizer.init, self.one_layer)
        params = [parameter_of(path)[0] for path, _ in jax.tree.leaves_with_path(self.one_layer)]
        places = reading.places_in(state, self.one_layer)
        for (path, _), place in zip(jax.tree.leaves_with_path(state), places, strict=True):
            name = parameter_of(path)[:1]
            if name != (() if place.owner is None else (params[place.owner],)):
                what = f"The optimizer's state has a part named {name[0]}, like the parameters"
                raise ConfigError(f"{what}. Use another label than {name[0]}.")

    @cached_property
    def one_layer(self) -> Tree:
        """The shapes of the optimizer's parameters {"embed_head", "layers"}, with one layer."""
        return _with_one_layer(without_counted(self.params, self.updates))

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether numbers are updated one by one, so that arrays may be divided and padded."""
        padded = jax.eval_shape(lambda tree: self.layout.of_rank.padded(tree, 0), self.one_layer)
        formulas = reading.update_formulas(self.optimizer, self.one_layer)
        if not all(formula.is_elementwise for formula in formulas):
            return False
        return formulas == reading.update_formulas(self.optimizer, padded)

    @property
    def guards_finite(self) -> bool:
        """Whether the optimizer has a rule for gradients that are not finite."""
        return has_rule(self.optimizer, self.one_layer)

    @cached_property
    def skips_nonfinite(self) -> bool:
        """Whether the optimizer changes nothing if a gradient is not finite."""
        return skips(self.optimizer, self.one_layer)

    def init(self, params: Tree) -> Tree:
        """Return the initial state, in natural order."""
        shapes = jax.eval_shape(self.optimizer.init, self.one_layer)
        params = without_counted(params, self.updates)
        num_layers = next((len(a) for a in jax.tree.leaves(params["layers"])), 1)
        axes = {"embed_head": None, "layers": 0}
        out_axes = jax.tree.map_with_path(lambda path, _: 0 if is_layer(path) else None, shapes)
        return jax.vmap(self.optimizer.init, (axes,), out_axes, axis_size=num_layers)(params)

    def update(
        self, grads: Tree, state: Tree, params: Tree, *, norm: Array, layer_in_slot: Slots = None
    ) -> tuple[Tree, Tree]:
        """Return (updates, next state), staged.

        norm: the norm of the whole model's gradients. layer_in_slot: slots of the ranks that hold
        these parameters; None: all ranks.
        """
        slots = self.layout.placement.layer_in_slot if layer_in_slot is None else layer_in_slot
        # 1. the arrays without padding
        grads = poisoned(grads, norm) if self.skips_nonfinite else grads
        given = grads, state, params
        if not self.is_elementwise:
            given = tuple(self.layout.of_rank.unpadded(tree, STAGED) for tree in given)
        # 2. the updates of embedding and head, and of each layer
        parts = [part for part in ("layers", "embed_head") if jax.tree.leaves(grads[part])]
        updates, found = dict(given[0]), {}
        for part in parts:
            updates[part], leaves = self._part(part, *given, norm=norm, sizes=slots.shape)
            found |= leaves
        state = with_leaves(state, found)
        # 3. pad the results; zero the updates of empty slots
        if not self.is_elementwise:
            updates, state = (self.layout.of_rank.padded(tree, STAGED) for tree in (updates, state))
        if (slots < 0).any():

            def held(u: Array) -> Array:
                return jnp.where((slots >= 0).reshape(*slots.shape, *[1] * (u.ndim - STAGED)), u, 0)

            updates = {**updates, "layers": jax.tree.map(held, updates["layers"])}
        return updates, state

    def _part(
        self, part: str, grads: Tree, state: Tree, params: Tree, *, norm: Array, sizes: tuple
    ) -> tuple[Tree, dict[tuple, Array]]:
        """Return the updates of "embed_head" or "layers", and leaves of the next state by path.

        The optimizer gets the whole tree, which masks need, with zeros for the other part. sizes:
        leading dims (V, P, K) of the layers.
        """
        # 1. the author's trees: gradients, state and parameters
        is_of = lambda path: parameter_of(path)[:1] in ((), (part,))  # noqa: E731
        shapes = jax.eval_shape(self.optimizer.init, self.one_layer)
        pairs = zip((self.one_layer, shapes, self.one_layer), (grads, state, params), strict=True)
        pick = lambda tree: {path: a for path, a in jax.tree.leaves_with_path(tree) if is_of(path)}  # noqa: E731
        given = [with_leaves(zeros_of(template), pick(tree)) for template, tree in pairs]
        update = optax.with_extra_args_support(self.optimizer).update

        # 2. the update of one layer, then of all: lists of leaves, in the order of paths
        is_owned = is_layer if part == "layers" else lambda _: False
        flat = [jax.tree.leaves_with_path(tree) for tree in given]
        owned = [[path for path, _ in leaves if is_owned(path)] for leaves in flat]
        paths = [path for path, _ in jax.tree.leaves_with_path(shapes) if is_of(path)]

        def of_one(layer: Sequence[list[Array]]) -> tuple[list, list]:
            own = (dict(zip(*each, strict=True)) for each in zip(owned, layer, strict=True))
            trees = (with_leaves(tree, leaves) for tree, leaves in zip(given, own, strict=True))
            found: tuple[Any, Any] = update(*trees, norm=norm)
            return jax.tree.leaves(found[0][part]), [*pick(found[1]).values()]

        layers = [[a for path, a in leaves if is_owned(path)] for leaves in flat]
        run = self._by_layer(of_one, sizes) if part == "layers" else of_one
        updates, found = run(layers)
        leaves = dict(zip(paths, found, strict=True))
        if part == "layers":  # a shared number is equal in all layers: take one
            leaves = {p: a if is_layer(p) else a[(0,) * len(sizes)] for p, a in leaves.items()}
        # 3. the updates in the tree of gradients
        updated = [path for path, _ in jax.tree.leaves_with_path(self.one_layer[part])]
        return with_leaves(grads[part], dict(zip(updated, updates, strict=True))), leaves

    def _by_layer(self, run: Callable, sizes: Sequence[int]) -> Callable:
        """Return `run` mapped over layers [V, P, K, ...].

        Ranks run at the same time. If the update needs whole arrays, the layers of a rank run one
        after the other, so each rank gathers one layer at a time.
        """
        for dim, size in reversed([*enumerate(sizes)]):
            at_once = self.is_elementwise or dim == RANK
            run = jax.vmap(run, axis_size=size) if at_once else partial(jax.lax.map, run)
        return run


def one_layer_of(stack: Stack) -> Tree:
    """Return the shapes of the parameters that the optimizer of a stack updates, with one layer."""
    trained = trained_part(stack.param_shapes, stack.options.trainable)
    return _with_one_layer(without_counted(trained, stack.options.updates))


def _with_one_layer(params: Tree) -> Tree:
    return {**params, "layers": shapes_like(params["layers"], first=1)}


def update_flops(optimizer: optax.GradientTransformation, one_layer: Tree) -> int:
    """Return the FLOPs of an update's matrix products; one_layer: shapes of the parameters."""
    update = optax.with_extra_args_support(optimizer).update
    state, norm = jax.eval_shape(optimizer.init, one_layer), jax.ShapeDtypeStruct((), jnp.float32)
    run = lambda grads, state, params, norm: update(grads, state, params, norm=norm)  # noqa: E731
    return matmul_flops(run, one_layer, state, one_layer, norm)


def check_optimizer(
    optimizer: optax.GradientTransformation, params: Tree, check: Callable = reading.check_separate
) -> None:
    """Raise ConfigError if `check` finds that updates depend on other parameters, or fails."""
    try:
        check(optimizer, params)
        both = skips(optimizer, params) and reading.has_state(
            optimizer, params, optax.ZeroNansState
        )
    except reading.Mixing as error:
        raise ConfigError(
            "The optimizer's update of a parameter depends on other parameters, so it would "
            f"differ between layouts: {error}. Use clip_norm=NORM for clipping by the global "
            "norm, and an optimizer that treats each parameter by itself."
        ) from error
    except Exception as error:  # anything that the optimizer's code raises
        what = f"The optimizer fails on the model's parameters: {type(error).__name__}"
        raise ConfigError(f"{what}: {error}.") from error
    if both:
        raise ConfigError(
            "optax.apply_if_finite and optax.zero_nans in one optimizer contradict each other: "
            "gradients of the whole model are checked before zero_nans only. Use one of them."
        )


class SkipsNonFinite(optax.GradientTransformationExtraArgs):
    """An optimizer that changes nothing if the global norm is not finite. It has no counters."""


def skipping(optimizer: optax.GradientTransformation) -> SkipsNonFinite:
    """Return the optimizer, with no update and the same state if the norm is not finite."""
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: Tree, state: Tree, params: Tree = None, *, norm: Array, **others: Any
    ) -> tuple[Tree, Tree]:
        updates, after = inner.update(updates, state, params, norm=norm, **others)
        chosen = lambda new, old: jnp.where(jnp.isfinite(norm), new, old)  # noqa: E731
        return jax.tree.map(lambda u: chosen(u, 0), updates), jax.tree.map(chosen, after, state)

    # optax's type of `update` has no extra arguments
    return SkipsNonFinite(inner.init, update)  # pyright: ignore[reportArgumentType]


def skips(optimizer: optax.GradientTransformation, params: Tree) -> bool:
    """Return whether the optimizer changes nothing if a gradient is not finite."""
    is_of_optax = reading.has_state(optimizer, params, optax.ApplyIfFiniteState)
    return is_of_optax or isinstance(optimizer, SkipsNonFinite)


def has_rule(optimizer: optax.GradientTransformation, params: Tree) -> bool:
    """Return whether the optimizer has a rule for gradients that are not finite."""
    return skips(optimizer, params) or reading.has_state(optimizer, params, optax.ZeroNansState)


def poisoned(grads: Tree, norm: Array) -> Tree:
    """Return gradients for `optax.apply_if_finite`: NaN if the norm is not finite."""
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(norm), g, jnp.nan), grads)


def with_leaves(tree: Tree, leaves: Mapping[tuple, Any]) -> Tree:
    """Return a tree with some leaves replaced: leaves by path."""
    return jax.tree.map_with_path(lambda path, leaf: leaves.get(path, leaf), tree)


def zeros_of(tree: Tree) -> Tree:
    """Return zeros of these shapes, as placeholders that no result depends on."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
