"""Checks of the arguments of the Python API: numbers, batches and states."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ppctl.config.field_checks import LARGEST
from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import Layout
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.model.network import Network
from ppctl.model.stack import Stack
from ppctl.training.pipeline.engines.mpmd_engine import Attempt

Tree = Any
NUMBERS = "biuf"  # NumPy dtype kinds allowed in a batch, besides bfloat16
ORDER = "layer_in_slot"  # name of the array in a state: the layers [V, P, K], -1 in padding
OF_FLAX = "ppctl.flax.stack(model, embed=, head=, loss=) or ppctl.flax.network(model, loss=)"
X64 = 'call jax.config.update("jax_enable_x64", True) first'


def checked_optimizer(
    optimizer: Any, model: Any, mesh: Any, clip_norm: float | None, ema: float | None
) -> optax.GradientTransformation:
    """Return the optimizer. ConfigError if an argument has a wrong type or value."""
    if not isinstance(model, Stack | Network):
        what = f"The model is {_short(model)}, not a ppctl.Stack or a ppctl.Network"
        raise ConfigError(f"{what}. Use {_made_by(model)}.")
    if not isinstance(mesh, Mesh | RankMeshes):
        raise ConfigError(f"mesh={_short(mesh)} is not a mesh. Use ppctl.mesh(dp=, pp=, fsdp=).")
    if not isinstance(optimizer, optax.GradientTransformation):
        what = f"optimizer={_short(optimizer)} is not an optax.GradientTransformation"
        raise ConfigError(f"{what}. Use one, such as optax.adamw(1e-3).")
    is_number = isinstance(clip_norm, Real) and 0 < clip_norm < float("inf")  # NaN fails
    if clip_norm is not None and not is_number:
        raise ConfigError(f"clip_norm={_short(clip_norm)} must be a finite number above 0.")
    if ema is not None and not (isinstance(ema, Real) and 0 < ema < 1):
        raise ConfigError(f"ema={_short(ema)} must be a number between 0 and 1, such as 0.999.")
    return optimizer


def _made_by(model: Any) -> str:
    """Return the call that makes a model of this object."""
    is_flax = any(each.__module__.startswith("flax.") for each in type(model).__mro__)
    return OF_FLAX if is_flax else "ppctl.transformer(...)"


@contextmanager
def flax_faults() -> Iterator[None]:
    """Turn Flax's error about a module of another trace into a ConfigError that leads on."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "TraceContextError":
            raise
        raise ConfigError(
            "The model's functions change variables of a Flax module that was made outside of "
            f"them, as its dropout does. Use {OF_FLAX}."
        ) from error


def whole_number(name: str, value: Any, least: int) -> int:
    """Return `value` as an int from `least` to `LARGEST`. ConfigError for any other value.

    >>> whole_number("seed", np.int64(3), 0)
    3
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= LARGEST:
        what = f"{name}={_short(value)} is not a whole number from {least} to {LARGEST}"
        raise ConfigError(f"{what}. Use one.")
    return number


def compute_dtype(dtype: Any, model: Stack | Network, usual: str) -> jnp.dtype:
    """Return `dtype`. None: `usual`, or float64 if the model has float64 parameters.

    ConfigError unless floating and enabled in JAX.
    """
    if dtype is None:
        dtype = jnp.float64 if parameter_dtype(model) == jnp.float64 else usual
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        use = "Use float32, bfloat16 or float64"
        raise ConfigError(f"dtype={_short(dtype)} is not a floating dtype. {use}.")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ConfigError(f"dtype={found} needs 64 bits, but JAX is set to 32: {X64}.")
    return found


def parameter_dtype(model: Stack | Network) -> jnp.dtype:
    """Return the widest dtype of a model's parameters, at least float32."""
    if isinstance(model, Stack):
        params = model.param_shapes
    else:
        params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    dtypes = {a.dtype for a in jax.tree.leaves(params)}
    return jnp.result_type(jnp.float32, *(d for d in dtypes if jnp.issubdtype(d, jnp.floating)))


