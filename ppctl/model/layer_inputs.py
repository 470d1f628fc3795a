"""The inputs of a layer besides its parameters and x: places of attached losses, and a random key.

Embedding and head have them too: together they are treated as one more layer, `LayerInputs.outer`.

`attach_loss` is the identity on x. Its backward gives the loss the value of a place, a scalar input
next to the layer's parameters, as cotangent (as Megatron-LM's MoEAuxLossAutoScaler does), so that
the loss is trained. It also returns the loss times this value as the "gradient" of the place. So
executors sum losses as they sum gradients: once, however often a forward is recomputed.

Executors divide all sums by the number of losses. The places' value is this number over the number
of units of the attached losses (`StackOptions.divisors`), so that these become means over units.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Self

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError, setting
from ppctl.model.layer_reports import cast_embed_head, cast_layers, num_reports
from ppctl.model.random_keys import layer_keys, names_key, without_key, wrapped

Tree = Any
Place = Callable[[str], jax.Array]  # name of a loss -> its place
LOSS = "loss"  # name of the trained loss among the losses of a step
PARAMS, LOSSES, KEY = "ppctl_params", "ppctl_losses", "ppctl_key"  # keys of an extended layer
# names of a step's other metrics, which no attached loss may have
RESERVED = re.compile(
    r"loss|grad_norm|lr|step|number|counts|(eval|expert)_.*|.*_(s|bytes|fraction)"
)

_place_of: ContextVar[Place | None] = ContextVar("place_of", default=None)
# JAX caches traces of inner functions. A new number for each trace of a layer makes JAX trace them
# again: a cached trace would hold the places of an earlier one
_trace_number, _traces = jax.make_user_context(None), count()


@jax.custom_vjp
def _attached(x: Tree, loss: jax.Array, place: jax.Array) -> Tree:
    del loss, place
    return x


def _forward(x: Tree, loss: jax.Array, place: jax.Array) -> tuple[Tree, tuple]:
    return x, (loss, place)


def _backward(kept: tuple[jax.Array, jax.Array], gx: Tree) -> tuple[Tree, jax.Array, jax.Array]:
    loss, scale = kept
    # asarray, because a constant loss may be a plain number
    return gx, scale.astype(jnp.result_type(loss)), jnp.asarray(loss, scale.dtype) * scale


_attached.defvjp(_forward, _backward)


def attach_loss(x: Tree, loss: jax.Array, *, name: str = "attached_loss") -> Tree:
    """Return x unchanged and add `loss` to the trained loss.

    For layers, embedding and head of a `Stack`, and for the `apply` of a `Network`.

    Args:
        x: An activation, an array or a tree.
        loss: A floating scalar: the sum over the layer's examples (and tokens). It is divided by
            the number of losses, as the head's sum is, or by the units of `StackOptions.divisors`.
            Inside a divided stage: this device's summand.
        name: Name of the metric that reports the loss, summed over layers, embedding and head. The
            metric "loss" does not include it.

    Returns:
        x, which the layer must use: otherwise the loss has no effect.

    Raises:
        ConfigError: `loss` is not a floating scalar.

    >>> grad = jax.grad(lambda w: attach_loss(2 * w, 5 * w))
    >>> float(attach_loss(jnp.float32(3), jnp.float32(1))), float(grad(1.0))
    (3.0, 7.0)
    """
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ConfigError(
            f"attach_loss({name}) needs a floating scalar, not {loss.dtype}{list(loss.shape)}. "
            "Pass the sum over examples and tokens."
        )
    return _attached(x, loss, place_of_loss(name))


def place_of_loss(name: str) -> jax.Array:
    """Return the place of a loss in the function that is traced; outside of executors, a one."""
    place_of = _place_of.get()
    return jnp.ones(()) if place_of is None else place_of(name)


@contextmanager
def placing(place_of: Place) -> Iterator[None]:
    """Give losses the place place_of(name) in layers that are traced within this context."""
    token = _place_of.set(place_of)
    try:
        with _trace_number(next(_traces)):
            yield
    finally:
        _place_of.reset(token)


def attached_in(function: Callable, *args: Any) -> tuple[str, ...]:
    """Return the names of the losses that function(*args) attaches; args may be shapes."""
    found: dict[str, None] = {}

    def record(name: str) -> jax.Array:
        found[name] = None
        return jnp.ones(())

    with placing(record):
        jax.eval_shape(function, *args)
    return tuple(found)


@lru_cache(256)
def _attached_in(layer: Callable, treedef: Any, shapes: tuple) -> tuple[str, ...]:
    """Return the names of the losses that a layer attaches.

    treedef: structure of w. shapes: (shape, dtype) of each leaf of w, then of x.
    """
    *leaves, x = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return attached_in(layer, jax.tree.unflatten(treedef, leaves), x)


def _attached_outside(stack: Any, embed_head: Tree, x: Any, batch: Tree) -> tuple[str, ...]:
    """Return the names of the losses that a stack attaches in its embedding and head."""
    embed, head = stack.outer
    of_head = attached_in(head, embed_head, x, batch["targets"])
    return tuple(dict.fromkeys((*attached_in(embed, embed_head, batch["inputs"]), *of_head)))


def check_parts(stack: Any, embed_head: Tree, batch: Tree) -> None:
    """Raise ConfigError if embedding or head have inputs, which `VocabularyParts` has not."""
    x = jax.eval_shape(stack.outer[0], embed_head, batch["inputs"])
    if _attached_outside(stack, embed_head, x, batch) or any(
        map(names_key, (stack.embed, stack.head))
    ):
        raise ConfigError(
            f"{setting('schedule.vocab', 'parallel')} divides embedding and head over the ranks, "
            "so they cannot attach losses or take a key. Move these to the first or last layer, "
            f"or use {setting('schedule.vocab', 'whole')}."
        )


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of layers besides parameters and x. A layer's tree holds them, see `extended`."""

    losses: tuple[str, ...] = ()  # names of attached losses
    divisors: Any = None  # `StackOptions.divisors`, if losses are attached
    has_key: bool = False  # whether a layer has a parameter `key`
    one_key: bool = False  # whether all layers, as parts of one function, share a key
    embed_head: Self | None = None  # inputs of embedding and head; None: they have none
    outside: bool = False  # whether embedding or head report counts

    @classmethod
    def of(cls, stack: Any, params: Tree, x: Any, batch: Tree) -> Self:
        """Return the inputs of a stack's layers, embedding and head.

        params: {"embed_head", "layers"}, with one layer. params, x, batch: arrays or shapes.
        ConfigError if a loss has a reserved name.
        """
        # 1. the names of losses
        leaves, treedef = jax.tree.flatten(params["layers"])
        shapes = tuple((a.shape, jnp.dtype(a.dtype)) for a in (*leaves, x))
        functions = map(stack.layer_of, [0] if stack.are_alike else range(stack.num_layers))
        names = dict.fromkeys(name for f in functions for name in _attached_in(f, treedef, shapes))
        before = num_reports()
        of_outer = _attached_outside(stack, params["embed_head"], x, batch)
        outside = num_reports() > before
        taken = next((name for name in (*names, *of_outer) if RESERVED.fullmatch(name)), None)
        if taken is not None:
            raise ConfigError(
                f"attach_loss({taken}): the name is reserved for metrics of a step (loss, "
                "grad_norm, lr, step, number, counts, eval_*, expert_*, *_s, *_bytes, *_fraction). "
                "Use another name."
            )
        # 2. the inputs
        divisors = stack.options.divisors if names or of_outer else None
        one_key = stack.options.network is not None
        has_key = any(map(names_key, (stack.embed, stack.head)))
        outer = cls(of_outer, divisors, has_key, one_key)
        takes_key = any(map(names_key, stack.functions))
        return cls(tuple(names), divisors, takes_key, one_key, outer if outer else None, outside)

    @property
    def outer(self) -> Self:
        """The inputs of embedding and head."""
        return type(self)() if self.embed_head is None else self.embed_head

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all attached losses."""
        return tuple(dict.fromkeys((*self.losses, *self.outer.losses)))

    @property
    def need_keys(self) -> bool:
        """Return whether a layer, the embedding or the head takes a key."""
        return self.has_key or self.outer.has_key

    def __bool__(self) -> bool:
        return bool(self.losses) or self.has_key

    def extended(self, params: Tree, place: Any, number: Any) -> Tree:
        """Return a layer's tree with its inputs; leaves may be arrays, shapes, specs or flags.

        place: the leaf of each attached loss. number: the leaf of the layer's number in the model,
        or of two numbers for embedding and head; `with_keys` replaces it with keys in a step.
        """
        if not self:
            return params
        tree = {PARAMS: params, LOSSES: dict.fromkeys(self.losses, place)}
        return tree | {KEY: number} if self.has_key else tree

    def places(self, batch: Tree, total: Callable[[Any], Any], dtype: Any) -> Any:
        """Return the value of the places of attached losses in a step.

        batch: {"inputs", "targets"}: the examples of a device or of all. total: sums a tree of
        numbers over all devices with different examples.
        """
        if self.divisors is None:
            return jnp.ones((), dtype)
        numbers = self.divisors(batch["inputs"], batch["targets"])
        losses, units = (jnp.maximum(jnp.asarray(a, dtype), 1) for a in total(numbers))
        return losses / units

    def with_keys(self, layers: Any, keys: jax.Array | None) -> Any:
        """Return extended layers with the random keys of a microbatch.

        layers: one layer, stacked layers, or a list of them. keys: key data of the microbatch's
        examples, [examples, 2]; None, as in evaluations: layers are returned unchanged.
        """
        if keys is None or not self.has_key:
            return layers
        if isinstance(layers, list):
            return [self.with_keys(layer, keys) for layer in layers]
        numbers = layers[KEY] * (0 if self.one_key else 1)
        return layers | {KEY: layer_keys(keys, numbers)}

    def trainable(self, stack: Any) -> Tree:
        """Return `StackOptions.trainable` for parameters with layers from `extended`."""
        layers = self.extended(stack.trains("layers"), True, False)
        embed_head = self.outer.extended(stack.trains("embed_head"), True, False)
        return {"embed_head": embed_head, "layers": layers}

    def computed(self, params: Tree, dtype: Any, uncast: Collection[str]) -> Tree:
        """Return parameters cast to `dtype`, except inputs and the parameters named in `uncast`."""
        layers = cast_layers(self.separate(params["layers"])[0], dtype, uncast)
        embed_head = self.outer.separate(params["embed_head"])[0]
        embed_head = cast_embed_head(embed_head, dtype, uncast)
        return {
            "embed_head": self.outer.replaced(params["embed_head"], embed_head),
            "layers": self.replaced(params["layers"], layers),
        }

    def replaced(self, tree: Tree, params: Tree) -> Tree:
        """Return an extended tree with other parameters."""
        return tree | {PARAMS: params} if self else params

    def separate(self, tree: Tree) -> tuple[Tree, Mapping[str, Any]]:
        """Return (parameters, attached losses by name) of an extended tree."""
        return (tree[PARAMS], tree[LOSSES]) if self else (tree, {})

    def separate_all(self, grads: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (gradients of parameters, sum of each attached loss) from extended gradients."""
        layers, attached = self.separate(grads["layers"])
        embed_head, outer = self.outer.separate(grads["embed_head"])
        return {"embed_head": embed_head, "layers": layers}, self.summed(attached, outer)

    def summed(
        self, layers: Mapping[str, jax.Array], outer: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Return the sum of each attached loss, from those of layers and of embedding and head."""
        sums = {name: a.sum() for name, a in layers.items()}
        return sums | {name: a + sums[name] if name in sums else a for name, a in outer.items()}

    def functions(self, layers: Any) -> Any:
        """Return a layer function, or a tuple of several, made to take the trees of `extended`."""
        convert = _with_inputs if self else without_key
        return convert(layers) if callable(layers) else tuple(map(convert, layers))

    def outer_functions(self, stack: Any) -> tuple[Callable, Callable]:
        """Return (embed, head) of a stack, made to take the trees of `outer.extended`."""
        if not self.outer:
            return stack.outer
        return _with_inputs(stack.embed, 0), _with_inputs(stack.head, 1)


def outer_numbers(num_layers: int) -> jax.Array:
    """Return the numbers of embedding and head, which make their keys: those after the layers'."""
    return num_layers + jnp.arange(2)


@lru_cache(1024)  # the same function for the same layer, because it is a key of compiled programs
def _with_inputs(function: Callable, place: int | None = None) -> Callable:
    """Return a layer, embedding or head that takes a tree of `extended` in place of parameters.

    place: index of the function's key among those of embedding and head; None: a layer.
    """
    has_key = names_key(function)

    def run(w: Tree, *args: Any) -> Any:
        given = {}
        if has_key:
            key = w[KEY] if place is None else w[KEY][place]
            given = {"key": wrapped(key) if key is not None and key.ndim else None}
        if not w[LOSSES]:
            return function(w[PARAMS], *args, **given)
        with placing(w[LOSSES].__getitem__):
            return function(w[PARAMS], *args, **given)

    return run
