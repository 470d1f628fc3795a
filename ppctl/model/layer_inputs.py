"""The values that a layer takes besides its parameters and x: places of attached losses, its key.

An attached loss is the identity on x, whose backward gives the loss the cotangent 1 and hands the
loss itself on as the "gradient" of a place: a scalar next to the layer's parameters. So executors
sum it as they sum gradients, once however often a forward is recomputed. Source of the first half:
Megatron-LM, MoEAuxLossAutoScaler.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Self

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.model.layer_reports import Updates, cast_layers
from ppctl.model.random_keys import layer_keys, names_key, without_key, wrapped

Tree = Any
Place = Callable[[str], jax.Array]  # name of a loss -> its place
LOSS = "loss"  # the name of the loss that is trained, among the losses of a step
PARAMS, LOSSES, KEY = "ppctl_params", "ppctl_losses", "ppctl_key"  # of a layer with inputs
# names of other numbers of a step
RESERVED = re.compile(
    r"loss|grad_norm|lr|step|number|counts|(eval|expert)_.*|.*_(s|bytes|fraction)"
)

_place_of: ContextVar[Place | None] = ContextVar("place_of", default=None)
# JAX keeps traces of inner functions: each trace of a layer has its own places
_trace_number, _traces = jax.make_user_context(None), count()


@jax.custom_vjp
def _attached(x: Tree, loss: jax.Array, place: jax.Array) -> Tree:
    del loss, place
    return x


def _forward(x: Tree, loss: jax.Array, place: jax.Array) -> tuple[Tree, tuple]:
    return x, (loss, jnp.zeros((), place.dtype))


def _backward(kept: tuple[jax.Array, jax.Array], gx: Tree) -> tuple[Tree, jax.Array, jax.Array]:
    loss, zero = kept
    return gx, jnp.ones_like(loss), jnp.asarray(loss, zero.dtype)  # of a constant it is a number


_attached.defvjp(_forward, _backward)


def attach_loss(x: Tree, loss: jax.Array, *, name: str = "attached_loss") -> Tree:
    """Return x unchanged; `loss`, a scalar, is added to the loss that is trained.

    For layers of a `Stack` and the `apply` of a `Network`, which must use the returned value. The
    loss is a sum over the layer's examples (and tokens), in units of the sum that the head returns:
    both are divided by the number of losses. Inside a divided stage it is the device's summand.
    A step reports the sum over the model as the metric `name`, apart from the loss. ConfigError if
    the loss is no floating scalar.

    >>> grad = jax.grad(lambda w: attach_loss(2 * w, 5 * w))
    >>> float(attach_loss(jnp.float32(3), jnp.float32(1))), float(grad(1.0))
    (3.0, 7.0)
    """
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ConfigError(
            f"attach_loss({name}) has a loss of {loss.dtype}{list(loss.shape)}, and it takes one "
            "floating scalar. Give it the sum over examples and tokens."
        )
    return _attached(x, loss, place_of_loss(name))


def place_of_loss(name: str) -> jax.Array:
    """Return the place of a loss in the layer that is traced, or a zero outside of executors."""
    place_of = _place_of.get()
    return jnp.zeros(()) if place_of is None else place_of(name)


@contextmanager
def placing(place_of: Place) -> Iterator[None]:
    """Let losses attached in the body, a trace of layers, have these places."""
    token = _place_of.set(place_of)
    try:
        with _trace_number(next(_traces)):
            yield
    finally:
        _place_of.reset(token)


def without_attached(where: str) -> AbstractContextManager[None]:
    """Refuse attached losses in the body, a trace of embedding or head, with a ConfigError."""

    def refuse(name: str) -> jax.Array:
        raise outside_of_layers(name, where)

    return placing(refuse)


def outside_of_layers(name: str, where: str) -> ConfigError:
    """Return the error for a loss that is attached in the embedding or the head."""
    return ConfigError(
        f"attach_loss({name}) stands in the {where}, and losses are attached in layers. Add it to "
        "the loss that the head returns, or attach it in the first or last layer."
    )


def attached_in(function: Callable, *args: Any) -> tuple[str, ...]:
    """Return the names of the losses that a function attaches; args may be shapes."""
    found: dict[str, None] = {}

    def record(name: str) -> jax.Array:
        found[name] = None
        return jnp.zeros(())

    with placing(record):
        jax.eval_shape(function, *args)
    return tuple(found)


@lru_cache(256)
def _attached_in(layer: Callable, treedef: Any, shapes: tuple) -> tuple[str, ...]:
    """Return the names of a layer; shapes: of w's leaves, then of x."""
    *leaves, x = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return attached_in(layer, jax.tree.unflatten(treedef, leaves), x)


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of layers besides parameters and x; if any, `extended` trees are the layers."""

    losses: tuple[str, ...] = ()  # names of attached losses
    has_key: bool = False  # whether a layer names a parameter `key`
    one_key: bool = False  # all layers get the same key of an example, as parts of one function

    @classmethod
    def of(cls, stack: Any, w: Tree, x: Any) -> Self:
        """Return the inputs of a stack's layers; w, x: arrays or shapes of a layer's arguments."""
        leaves, treedef = jax.tree.flatten(w)
        shapes = tuple((a.shape, jnp.dtype(a.dtype)) for a in (*leaves, x))
        functions = map(stack.layer_of, [0] if stack.are_alike else range(stack.num_layers))
        names = dict.fromkeys(name for f in functions for name in _attached_in(f, treedef, shapes))
        taken = next((name for name in names if RESERVED.fullmatch(name)), None)
        if taken is not None:
            raise ConfigError(
                f"attach_loss({taken}): a step reports loss, grad_norm, lr, step, counts and "
                "numbers that begin with eval_ or expert_, or end in a unit (_s, _bytes, "
                "_fraction). Use another name."
            )
        return cls(tuple(names), stack.takes_key, stack.options.network is not None)

    def __bool__(self) -> bool:
        return bool(self.losses) or self.has_key

    def extended(self, params: Tree, place: Any, number: Any) -> Tree:
        """Return a layer's tree with inputs; leaves may be arrays, shapes, specs or flags.

        place: the leaf of each attached loss. number: the layer's number in the model, which
        `with_keys` replaces in a step.
        """
        if not self:
            return params
        tree = {PARAMS: params, LOSSES: dict.fromkeys(self.losses, place)}
        return tree | {KEY: number} if self.has_key else tree

    def with_keys(self, layers: Any, keys: jax.Array | None) -> Any:
        """Return extended layers, listed, or one or stacked ones, with their keys of a microbatch.

        keys: of its examples, data [examples, 2]; None: as they are, for evaluations.
        """
        if keys is None or not self.has_key:
            return layers
        if isinstance(layers, list):
            return [self.with_keys(layer, keys) for layer in layers]
        numbers = layers[KEY] * (0 if self.one_key else 1)
        return layers | {KEY: layer_keys(keys, numbers)}

    def trainable(self, stack: Any) -> Tree:
        """Return `StackOptions.trainable` of parameters whose layers are extended."""
        layers = self.extended(stack.trains("layers"), True, False)
        return {"embed_head": stack.trains("embed_head"), "layers": layers}

    def computed(self, params: Tree, dtype: Any, updates: Updates) -> Tree:
        """Return parameters in the dtype of compute; inputs and counted parameters keep theirs."""
        layers = cast_layers(self.separate(params["layers"])[0], dtype, updates)
        layers = params["layers"] | {PARAMS: layers} if self else layers
        embed_head = jax.tree.map(lambda a: a.astype(dtype), params["embed_head"])
        return {"embed_head": embed_head, "layers": layers}

    def separate(self, tree: Tree) -> tuple[Tree, Mapping[str, Any]]:
        """Return (the tree of parameters, attached losses by name) of an extended tree."""
        return (tree[PARAMS], tree[LOSSES]) if self else (tree, {})

    def functions(self, layers: Any) -> Any:
        """Return a layer, or several, as functions of extended trees."""
        convert = _with_inputs if self else without_key
        return convert(layers) if callable(layers) else tuple(map(convert, layers))


@lru_cache(1024)  # programs are kept by the identity of functions
def _with_inputs(layer: Callable) -> Callable:
    has_key = names_key(layer)

    def run(w: Tree, x: jax.Array) -> jax.Array:
        key = w[KEY] if has_key else None
        given = {"key": wrapped(key) if key is not None and key.ndim else None} if has_key else {}
        if not w[LOSSES]:
            return layer(w[PARAMS], x, **given)
        with placing(w[LOSSES].__getitem__):
            return layer(w[PARAMS], x, **given)

    return run