def _short(value: Any) -> str:
    """Return the repr of a value, or its type if the repr exceeds 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"<{type(value).__name__}>"


# batches


def arrays_of(batch: Any, names: Sequence[str] = ("inputs", "targets")) -> dict[str, Any]:
    """Return the parts of a batch with these names as arrays, or as shapes and dtypes.

    The inputs may be a dict of arrays, also a nested one.
    """
    if not isinstance(batch, Mapping) or not set(names) <= set(batch):
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            f'batch is {found}; it must be {{"inputs": [batch, ...], "targets": [batch, ...]}}.'
        )
    return {name: _array_tree(name, batch[name]) for name in names}


def _array_tree(name: str, value: Any) -> Any:
    """Return an array; for inputs also a dict of arrays."""
    if not (isinstance(value, Mapping) and name.startswith("inputs")):
        return _numbers(name, value)
    if not value:
        raise ConfigError(f"{name} is an empty dict. Give it arrays [batch, ...].")
    return {key: _array_tree(f"{name}.{key}", each) for key, each in value.items()}


def named(arrays: Tree, separator: str = ".") -> dict[str, Any]:
    """Return the arrays of a tree by name: the joined keys of their paths, such as inputs.tokens.

    >>> named({"inputs": {"tokens": 1}, "targets": 2})
    {'inputs.tokens': 1, 'targets': 2}
    """
    paths = jax.tree.leaves_with_path(arrays)
    return {jax.tree_util.keystr(path, simple=True, separator=separator): a for path, a in paths}


def _numbers(name: str, value: Any) -> Any:
    """Return an array, or a shape with a dtype. ConfigError for a dtype that is not numeric."""
    try:
        array = value if hasattr(value, "dtype") and hasattr(value, "shape") else np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in NUMBERS and not jnp.issubdtype(array.dtype, jnp.floating):
        raise ConfigError(f"{name} have dtype {array.dtype}, which is not numeric.")
    return array


def on_host(
    batch: Any, shapes: Mapping[str, Tree], stack: Stack, *, any_number: bool = False
) -> dict[str, np.ndarray]:
    """Return the parts of a batch that `shapes` names, as NumPy arrays of their dtypes.

    any_number: the batch may have any number of examples. ConfigError if its shapes or kinds of
    numbers differ, or the model rejects its values (`check_batch` of the stack).
    """
    arrays = jax.tree.map(np.asarray, arrays_of(batch, [*shapes]))
    actual, wanted = ({n: a.shape for n, a in named(tree).items()} for tree in (arrays, shapes))
    found, made_for = f"The batch has shapes {actual}", f"but the pipeline was made for {wanted}"
    if any_number:
        number = next(iter(actual.values()))[:1]
        made_for += ", or another number of examples, at least 1"
        wanted = {name: (*number, *shape[1:]) for name, shape in wanted.items() if number != (0,)}
    if actual != wanted:
        raise ConfigError(f"{found}, {made_for}.")
    check_values(arrays, shapes, stack)
    return jax.tree.map(lambda a, shape: np.asarray(a, shape.dtype), arrays, dict(shapes))


def check_values(arrays: Mapping[str, Any], shapes: Mapping[str, Tree], stack: Stack) -> None:
    """Raise ConfigError if a dtype does not cast to that of `shapes`, or a value is beyond it.

    Then run the model's `check_batch`, if it has one, on the inputs and targets.
    """
    wanted = named(shapes)
    for name, a in named(arrays).items():
        dtype = wanted[name].dtype
        if not np.can_cast(a.dtype, dtype, "same_kind"):
            what = f"{name} are {a.dtype}, but the pipeline was made for {dtype}"
            raise ConfigError(f"{what}. Give {dtype}.")
        is_narrowed = a.dtype.kind in "iu" and dtype.kind in "iu" and a.dtype != dtype
        if is_narrowed and isinstance(a, np.ndarray) and a.size:
            ends, bounds = (int(a.min()), int(a.max())), np.iinfo(dtype)
            if ends[0] < bounds.min or ends[1] > bounds.max:
                furthest = max(*ends, key=abs)
                raise ConfigError(f"{name} hold {furthest}, beyond {dtype}. Use smaller numbers.")
    check_by_model(stack, arrays)


def check_by_model(stack: Stack, arrays: Mapping[str, Any]) -> None:
    """Run the model's `check_batch`, if it has one, on the inputs and targets."""
    if stack.options.check_batch is not None:
        stack.options.check_batch(arrays["inputs"], arrays.get("targets"))


# states


