"""Parts of a Flax module, such as a block, as pure functions of their parameters.

A part holds the static definition of a module and its other variables; its parameters are a tree of
dicts named by the module's paths. A call joins both for one trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.model.random_keys import KIND
from ppctl.model.stack import shapes_like
from ppctl.model.tree_modules import LOSSES

Tree = Any
Path = tuple[Any, ...]  # names, and numbers of lists
Function = Callable[..., Any]  # (module, x) -> result, perhaps with a parameter `train`
MODES = {"deterministic", "use_running_average"}  # attributes that train() and eval() set
OWN = {"_pytree__nodes", "_pytree__state"}  # attributes of NNX itself
OF_LINEN = {"parent", "name"}  # fields of every linen module
MOST_DRAWS = 2**16  # largest number of draws from a stream in a call


class Traced(NamedTuple):
    """Draws and sown losses of a call."""

    draws: bool  # whether it draws random numbers
    losses: tuple[str, ...]  # names of the losses that it sows


def nested(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Return nested dicts of values by path.

    >>> nested({("blocks", 0, "kernel"): 1})
    {'blocks': {'0': {'kernel': 1}}}
    """
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(str(name), {})
        place[str(path[-1])] = value
    return tree


def _spec(names: Any, axis: str) -> P | None:
    """Return the PartitionSpec over tp, given the names of mesh axes; None: nothing is divided."""
    dims = ["tp" if each in (axis, (axis,)) else None for each in names or ()]
    return P(*dims) if "tp" in dims else None


def takes_train(function: Function) -> bool:
    return "train" in signature(function).parameters