@dataclass(frozen=True)
class StateChecks:
    """The checks of the states of one pipeline: shapes, shardings and the order of layers.

    A state of another pipeline may have the same shapes with its layers in another order. So a
    pipeline's state is the engine's state and the layer in each slot. It is an array, not a part of
    the tree's structure: it stays with the other arrays on the host and in files, while a restored
    state gets the structure of its target.
    """

    wanted: Tree  # shapes, dtypes and shardings of an engine's state
    layout: Layout

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten(self.wanted)

    def ordered(self, state: Tree, before: Tree | None = None) -> Tree:
        """Return an engine's state with the layer in each slot; before: the previous state."""
        if isinstance(state, Attempt):
            state.order = self.layout.placement.layer_in_slot
            return state
        _, order = _split(before)
        if order is None:
            a, mesh = self.layout.placement.layer_in_slot, self.layout.mesh
            order = jax.make_array_from_callback(a.shape, NamedSharding(mesh, P()), a.__getitem__)
        return {**state, ORDER: order} if isinstance(state, dict) else (*state, {ORDER: order})

    def checked(self, state: Tree, *, is_donated: bool = False) -> Tree:
        """Return the engine's state.

        ConfigError if it has another layout or order of layers, or a step has reused its memory.
        is_donated: whether the memory will be reused, which XLA cannot do for shared arrays.
        """
        of_engine, order = _split(state)
        arrays = of_engine.state if isinstance(of_engine, Attempt) else of_engine
        # mpmd: leave out remote ranks, whose arrays this process does not have
        if isinstance(self.wanted, tuple) and isinstance(arrays, tuple):
            pairs = zip(arrays, self.wanted, strict=False)
            arrays = tuple(None if wanted is None else part for part, wanted in pairs)
        leaves, tree = jax.tree.flatten(arrays)
        wanted, wanted_tree = self._flat
        why = f"it has no {ORDER}" if order is None else None
        if tree != wanted_tree or not all(map(_is_like, leaves, wanted)):
            why = _difference(arrays, self.wanted) or "its arrays are on other devices"
        if why is not None:
            raise ConfigError(
                f"The state does not fit this pipeline: {why}. Use "
                "pipe.init(), or pipe.from_natural(other.to_natural(state)) for a state of another "
                "pipeline of the same model."
            )
        if any(isinstance(a, jax.Array) and a.is_deleted() for a in (*leaves, order)):
            raise ConfigError(
                "The state was passed to an earlier step, which reused its memory. Use the state "
                "that the step returned: state, metrics = pipe.step(state, batch)."
            )
        if is_donated and len({*map(id, leaves)}) < len(leaves):
            what = "The state is of pipe.averaged, or has an array twice, so a step cannot reuse it"
            raise ConfigError(f"{what}. Use the state that pipe.init or pipe.step returned.")
        if order is None or not np.array_equal(order, self.layout.placement.layer_in_slot):
            what = "The state belongs to a pipeline whose ranks hold other layers"
            raise ConfigError(f"{what}. Use pipe.from_natural(other.to_natural(state)).")
        return of_engine


def _split(state: Any) -> tuple[Any, Any]:
    """Return (engine's state, layer in each slot); None if the state has no such array."""
    if isinstance(state, Attempt):
        return state, state.order
    if isinstance(state, Mapping):
        return {name: a for name, a in state.items() if name != ORDER}, state.get(ORDER)
    if isinstance(state, tuple) and state and isinstance(state[-1], Mapping) and ORDER in state[-1]:
        return state[:-1], state[-1][ORDER]
    return state, None


def _is_like(a: Any, wanted: jax.ShapeDtypeStruct) -> bool:
    if not isinstance(a, jax.Array):  # a NumPy array: the step places it
        return _text_of("", a) == _text_of("", wanted)
    return a.shape == wanted.shape and a.dtype == wanted.dtype and a.sharding == wanted.sharding


def check_natural(state: Tree, wanted: Tree) -> None:
    """Raise ConfigError if a state in natural order is of another model or optimizer."""
    difference = _difference(state, wanted)
    if difference is not None:
        use = "Use a state that to_natural returned, or one restored with its shapes"
        raise ConfigError(f"The state does not fit this model and optimizer: {difference}. {use}.")


def _difference(state: Tree, wanted: Tree) -> str | None:
    """Return the first difference in names, dtypes or shapes; None if equal."""
    found, expected = (named(tree, "/") for tree in (state, wanted))
    missing = [name for name in expected if name not in found]
    if missing or len(found) > len(expected):
        other = next((name for name in found if name not in expected), None)
        return f"it has no {missing[0]}" if missing else f"it has {other}"
    for name, a in expected.items():
        text, wanted_text = _text_of(name, found[name]), _text_of(name, a)
        if text != wanted_text:
            return f"{name} is {text}, not {wanted_text}"
    return None


def _text_of(name: str, array: Any) -> str:
    """Return dtype and shape as text, such as float32[2, 3]."""
    array = _numbers(name, array)
    return f"{array.dtype}{[*array.shape]}"