@dataclass(frozen=True, eq=False)
class Part:
    """A module as a pure function of its parameters, the floating variables."""

    graphdef: Any
    state: dict[Path, Any]  # variables, and arrays that are plain attributes, by path
    settings: dict[Path, Any]  # other attributes
    where: str  # path in the model, for messages
    is_stacked: bool  # whether arrays have a leading axis of layers

    @classmethod
    def of(cls, module: nnx.Module, where: str = "", *, is_stacked: bool = False) -> Part:
        graphdef, state = nnx.split(module)
        settings = {path: each for path, each in nnx.iter_graph(module) if not OWN & {*path}}
        return cls(graphdef, dict(nnx.to_flat_state(state)), settings, where, is_stacked)

    @functools.cached_property
    def trees(self) -> dict[Path, nnx.Variable]:
        """The parameters."""
        return {path: each for path, each in self.state.items() if _is_parameter(each)}

    @property
    def params(self) -> Tree:
        return nested({path: jnp.asarray(each[...]) for path, each in self.trees.items()})

    def by_path(self, params: Tree) -> dict[Path, jax.Array]:
        """Return parameters by path."""
        leaves: dict[Path, Any] = dict.fromkeys(self.trees, params)
        for path in leaves:
            for name in path:
                leaves[path] = leaves[path][str(name)]
        return leaves

    def flags(self, trainable: Any) -> Tree:
        is_trained = nnx.filterlib.to_predicate(trainable)
        return nested({path: bool(is_trained(path, each)) for path, each in self.trees.items()})

    def specs(self, axis: str) -> Tree:
        first, found = int(self.is_stacked), {}
        for path, each in self.trees.items():
            names = each.get_metadata("out_sharding", None)
            found[path] = _spec(names and names[first:], axis)
        return nested(found)

    def equals(self, other: Part) -> bool:
        """Return whether a part with equal parameters computes the same function."""
        return _equal(self._fixed, other._fixed)

    @functools.cached_property
    def _fixed(self) -> dict[Path, Any]:
        """The settings and constants."""
        rest = {path: each for path, each in self.state.items() if path not in self.trees}
        arrays = {p: _array(each) for p, each in rest.items() if not isinstance(each, nnx.RngState)}
        return self.settings | arrays

    def has_modes(self, function: Function) -> bool:
        names = {name for path in self.settings for name in path[-1:]}
        streams = any(isinstance(each, nnx.RngState) for each in self.state.values())
        return streams or bool(names & MODES) or takes_train(function)

    def call(
        self, function: Function, params: Tree, x: Tree, key: jax.Array | None, *, is_training: bool
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Return (function(module, x), the sown losses). key: of its random numbers, if any."""
        result, sown, _ = self._called(function, self._leaves(params, key), x, is_training)
        return result, sown

    def traced(self, function: Function, params: Tree, x: Tree, *, is_training: bool) -> Traced:
        """Trace a call of one example. ConfigError if it changes variables."""
        leaves, one = self._leaves(params, jax.random.key(0, impl=KIND)), shapes_like(x, 1, first=1)

        def run(leaves: list[Any], x: Tree) -> tuple[dict[str, jax.Array], list[Any]]:
            _, sown, after = self._called(function, leaves, x, is_training)
            return sown, after

        program, (sown, _) = jax.make_jaxpr(run, return_shape=True)(leaves, one)
        jaxpr, number = program.jaxpr, len(leaves)
        ends = zip(jaxpr.invars[:number], jaxpr.outvars[-number:], strict=True)
        kept = [_passes(jaxpr, before, after) for before, after in ends]
        changed = [path for path, is_kept in zip(self.state, kept, strict=True) if not is_kept]
        for path in changed:
            if not isinstance(leaf := self.state[path], nnx.RngState):
                name = "/".join(map(str, (*filter(None, [self.where]), *path)))
                raise ConfigError(
                    f"{name} is a {type(leaf).__name__} that a step changes, but a step changes "
                    "only parameters. Use LayerNorm or GroupNorm, or batch norm with "
                    "use_running_average=True."
                )
        return Traced(bool(changed), tuple(sown))

    def _called(
        self, function: Function, leaves: list[Any], x: Tree, is_training: bool
    ) -> tuple[Any, dict[str, jax.Array], list[Any]]:
        """Return (function(module, x), sown losses, leaves afterwards)."""
        state = {
            path: each.copy(value) if isinstance(each, nnx.Variable) else value
            for (path, each), value in zip(self.state.items(), leaves, strict=True)
        }
        module = nnx.merge(self.graphdef, nnx.from_flat_state(state), copy=True)
        if is_training:  # batch norms stay as their author set them
            module.set_attributes(deterministic=False, raise_if_not_found=False)
        else:
            module.eval()
        if takes_train(function):
            function = functools.partial(function, train=is_training)
        kinds = (nnx.Intermediate, nnx.variable_type_from_name(LOSSES, allow_register=True))
        run = nnx.capture(lambda module, x: function(module, x), *kinds)
        result, *sown = run(module, x)
        after = dict(nnx.to_flat_state(nnx.state(module)))
        flat = {path: _raw(each) for kind in sown for path, each in nnx.to_flat_state(kind)}
        return result, _scalars(flat), [_raw(after[path]) for path in self.state]

    def _leaves(self, params: Tree, key: jax.Array | None) -> list[Any]:
        """Return the leaves of the state for one call: parameters, streams of `key`, constants.

        All streams have the key, and each starts to count at another number: so that a layer of a
        network computes the keys of its draws by itself.
        """
        values: dict[Path, Any] = self.by_path(params)
        for number, (path, leaf) in enumerate(self.state.items()):
            if isinstance(leaf, nnx.RngCount):
                values[path] = jnp.uint32(number * MOST_DRAWS)
            elif isinstance(leaf, nnx.RngKey):
                values[path] = jax.random.key(0, impl=KIND) if key is None else key
            elif path not in values:
                values[path] = self._constant(leaf)
        return [values[path] for path in self.state]

    def _constant(self, leaf: Any) -> np.ndarray:
        value = _array(leaf)
        if self.is_stacked and not np.array_equal(value, np.broadcast_to(value[:1], value.shape)):
            raise ConfigError(
                f"{self.where} has a {type(leaf).__name__} of {value.dtype} that differs between "
                "layers, but only floating variables may. Use a list of blocks."
            )
        return value[0] if self.is_stacked else value

    def restored(self, params: Tree) -> nnx.Module:
        return self.with_values(self.by_path(params))

    def with_values(self, values: Mapping[Path, Any]) -> nnx.Module:
        """Return a new module with other values of some variables."""
        state = dict(self.state)
        for path, value in values.items():
            state[path] = state[path].copy(jnp.asarray(value, state[path].dtype))
        return nnx.merge(self.graphdef, nnx.from_flat_state(state), copy=True)


def variables_of(module: Any) -> dict[int, str]:
    """Return the paths of a module's variables by identity, without its random numbers."""
    found = nnx.iter_graph(module)
    return {
        id(each): "/".join(map(str, path))
        for path, each in found
        if isinstance(each, nnx.Variable) and not isinstance(each, nnx.RngState)
    }


def _is_parameter(leaf: Any) -> bool:
    is_variable = isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState)
    return is_variable and jnp.issubdtype(leaf.dtype, jnp.floating)


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(leaf[...] if isinstance(leaf, nnx.Variable) else leaf)


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _passes(jaxpr: Any, source: Any, out: Any) -> bool:
    """Return whether `out` is `source`, perhaps passed through an inner program (nnx.remat)."""
    if out is source:
        return True
    made = next((each for each in jaxpr.eqns if out in each.outvars), None)
    params = {} if made is None else made.params
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    if made is None or inner is None or len(inner.invars) != len(made.invars):
        return False
    end = inner.outvars[made.outvars.index(out)]
    given = zip(inner.invars, made.invars, strict=True)
    return any(_passes(inner, a, end) and _passes(jaxpr, source, b) for a, b in given)


def _scalars(sown: Mapping[Path, Any]) -> dict[str, jax.Array]:
    """Return the sum of the floating scalars that were sown, by name."""
    sums: dict[str, jax.Array] = {}
    for path, values in sown.items():
        for value in map(jnp.asarray, values if isinstance(values, tuple) else (values,)):
            if value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
                sums[path[-1]] = sums[path[-1]] + value if path[-1] in sums else value
    return sums


def _equal(a: Any, b: Any) -> bool:
    """Return whether two settings are equal. Functions are, if their code and its values are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, nnx.Variable | nnx.Pytree):
        return True  # `settings` and `state` hold their contents, at other paths
    if isinstance(a, linen.Module):
        names = [each.name for each in dataclasses.fields(a) if each.name not in OF_LINEN]
        return all(_equal(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, functools.partial):
        return _equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if code := getattr(a, "__code__", None):
        cells = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (a, b)]
        return code == b.__code__ and _equal(*cells) and _equal(a.__defaults__, b.__defaults__)
    try:
        return bool(a == b)
    except ValueError:  # the comparison of arrays is an array
        return bool(np.array_equal(a, b))
